// Softmax attention of every row over the records that its slot lists name; key = value.
//
// Columns are visited in blocks of 64, the window's first, with a running maximum. A block's keys
// are decoded once for all heads; their logits, probabilities and products with the values are small
// matrix products in float32. Each number is summed in an order that only the row knows: channels in
// lanes for the logits, keys in column order for the values.
#include "deepinfer/codec.h"

namespace deepinfer {
namespace DI_NAME {

constexpr int kBlock = 64;                     // columns that share one maximum
constexpr int kHeads = 4;                      // of a tile
constexpr int kKeys = kWidth == 16 ? 6 : 3;    // of a tile of logits
constexpr int kNear = 3 * kKeys;
constexpr int kTile = kBlock * kHeads;         // logits of a tile of heads ...
constexpr int kSpare = kKeys * kHeads;         // ... and what the last tile of keys may add
constexpr int kMany = 8;                       // rows: a task for each
constexpr size_t kRoom = 64 << 20;             // bytes of keys that rows share
constexpr float kLeast = -1e30f;

struct Source {
  const uint8_t* records;
  const int64_t* slots;  // [rows, columns]
  int64_t columns, bytes;
  int kind;
  const void* decoded;   // null, or keys by record, or ...
  bool by_column;        // ... by row and column
};

struct Shape {
  int64_t heads, width, inner, stride;  // inner: width in whole lanes; stride: of keys
  float factor;
};

// The sums of four registers.
inline void sums(const fvec* x, float* out) {
#if DI_LEVEL >= 1
#if DI_LEVEL >= 2
  __m256 v[4];
  DI_UNROLL for (int i = 0; i < 4; i++)
    v[i] = _mm256_add_ps(_mm512_maskz_extractf32x8_ps(255, (__m512)x[i], 0),
                         _mm512_maskz_extractf32x8_ps(255, (__m512)x[i], 1));
#else
  const __m256* v = (const __m256*)x;
#endif
  __m256 r = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(r), _mm256_extractf128_ps(r, 1)));
#else
  for (int i = 0; i < 4; i++) out[i] = (x[i][0] + x[i][1]) + (x[i][2] + x[i][3]);
#endif
}

// out [kKeys, kHeads]: products of four queries with some keys.
template <class K>
inline void dots(const float* q, const K* const* keys, const Shape& shape, float* out) {
  fvec sum[kKeys][kHeads] = {};
  for (int64_t d = 0; d < shape.inner; d += kWidth) {
    fvec k[kKeys];
    DI_UNROLL for (int j = 0; j < kKeys; j++) k[j] = part(keys[j] + d);
    DI_UNROLL for (int h = 0; h < kHeads; h++) {
      fvec x = part(q + h * shape.inner + d);
      DI_UNROLL for (int j = 0; j < kKeys; j++) sum[j][h] = fma(x, k[j], sum[j][h]);
    }
  }
  DI_UNROLL for (int j = 0; j < kKeys; j++) sums(sum[j], out + j * kHeads);
}

// Of 16 lanes, four keys of four heads each: the four heads', repeated.
template <class Op> inline F by_head(F x, const Op& op) {
  float a[kLanes], r[kLanes];
  store(a, x);
  DI_UNROLL for (int h = 0; h < kLanes; h++) {
    int i = h % kHeads;
    r[h] = op(op(a[i], a[i + 8]), op(a[i + 4], a[i + 12]));
  }
  return load(r);
}

// The state of a tile of heads between blocks; 16 lanes each: heads, repeated.
struct Running {
  F peak, total, alpha;
};

// Logits [count, kHeads] become probabilities beside the new peak, rounded as T.
template <class T> inline void softmax(float* l, int64_t count, float factor, Running& run) {
  int64_t lanes = count * kHeads, padded = ceil_div(lanes, kLanes) * kLanes;
  for (int64_t i = lanes; i < padded; i++) l[i] = -__builtin_inff();
  F top = run.peak;
  for (int64_t i = 0; i < padded; i += kLanes) {
    F x = load(l + i) * splat(factor);
    store(l + i, x);
    top = max(top, x);
  }
  top = by_head(top, [](float a, float b) { return a > b ? a : b; });
  F sum = zero();
  for (int64_t i = 0; i < padded; i += kLanes) {
    F p = exp(load(l + i) - top);
    sum = sum + p;
    store(l + i, rounded(p, (const T*)nullptr));
  }
  run.alpha = exp(run.peak - top);
  run.total = run.total * run.alpha + by_head(sum, [](float a, float b) { return a + b; });
  run.peak = top;
}

// acc [tiles * kHeads, inner] = acc * alpha + probabilities x values.
template <class K>
inline void add_values(const float* p, int64_t tiles, const Running* run, const K* const* keys,
                       int64_t count, bool first, const Shape& shape, float* acc) {
  for (int64_t d = 0; d < shape.inner; d += kLanes) {
    for (int64_t t = 0; t < tiles; t++) {
      const float* weights = p + t * (kTile + kSpare);
      float* to = acc + t * kHeads * shape.inner + d;
      float alpha[kLanes];
      store(alpha, run[t].alpha);
      F sum[kHeads];
      DI_UNROLL for (int h = 0; h < kHeads; h++)
        sum[h] = first ? zero() : load(to + h * shape.inner) * splat(alpha[h]);
      for (int64_t k = 0; k < count; k++) {
        F v = load(keys[k] + d);
        DI_UNROLL for (int h = 0; h < kHeads; h++)
          sum[h] = fma(splat(weights[k * kHeads + h]), v, sum[h]);
      }
      DI_UNROLL for (int h = 0; h < kHeads; h++) store(to + h * shape.inner, sum[h]);
    }
  }
}

// Heads [begin, end) of one row; false: no memory.
template <class T, class K>
bool attend(const T* q, const Source* sources, int64_t row, const float* sink, int64_t begin,
            int64_t end, const Shape& shape, T* out) {
  int64_t tiles = ceil_div(end - begin, kHeads), rows = tiles * kHeads;
  float* queries = scratch<float>(1, rows * shape.inner);
  float* acc = scratch<float>(2, rows * shape.inner);
  K* block = scratch<K>(3, kBlock * shape.stride);
  float* p = scratch<float>(4, tiles * (kTile + kSpare));
  Running* run = scratch<Running>(5, tiles);
  if (!queries || !acc || !block || !p || !run) return false;
  for (int64_t h = 0; h < rows; h++) {
    int64_t from = min(begin + h, end - 1);  // the last head fills its tile up
    decode_plain(q + from * shape.width, shape.width, queries + h * shape.inner);
  }
  for (int64_t t = 0; t < tiles; t++) run[t].peak = splat(kLeast), run[t].total = zero();
  int64_t all = sources[0].columns + sources[1].columns;
  bool first = true;
  for (int64_t start = 0; start < all; start += kBlock) {
    const K* keys[kBlock + kKeys];
    int64_t count = 0;
    for (int64_t c = start; c < min(all, start + kBlock); c++) {
      const Source& s = c < sources[0].columns ? sources[0] : sources[1];
      int64_t column = row * s.columns + (c < sources[0].columns ? c : c - sources[0].columns);
      int64_t slot = s.slots[column];
      if (slot < 0) continue;
      if (s.decoded) {
        keys[count] = (const K*)s.decoded + (s.by_column ? column : slot) * shape.stride;
      } else {
        keys[count] = block + count * shape.stride;
        decode(s.kind, s.records + slot * s.bytes, shape.width, block + count * shape.stride);
      }
      count++;
    }
    if (!count) continue;
    for (int64_t k = count; k < count + kKeys - 1; k++) keys[k] = keys[count - 1];
    // A few keys at a time stay close by while the queries pass.
    for (int64_t some = 0; some < count; some += kNear)
      for (int64_t t = 0; t < tiles; t++)
        for (int64_t k = some; k < min(count, some + kNear); k += kKeys)
          dots(queries + t * kHeads * shape.inner, keys + k, shape,
               p + t * (kTile + kSpare) + k * kHeads);
    for (int64_t t = 0; t < tiles; t++)
      softmax<T>(p + t * (kTile + kSpare), count, shape.factor, run[t]);
    add_values(p, tiles, run, keys, count, first, shape, acc);
    first = false;
  }
  for (int64_t t = 0; t < tiles; t++) {
    float sinks[kLanes] = {}, inverse[kLanes];
    for (int64_t h = 0; h < min(kHeads, end - begin - t * kHeads); h++)
      sinks[h] = sink[begin + t * kHeads + h];
    F total = run[t].total + exp(load(sinks) - run[t].peak);
    store(inverse, splat(1.0f) / total);
    for (int64_t h = t * kHeads; h < min(end - begin, (t + 1) * kHeads); h++) {
      T* to = out + (begin + h) * shape.width;
      for (int64_t d = 0; d < shape.width; d += kLanes) {
        F x = first ? zero() : load(acc + h * shape.inner + d) * splat(inverse[h % kHeads]);
        store(to + d, x, shape.width - d);
      }
    }
  }
  return true;
}

// Keys that rows share are decoded before, by record; those of few rows, on all threads, by column.
template <class K>
bool decode_before(Source* s, int64_t rows, int64_t records, const Shape& shape, int slot) {
  int64_t named = rows * s->columns;
  s->by_column = records >= named;
  int64_t count = s->by_column ? named : records;
  // Or each when its row comes to it.
  bool alone = s->by_column ? rows >= kMany : count * shape.stride * sizeof(K) > kRoom;
  if (!count || alone) return true;
  K* keys = scratch<K>(slot, count * shape.stride);
  if (!keys) return false;
  split(count, max(1, (1 << 16) / shape.stride), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t record = s->by_column ? s->slots[i] : i;
      if (record >= 0)
        decode(s->kind, s->records + record * s->bytes, shape.width, keys + i * shape.stride);
    }
  });
  s->decoded = keys;
  return true;
}

template <class K, class T>
int sparse_attention(const T* q, int64_t rows, Source* sources, const int64_t* records,
                     const float* sink, const Shape& shape, T* out) {
  for (int i = 0; i < 2; i++)
    if (!decode_before<K>(&sources[i], rows, records[i], shape, 6 + i)) return kNoMemory;
  // Heads of few rows are shared out as well; no head knows which others stand beside it.
  int64_t group = rows >= kMany ? shape.heads : min(shape.heads, 16);
  int64_t groups = ceil_div(shape.heads, group);
  int failed = 0;
  parallel(rows * groups, [&](int64_t task) {
    int64_t row = task / groups, begin = task % groups * group;
    int64_t at = row * shape.heads * shape.width;
    if (!attend<T, K>(q + at, sources, row, sink, begin, min(shape.heads, begin + group), shape, out + at))
      __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
  });
  return failed ? kNoMemory : kOk;
}

}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// q, out [rows, heads, width] of type `type`; records uint8 [records, bytes of their kind]; slots
// int64 [rows, columns], -1: no key; sink float32 [heads].
DI_OP(sparse_attention)
(const void* q, int type, int64_t rows, int64_t heads, int64_t width, const uint8_t* window,
 int64_t window_records, const int64_t* window_slots, int64_t window_columns, int window_kind,
 const uint8_t* entries, int64_t entry_records, const int64_t* entry_slots, int64_t entry_columns,
 int entry_kind, const float* sink, void* out) {
  int64_t inner = ceil_div(width, kLanes) * kLanes;
  // A line more, so that equal channels of many keys do not compete for a few places of the cache.
  Shape shape{heads, width, inner, inner + 32, (float)(1.0 / __builtin_sqrt((double)width))};
  Source sources[2] = {
      {window, window_slots, window_columns, record_bytes(window_kind, width), window_kind, nullptr,
       false},
      {entries, entry_slots, entry_columns, record_bytes(entry_kind, width), entry_kind, nullptr,
       false},
  };
  int64_t records[2] = {window_records, entry_records};
  bool wide = heads > 16 || window_kind == kPlainFloat || entry_kind == kPlainFloat;
  const auto *a = (const bf16*)q;
  const auto *b = (const float*)q;
  if (type == kBf16)
    return wide ? sparse_attention<float>(a, rows, sources, records, sink, shape, (bf16*)out)
                : sparse_attention<bf16>(a, rows, sources, records, sink, shape, (bf16*)out);
  return wide ? sparse_attention<float>(b, rows, sources, records, sink, shape, (float*)out)
              : sparse_attention<bf16>(b, rows, sources, records, sink, shape, (float*)out);
}
DI_CAPTURED(sparse_attention)
