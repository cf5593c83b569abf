// x * rsqrt(mean(x^2) + eps) * weight, one rounding at the end. The sum is float64.
#include "deepinfer/op.h"

namespace deepinfer {
namespace DI_NAME {

template <class T, class W>
void rmsnorm(const T* x, const W* weight, int64_t rows, int64_t n, double eps, T* out) {
  split(rows, max(1, 65536 / n), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T* a = x + row * n;
      D squares{};
      for (int64_t i = 0; i < n; i += kLanes) {
        D v = widen(a + i, n - i);
        squares = fma(v, v, squares);
      }
      F inverse = splat((float)(1.0 / __builtin_sqrt(sum(squares) / n + eps)));
      for (int64_t i = 0; i < n; i += kLanes)
        store(out + row * n + i, load(a + i, n - i) * inverse * load(weight + i, n - i), n - i);
    }
  });
}

}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// x, out [rows, n] of type `type`; weight [n] of type `weight_type`.
DI_OP(rmsnorm)
(const void* x, int type, const void* weight, int weight_type, int64_t rows, int64_t n, double eps,
 void* out) {
  if (type == kBf16 && weight_type == kBf16)
    rmsnorm((const bf16*)x, (const bf16*)weight, rows, n, eps, (bf16*)out);
  else if (type == kBf16)
    rmsnorm((const bf16*)x, (const float*)weight, rows, n, eps, (bf16*)out);
  else if (weight_type == kBf16)
    rmsnorm((const float*)x, (const bf16*)weight, rows, n, eps, (float*)out);
  else
    rmsnorm((const float*)x, (const float*)weight, rows, n, eps, (float*)out);
  return kOk;
}
DI_CAPTURED(rmsnorm)
