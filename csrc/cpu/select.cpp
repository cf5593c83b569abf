// The k best visible entries of each row, and the best blocks of them: see pick.h.
#include "deepinfer/pick.h"

namespace deepinfer {
namespace DI_NAME {

// body(row, keys, visible) for each row of scores [rows, n]; keys: sortable, of the visible entries,
// with room for as many once more.
template <class T, class Body>
int by_row(const T* scores, const int64_t* visible, int64_t rows, int64_t n, const Body& body) {
  int failed = 0;
  split(rows, max(1, 16384 / (n + 1)), [&](int64_t begin, int64_t end) {
    int32_t* keys = scratch<int32_t>(0, 2 * (n + kLanes));
    if (!keys) return __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
    for (int64_t row = begin; row < end; row++) {
      int64_t seen = max(0, min(n, visible[row]));
      sortable(scores + row * n, seen, keys);
      body(row, keys, seen);
    }
  });
  return failed ? kNoMemory : kOk;
}

template <class T>
int select(const T* scores, const int64_t* visible, const uint8_t* allowed, int64_t rows, int64_t n,
           int64_t k, int64_t* out) {
  return by_row(scores, visible, rows, n, [&](int64_t row, int32_t* keys, int64_t seen) {
    int64_t *to = out + row * k, count = 0;
    if (allowed) {
      int32_t* index = keys + n + kLanes;
      int64_t some = 0;
      for (int64_t i = 0; i < seen; i++)
        if (allowed[row * n + i]) index[some] = (int32_t)i, keys[some++] = keys[i];
      count = pick<T>(keys, some, k, [&](int64_t i) { *to++ = index[i]; });
    } else {
      count = pick<T>(keys, seen, k, [&](int64_t i) { *to++ = i; });
    }
    for (; count < k; count++) *to++ = -1;
  });
}

template <class T>
int candidate_blocks(const T* scores, const int64_t* visible, int64_t rows, int64_t n,
                     int64_t count, int64_t size, uint8_t* out) {
  int64_t blocks = ceil_div(n, size);
  return by_row(scores, visible, rows, n, [&](int64_t row, int32_t* keys, int64_t seen) {
    uint8_t* to = out + row * blocks;
    if (blocks) memset(to, 0, (size_t)blocks);
    int32_t* best = keys + n + kLanes;
    pick<T>(best, block_keys(keys, seen, size, best), count, [&](int64_t b) { to[b] = 1; });
  });
}

}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// scores [rows, n] of type `type`; visible int64 [rows]; allowed bool [rows, n] or null; out int64
// [rows, k], -1 at the end.
DI_OP(select)
(const void* scores, int type, const int64_t* visible, const uint8_t* allowed, int64_t rows,
 int64_t n, int64_t k, int64_t* out) {
  if (n > INT32_MAX) return kUnsupported;
  if (type == kBf16) return select((const bf16*)scores, visible, allowed, rows, n, k, out);
  return select((const float*)scores, visible, allowed, rows, n, k, out);
}
DI_CAPTURED(select)
// out bool [rows, ceil(n / size)].
DI_OP(candidate_blocks)
(const void* scores, int type, const int64_t* visible, int64_t rows, int64_t n, int64_t count,
 int64_t size, uint8_t* out) {
  if (type == kBf16)
    return candidate_blocks((const bf16*)scores, visible, rows, n, count, size, out);
  return candidate_blocks((const float*)scores, visible, rows, n, count, size, out);
}
DI_CAPTURED(candidate_blocks)
