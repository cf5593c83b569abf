// Sixteen lanes of float or double, whatever the instruction set holds at once.
//
// Every op is compiled once per level; all that it includes lives in a namespace of that level, so
// that no inline function of one level can be linked into another. For the same reason ops use no
// templates of the standard library. Nothing here contracts a * b + c: where one rounding is meant,
// `fma` says so, and results do not depend on the compiler's taste.
#pragma once

#include <cstdint>
#include <cstring>

#if DI_LEVEL >= 1
// What gcc 12 finds uninitialised in here is so on purpose.
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Levels: 0 portable, 1 avx2 (with fma), 2 avx512 (f, bw, dq, vl), 3 avx512bf16 (with vbmi).
#if DI_LEVEL == 0
#define DI_NAME portable
#elif DI_LEVEL == 1
#define DI_NAME avx2
#elif DI_LEVEL == 2
#define DI_NAME avx512
#else
#define DI_NAME avx512bf16
#endif

#define DI_JOIN_(a, b) a##_##b
#define DI_JOIN(a, b) DI_JOIN_(a, b)
// The C entry point of an op at this level: di_<op>_<level>, 0 or an error of `op.h`.
#define DI_OP(op) extern "C" __attribute__((visibility("default"))) int DI_JOIN(di_##op, DI_NAME)
#define DI_UNROLL _Pragma("GCC unroll 16")

namespace deepinfer {
namespace DI_NAME {

constexpr int kLanes = 16;
constexpr int kWidth = DI_LEVEL >= 2 ? 16 : DI_LEVEL == 1 ? 8 : 4;  // floats of one register
constexpr int kParts = kLanes / kWidth;
constexpr int kHalf = kWidth / 2;  // doubles of one register
constexpr int kHalves = kLanes / kHalf;

struct bf16 {
  uint16_t bits;
};

inline float as_float(uint32_t bits) {
  float out = 0;
  memcpy(&out, &bits, 4);
  return out;
}

template <int N> struct Vectors {
  typedef float f __attribute__((vector_size(4 * N), aligned(4)));
  typedef int32_t i __attribute__((vector_size(4 * N), aligned(4)));
  typedef uint32_t u __attribute__((vector_size(4 * N), aligned(4)));
  typedef uint16_t h __attribute__((vector_size(2 * N), aligned(2)));
  typedef uint8_t b __attribute__((vector_size(N), aligned(1)));
  typedef double d __attribute__((vector_size(8 * N), aligned(8)));
};
typedef float fvec __attribute__((vector_size(4 * kWidth)));
typedef int32_t ivec __attribute__((vector_size(4 * kWidth)));
typedef uint32_t uvec __attribute__((vector_size(4 * kWidth)));
typedef double dvec __attribute__((vector_size(8 * kHalf)));

// float x 16

struct F {
  fvec part[kParts];
};

inline F splat(float x) {
  F r;
  DI_UNROLL for (int i = 0; i < kParts; i++) r.part[i] = x - (fvec){};
  return r;
}
inline F zero() { return F{}; }

inline F load(const float* p) {
  F r;
  DI_UNROLL for (int i = 0; i < kParts; i++)
    r.part[i] = (fvec)*(const typename Vectors<kWidth>::f*)(p + i * kWidth);
  return r;
}
inline F load(const bf16* p) {
  F r;
  DI_UNROLL for (int i = 0; i < kParts; i++) {
    const bf16* at = p + i * kWidth;
#if DI_LEVEL >= 2
    __m256i bits = _mm256_loadu_si256((const __m256i*)at);
    r.part[i] = (fvec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#elif DI_LEVEL == 1
    __m128i bits = _mm_loadu_si128((const __m128i*)at);
    r.part[i] = (fvec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#else
    auto bits = *(const typename Vectors<kWidth>::h*)at;
    r.part[i] = (fvec)(__builtin_convertvector(bits, uvec) << 16);
#endif
  }
  return r;
}
inline void store(float* p, F x) {
  DI_UNROLL for (int i = 0; i < kParts; i++)
    *(typename Vectors<kWidth>::f*)(p + i * kWidth) = x.part[i];
}
// To nearest even, subnormals kept, any NaN to 0x7fc0: what torch does.
inline void store(bf16* p, F x) {
  DI_UNROLL for (int i = 0; i < kParts; i++) {
    uvec u = (uvec)x.part[i];
    uvec r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    uvec nan = (uvec)((u & 0x7fffffff) > 0x7f800000);
    r = (r & ~nan) | (nan & 0x7fc0);
    bf16* at = p + i * kWidth;
#if DI_LEVEL >= 2
    _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16((__m512i)r));
#elif DI_LEVEL == 1
    __m256i both = (__m256i)r;
    _mm_storeu_si128((__m128i*)at, _mm_packus_epi32(_mm256_castsi256_si128(both),
                                                    _mm256_extracti128_si256(both, 1)));
#else
    *(typename Vectors<kWidth>::h*)at =
        __builtin_convertvector(r, typename Vectors<kWidth>::h);
#endif
  }
}
// The first n <= 16 lanes; the others load as 0.
template <class T> inline F load(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  T some[kLanes] = {};
  for (int64_t i = 0; i < n; i++) some[i] = p[i];
  return load(some);
}
template <class T> inline void store(T* p, F x, int64_t n) {
  if (n >= kLanes) return store(p, x);
  T some[kLanes];
  store(some, x);
  for (int64_t i = 0; i < n; i++) p[i] = some[i];
}

#define DI_BINARY(op)                                                                        \
  inline F operator op(F a, F b) {                                                           \
    F r;                                                                                     \
    DI_UNROLL for (int i = 0; i < kParts; i++) r.part[i] = a.part[i] op b.part[i];           \
    return r;                                                                                \
  }
DI_BINARY(+)
DI_BINARY(-)
DI_BINARY(*)
DI_BINARY(/)
#undef DI_BINARY

inline fvec fma(fvec a, fvec b, fvec c) {
#if DI_LEVEL >= 2
  return (fvec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif DI_LEVEL == 1
  return (fvec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (fvec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
inline F fma(F a, F b, F c) {
  F r;
  DI_UNROLL for (int i = 0; i < kParts; i++) r.part[i] = fma(a.part[i], b.part[i], c.part[i]);
  return r;
}
// b where a or b is NaN: put the value that may be NaN second.
inline fvec max(fvec a, fvec b) {
#if DI_LEVEL >= 2
  return (fvec)_mm512_maskz_max_ps((__mmask16)-1, (__m512)a, (__m512)b);
#elif DI_LEVEL == 1
  return (fvec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
inline fvec min(fvec a, fvec b) {
#if DI_LEVEL >= 2
  return (fvec)_mm512_maskz_min_ps((__mmask16)-1, (__m512)a, (__m512)b);
#elif DI_LEVEL == 1
  return (fvec)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}
inline F max(F a, F b) {
  F r;
  DI_UNROLL for (int i = 0; i < kParts; i++) r.part[i] = max(a.part[i], b.part[i]);
  return r;
}
inline F min(F a, F b) {
  F r;
  DI_UNROLL for (int i = 0; i < kParts; i++) r.part[i] = min(a.part[i], b.part[i]);
  return r;
}
// e^x within 1.2e-7 of the value; 0 below -87.3, infinity above 88.7, NaN stays.
inline F exp(F x) {
  F r;
  DI_UNROLL for (int i = 0; i < kParts; i++) {
    fvec a = x.part[i];
    a = a < -88.0f ? (fvec){} - 88.0f : a;
    a = a > 89.0f ? (fvec){} + 89.0f : a;
    fvec magic = (fvec){} + 12582912.0f;  // 1.5 * 2^23: the sum is rounded to an integer
    fvec n = fma(a, (fvec){} + 1.44269504088896341f, magic);
    ivec k = (ivec)n - (ivec)magic;
    n = n - magic;
    fvec t = fma(n, (fvec){} - 0.693359375f, a);
    t = fma(n, (fvec){} + 2.12194440e-4f, t);
    fvec p = (fvec){} + 1.9875691500e-4f;
    p = fma(p, t, (fvec){} + 1.3981999507e-3f);
    p = fma(p, t, (fvec){} + 8.3334519073e-3f);
    p = fma(p, t, (fvec){} + 4.1665795894e-2f);
    p = fma(p, t, (fvec){} + 1.6666665459e-1f);
    p = fma(p, t, (fvec){} + 5.0000001201e-1f);
    p = fma(p, t * t, t) + 1.0f;
    // 2^k in two factors, so that k = 128 and subnormal results are right.
    ivec half = k >> 1;
    fvec y = p * (fvec)((half + 127) << 23) * (fvec)((k - half + 127) << 23);
    r.part[i] = x.part[i] == x.part[i] ? y : x.part[i];
  }
  return r;
}
inline F sigmoid(F x) { return splat(1.0f) / (splat(1.0f) + exp(zero() - x)); }

// double x 16

struct D {
  dvec part[kHalves];
};

inline D load(const double* p) {
  D r;
  DI_UNROLL for (int i = 0; i < kHalves; i++)
    r.part[i] = (dvec)*(const typename Vectors<kHalf>::d*)(p + i * kHalf);
  return r;
}
inline void store(double* p, D x) {
  DI_UNROLL for (int i = 0; i < kHalves; i++)
    *(typename Vectors<kHalf>::d*)(p + i * kHalf) = x.part[i];
}
inline D widen(const float* p) {
  D r;
  DI_UNROLL for (int i = 0; i < kHalves; i++) {
    const float* at = p + i * kHalf;
#if DI_LEVEL >= 2
    r.part[i] = (dvec)_mm512_cvtps_pd(_mm256_loadu_ps(at));
#elif DI_LEVEL == 1
    r.part[i] = (dvec)_mm256_cvtps_pd(_mm_loadu_ps(at));
#else
    auto x = *(const typename Vectors<kHalf>::f*)at;
    r.part[i] = (dvec)__builtin_convertvector(x, typename Vectors<kHalf>::d);
#endif
  }
  return r;
}
inline D widen(const bf16* p) {
  D r;
  DI_UNROLL for (int i = 0; i < kHalves; i++) {
    const bf16* at = p + i * kHalf;
#if DI_LEVEL >= 2
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
    r.part[i] = (dvec)_mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)));
#elif DI_LEVEL == 1
    __m128i bits = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)at));
    r.part[i] = (dvec)_mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(bits, 16)));
#else
    auto bits = *(const typename Vectors<kHalf>::h*)at;
    auto x = (typename Vectors<kHalf>::f)(__builtin_convertvector(bits, typename Vectors<kHalf>::u)
                                          << 16);
    r.part[i] = (dvec)__builtin_convertvector(x, typename Vectors<kHalf>::d);
#endif
  }
  return r;
}
template <class T> inline D widen(const T* p, int64_t n) {
  if (n >= kLanes) return widen(p);
  T some[kLanes] = {};
  for (int64_t i = 0; i < n; i++) some[i] = p[i];
  return widen(some);
}
inline D fma(D a, D b, D c) {
  D r;
  DI_UNROLL for (int i = 0; i < kHalves; i++) {
#if DI_LEVEL >= 2
    r.part[i] = (dvec)_mm512_fmadd_pd((__m512d)a.part[i], (__m512d)b.part[i], (__m512d)c.part[i]);
#elif DI_LEVEL == 1
    r.part[i] = (dvec)_mm256_fmadd_pd((__m256d)a.part[i], (__m256d)b.part[i], (__m256d)c.part[i]);
#else
    r.part[i] = a.part[i] * b.part[i] + c.part[i];
#endif
  }
  return r;
}
inline D operator*(D a, D b) {
  D r;
  DI_UNROLL for (int i = 0; i < kHalves; i++) r.part[i] = a.part[i] * b.part[i];
  return r;
}
inline D operator+(D a, D b) {
  D r;
  DI_UNROLL for (int i = 0; i < kHalves; i++) r.part[i] = a.part[i] + b.part[i];
  return r;
}
inline D operator-(D a, D b) {
  D r;
  DI_UNROLL for (int i = 0; i < kHalves; i++) r.part[i] = a.part[i] - b.part[i];
  return r;
}
inline D splat(double x) {
  D r;
  DI_UNROLL for (int i = 0; i < kHalves; i++) r.part[i] = x - (dvec){};
  return r;
}
inline D widen(F x) {
#if DI_LEVEL == 1
  D r;
  DI_UNROLL for (int i = 0; i < kParts; i++) {
    __m256 v = (__m256)x.part[i];
    r.part[2 * i] = (dvec)_mm256_cvtps_pd(_mm256_castps256_ps128(v));
    r.part[2 * i + 1] = (dvec)_mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
  }
  return r;
#else
  float some[kLanes];
  store(some, x);
  return widen(some);
#endif
}
inline F narrow(D x) {
  double some[kLanes];
  store(some, x);
  float r[kLanes];
  DI_UNROLL for (int i = 0; i < kLanes; i++) r[i] = (float)some[i];
  return load(r);
}
// Lanes are added in one order: 0 with 8, 1 with 9, ..., then fours, twos, one.
inline double sum(D x) {
  double a[kLanes];
  store(a, x);
  DI_UNROLL for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) a[i] += a[i + n];
  return a[0];
}

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace DI_NAME
}  // namespace deepinfer
