// The last channels of each head, turned as adjacent pairs, the others copied; and the table of it.
#include "deepinfer/op.h"

namespace deepinfer {
namespace DI_NAME {

inline float value(float x) { return x; }
inline float value(bf16 x) { return as_float((uint32_t)x.bits << 16); }

// table [rows, pairs] each, shared by the heads of a row.
template <class T>
void rope(const T* x, const float* cos, const float* sin, int64_t rows, int64_t heads, int64_t dim,
          int64_t pairs, float sign, T* out) {
  split(rows, max(1, 32768 / (heads * dim)), [&](int64_t begin, int64_t end) {
    float even[kLanes], odd[kLanes], turned[2 * kLanes];
    for (int64_t row = begin; row < end; row++) {
      const float *c = cos + row * pairs, *s = sin + row * pairs;
      for (int64_t head = 0; head < heads; head++) {
        int64_t first = (row * heads + head) * dim;
        if (out != x) memcpy(out + first, x + first, (size_t)(dim - 2 * pairs) * sizeof(T));
        const T* a = x + first + dim - 2 * pairs;
        T* b = out + first + dim - 2 * pairs;
        for (int64_t i = 0; i < pairs; i += kLanes) {
          int64_t n = min(kLanes, pairs - i);
          for (int64_t j = 0; j < n; j++) {
            even[j] = value(a[2 * (i + j)]);
            odd[j] = value(a[2 * (i + j) + 1]);
          }
          for (int64_t j = n; j < kLanes; j++) even[j] = odd[j] = 0;
          F e = load(even), o = load(odd), cs = load(c + i, n), sn = load(s + i, n) * splat(sign);
          F re = e * cs - o * sn, im = e * sn + o * cs;
          store(even, re);
          store(odd, im);
          for (int j = 0; j < kLanes; j++) turned[2 * j] = even[j], turned[2 * j + 1] = odd[j];
          store(b + 2 * i, load(turned), 2 * n);
          if (2 * n > kLanes) store(b + 2 * i + kLanes, load(turned + kLanes), 2 * n - kLanes);
        }
      }
    }
  });
}

// The angle is rounded to float first.
void table(const int64_t* positions, const float* freqs, int64_t rows, int64_t pairs, float* cos,
           float* sin) {
  split(rows, max(1, 2048 / pairs), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      for (int64_t i = 0; i < pairs; i++) {
        float angle = (float)positions[row] * freqs[i];
        cos[row * pairs + i] = __builtin_cosf(angle);
        sin[row * pairs + i] = __builtin_sinf(angle);
      }
  });
}

}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// x, out [rows, heads, dim]; cos, sin float [rows, pairs]; sign -1 turns back.
DI_OP(rope)
(const void* x, int type, const float* cos, const float* sin, int64_t rows, int64_t heads,
 int64_t dim, int64_t pairs, int sign, void* out) {
  if (type == kBf16)
    rope((const bf16*)x, cos, sin, rows, heads, dim, pairs, (float)sign, (bf16*)out);
  else
    rope((const float*)x, cos, sin, rows, heads, dim, pairs, (float)sign, (float*)out);
  return kOk;
}
DI_CAPTURED(rope)

// positions [rows], freqs [pairs]; cos, sin [rows, pairs].
DI_OP(rope_table)
(const int64_t* positions, const float* freqs, int64_t rows, int64_t pairs, float* cos,
 float* sin) {
  table(positions, freqs, rows, pairs, cos, sin);
  return kOk;
}
DI_CAPTURED(rope_table)
