// The k best entries of each row, from packed index keys to slots in one pass: keys are unpacked in
// registers, the scores of a row live as long as it takes to choose among them.
//
// FP4 queries and keys are small integers times a scale for 32 channels: the products of a group are
// summed exactly, as bytes and words, 16 keys side by side; groups are added in float32, in order,
// which rounds only where their scales are far apart. Queries or keys of another kind are multiplied
// in float64, one key at a time.
#include "deepinfer/codec.h"
#include "deepinfer/pick.h"

namespace deepinfer {
namespace DI_NAME {

constexpr int kGroup = 32;  // channels that share a scale
constexpr int kRows = 16;   // that read unpacked keys together

struct Call {
  const uint8_t* records;
  const int64_t* table;    // [requests, n]
  const int64_t* visible;  // [requests, rows]
  const uint8_t* within;   // bool [requests, rows, blocks] or null: entries of these blocks alone
  uint8_t* kept;           // the same shape or null: where the best blocks go ...
  int64_t keep, size;      // ... so many of so many entries
  int64_t requests, rows, heads, width, n, k, bytes;
  int kind;
  int64_t* out;  // [requests, rows, k]

  int64_t groups() const { return ceil_div(width, kGroup); }
  int64_t blocks() const { return size ? ceil_div(n, size) : 0; }
  int64_t seen(int64_t row) const { return max(0, min(n, visible[row])); }
  // Whether anything is left out, so that scores decide.
  bool scored(int64_t row) const {
    return seen(row) > k || (kept && ceil_div(seen(row), size) > keep);
  }
  const uint8_t* record(int64_t request, int64_t entry) const {
    return records + table[request * n + entry] * bytes;
  }
};

// Memory of this thread for some rows.
struct Work {
  float* queries;    // [rows, heads, width]
  float* weights;    // [rows, heads]
  uint8_t* codes;    // [rows, heads, width] twice the value plus 12, in the order of unpacked keys
  float* scales;     // [rows, heads, groups]
  uint8_t* records;  // of queries
  float* key;        // a decoded record
  int8_t* unpacked;
  bool exact[kRows];  // FP4 holds the row's queries
};
constexpr int64_t unpacked_bytes(int64_t groups) { return groups * (16 * 32 + 2 * 32 + 64); }

bool prepare(const Call& c, Work& w) {
  int64_t heads = kRows * c.heads, row = c.width + kLanes;
  w.queries = scratch<float>(1, heads * row);
  w.weights = scratch<float>(2, heads * (1 + c.groups()) + row + kLanes);
  w.codes = scratch<uint8_t>(3, heads * c.width + c.bytes + unpacked_bytes(c.groups()) + 64);
  if (!w.queries || !w.weights || !w.codes) return false;
  w.scales = w.weights + heads;
  w.key = w.scales + heads * c.groups();
  w.unpacked = (int8_t*)w.codes;
  w.codes += unpacked_bytes(c.groups());
  w.records = w.codes + heads * c.width;
  return true;
}

#if DI_LEVEL >= 1
inline __m256i twice_table() {
  return _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
}

// Sixteen keys, two registers of eight: for every group 8 quads of channels (0, 2, 4, 6, then 1, 3,
// 5, 7 of eight) [16, 32] bytes of twice the values; words to start the sums with, which take away
// what is 12 too much in every query; scales [16].
inline void unpack(const uint8_t* const* record, const Call& c, int8_t* to) {
  __m256i low = _mm256_set1_epi8(15), table = twice_table(), ones = _mm256_set1_epi8(1);
  for (int64_t g = 0; g < c.groups(); g++, to += unpacked_bytes(1)) {
    for (int half = 0; half < 2; half++) {
      __m256i v[4], sum = _mm256_setzero_si256();
      DI_UNROLL for (int e = 0; e < 4; e++) {
        const uint8_t* const* at = record + 8 * half + e;
        v[e] = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(at[0] + 16 * g))),
            _mm_loadu_si128((const __m128i*)(at[4] + 16 * g)), 1);
      }
      __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
      __m256i d = _mm256_unpacklo_epi32(v[2], v[3]), e = _mm256_unpackhi_epi32(v[2], v[3]);
      v[0] = _mm256_unpacklo_epi64(a, d), v[1] = _mm256_unpackhi_epi64(a, d);
      v[2] = _mm256_unpacklo_epi64(b, e), v[3] = _mm256_unpackhi_epi64(b, e);
      DI_UNROLL for (int j = 0; j < 4; j++) {
        __m256i even = _mm256_and_si256(v[j], low);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi16(v[j], 4), low);
        even = _mm256_shuffle_epi8(table, even), odd = _mm256_shuffle_epi8(table, odd);
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(ones, even));
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(ones, odd));
        _mm256_store_si256((__m256i*)(to + (4 * j + half) * 32), even);
        _mm256_store_si256((__m256i*)(to + (4 * j + 2 + half) * 32), odd);
      }
      sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(-12));
      sum = _mm256_and_si256(sum, _mm256_set1_epi32(0xffff));
      _mm256_store_si256((__m256i*)(to + (16 + half) * 32), sum);
    }
    float* scales = (float*)(to + 18 * 32);
    DI_UNROLL for (int e = 0; e < 16; e++) scales[e] = e8m0(record[e][c.width / 2 + g]) * 0.5f;
  }
}

inline F to_floats(__m256i a, __m256i b) {
  F r;
#if DI_LEVEL >= 2
  __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
  r.part[0] = __builtin_convertvector((ivec)both, fvec);
#else
  r.part[0] = (fvec)_mm256_cvtepi32_ps(a), r.part[1] = (fvec)_mm256_cvtepi32_ps(b);
#endif
  return r;
}

// Products of a head's query with sixteen unpacked keys.
inline F products(const uint8_t* codes, const float* scales, const int8_t* keys, int64_t groups) {
  F dot = zero();
  for (int64_t g = 0; g < groups; g++, codes += kGroup, keys += unpacked_bytes(1)) {
    const __m256i* k = (const __m256i*)keys;
    __m256i a = k[16], b = k[17];
    DI_UNROLL for (int i = 0; i < 8; i++) {
      int32_t quad;
      memcpy(&quad, codes + 4 * i, 4);
      __m256i q = _mm256_set1_epi32(quad);
      a = _mm256_add_epi16(a, _mm256_maddubs_epi16(q, k[2 * i]));
      b = _mm256_add_epi16(b, _mm256_maddubs_epi16(q, k[2 * i + 1]));
    }
    __m256i one = _mm256_set1_epi16(1);
    F sum = to_floats(_mm256_madd_epi16(a, one), _mm256_madd_epi16(b, one));
    dot = fma(sum * splat(scales[g]), load((const float*)(keys + 18 * 32)), dot);
  }
  return dot;
}
#endif

// Queries and weights of rows [begin, end).
template <class T>
void load_rows(const Call& c, const T* q, const T* weights, int64_t begin, int64_t end, Work& w) {
  int64_t stride = c.width + kLanes;
  for (int64_t row = begin; row < end; row++) {
    if (!c.scored(row)) continue;
    int64_t at = (row - begin) * c.heads;
    bool exact = DI_LEVEL >= 1 && c.kind == kIndex;
    for (int64_t h = 0; h < c.heads; h++) {
      float* query = w.queries + (at + h) * stride;
      decode_plain(q + (row * c.heads + h) * c.width, c.width, query);
      w.weights[at + h] = load(weights + row * c.heads + h, 1).part[0][0];
      if (!exact) continue;
#if DI_LEVEL >= 1
      encode_index(query, c.width, w.records);
      decode_index(w.records, c.width, w.key);
      int other = 0;
      for (int64_t i = 0; i < c.width; i++) other |= query[i] != w.key[i];
      exact = exact && !other;
      uint8_t* codes = w.codes + (at + h) * c.width;
      __m256i low = _mm256_set1_epi8(15), twelve = _mm256_set1_epi8(12);
      for (int64_t i = 0; i < c.width / 2; i += 16) {
        __m256i x = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(w.records + i)));
        __m256i even = _mm256_and_si256(x, low);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi16(x, 4), low);
        // Quads of even and odd channels in turn.
        __m256i lower = _mm256_unpacklo_epi32(even, odd), upper = _mm256_unpackhi_epi32(even, odd);
        x = _mm256_blend_epi32(lower, upper, 0xf0);
        x = _mm256_add_epi8(_mm256_shuffle_epi8(twice_table(), x), twelve);
        _mm256_storeu_si256((__m256i*)(codes + 2 * i), x);
      }
      for (int64_t g = 0; g < c.groups(); g++)
        w.scales[(at + h) * c.groups() + g] = e8m0(w.records[c.width / 2 + g]) * 0.5f;
#endif
    }
    w.exact[row - begin] = exact;
  }
}

// What a head adds to a score.
template <class T> inline F weighted(F dot, float weight) {
  F x = max(zero(), rounded(dot, (const T*)nullptr));
  return rounded(x * splat(weight), (const T*)nullptr);
}

// The score of one decoded key for a row.
template <class T> float score(const Call& c, const Work& w, int64_t row) {
  D total{};
  for (int64_t h = row * c.heads; h < (row + 1) * c.heads; h++) {
    const float* query = w.queries + h * (c.width + kLanes);
    D dot{};
    for (int64_t i = 0; i < c.width; i += kLanes)
      dot = fma(widen(query + i), widen(w.key + i), dot);
    total = total + widen(weighted<T>(splat((float)sum(dot)), w.weights[h]));
  }
  return rounded(narrow(total), (const T*)nullptr).part[0][0];
}

// Sortable scores of up to sixteen records for rows [0, rows) of the work that `wanted` names.
template <class T, class Wanted>
void score_keys(const Call& c, const uint8_t* const* record, int64_t count, Work& w, int64_t rows,
                const Wanted& wanted, int32_t* keys, int64_t stride) {
  [[maybe_unused]] bool ready = false;
  for (int64_t r = 0; r < rows; r++) {
    if (!wanted(r)) continue;
    float scores[kLanes] = {};
    if (w.exact[r]) {
#if DI_LEVEL >= 1
      if (!ready) unpack(record, c, w.unpacked);
      ready = true;
      D total{};
      for (int64_t h = r * c.heads; h < (r + 1) * c.heads; h++) {
        F dot = products(w.codes + h * c.width, w.scales + h * c.groups(), w.unpacked, c.groups());
        total = total + widen(weighted<T>(dot, w.weights[h]));
      }
      store(scores, rounded(narrow(total), (const T*)nullptr));
#endif
    } else {
      for (int64_t i = 0; i < count; i++) {
        decode(c.kind, record[i], c.width, w.key);
        scores[i] = score<T>(c, w, r);
      }
    }
    sortable(scores, kLanes, keys + r * stride);
  }
}

// Scores of entries [first, last) for rows [begin, end) of a request.
template <class T>
void score_rows(const Call& c, int64_t request, int64_t begin, int64_t end, int64_t first,
                int64_t last, Work& w, int32_t* keys, int64_t stride) {
  int64_t most = 0;
  for (int64_t row = begin; row < end; row++)
    if (c.scored(row)) most = max(most, c.seen(row));
  last = min(last, most);
  for (int64_t e = first; e < last; e += kLanes) {
    const uint8_t* record[kLanes];
    for (int64_t i = 0; i < kLanes; i++) record[i] = c.record(request, min(e + i, c.n - 1));
    auto wanted = [&](int64_t r) { return c.scored(begin + r) && c.seen(begin + r) > e; };
    score_keys<T>(c, record, min(kLanes, c.n - e), w, end - begin, wanted, keys + e, stride);
  }
}

// A row's choice among keys of its visible entries; `best` has room for one a block.
template <class T> void finish(const Call& c, int64_t row, int32_t* keys, int32_t* best) {
  int64_t *to = c.out + row * c.k, *end = to + c.k, seen = c.seen(row);
  const int64_t* slots = c.table + row / c.rows * c.n;
  pick<T>(keys, seen, c.k, [&](int64_t i) { *to++ = slots[i]; });
  while (to < end) *to++ = -1;
  if (!c.kept) return;
  uint8_t* kept = c.kept + row * c.blocks();
  if (c.blocks()) memset(kept, 0, (size_t)c.blocks());
  int64_t blocks = ceil_div(seen, c.size);
  if (blocks > c.keep) block_keys(keys, seen, c.size, best);
  pick<T>(best, blocks, c.keep, [&](int64_t b) { kept[b] = 1; });
}

// A row that may only choose entries of some blocks.
template <class T> bool choose_within(const Call& c, const T* q, const T* weights, int64_t row) {
  int64_t seen = c.seen(row), count = 0;
  int32_t* entries = scratch<int32_t>(4, 2 * (c.n + kLanes));
  Work w;
  if (!entries || !prepare(c, w)) return false;
  int32_t* keys = entries + c.n + kLanes;
  const uint8_t* blocks = c.within + row * c.blocks();
  for (int64_t b = 0; b * c.size < seen; b++)
    for (int64_t i = b * c.size; blocks[b] && i < min(seen, (b + 1) * c.size); i++)
      entries[count++] = (int32_t)i;
  int64_t request = row / c.rows;
  if (count > c.k) {
    load_rows(c, q, weights, row, row + 1, w);
    for (int64_t e = 0; e < count; e += kLanes) {
      const uint8_t* record[kLanes];
      for (int64_t i = 0; i < kLanes; i++)
        record[i] = c.record(request, entries[min(e + i, count - 1)]);
      auto wanted = [](int64_t) { return true; };
      score_keys<T>(c, record, min(kLanes, count - e), w, 1, wanted, keys + e, 0);
    }
  }
  int64_t *to = c.out + row * c.k, *end = to + c.k;
  const int64_t* slots = c.table + request * c.n;
  pick<T>(keys, count, c.k, [&](int64_t i) { *to++ = slots[entries[i]]; });
  while (to < end) *to++ = -1;
  return true;
}

template <class T> int choose(const Call& c, const T* q, const T* weights) {
  int failed = 0;
  auto fail = [&] { __atomic_store_n(&failed, 1, __ATOMIC_RELAXED); };
  if (c.within) {
    split(c.requests * c.rows, 4, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++)
        if (!choose_within(c, q, weights, row)) fail();
    });
    return failed ? kNoMemory : kOk;
  }
  int64_t stride = c.n + kLanes, tiles = ceil_div(c.rows, kRows);
  int64_t chunk = 2048, chunks = ceil_div(c.n, chunk);
  auto tile = [&](int64_t index, int64_t* begin, int64_t* end) {
    *begin = index / tiles * c.rows + index % tiles * kRows;
    *end = min(*begin + kRows, (index / tiles + 1) * c.rows);
    return index / tiles;
  };
  if (c.requests * tiles <= 4 && chunks > 1) {  // few rows: their entries are shared out
    int64_t rows = c.requests * c.rows;
    int32_t* keys = scratch<int32_t>(5, rows * stride);
    if (!keys) return kNoMemory;
    parallel(c.requests * tiles * chunks, [&](int64_t task) {
      int64_t begin, end, request = tile(task / chunks, &begin, &end), at = task % chunks * chunk;
      Work w;
      if (!prepare(c, w)) return fail();
      load_rows(c, q, weights, begin, end, w);
      score_rows<T>(c, request, begin, end, at, at + chunk, w, keys + begin * stride, stride);
    });
    parallel(rows, [&](int64_t row) {
      int32_t* best = scratch<int32_t>(4, c.blocks() + kLanes);
      if (!best) return fail();
      finish<T>(c, row, keys + row * stride, best);
    });
    return failed ? kNoMemory : kOk;
  }
  parallel(c.requests * tiles, [&](int64_t task) {
    int64_t begin, end, request = tile(task, &begin, &end);
    int32_t* keys = scratch<int32_t>(4, kRows * stride + c.blocks() + kLanes);
    Work w;
    if (!keys || !prepare(c, w)) return fail();
    load_rows(c, q, weights, begin, end, w);
    score_rows<T>(c, request, begin, end, 0, c.n, w, keys, stride);
    for (int64_t row = begin; row < end; row++)
      finish<T>(c, row, keys + (row - begin) * stride, keys + kRows * stride);
  });
  return failed ? kNoMemory : kOk;
}

}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// q [requests, rows, heads, width] and weights [requests, rows, heads] of type `type`; records uint8
// of a kind; table int64 [requests, n]; visible int64 [requests, rows]; out int64 [requests, rows,
// k]. within, kept: bool [requests, rows, ceil(n / size)] or null, not both.
DI_OP(choose)
(const void* q, const void* weights, int type, const uint8_t* records, int kind,
 const int64_t* table, const int64_t* visible, int64_t requests, int64_t rows, int64_t heads,
 int64_t width, int64_t n, int64_t k, const uint8_t* within, uint8_t* kept, int64_t keep,
 int64_t size, int64_t* out) {
  if (n > INT32_MAX) return kUnsupported;
  Call c{records, table, visible, within, kept, keep, size, requests, rows, heads,
         width, n, k, record_bytes(kind, width), kind, out};
  if (type == kBf16) return choose(c, (const bf16*)q, (const bf16*)weights);
  return choose(c, (const float*)q, (const float*)weights);
}
DI_CAPTURED(choose)
