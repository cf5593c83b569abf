// Where the rows of a step lie: in rings, pages, compression groups and among each other.
#include "deepinfer/op.h"

namespace deepinfer {
namespace DI_NAME {
namespace {

// N rows of sequences: first position and first row of each; sequence and position of each row.
struct Rows {
  const int64_t *starts, *offsets, *of, *positions;

  // Which of them is at a position.
  int64_t at(int64_t sequence, int64_t position) const {
    return position + offsets[sequence] - starts[sequence];
  }
};
// Some of them that stay, by sequence and position: their numbers and places in a ring per slot.
void stay(const Rows& rows, const int64_t* of, const int64_t* positions, int64_t count,
          const int64_t* slots, int64_t ring, int64_t* numbers, int64_t* places) {
  for (int64_t i = 0; i < count; i++) {
    numbers[i] = rows.at(of[i], positions[i]);
    places[i] = slots[of[i]] * ring + positions[i] % ring;
  }
}
// Of row i of `from` [rows, width] and of what is kept in a ring [slots, ring, width].
const float* member(const float* from, const float* state, int64_t width, const int64_t* slots,
                    int64_t sequences, int64_t ring, int64_t i) {
  if (i >= sequences * ring) return from + (i - sequences * ring) * width;
  return state + (slots[i / ring] * ring + i % ring) * width;
}

}  // namespace
}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// past [sequences, width - 1]; columns [count, width]; numbers, places [kept]; all int64, as is
// everything below but the rows of groups.
DI_OP(window_places)
(const int64_t* starts, const int64_t* offsets, const int64_t* of, const int64_t* positions,
 int64_t sequences, int64_t count, const int64_t* kept_of, const int64_t* kept_positions,
 int64_t kept, const int64_t* slots, const int64_t* sees, int64_t width, int64_t ring,
 int64_t* past, int64_t* columns, int64_t* numbers, int64_t* places) {
  Rows rows = {starts, offsets, of, positions};
  int64_t before = width - 1;
  for (int64_t s = 0; s < sequences; s++)
    for (int64_t j = 0; j < before; j++) {
      int64_t p = starts[s] - before + j;
      past[s * before + j] = p < 0 ? 0 : slots[s] * ring + p % ring;
    }
  split(count, max(1, 16384 / width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t s = of[i], start = starts[s], oldest = max(positions[i] - before, sees[s]);
      int64_t old = (s + 1) * before - start, own = sequences * before + rows.at(s, 0);
      int64_t seen = positions[i] - oldest + 1, past_ones = max(0, min(seen, start - oldest));
      int64_t* to = columns + i * width;
      int64_t j = 0;
      for (; j < past_ones; j++) to[j] = old + oldest + j;
      for (; j < seen; j++) to[j] = own + oldest + j;
      for (; j < width; j++) to[j] = -1;
    }
  });
  stay(rows, kept_of, kept_positions, kept, slots, ring, numbers, places);
  return kOk;
}
DI_CAPTURED(window_places)
// out [count]: of rows in pages [sequences, columns] of `size` positions each.
DI_OP(page_places)
(const int64_t* of, const int64_t* positions, int64_t count, const int64_t* pages, int64_t columns,
 int64_t size, int64_t* out) {
  for (int64_t i = 0; i < count; i++) {
    int64_t p = positions[i];
    out[i] = pages[of[i] * columns + p / size] * size + p % size;
  }
  return kOk;
}
DI_CAPTURED(page_places)
// closed [groups, ratio], first and entry [groups], numbers and places [kept].
DI_OP(group_places)
(const int64_t* starts, const int64_t* offsets, const int64_t* of, const int64_t* positions,
 int64_t sequences, int64_t, const int64_t* kept_of, const int64_t* kept_positions, int64_t kept,
 const int64_t* end_of, const int64_t* last, int64_t groups, const int64_t* slots,
 const int64_t* pages, int64_t columns, int64_t ratio, int64_t ring, int64_t page_tokens,
 int64_t scratch, int64_t* closed, int64_t* first, int64_t* entry, int64_t* numbers,
 int64_t* places) {
  Rows rows = {starts, offsets, of, positions};
  int64_t per_page = page_tokens / ratio, turn = max(1, ring);
  for (int64_t e = 0; e < groups; e++) {
    int64_t s = end_of[e], end = last[e], number = end / ratio;
    for (int64_t t = 0; t < ratio; t++) {
      int64_t p = min(number * ratio + t, end);
      closed[e * ratio + t] =
          p < starts[s] ? s * ring + p % turn : sequences * ring + rows.at(s, p);
    }
    first[e] = number * ratio;
    bool whole = (end + 1) % ratio == 0;
    int64_t page = whole ? pages[s * columns + end / page_tokens] : scratch;
    entry[e] = page * per_page + number % per_page;
  }
  stay(rows, kept_of, kept_positions, kept, slots, turn, numbers, places);
  return kOk;
}
DI_CAPTURED(group_places)
// v, z float [N, width]; state float [2, slots_of_pool, ring, width]; members of each [count,
// width].
DI_OP(group_rows)
(const float* v, const float* z, float* state, const int64_t* slots, int64_t sequences,
 int64_t all_slots, int64_t ring, int64_t width, const int64_t* closed, int64_t count,
 const int64_t* kept_rows, const int64_t* kept_places, int64_t kept, float* of_v, float* of_z) {
  const float* from[] = {v, z};
  float* state_of[] = {state, state + all_slots * ring * width};
  float* to[] = {of_v, of_z};
  size_t bytes = (size_t)width * sizeof(float);
  for (int part = 0; part < 2; part++) {
    split(count, max(1, 65536 / width), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        memcpy(to[part] + i * width,
               member(from[part], state_of[part], width, slots, sequences, ring, closed[i]), bytes);
    });
    // After the old ones were read.
    for (int64_t i = 0; i < kept; i++)
      memcpy(state_of[part] + kept_places[i] * width, from[part] + kept_rows[i] * width, bytes);
  }
  return kOk;
}
DI_CAPTURED(group_rows)
// places, visible [requests, most]; table [requests, entries].
DI_OP(entry_table)
(const int64_t* starts, const int64_t* offsets, const int64_t* counts, const int64_t* pages,
 int64_t requests, int64_t columns, int64_t total, int64_t most, int64_t entries, int64_t ratio,
 int64_t page_tokens, int64_t* places, int64_t* visible, int64_t* table) {
  int64_t per_page = page_tokens / ratio;
  for (int64_t r = 0; r < requests; r++) {
    for (int64_t t = 0; t < most; t++) {
      bool there = t < counts[r];
      places[r * most + t] = there ? offsets[r] + t : total;
      visible[r * most + t] = there ? (starts[r] + 1 + t) / ratio : 0;
    }
    int64_t* to = table + r * entries;
    for (int64_t page = 0; page * per_page < entries; page++) {
      int64_t begin = page * per_page, end = min(entries, begin + per_page);
      for (int64_t j = begin; j < end; j++)
        to[j] = pages[r * columns + page] * per_page + j - begin;
    }
  }
  return kOk;
}
DI_CAPTURED(entry_table)
// out [count, depth + 1]; history [slots_of_pool, ring].
DI_OP(ngrams)
(const int64_t* starts, const int64_t* offsets, const int64_t* of, const int64_t* positions,
 int64_t, int64_t count, const int64_t* kept_of, const int64_t* kept_positions, int64_t kept,
 const int64_t* slots, const int64_t* mapped, int64_t* history, int64_t ring, int64_t depth,
 int64_t pad, int64_t* out) {
  Rows rows = {starts, offsets, of, positions};
  for (int64_t i = 0; i < count; i++)
    for (int64_t d = 0; d <= depth; d++) {
      int64_t s = of[i], p = positions[i] - d, found = pad;
      if (p >= starts[s])
        found = mapped[rows.at(s, p)];
      else if (p >= 0)
        found = history[slots[s] * ring + p % ring];
      out[i * (depth + 1) + d] = found;
    }
  for (int64_t i = 0; i < kept; i++)
    history[slots[kept_of[i]] * ring + kept_positions[i] % ring] =
        mapped[rows.at(kept_of[i], kept_positions[i])];
  return kOk;
}
DI_CAPTURED(ngrams)
