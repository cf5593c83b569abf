// The product of rows and panels in float32 (panels.h), and how rows become left operands.
#include "deepinfer/codes.h"

namespace deepinfer {
namespace DI_NAME {
namespace {

constexpr int kFew = 6;  // rows up to which codes become floats in registers
constexpr int kTile = DI_LEVEL >= 2 ? 12 : 6;  // rows whose sums fit the registers
constexpr int kDepth = 8;                      // groups of a decoded block: 16 KiB

// The sums of one group, times the weight's scale, go into the totals.
template <int kind> DI_INLINE void add(F& total, F sum, const Rows& x, int64_t row, int64_t group) {
  if constexpr (kind <= kFp4)
    total = fma(sum, splat(x.scales[row * x.groups + group]), total);
  else
    total = total + sum;
}
template <int kind> DI_INLINE F scale_of(const Matrix& w, int64_t panel, int64_t group) {
  if constexpr (kind <= kFp4)
    return Codes<kind>::scale(w, panel, group);
  else
    return splat(1.0f);
}

// R rows times P panels, each code decoded once, in registers.
template <int kind, int R, int P>
void few(const Rows& x, const Matrix& w, int64_t panel, float* totals) {
  using C = Codes<kind>;
  const int64_t groups = w.groups(), bytes = groups * (kGroup / C::per) * C::bytes;
  const uint8_t* codes = w.codes + panel * bytes;
  F total[P][R] = {};
  for (int64_t g = 0; g < groups; g++) {
    F sum[P][R] = {};
    const float* values = x.values + g * kGroup;
    for (int k = 0; k < kGroup; k += C::per) {
      DI_UNROLL for (int p = 0; p < P; p++) {
        F v[C::per];
        C::decode(codes + p * bytes, v);
        DI_UNROLL for (int i = 0; i < C::per; i++)
          DI_UNROLL for (int r = 0; r < R; r++)
            sum[p][r] = fma(splat(values[r * x.stride + k + i]), v[i], sum[p][r]);
      }
      codes += C::bytes;
    }
    DI_UNROLL for (int p = 0; p < P; p++) {
      F scale = scale_of<kind>(w, panel + p, g);
      DI_UNROLL for (int r = 0; r < R; r++)
        add<kind>(total[p][r], sum[p][r] * scale, x, r, g);
    }
  }
  DI_UNROLL for (int p = 0; p < P; p++)
    DI_UNROLL for (int r = 0; r < R; r++) store(totals + (p * R + r) * kLanes, total[p][r]);
}

template <int kind, int R, int P>
void all_few(const Rows& x, const Matrix& w, int64_t first, int64_t panels, float* totals) {
  for (; panels >= P; first += P, panels -= P, totals += P * R * kLanes)
    few<kind, R, P>(x, w, first, totals);
  if constexpr (P > 1)
    if (panels) all_few<kind, R, P / 2>(x, w, first, panels, totals);
}
template <int kind, int R>
void any_few(int64_t rows, const Rows& x, const Matrix& w, int64_t first, int64_t panels,
             float* totals) {
  if (rows == R) return all_few<kind, R, R == 1 ? 4 : 1>(x, w, first, panels, totals);
  if constexpr (R > 1) any_few<kind, R - 1>(rows, x, w, first, panels, totals);
}

// R rows times `groups` decoded groups of one panel, from group `g`. Decoded values are scaled: their
// sums are to the bit what unscaled ones' are, scaled, as a scale is a power of two.
template <int kind, int R>
__attribute__((noinline)) void tile(const Rows& x, int64_t g, int64_t groups, const float* block,
                                    float* totals) {
  for (int64_t end = g + groups; g < end; g++) {
    const float* values = x.values + g * kGroup;
    F sum[R] = {};
    // Unrolled, or the loop's end is mispredicted once a group.
    _Pragma("GCC unroll 8") for (int k = 0; k < kGroup; k++) {
      F v = load(block + k * kLanes);
      DI_UNROLL for (int r = 0; r < R; r++)
        sum[r] = fma(splat(values[r * x.stride + k]), v, sum[r]);
    }
    block += kGroup * kLanes;
    DI_UNROLL for (int r = 0; r < R; r++) {
      F total = load(totals + r * kLanes);
      add<kind>(total, sum[r], x, r, g);
      store(totals + r * kLanes, total);
    }
  }
}

template <int kind, int R>
void any_tile(int64_t rows, const Rows& x, int64_t g, int64_t groups, const float* block,
              float* totals) {
  if (rows == R) return tile<kind, R>(x, g, groups, block, totals);
  if constexpr (R > 1) any_tile<kind, R - 1>(rows, x, g, groups, block, totals);
}

template <int kind>
void many(const Rows& x, int64_t rows, const Matrix& w, int64_t first, int64_t panels,
          float* totals) {
  using C = Codes<kind>;
  const int64_t groups = w.groups();
  alignas(64) float block[kDepth * kGroup * kLanes];
  memset(totals, 0, sizeof(float) * panels * rows * kLanes);
  for (int64_t g = 0; g < groups; g += kDepth) {
    int64_t deep = min(kDepth, groups - g);
    for (int64_t p = 0; p < panels; p++) {
      const uint8_t* codes = w.codes + ((first + p) * groups + g) * (kGroup / C::per) * C::bytes;
      float* to = block;
      for (int64_t i = 0; i < deep; i++) {
        F scale = scale_of<kind>(w, first + p, g + i);
        for (int k = 0; k < kGroup; k += C::per, codes += C::bytes, to += C::per * kLanes) {
          F v[C::per];
          C::decode(codes, v);
          DI_UNROLL for (int j = 0; j < C::per; j++)
            store(to + j * kLanes, kind <= kFp4 ? v[j] * scale : v[j]);
        }
      }
      float* out = totals + p * rows * kLanes;
      // As few tiles as hold the rows, of nearly one height: a low one waits for its own sums.
      for (int64_t r = 0, tiles = ceil_div(rows, kTile); tiles; tiles--) {
        int64_t height = ceil_div(rows - r, tiles);
        any_tile<kind, kTile>(height, x.from(r), g, deep, block, out + r * kLanes);
        r += height;
      }
    }
  }
}

template <int kind>
void multiply_as(const Rows& x, int64_t rows, const Matrix& w, int64_t first, int64_t panels,
                 float* totals) {
  if (rows <= kFew) return any_few<kind, kFew>(rows, x, w, first, panels, totals);
  many<kind>(x, rows, w, first, panels, totals);
}

constexpr float kSmallest = 1e-4f;  // model spec §3.0: the least maximum of a group
constexpr float kLargest = 448.0f;

}  // namespace

void multiply(const Rows& x, int64_t rows, const Matrix& w, int64_t first, int64_t panels,
              float* totals) {
  if (w.kind == kFp8) return multiply_as<kFp8>(x, rows, w, first, panels, totals);
  if (w.kind == kFp4) return multiply_as<kFp4>(x, rows, w, first, panels, totals);
  multiply_as<kPlain>(x, rows, w, first, panels, totals);
}

namespace {

// The largest of magnitudes, as bits: a NaN is the largest of all.
DI_INLINE uint32_t largest_bits(F a, F b) {
  const uvec sign = (uvec){} + 0x80000000;
  ivec most = {};
  DI_UNROLL for (int i = 0; i < kParts; i++) {
    ivec u = (ivec)((uvec)a.part[i] & ~sign), v = (ivec)((uvec)b.part[i] & ~sign);
    u = u > v ? u : v;
    most = u > most ? u : most;
  }
  int32_t some[kWidth];
#if DI_LEVEL == 1
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)most),
                               _mm256_extracti128_si256((__m256i)most, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  some[0] = _mm_cvtsi128_si32(four);
#else
  memcpy(some, &most, sizeof some);
  DI_UNROLL for (int n = kWidth / 2; n; n /= 2)
    for (int i = 0; i < n; i++) some[i] = some[i] > some[i + n] ? some[i] : some[i + n];
#endif
  return (uint32_t)some[0];
}

// Values of the group in E4M3's steps, and its scale: 2^ceil(log2(max / 448)), 1 / 448 rounded.
// Without `round`, values as they are; the scale brings the largest into [1, 2).
template <bool round> DI_INLINE void make_group(F a, F b, float* values, float* scale) {
  F in[2] = {a, b};
  uint32_t top = largest_bits(a, b);
  if (top >= 0x7f800000) {
    store(values, zero());
    store(values + kLanes, zero());
    *scale = __builtin_nanf("");
    return;
  }
  if (round) {
    float most;
    memcpy(&most, &top, 4);
    most = (most > kSmallest ? most : kSmallest) * (1.0f / 448.0f);
    memcpy(&top, &most, 4);
    top += 0x7fffff;
  } else if (top < 0x00800000) {
    top = 0x00800000;
  }
  top &= 0x7f800000;
  uint32_t other = (254u << 23) - top;
  float inverse;
  memcpy(scale, &top, 4);
  memcpy(&inverse, &other, 4);
  if (other < 0x00800000) inverse = 0x1p-127f;
  DI_UNROLL for (int j = 0; j < 2; j++) {
    F v = in[j] * splat(inverse);
    if (round) {
      v = max(min(v, splat(kLargest)), splat(-kLargest));
      F step;
      DI_UNROLL for (int i = 0; i < kParts; i++)
        step.part[i] = (fvec)((uvec)v.part[i] & 0x7f800000);
      step = max(step, splat(0x1p-6f)) * splat(0x1.8p20f);
      v = (v + step) - step;
    }
    store(values + j * kLanes, v * splat(0x1p60f));
  }
}

template <class Body> DI_INLINE void each_group(const bf16* x, int64_t k, const Body& body) {
  int64_t at = 0;
  for (; at + kGroup <= k; at += kGroup) body(at, load(x + at), load(x + at + kLanes));
  if (at < k) body(at, load(x + at, k - at), load(x + at + kLanes, max(0, k - at - kLanes)));
}

}  // namespace

void make_left(Form form, const bf16* x, int64_t k, float* values, float* scales) {
  if (form == kAsIs)
    each_group(x, k, [&](int64_t at, F a, F b) {
      store(values + at, a);
      store(values + at + kLanes, b);
    });
  else if (form == kQuantised)
    each_group(x, k, [&](int64_t at, F a, F b) {
      make_group<true>(a, b, values + at, scales + at / kGroup);
    });
  else
    each_group(x, k, [&](int64_t at, F a, F b) {
      make_group<false>(a, b, values + at, scales + at / kGroup);
    });
}

Rows prepared(Form form, const bf16* x, int64_t rows, int64_t step, int64_t k) {
  int64_t groups = ceil_div(k, kGroup), stride = row_stride(groups);
  float* values = scratch<float>(6, rows * stride);
  float* scales = form != kAsIs ? scratch<float>(7, rows * groups) : nullptr;
  if (!values || (form != kAsIs && !scales)) return {};
  split(rows, max(1, 65536 / max(k, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      make_left(form, x + r * step, k, values + r * stride,
                scales ? scales + r * groups : nullptr);
  });
  return {values, scales, stride, groups};
}

}  // namespace DI_NAME
}  // namespace deepinfer
