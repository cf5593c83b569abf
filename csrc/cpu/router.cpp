// The k best experts of each row and their weights.
#include <math.h>

#include "deepinfer/op.h"

namespace deepinfer {
namespace DI_NAME {

// sqrt(log(1 + e^x)) in double, rounded twice as the reference does.
inline float score(float x) {
  float soft = x > 20.0f ? x : (float)::log1p(::exp((double)x));
  return __builtin_sqrtf(soft);
}
// Larger, or NaN beside a number: the order in which a row's experts are taken.
inline bool before(float a, float b) { return a > b || (a != a && b == b); }

}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// logits float [rows, experts], bias [experts]; ids int64 and weights float [rows, k].
DI_OP(router)
(const float* logits, const float* bias, int64_t rows, int64_t experts, int64_t k, float scale,
 int normalise, int64_t* ids, float* weights) {
  bool enough = true;
  split(rows, max(1, 1024 / experts), [&](int64_t begin, int64_t end) {
    float* key = scratch<float>(0, k);
    if (!key) return __atomic_store_n(&enough, false, __ATOMIC_RELAXED);
    for (int64_t row = begin; row < end; row++) {
      int64_t* best = ids + row * k;
      float* w = weights + row * k;
      int64_t count = 0;
      for (int64_t e = 0; e < experts; e++) {  // insertion keeps equal keys in id order
        float s = score(logits[row * experts + e]), v = s + bias[e];
        if (count == k && !before(v, key[k - 1])) continue;
        int64_t at = count < k ? count++ : k - 1;
        for (; at && before(v, key[at - 1]); at--)
          key[at] = key[at - 1], best[at] = best[at - 1], w[at] = w[at - 1];
        key[at] = v, best[at] = e, w[at] = s;
      }
      double total = 0;
      for (int64_t j = 0; j < k; j++) total += w[j];
      float norm = normalise && k > 1 ? (float)total + 1e-20f : 1.0f;
      for (int64_t j = 0; j < k; j++) w[j] = w[j] / norm * scale;
    }
  });
  return enough ? kOk : kNoMemory;
}
DI_CAPTURED(router)
