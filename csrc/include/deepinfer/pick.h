// The largest of some scores, in one order for everybody: NaN counts as -infinity, the two zeros are
// equal, ties go to the lower index.
#pragma once

#include "deepinfer/op.h"

namespace deepinfer {
namespace DI_NAME {

// Integers in the order of the scores.
inline ivec sortable(fvec x) {
  x = x + 0.0f;  // -0 becomes 0
  ivec bits = x == x ? (ivec)x : (ivec){} + (int32_t)0xff800000;
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}
// keys has room for whole lanes.
template <class T> inline void sortable(const T* scores, int64_t n, int32_t* keys) {
  for (int64_t i = 0; i < n; i += kLanes) {
    F x = load(scores + i, n - i);
    DI_UNROLL for (int j = 0; j < kParts; j++)
      *(typename Vectors<kWidth>::i*)(keys + i + j * kWidth) = sortable(x.part[j]);
  }
}

// Which of sixteen keys are at least `limit`: bit i for keys[i].
inline uint32_t at_least(const int32_t* keys, int32_t limit) {
#if DI_LEVEL >= 2
  return _mm512_cmpge_epi32_mask(_mm512_loadu_si512(keys), _mm512_set1_epi32(limit));
#elif DI_LEVEL == 1
  __m256i under = _mm256_set1_epi32(limit - 1);
  __m256i a = _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i*)keys), under);
  __m256i b = _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i*)(keys + 8)), under);
  return (uint32_t)_mm256_movemask_ps((__m256)a) | (uint32_t)_mm256_movemask_ps((__m256)b) << 8;
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; i++) bits |= (uint32_t)(keys[i] >= limit) << i;
  return bits;
#endif
}
// How many of n keys, whole lanes, are at least `limit`.
inline int64_t count_at_least(const int32_t* keys, int64_t n, int32_t limit) {
  ivec total{};
  for (int64_t i = 0; i < n; i += kLanes)
    DI_UNROLL for (int j = 0; j < kParts; j++)
      total -= (ivec)(*(const typename Vectors<kWidth>::i*)(keys + i + j * kWidth) >= limit);
  int64_t r = 0;
  for (int i = 0; i < kWidth; i++) r += total[i];
  return r;
}

// emit(i) for the k largest of n keys, ascending; their number. Of equal keys the first ones. There
// is room for whole lanes of keys; what is behind the n-th is lost. T: the type of the scores.
template <class T, class Emit>
inline int64_t pick(int32_t* keys, int64_t n, int64_t k, const Emit& emit) {
  constexpr int64_t kStep = sizeof(T) == 2 ? 1 << 16 : 1;  // between keys that differ, at least
  if (n <= k) {
    for (int64_t i = 0; i < n; i++) emit(i);
    return n;
  }
  if (k <= 0) return 0;
  int64_t lanes = ceil_div(n, kLanes) * kLanes;
  for (int64_t i = n; i < lanes; i++) keys[i] = INT32_MIN;
  ivec least{}, most{};
  least += INT32_MAX, most += INT32_MIN;
  for (int64_t i = 0; i < n; i += kWidth) {
    ivec x = *(const typename Vectors<kWidth>::i*)(keys + i);
    ivec y = x == INT32_MIN ? (ivec){} + INT32_MAX : x;
    most = x > most ? x : most, least = y < least ? y : least;
  }
  int64_t low = INT32_MAX, high = INT32_MIN;
  for (int i = 0; i < kWidth; i++) low = min(low, least[i]), high = max(high, most[i]);
  // The k-th largest lies in [low, high]: count those above the middle until one is left, or k are.
  int64_t limit = low;
  int64_t count = n;
  while (count > k && high - low >= kStep) {
    int64_t middle = low + (high - low) / 2 + 1;
    int64_t c = count_at_least(keys, lanes, (int32_t)middle);
    if (c >= k)
      low = limit = middle, count = c;
    else
      high = middle - 1;
  }
  // All of the keys above the limit's, and the first of those that equal it.
  int64_t spare = k, left = k;
  if (count > k && limit + kStep <= INT32_MAX)
    spare -= count_at_least(keys, lanes, (int32_t)(limit + kStep));
  for (int64_t i = 0; left; i += kLanes) {
    for (uint32_t bits = at_least(keys + i, (int32_t)limit); bits && left; bits &= bits - 1) {
      int64_t at = i + __builtin_ctz(bits);
      if (count > k && keys[at] < limit + kStep && spare-- <= 0) continue;
      emit(at), left--;
    }
  }
  return k;
}

// The sortable best of each block of `size` among n keys; the newest block beats all.
inline int64_t block_keys(const int32_t* keys, int64_t n, int64_t size, int32_t* best) {
  int64_t blocks = ceil_div(n, size);
  for (int64_t b = 0; b < blocks; b++) {
    int32_t most = INT32_MIN;
    for (int64_t i = b * size; i < min(n, (b + 1) * size); i++)
      most = keys[i] > most ? keys[i] : most;
    best[b] = most;
  }
  if (blocks) best[blocks - 1] = INT32_MAX;
  return blocks;
}

}  // namespace DI_NAME
}  // namespace deepinfer
