// y = x W^T with one matrix, with one a group of columns, or in float64 for a float32 result.
#include "deepinfer/codes.h"

namespace deepinfer {
namespace DI_NAME {
namespace {

// Columns [begin, end) of x times the matrix, at out[row * step + column - begin].
int product(const Rows& x, int64_t rows, const Matrix& w, int64_t begin, int64_t end, bf16* out,
            int64_t step) {
  int64_t first = begin / kLanes, panels = ceil_div(end, kLanes) - first;
  bool failed = false;
  Grid grid(rows, panels, w);
  run(grid.tasks(), cycles(rows, w, panels) < kAlone, [&](int64_t task) {
    Grid::Piece a = grid.at(task);
    float* totals = scratch<float>(0, a.panels * a.rows * kLanes);
    if (!totals) return __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    multiply(x.from(a.row), a.rows, w, first + a.panel, a.panels, totals);
    for (int64_t p = 0; p < a.panels; p++) {
      int64_t column = (first + a.panel + p) * kLanes, from = max(begin, column);
      int64_t lanes = min(end, column + kLanes) - from;
      for (int64_t r = 0; r < a.rows; r++)
        store(out + (a.row + r) * step + from - begin,
              load(totals + (p * a.rows + r) * kLanes + from - column, lanes), lanes);
    }
  });
  return failed ? kNoMemory : kOk;
}

// The float64 product: each value one chain of fma in k order.

// Rows are kept 2^400 of what they are: far from both ends, whatever `Wide` does.
constexpr double kRaised = 0x1p400;

// A unit's codes as float64; what is left to do to a sum of their products.
template <int kind> struct Wide {
  static DI_INLINE void decode(const uint8_t* p, D* w) {
    F v[Codes<kind>::per];
    Codes<kind>::decode(p, v);
    DI_UNROLL for (int i = 0; i < Codes<kind>::per; i++) w[i] = widen(v[i]);
  }
  static DI_INLINE D finished(D sum) { return sum * splat(1 / kRaised); }
};
#if DI_LEVEL == 1
// The conversion takes two cycles for four values. Here the bits of finite bf16 go to their places
// in a float64, whose exponent then is 896 too small; of eight columns, the even ones come first.
template <> struct Wide<kPlain> {
  static DI_INLINE void decode(const uint8_t* p, D* w) {
    const __m256i mask = _mm256_set1_epi64x((long long)0x8fffe00000000000);
    DI_UNROLL for (int i = 0; i < kParts; i++) {
      __m256i u = _mm256_loadu_si256((const __m256i*)(p + 32 * i));
      __m256i k[2] = {_mm256_srai_epi32(_mm256_slli_epi32(u, 16), 3), _mm256_srai_epi32(u, 3)};
      DI_UNROLL for (int j = 0; j < 2; j++) {
        w[j].part[2 * i] = (dvec)_mm256_and_si256(_mm256_slli_epi64(k[j], 32), mask);
        w[j].part[2 * i + 1] = (dvec)_mm256_and_si256(k[j], mask);
      }
    }
  }
  static DI_INLINE D finished(D sum) {
    D r;
    DI_UNROLL for (int i = 0; i < kHalves; i += 2) {
      __m256d even = (__m256d)sum.part[i], odd = (__m256d)sum.part[i + 1];
      __m256d a = _mm256_unpacklo_pd(even, odd), b = _mm256_unpackhi_pd(even, odd);
      r.part[i] = (dvec)_mm256_permute2f128_pd(a, b, 0x20);
      r.part[i + 1] = (dvec)_mm256_permute2f128_pd(a, b, 0x31);
    }
    return r * splat(0x1p896 / kRaised);
  }
};
#endif

// R rows times P panels of codes.
template <int kind, int R, int P>
void chains(const double* x, int64_t stride, const uint8_t* codes, int64_t groups, double* total) {
  using C = Codes<kind>;
  const int64_t bytes = groups * (kGroup / C::per) * C::bytes;
  D sum[P][R] = {};
  for (int64_t k = 0; k < groups * kGroup; k += C::per, codes += C::bytes)
    DI_UNROLL for (int p = 0; p < P; p++) {
      D v[C::per];
      Wide<kind>::decode(codes + p * bytes, v);
      DI_UNROLL for (int i = 0; i < C::per; i++)
        DI_UNROLL for (int r = 0; r < R; r++)
          sum[p][r] = fma(splat(x[r * stride + k + i]), v[i], sum[p][r]);
    }
  DI_UNROLL for (int p = 0; p < P; p++)
    DI_UNROLL for (int r = 0; r < R; r++)
      store(total + (p * R + r) * kLanes, sum[p][r]);
}

constexpr int kWideTile = DI_LEVEL >= 2 ? 6 : 3;  // rows whose sums fit the registers
constexpr int kWideDepth = 128;                   // k of a decoded block: 16 KiB

template <int R>
__attribute__((noinline)) void wide_tile(const double* x, int64_t stride, const double* block,
                                         int64_t depth, double* total) {
  D sum[R];
  DI_UNROLL for (int r = 0; r < R; r++) sum[r] = load(total + r * kLanes);
  for (int64_t k = 0; k < depth; k++) {
    D v = load(block + k * kLanes);
    DI_UNROLL for (int r = 0; r < R; r++) sum[r] = fma(splat(x[r * stride + k]), v, sum[r]);
  }
  DI_UNROLL for (int r = 0; r < R; r++) store(total + r * kLanes, sum[r]);
}
template <int R>
void any_wide_tile(int64_t rows, const double* x, int64_t stride, const double* block,
                   int64_t depth, double* total) {
  if (rows == R) return wide_tile<R>(x, stride, block, depth, total);
  if constexpr (R > 1) any_wide_tile<R - 1>(rows, x, stride, block, depth, total);
}

// totals [panels, rows, 16], to be finished, of the matrix's panels from `codes`.
template <int kind>
void wide_multiply(const double* x, int64_t stride, int64_t rows, const uint8_t* codes,
                   int64_t groups, int64_t panels, double* total) {
  using C = Codes<kind>;
  const int64_t bytes = groups * (kGroup / C::per) * C::bytes;
  if (rows <= 2) {
    for (; rows == 1 && panels > 1; panels -= 2, codes += 2 * bytes, total += 2 * kLanes)
      chains<kind, 1, 2>(x, stride, codes, groups, total);
    for (; panels; panels--, codes += bytes, total += rows * kLanes)
      if (rows == 1)
        chains<kind, 1, 1>(x, stride, codes, groups, total);
      else
        chains<kind, 2, 1>(x, stride, codes, groups, total);
    return;
  }
  alignas(64) double block[kWideDepth * kLanes];
  memset(total, 0, sizeof(double) * panels * rows * kLanes);
  for (int64_t at = 0; at < groups * kGroup; at += kWideDepth) {
    int64_t depth = min(kWideDepth, groups * kGroup - at);
    for (int64_t p = 0; p < panels; p++) {
      const uint8_t* from = codes + p * bytes + at / C::per * C::bytes;
      for (int64_t k = 0; k < depth; k += C::per, from += C::bytes) {
        D v[C::per];
        Wide<kind>::decode(from, v);
        DI_UNROLL for (int i = 0; i < C::per; i++) store(block + (k + i) * kLanes, v[i]);
      }
      for (int64_t r = 0, tiles = ceil_div(rows, kWideTile); tiles; tiles--) {
        int64_t height = ceil_div(rows - r, tiles);
        any_wide_tile<kWideTile>(height, x + r * stride + at, stride, block, depth,
                                 total + (p * rows + r) * kLanes);
        r += height;
      }
    }
  }
}

template <int kind>
int exact(const double* x, int64_t stride, int64_t rows, const Matrix& w, float* out) {
  int64_t groups = w.groups(), bytes = groups * w.group_bytes();
  Grid grid(rows, w.panels(), w);
  bool failed = false;
  run(grid.tasks(), 3 * cycles(rows, w, w.panels()) < kAlone, [&](int64_t task) {
    Grid::Piece a = grid.at(task);
    double* totals = scratch<double>(0, a.panels * a.rows * kLanes);
    if (!totals) return __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    wide_multiply<kind>(x + a.row * stride, stride, a.rows, w.codes + a.panel * bytes, groups,
                        a.panels, totals);
    for (int64_t p = 0; p < a.panels; p++) {
      int64_t column = (a.panel + p) * kLanes;
      for (int64_t r = 0; r < a.rows; r++) {
        D sum = Wide<kind>::finished(load(totals + (p * a.rows + r) * kLanes));
        store(out + (a.row + r) * w.n + column, narrow(sum), w.n - column);
      }
    }
  });
  return failed ? kNoMemory : kOk;
}

// A row as float64, each block of 128 rounded to integers of 23 bits times one power of two: as the
// reference does (`deepinfer/ops/torch/blocked.py`), whose float32 products must be met. Weights
// that need it come so.
template <class T> void snapped(const T* x, int64_t k, int64_t filled, double* out) {
  constexpr int kBlock = 128;
  for (int64_t at = 0; at < filled; at += kBlock) {
    int64_t end = min(filled, at + kBlock);
    double top = 0;
    for (int64_t i = at; i < end; i += kLanes) {
      D v = widen(x + i, max(0, k - i));
      store(out + i, v);
    }
    uint64_t most = 0;
    for (int64_t i = at; i < end; i++) {
      uint64_t bits;
      memcpy(&bits, out + i, 8);
      bits &= ~0ull >> 1;  // compared as integers: a NaN is the largest
      most = most > bits ? most : bits;
    }
    most &= 0x7ffull << 52;
    memcpy(&top, &most, 8);
    D magic = splat(top * 0x1.8p30);
    for (int64_t i = at; i < end; i += kLanes) {
      D v;
      memcpy(v.part, out + i, sizeof v.part);
      store(out + i, ((v + magic) - magic) * splat(kRaised));
    }
  }
}

template <class T>
int linear_f32(const T* x, int64_t rows, const Matrix& w, float* out) {
  int64_t stride = row_stride(w.groups());
  double* wide = scratch<double>(6, rows * stride);
  if (!wide) return kNoMemory;
  split(rows, max(1, 65536 / max(w.k, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      snapped(x + r * w.k, w.k, w.groups() * kGroup, wide + r * stride);
  });
  return w.kind == kPlain ? exact<kPlain>(wide, stride, rows, w, out)
                          : exact<kWide>(wide, stride, rows, w, out);
}

}  // namespace
}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// x bf16 [rows, k]; out bf16 [rows, n]; weights fp8, fp4 or bf16.
DI_OP(linear)(const bf16* x, int64_t rows, const Matrix* w, bf16* out) {
  Rows left = prepared(w->quantised() ? kQuantised : kAsIs, x, rows, w->k, w->k);
  if (!left.values) return kNoMemory;
  return product(left, rows, *w, 0, w->n, out, w->n);
}
DI_CAPTURED(linear)

// x bf16 [rows, groups, k]; out bf16 [rows, n]: group g times rows [g n / groups, ...) of the matrix.
DI_OP(grouped_linear)
(const bf16* x, int64_t rows, int64_t groups, const Matrix* w, bf16* out) {
  int64_t wide = w->n / groups;
  Form form = w->quantised() ? kScaled : kAsIs;
  for (int64_t g = 0; g < groups; g++) {
    Rows left = prepared(form, x + g * w->k, rows, groups * w->k, w->k);
    if (!left.values) return kNoMemory;
    int status = product(left, rows, *w, g * wide, (g + 1) * wide, out + g * wide, w->n);
    if (status) return status;
  }
  return kOk;
}
DI_CAPTURED(grouped_linear)

// x [rows, k] of type `type`; out float [rows, n]; weights bf16 or float.
DI_OP(linear_f32)(const void* x, int type, int64_t rows, const Matrix* w, float* out) {
  if (type == kBf16) return linear_f32((const bf16*)x, rows, *w, out);
  return linear_f32((const float*)x, rows, *w, out);
}
DI_CAPTURED(linear_f32)
