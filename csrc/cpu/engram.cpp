// Hashed rows, their values, and the gate into the streams.
#include "deepinfer/codec.h"

namespace deepinfer {
namespace DI_NAME {

template <class T>
void lookup(const uint8_t* codes, const uint8_t* scales, const int64_t* rows, int64_t count,
            int64_t width, int64_t group, T* out) {
  int64_t groups = ceil_div(width, group);
  split(count, max(1, 16384 / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const uint8_t* code = codes + rows[row] * width;
      for (int64_t g = 0; g < groups; g++) {
        F scale = splat(e8m0(scales[rows[row] * groups + g]));
        int64_t last = min(width, (g + 1) * group);
        for (int64_t i = g * group; i < last; i += kLanes) {
          float some[kLanes] = {};
          int64_t n = min(kLanes, last - i);
          for (int64_t j = 0; j < n; j++) some[j] = kE4m3.value[code[i + j]];
          store(out + row * width + i, load(some) * scale, n);
        }
      }
    }
  });
}

template <class T> inline float inverse_rms(const T* x, int64_t n, double eps) {
  D squares{};
  for (int64_t i = 0; i < n; i += kLanes) {
    D v = widen(x + i, n - i);
    squares = fma(v, v, squares);
  }
  return (float)(1.0 / __builtin_sqrt(sum(squares) / n + eps));
}

template <class T, class W>
void gate(const T* streams, const T* kv, const W* q, const W* k, const uint8_t* image, int64_t rows,
          int64_t copies, int64_t n, double eps, T* out, float* gates) {
  split(rows, max(1, 16384 / (copies * n)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T *keys = kv + row * (copies + 1) * n, *value = keys + copies * n;
      for (int64_t c = 0; c < copies; c++) {
        const T *s = streams + (row * copies + c) * n, *key = keys + c * n;
        D dots{};
        for (int64_t i = 0; i < n; i += kLanes) {
          F g = load(q + c * n + i, n - i) * load(k + c * n + i, n - i);
          float some[kLanes];
          store(some, load(s + i, n - i) * g * load(key + i, n - i));
          dots = dots + widen(some);
        }
        float dot = (float)sum(dots) * (inverse_rms(s, n, eps) * inverse_rms(key, n, eps)) *
                    (float)(1.0 / __builtin_sqrt((double)n));
        float size = __builtin_fabsf(dot);
        float root = __builtin_copysignf(__builtin_sqrtf(size < 1e-6f ? 1e-6f : size), dot);
        float some[kLanes];
        store(some, sigmoid(splat(root)));
        float open = image && image[row] ? 0.0f : some[0];
        gates[row * copies + c] = open;
        for (int64_t i = 0; i < n; i += kLanes)
          store(out + (row * copies + c) * n + i,
                load(s + i, n - i) + splat(open) * load(value + i, n - i), n - i);
      }
    }
  });
}

}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// Table rows [count, (orders) * heads] of mapped ids [count, orders + 1]; columns of the table
// follow each other, each as long as its prime.
DI_OP(engram_rows)
(const int64_t* ngrams, const int64_t* multipliers, const int64_t* primes, int64_t count,
 int64_t orders, int64_t heads, int64_t* out) {
  for (int64_t row = 0; row < count; row++) {
    const int64_t* ids = ngrams + row * (orders + 1);
    uint64_t mixed = (uint64_t)ids[0] * (uint64_t)multipliers[0];
    int64_t offset = 0;
    for (int64_t s = 0; s < orders; s++) {
      mixed ^= (uint64_t)ids[s + 1] * (uint64_t)multipliers[s + 1];
      for (int64_t h = 0; h < heads; h++) {
        int64_t prime = primes[s * heads + h], rest = (int64_t)mixed % prime;
        *out++ = (rest < 0 ? rest + prime : rest) + offset;
        offset += prime;
      }
    }
  }
  return kOk;
}
DI_CAPTURED(engram_rows)

// codes E4M3 [any, width], scales E8M0 [any, width / group]; rows int64 [count]; out [count, width].
DI_OP(engram_lookup)
(const uint8_t* codes, const uint8_t* scales, const int64_t* rows, int64_t count, int64_t width,
 int64_t group, int type, void* out) {
  if (type == kBf16)
    lookup(codes, scales, rows, count, width, group, (bf16*)out);
  else
    lookup(codes, scales, rows, count, width, group, (float*)out);
  return kOk;
}
DI_CAPTURED(engram_lookup)

// streams, out [rows, copies, n]; kv [rows, (copies + 1) n]: keys, then the value; q, k [copies, n];
// image [rows] or null; gates float [rows, copies].
DI_OP(engram_gate)
(const void* streams, int type, const void* kv, const void* q, const void* k, int weight_type,
 const uint8_t* image, int64_t rows, int64_t copies, int64_t n, double eps, void* out,
 float* gates) {
  if (type == kBf16 && weight_type == kBf16)
    gate((const bf16*)streams, (const bf16*)kv, (const bf16*)q, (const bf16*)k, image, rows, copies,
         n, eps, (bf16*)out, gates);
  else if (type == kBf16)
    gate((const bf16*)streams, (const bf16*)kv, (const float*)q, (const float*)k, image, rows,
         copies, n, eps, (bf16*)out, gates);
  else if (weight_type == kBf16)
    gate((const float*)streams, (const float*)kv, (const bf16*)q, (const bf16*)k, image, rows,
         copies, n, eps, (float*)out, gates);
  else
    gate((const float*)streams, (const float*)kv, (const float*)q, (const float*)k, image, rows,
         copies, n, eps, (float*)out, gates);
  return kOk;
}
DI_CAPTURED(engram_gate)
