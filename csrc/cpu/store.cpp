// Rows as records: to places of a pool, and behind records that are kept there.
#include "deepinfer/codec.h"

namespace deepinfer {
namespace DI_NAME {

template <class T>
void encode_rows(const T* x, int kind, int64_t rows, int64_t width, uint8_t* out) {
  int64_t bytes = record_bytes(kind, width);
  if (kind < kWindow) {
    if (rows) memcpy(out, x, (size_t)(rows * bytes));
    return;
  }
  split(rows, max(1, 16384 / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      encode(kind, x + row * width, width, out + row * bytes);
  });
}
void encode_rows(const void* x, int type, int kind, int64_t rows, int64_t width, uint8_t* out) {
  if (type == kBf16) return encode_rows((const bf16*)x, kind, rows, width, out);
  encode_rows((const float*)x, kind, rows, width, out);
}
// to[places[i]] = from[rows[i]]; null: i itself.
void copy(const uint8_t* from, const int64_t* rows, uint8_t* to, const int64_t* places,
          int64_t count, int64_t bytes) {
  for (int64_t i = 0; i < count; i++)
    memcpy(to + (places ? places[i] : i) * bytes, from + (rows ? rows[i] : i) * bytes,
           (size_t)bytes);
}

}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// x [rows, width] of type `type`, which a plain kind has as well; target uint8 [records, bytes of
// the kind], places int64 [rows].
DI_OP(store)
(const void* x, int type, int kind, int64_t rows, int64_t width, uint8_t* target,
 const int64_t* places) {
  if (kind >= kWindow && width % 32) return kUnsupported;
  int64_t bytes = record_bytes(kind, width);
  uint8_t* records = scratch<uint8_t>(0, rows * bytes);
  if (rows && !records) return kNoMemory;
  encode_rows(x, type, kind, rows, width, records);
  // In order: places may be alike where nobody reads.
  copy(records, nullptr, target, places, rows, bytes);
  return kOk;
}
DI_CAPTURED(store)

// out uint8 [kept + rows, bytes]: records `past` int64 [kept] of the ring, then those of x. Some of
// these, by row, go to places of the ring and of a second target (null: none).
DI_OP(extend)
(const void* x, int type, int kind, int64_t rows, int64_t width, uint8_t* ring,
 const int64_t* past, int64_t kept, const int64_t* ring_rows, const int64_t* ring_places,
 int64_t ring_count, uint8_t* target, const int64_t* target_rows, const int64_t* target_places,
 int64_t target_count, uint8_t* out) {
  if (kind >= kWindow && width % 32) return kUnsupported;
  int64_t bytes = record_bytes(kind, width);
  uint8_t* records = out + kept * bytes;
  encode_rows(x, type, kind, rows, width, records);
  split(kept, max(1, (1 << 18) / bytes), [&](int64_t begin, int64_t end) {
    copy(ring, past + begin, out + begin * bytes, nullptr, end - begin, bytes);
  });
  // After the old ones were read: their places overlap.
  copy(records, ring_rows, ring, ring_places, ring_count, bytes);
  if (target) copy(records, target_rows, target, target_places, target_count, bytes);
  return kOk;
}
DI_CAPTURED(extend)
