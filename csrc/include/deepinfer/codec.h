// State records in lanes: rows of floats to FP8 and FP4 codes with block scales, and back. Formats
// and rounding: model spec 3.0 and 4; bit for bit what deepinfer/quant/codec.py does.
#pragma once

#include "deepinfer/op.h"

namespace deepinfer {
namespace DI_NAME {

// How a record is stored, as the bindings number it. Window: E4M3 codes, an E8M0 byte for every 32.
// Entry: E2M1 codes, an E4M3 byte for every 16. Index: E2M1 codes, an E8M0 byte for every 32.
enum Record { kPlainBf16 = 0, kPlainFloat = 1, kWindow = 2, kEntry = 3, kIndex = 4 };

inline int64_t record_bytes(int kind, int64_t width) {
  switch (kind) {
    case kPlainBf16: return 2 * width;
    case kPlainFloat: return 4 * width;
    case kWindow: return width + width / 32;
    case kEntry: return width / 2 + width / 16;
    default: return width / 2 + width / 32;
  }
}

// One register of lanes

inline fvec part(const float* p) { return (fvec)*(const typename Vectors<kWidth>::f*)p; }
// Words of 16 bits as 32, and back.
inline uvec widened(const void* p) {
#if DI_LEVEL == 1  // the compiler would take the register apart
  return (uvec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  return __builtin_convertvector(*(const typename Vectors<kWidth>::h*)p, uvec);
#endif
}
inline void narrowed(void* p, uvec x) {
#if DI_LEVEL == 1
  __m256i a = (__m256i)x;
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(a),
                                                 _mm256_extracti128_si256(a, 1)));
#else
  *(typename Vectors<kWidth>::h*)p = __builtin_convertvector(x, typename Vectors<kWidth>::h);
#endif
}
inline fvec part(const bf16* p) { return (fvec)(widened(p) << 16); }
inline uvec part(const uint8_t* p) {
#if DI_LEVEL == 1  // the compiler would take eight bytes apart
  return (uvec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return __builtin_convertvector(*(const typename Vectors<kWidth>::b*)p, uvec);
#endif
}
inline void put(float* p, fvec x) { *(typename Vectors<kWidth>::f*)p = x; }
inline void put(uint8_t* p, uvec x) {
#if DI_LEVEL == 1
  __m256i a = (__m256i)x;
  __m128i h = _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(h, h));
#else
  *(typename Vectors<kWidth>::b*)p = __builtin_convertvector(x, typename Vectors<kWidth>::b);
#endif
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// x as T holds it: to nearest even; NaN with the highest bits set only.
inline F rounded(F x, const bf16*) {
  F r;
  DI_UNROLL for (int i = 0; i < kParts; i++) {
    uvec u = (uvec)x.part[i];
    r.part[i] = (fvec)((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000);
  }
  return r;
}
inline F rounded(F x, const float*) { return x; }

// 2^(b - 127); 255 is NaN.
inline float e8m0(uint8_t b) {
  return as_float(b == 255 ? 0x7fc00000u : b ? (uint32_t)b << 23 : 1u << 22);
}
// 2^ceil(log2 x) of positive normal numbers; 0 of NaN, infinity of infinity.
inline float power_above(float x) { return as_float((bits_of(x) + 0x7fffffu) & 0x7f800000u); }

// Values within [-448, 448], to nearest even.
inline uvec e4m3_codes(fvec x) {
  uvec sign = (uvec)x & 0x80000000u;
  ivec a = (ivec)((uvec)x ^ sign);
  ivec code = (a + (0x7ffff - (120 << 23)) + ((a >> 20) & 1)) >> 20;
  fvec magic = (fvec){} + 16384.0f;  // its last place is 2^-9, the smallest E4M3 number
  ivec small = (ivec)((fvec)a + magic) - (ivec)magic;
  code = a < (121 << 23) ? small : code;
  code = a >= (1087 << 20) ? (ivec){} + 0x7f : code;
  return (uvec)code | sign >> 24;
}
inline fvec e4m3_values(uvec codes) {
  ivec a = (ivec)(codes & 0x7f);
  fvec normal = (fvec)((a << 20) + (120 << 23));
  fvec small = (fvec)((a << 20) + (121 << 23)) - 0.015625f;
  fvec x = a < 8 ? small : normal;
  x = a == 0x7f ? (fvec)((ivec){} + 0x7fc00000) : x;
  return (fvec)((uvec)x | (codes & 0x80) << 24);
}
struct E4m3Table {
  float value[256];
  constexpr E4m3Table() : value() {
    for (int c = 0; c < 256; c++) {
      int exponent = c >> 3 & 15;
      float x = exponent ? (8 + (c & 7)) / 512.0f : (c & 7) / 512.0f;
      for (int i = 1; i < exponent; i++) x *= 2;
      if ((c & 127) == 127) x = __builtin_nanf("");
      value[c] = c & 128 ? -x : x;
    }
  }
};
constexpr E4m3Table kE4m3;

// Values within [-6, 6], ties to the even code; bit 3 is the sign, also of -0.
inline uvec e2m1_codes(fvec x) {
  fvec a = (fvec)((uvec)x & 0x7fffffff);
  ivec below = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) +
               (a >= 3.5f) + (a > 5.0f);
  return (uvec)(-below) | ((uvec)x >> 31) << 3;
}
#if DI_LEVEL >= 1
// Of 8 bytes, the even element in the low nibble: 16 words, each out of a table of eight (by code
// without its sign).
inline __m256i e2m1_words(const uint8_t* p, __m128i table) {
  __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  x = _mm256_or_si256(x, _mm256_slli_epi32(x, 12));  // a nibble in the low bits of each word
  __m256i code = _mm256_and_si256(x, _mm256_set1_epi16(7));
  __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(8)), 12);
  __m256i bytes = _mm256_add_epi16(_mm256_mullo_epi16(code, _mm256_set1_epi16(0x202)),
                                   _mm256_set1_epi16(0x100));
  __m256i both = _mm256_broadcastsi128_si256(table);
  return _mm256_xor_si256(_mm256_shuffle_epi8(both, bytes), sign);
}
#endif
// 16 values of 8 bytes.
inline F e2m1_values(const uint8_t* p) {
#if DI_LEVEL >= 1
  __m128i table = _mm_setr_epi16(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0);
  bf16 words[kLanes];
  _mm256_storeu_si256((__m256i*)words, e2m1_words(p, table));
  return load(words);
#else
  constexpr float kValues[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
  float some[kLanes];
  for (int i = 0; i < 8; i++)
    some[2 * i] = kValues[p[i] & 15], some[2 * i + 1] = kValues[p[i] >> 4];
  return load(some);
#endif
}
inline void pack_nibbles(const uint8_t* codes, int64_t count, uint8_t* out) {
#if DI_LEVEL >= 1
  for (int64_t i = 0; i < count; i += 16) {
    __m128i c = _mm_loadu_si128((const __m128i*)(codes + i));
    __m128i both = _mm_maddubs_epi16(c, _mm_set1_epi16(0x1001));  // low + 16 * high
    _mm_storel_epi64((__m128i*)(out + i / 2), _mm_packus_epi16(both, both));
  }
#else
  for (int64_t i = 0; i < count; i += 2) out[i / 2] = codes[i] | codes[i + 1] << 4;
#endif
}

// The largest magnitude of kCount numbers, as bits: NaN is above infinity.
template <int kCount, class T> inline int32_t largest_bits(const T* x) {
  ivec most{};
  DI_UNROLL for (int i = 0; i < kCount; i += kWidth) {
    ivec a = (ivec)((uvec)part(x + i) & 0x7fffffff);
    most = a > most ? a : most;
  }
#if DI_LEVEL >= 1
#if DI_LEVEL >= 2
  __m512i all = (__m512i)most;
  __m256i most8 = _mm256_max_epi32(_mm512_maskz_extracti32x8_epi32(255, all, 0),
                                   _mm512_maskz_extracti32x8_epi32(255, all, 1));
#else
  __m256i most8 = (__m256i)most;
#endif
  __m128i r = _mm_max_epi32(_mm256_castsi256_si128(most8), _mm256_extracti128_si256(most8, 1));
  r = _mm_max_epi32(r, _mm_shuffle_epi32(r, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(r, _mm_shuffle_epi32(r, 0xb1)));
#else
  int32_t r = 0;
  for (int i = 0; i < kWidth; i++) r = most[i] > r ? most[i] : r;
  return r;
#endif
}

// Rows to records

inline fvec clamp(fvec x, float limit) {
  fvec high = (fvec){} + limit, low = (fvec){} - limit;
  x = x > high ? high : x;
  return x < low ? low : x;
}
inline float at_least(int32_t bits, float least) {
  return as_float((uint32_t)max(bits, (int64_t)bits_of(least)));
}

template <class T> inline void encode_window(const T* x, int64_t width, uint8_t* out) {
  for (int64_t g = 0; g < width / 32; g++, x += 32) {
    float scale = power_above(at_least(largest_bits<32>(x), 1e-4f) * (float)(1 / 448.0));
    fvec inverse = (fvec){} + 1.0f / scale;  // a power of two: the product is the quotient
    DI_UNROLL for (int i = 0; i < 32; i += kWidth)
      put(out + 32 * g + i, e4m3_codes(clamp(part(x + i) * inverse, 448.0f)));
    out[width + g] = (uint8_t)(bits_of(scale) >> 23);
  }
}
template <class T> inline void encode_index(const T* x, int64_t width, uint8_t* out) {
  uint8_t codes[32];
  for (int64_t g = 0; g < width / 32; g++, x += 32) {
    float least = 6 * 1.1754943508222875e-38f;
    float scale = power_above(at_least(largest_bits<32>(x), least) * (float)(1 / 6.0));
    fvec inverse = (fvec){} + 1.0f / scale;
    DI_UNROLL for (int i = 0; i < 32; i += kWidth)
      put(codes + i, e2m1_codes(clamp(part(x + i) * inverse, 6.0f)));
    pack_nibbles(codes, 32, out + 16 * g);
    out[width / 2 + g] = (uint8_t)(bits_of(scale) >> 23);
  }
}
template <class T> inline void encode_entry(const T* x, int64_t width, uint8_t* out) {
  uint8_t codes[16];
  for (int64_t g = 0; g < width / 16; g++, x += 16) {
    float s = at_least(largest_bits<16>(x), 6.0f / 512) / 6.0f;
    s = s > 448.0f ? 448.0f : s;
    uint8_t code = (uint8_t)e4m3_codes((fvec){} + s)[0];
    fvec scale = (fvec){} + kE4m3.value[code];
    DI_UNROLL for (int i = 0; i < 16; i += kWidth)
      put(codes + i, e2m1_codes(clamp(part(x + i) / scale, 6.0f)));
    pack_nibbles(codes, 16, out + 8 * g);
    out[width / 2 + g] = code;
  }
}
// Kinds of a row of T that this file encodes: kWindow, kEntry, kIndex.
template <class T> inline void encode(int kind, const T* x, int64_t width, uint8_t* out) {
  if (kind == kWindow) return encode_window(x, width, out);
  if (kind == kEntry) return encode_entry(x, width, out);
  encode_index(x, width, out);
}

// Records to rows of K, float or bf16, which holds all of their values but those of plain float32;
// out has room for a multiple of kLanes, filled up with zeros.

inline void store_exact(float* p, F x) { store(p, x); }
// Of values that bf16 holds.
inline void store_exact(bf16* p, F x) {
  DI_UNROLL for (int i = 0; i < kParts; i++)
    narrowed(p + i * kWidth, (uvec)x.part[i] >> 16);
}

template <class T, class K> inline void decode_plain(const T* record, int64_t width, K* out) {
  for (int64_t i = 0; i < width; i += kLanes) store_exact(out + i, load(record + i, width - i));
}
template <class K> inline void decode_window(const uint8_t* record, int64_t width, K* out) {
  for (int64_t i = 0; i < width; i += kLanes) {
    fvec scale = (fvec){} + e8m0(record[width + i / 32]);
    F x;
    DI_UNROLL for (int j = 0; j < kParts; j++)
      x.part[j] = e4m3_values(part(record + i + j * kWidth)) * scale;
    store_exact(out + i, x);
  }
}
template <class K> inline void decode_entry(const uint8_t* record, int64_t width, K* out) {
  const uint8_t* scales = record + width / 2;
  for (int64_t i = 0; i < width; i += kLanes)
    store_exact(out + i, e2m1_values(record + i / 2) * splat(kE4m3.value[scales[i / 16]]));
}
template <class K> inline void decode_index(const uint8_t* record, int64_t width, K* out) {
  const uint8_t* scales = record + width / 2;
  for (int64_t i = 0; i < width; i += kLanes)
    store_exact(out + i, e2m1_values(record + i / 2) * splat(e8m0(scales[i / 32])));
}

#if DI_LEVEL >= 1
// The same in words of 16 bits, which need no arithmetic but that of exponents.

inline void decode_window(const uint8_t* record, int64_t width, bf16* out) {
  const uint8_t* scales = record + width;
  for (int64_t i = 0; i < width / 32; i++)
    if (scales[i] < 10 || scales[i] > 246) return decode_window<bf16>(record, width, out);
  // What a subnormal (0 to 7 times 2^-9) is beside the normal number of the same bits.
  __m256i small = _mm256_broadcastsi128_si256(
      _mm_setr_epi16(0, -272, -160, -112, -64, -48, -32, -16));
  __m256i twice = _mm256_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10,
                                   10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
  __m256i seven = _mm256_set1_epi8(0x7f);
  for (int64_t i = 0; i < width; i += 16) {
    __m256i exponent = _mm256_set1_epi16((int16_t)((scales[i / 32] - 7) << 7));
    __m256i codes = _mm256_shuffle_epi8(
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(record + i))), twice);
    __m256i a = _mm256_and_si256(codes, seven);
    // Bytes 2 a and 2 a + 1 of the table; above 7 the highest bit is set, which stands for 0.
    __m256i at = _mm256_adds_epu8(_mm256_add_epi8(a, a), _mm256_set1_epi16(0x7170));
    __m256i x = _mm256_and_si256(_mm256_slli_epi16(a, 4), _mm256_set1_epi16(0x7f0));
    x = _mm256_add_epi16(_mm256_add_epi16(x, exponent), _mm256_shuffle_epi8(small, at));
    x = _mm256_andnot_si256(_mm256_cmpeq_epi16(a, _mm256_setzero_si256()), x);
    x = _mm256_or_si256(x, _mm256_srli_epi16(_mm256_cmpeq_epi16(a, seven), 1));  // NaN
    x = _mm256_or_si256(x, _mm256_and_si256(codes, _mm256_set1_epi16((int16_t)0x8000)));
    _mm256_storeu_si256((__m256i*)(out + i), x);
  }
}

// Every E4M3 number times the eight magnitudes of E2M1, as bf16.
struct EntryTable {
  uint16_t word[256][8];
  constexpr EntryTable() : word() {
    constexpr int kTwice[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    for (int s = 0; s < 256; s++)
      for (int c = 0; c < 8; c++) {
        int e = s >> 3 & 15, a = kTwice[c] * (e ? 8 + (s & 7) : s & 7), p = (e ? e : 1) - 11;
        while (a && a < 128) a *= 2, p--;
        int bits = a ? ((p + 7 + 127) << 7) + (a & 127) : 0;
        if ((s & 127) == 127) bits = 0x7fc0;
        word[s][c] = (uint16_t)(bits | (s & 128) << 8);
      }
  }
};
constexpr EntryTable kEntryTable;

inline void decode_entry(const uint8_t* record, int64_t width, bf16* out) {
  const uint8_t* scales = record + width / 2;
  for (int64_t i = 0; i < width; i += 16) {
    __m128i table = _mm_loadu_si128((const __m128i*)kEntryTable.word[scales[i / 16]]);
    _mm256_storeu_si256((__m256i*)(out + i), e2m1_words(record + i / 2, table));
  }
}
#endif

template <class K> inline void decode(int kind, const uint8_t* record, int64_t width, K* out) {
  switch (kind) {
    case kPlainBf16: return decode_plain((const bf16*)record, width, out);
    case kPlainFloat: return decode_plain((const float*)record, width, out);
    case kWindow: return decode_window(record, width, out);
    case kEntry: return decode_entry(record, width, out);
    default: return decode_index(record, width, out);
  }
}

}  // namespace DI_NAME
}  // namespace deepinfer
