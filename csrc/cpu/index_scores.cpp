// Relevance of entries: sum_h w_h relu(q_h . k), rounded as q after the product, after the weight
// and after the sum.
#include "deepinfer/op.h"

namespace deepinfer {
namespace DI_NAME {

inline float rounded(float x, const bf16*) {
  bf16 some[kLanes];
  store(some, splat(x));
  float back[kLanes];
  store(back, load(some));
  return back[0];
}
inline float rounded(float x, const float*) { return x; }

// q [heads, width], weights [heads], k [n, width] of T; out [n].
template <class T>
void score_row(const T* q, const T* k, const T* weights, int64_t heads, int64_t width, int64_t n,
               T* out) {
  for (int64_t j = 0; j < n; j++) {
    double total = 0;
    for (int64_t h = 0; h < heads; h++) {
      D dot{};
      for (int64_t i = 0; i < width; i += kLanes)
        dot = fma(widen(q + h * width + i, width - i), widen(k + j * width + i, width - i), dot);
      float x = rounded((float)sum(dot), (const T*)nullptr);
      x = x < 0 ? 0 : x;
      float w[kLanes];
      store(w, load(weights + h, 1));
      total += rounded(x * w[0], (const T*)nullptr);
    }
    T some[kLanes];
    store(some, splat((float)total));
    out[j] = some[0];
  }
}

template <class T>
void index_scores(const T* q, const T* k, const T* weights, int64_t requests, int64_t rows,
                  int64_t heads, int64_t width, int64_t n, T* out) {
  parallel(requests * rows, [&](int64_t row) {
    score_row(q + row * heads * width, k + row / rows * n * width, weights + row * heads, heads,
              width, n, out + row * n);
  });
}

}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// q [requests, rows, heads, width], k [requests, n, width], weights [requests, rows, heads] and out
// [requests, rows, n] of type `type`.
DI_OP(index_scores)
(const void* q, const void* k, const void* weights, int type, int64_t requests, int64_t rows,
 int64_t heads, int64_t width, int64_t n, void* out) {
  if (type == kBf16)
    index_scores((const bf16*)q, (const bf16*)k, (const bf16*)weights, requests, rows, heads, width,
                 n, (bf16*)out);
  else
    index_scores((const float*)q, (const float*)k, (const float*)weights, requests, rows, heads,
                 width, n, (float*)out);
  return kOk;
}
DI_CAPTURED(index_scores)
