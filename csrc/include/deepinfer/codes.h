// Weight codes to floats: units of panels (panels.h), one struct a format.
//
// `per`: values of k in a unit; `bytes` of a unit; `decode` makes the 16 columns of each k. `scale`
// gives what a group's sums are multiplied with: the stored scale, and what `decode` left out. FP8
// and FP4 values come 2^-120 of what they are; rows are kept 2^60 of what they are (kCodeShift), so
// that sums stay normal numbers.
#pragma once

#include "deepinfer/panels.h"

namespace deepinfer {
namespace DI_NAME {

template <int kind> struct Codes;

// E4M3: four k of column c at bytes 4c to 4c + 3. The code's bits at their places in a float,
// whose exponent then is 120 too small. Reading further left brings a code to the highest byte.
template <> struct Codes<kFp8> {
  static constexpr int per = 4, bytes = 64;

  static DI_INLINE void decode(const uint8_t* p, F* w) {
    const uvec mask = (uvec){} + 0x87f00000;
    DI_UNROLL for (int i = 0; i < kParts; i++) {
      DI_UNROLL for (int k = 0; k < 4; k++) {
        ivec u;
        memcpy(&u, p + 4 * i * kWidth - (3 - k), sizeof u);
        w[k].part[i] = (fvec)((uvec)(u >> 4) & mask);
      }
    }
  }
  static DI_INLINE F scale(const Matrix& w, int64_t panel, int64_t group) {
    uint32_t bits = (uint32_t)(w.scales[panel / 2 * w.groups() + group] + kCodeShift) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return splat(value);
  }
};

// E2M1. AVX2: four k; the order is that of `decode`. Others: byte j of column c, at 4c + j, holds k
// 2j (low nibble) and 2j + 1.
template <> struct Codes<kFp4> {
#if DI_LEVEL == 1
  static constexpr int per = 4, bytes = 32;

  static DI_INLINE void decode(const uint8_t* p, F* w) {
    // The two high bytes of a value's float.
    const __m256i high = _mm256_broadcastsi128_si256(_mm_setr_epi8(0x00, 0x03, 0x03, 0x03, 0x04, 0x04, 0x04, 0x04, (char)0x80, (char)0x83, (char)0x83, (char)0x83, (char)0x84, (char)0x84, (char)0x84, (char)0x84));
    const __m256i low = _mm256_broadcastsi128_si256(_mm_setr_epi8(0x00, 0x00, (char)0x80, (char)0xc0, 0x00, 0x40, (char)0x80, (char)0xc0, 0x00, 0x00, (char)0x80, (char)0xc0, 0x00, 0x40, (char)0x80, (char)0xc0));
    const __m256i nibble = _mm256_set1_epi8(15), top = _mm256_set1_epi32((int)0xffff0000);
    __m256i both = _mm256_loadu_si256((const __m256i*)p);
    __m256i codes[2] = {_mm256_and_si256(both, nibble),
                        _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble)};
    DI_UNROLL for (int j = 0; j < 2; j++) {
      __m256i l = _mm256_shuffle_epi8(low, codes[j]), h = _mm256_shuffle_epi8(high, codes[j]);
      __m256i a = _mm256_unpacklo_epi8(l, h), b = _mm256_unpackhi_epi8(l, h);
      w[j].part[0] = (fvec)_mm256_slli_epi32(a, 16);
      w[j].part[1] = (fvec)_mm256_and_si256(a, top);
      w[j + 2].part[0] = (fvec)_mm256_slli_epi32(b, 16);
      w[j + 2].part[1] = (fvec)_mm256_and_si256(b, top);
    }
  }
#else
  static constexpr int per = 8, bytes = 64;

  static DI_INLINE void decode(const uint8_t* p, F* w) {
    DI_UNROLL for (int i = 0; i < kParts; i++) {
      uvec u;
      memcpy(&u, p + 4 * i * kWidth, sizeof u);
#if DI_LEVEL >= 2
      const __m512 values = _mm512_setr_ps(
          0.0f, 0x1p-121f, 0x1p-120f, 0x1.8p-120f, 0x1p-119f, 0x1.8p-119f, 0x1p-118f, 0x1.8p-118f,
          -0.0f, -0x1p-121f, -0x1p-120f, -0x1.8p-120f, -0x1p-119f, -0x1.8p-119f, -0x1p-118f,
          -0x1.8p-118f);
      DI_UNROLL for (int k = 0; k < 8; k++)
        w[k].part[0] = (fvec)_mm512_maskz_permutexvar_ps((__mmask16)-1, (__m512i)(u >> (4 * k)), values);
#else
      for (int k = 0; k < 8; k++) {
        uvec code = u >> (4 * k);
        w[k].part[i] = (fvec)((code & 8) << 28 | (code & 7) << 22) * 0x1p6f;
      }
#endif
    }
  }
#endif
  static DI_INLINE uvec lanes(const uint8_t* p) {
#if DI_LEVEL >= 2
    return (uvec)_mm512_maskz_cvtepu8_epi32((__mmask16)-1, _mm_loadu_si128((const __m128i*)p));
#elif DI_LEVEL == 1
    return (uvec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    return __builtin_convertvector(*(const typename Vectors<kWidth>::b*)p, uvec);
#endif
  }
  static DI_INLINE F scale(const Matrix& w, int64_t panel, int64_t group) {
    const uint8_t* p = w.scales + (panel * w.groups() + group) * kLanes;
    F r;
    DI_UNROLL for (int i = 0; i < kParts; i++)
      r.part[i] = (fvec)((lanes(p + i * kWidth) + kCodeShift) << 23);
    return r;
  }
};

// bf16: two k of column c in its 32 bits.
template <> struct Codes<kPlain> {
  static constexpr int per = 2, bytes = 64;

  static DI_INLINE void decode(const uint8_t* p, F* w) {
    DI_UNROLL for (int i = 0; i < kParts; i++) {
      uvec u;
      memcpy(&u, p + 4 * i * kWidth, sizeof u);
      w[0].part[i] = (fvec)(u << 16);
      w[1].part[i] = (fvec)(u & 0xffff0000);
    }
  }
};

template <> struct Codes<kWide> {
  static constexpr int per = 1, bytes = 64;

  static DI_INLINE void decode(const uint8_t* p, F* w) { w[0] = load((const float*)p); }
};

}  // namespace DI_NAME
}  // namespace deepinfer
