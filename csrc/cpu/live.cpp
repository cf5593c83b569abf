// The running requests, by state slot: rows of the next step, and the tokens it gave.
#include "deepinfer/op.h"

namespace deepinfer {
namespace DI_NAME {

bool ends_request(int64_t token, const int64_t* stops, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (token == stops[i]) return token >= 0;
  return false;
}

}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// of_request [3, requests]: starts, counts, offsets; of_row [4, total]: request, position, id, rows
// behind the first; tables [2, requests, columns]: pages, windows, of so many `wide`. All int64.
DI_OP(live_rows)
(const int64_t* slots, const int64_t* allotted, int64_t requests, int64_t total,
 const int64_t* length, const int64_t* last, const int64_t* drafts, int64_t most,
 const int64_t* pages, const int64_t* windows, int64_t wide, int64_t columns, int64_t* of_request,
 int64_t* of_row, int64_t* tables) {
  if (columns > wide) return kUnsupported;
  int64_t row = 0;
  for (int64_t r = 0; r < requests; r++) {
    int64_t s = slots[r], start = length[s] - 1;
    if (allotted[r] > most || row + allotted[r] >= total) return kUnsupported;
    of_request[r] = start, of_request[requests + r] = allotted[r] + 1;
    of_request[2 * requests + r] = row;
    for (int64_t t = 0; t <= allotted[r]; t++, row++) {
      of_row[row] = r, of_row[total + row] = start + t;
      of_row[2 * total + row] = t ? max(int64_t{0}, drafts[s * most + t - 1]) : last[s];
      of_row[3 * total + row] = t;
    }
    size_t bytes = (size_t)columns * sizeof(int64_t);
    memcpy(tables + r * columns, pages + s * wide, bytes);
    memcpy(tables + (requests + r) * columns, windows + s * wide, bytes);
  }
  return row == total ? kOk : kUnsupported;
}
DI_CAPTURED(live_rows)
// out bool [requests, n]; stops int64 [slots, stops_count].
DI_OP(ends)
(const int64_t* tokens, int64_t requests, int64_t n, const int64_t* slots, const int64_t* stops,
 int64_t stops_count, uint8_t* out) {
  for (int64_t r = 0; r < requests; r++)
    for (int64_t i = 0; i < n; i++)
      out[r * n + i] = ends_request(tokens[r * n + i], stops + slots[r] * stops_count, stops_count);
  return kOk;
}
DI_CAPTURED(ends)
// counts int64, look bool [requests]; length and last are written.
DI_OP(append)
(const int64_t* tokens, const int64_t* accepted, const uint8_t* broken, int64_t requests, int64_t n,
 const int64_t* slots, const int64_t* stops, int64_t stops_count, const int64_t* end,
 int64_t* length, int64_t* last, int64_t* counts, uint8_t* look) {
  for (int64_t r = 0; r < requests; r++) {
    int64_t s = slots[r], most = accepted[r] + (broken[r] ? 0 : 1), first = n + 1;
    for (int64_t i = min(most, n) - 1; i >= 0; i--)
      if (ends_request(tokens[r * n + i], stops + s * stops_count, stops_count)) first = i + 1;
    int64_t count = max(int64_t{0}, min(min(most, first), end[s] - length[s]));
    if (count) last[s] = tokens[r * n + count - 1];
    length[s] += count;
    counts[r] = count, look[r] = first <= count || broken[r];
  }
  return kOk;
}
DI_CAPTURED(append)
