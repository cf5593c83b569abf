// Softmax-weighted mean over the tokens of a group, channel by channel.
#include "deepinfer/op.h"

namespace deepinfer {
namespace DI_NAME {

void pool(const float* v, const float* z, int64_t groups, int64_t tokens, int64_t n, float* out) {
  split(groups, max(1, 16384 / (tokens * n)), [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; group++)
      for (int64_t i = 0; i < n; i += kLanes) {
        const float *a = v + group * tokens * n + i, *b = z + group * tokens * n + i;
        int64_t left = n - i;
        F most = load(b, left);
        for (int64_t t = 1; t < tokens; t++) most = max(most, load(b + t * n, left));
        F weight = exp(load(b, left) - most), total = load(a, left) * weight, norm = weight;
        for (int64_t t = 1; t < tokens; t++) {
          weight = exp(load(b + t * n, left) - most);
          total = total + load(a + t * n, left) * weight;
          norm = norm + weight;
        }
        store(out + group * n + i, total / norm, left);
      }
  });
}

}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// v, z float [groups, tokens, n]; out float [groups, n].
DI_OP(pool)
(const float* v, const float* z, int64_t groups, int64_t tokens, int64_t n, float* out) {
  pool(v, z, groups, tokens, n, out);
  return kOk;
}
DI_CAPTURED(pool)
