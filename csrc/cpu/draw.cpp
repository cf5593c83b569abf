// The token of each row: the first arg-max of what is allowed of its logits, and for rows with a
// temperature of logits over it plus the Gumbel noise of their stream. The noise is
// deepinfer/ops/noise.py, one IEEE operation at a time, hence the same bits everywhere.
#include "deepinfer/op.h"

namespace deepinfer {
namespace DI_NAME {
namespace {

constexpr int kTogether = 8;       // tokens in one go: those of a byte of a mask
constexpr int64_t kPiece = 4096;   // tokens of a task
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
inline uint64_t named(uint64_t seed, uint64_t position) {
  return mix(mix(mix(seed + kGolden)) + kGolden * (position + 1));
}
// Below 2^52, without an instruction for it.
inline double as_double(uint64_t x) {
  double r;
  x |= 0x4330000000000000ull;
  memcpy(&r, &x, 8);
  return r - 0x1p52;
}
inline double log(double x) {
  int64_t bits;
  memcpy(&bits, &x, 8);
  int64_t mantissa = bits & ((1ll << 52) - 1);
  int64_t high = mantissa >= 0x6A09E667F3BCDll;
  uint64_t raised = (uint64_t)(bits >> 52) + high;  // exponent + 1023
  int64_t one = mantissa | 1023ll << 52;
  double m;
  memcpy(&m, &one, 8);
  m = m - m * 0.5 * as_double(high);
  double s = (m - 1.0) / (m + 1.0), square = s * s;
  double series = square * (1.0 / 13) + 1.0 / 11;
  series = series * square + 1.0 / 9;
  series = series * square + 1.0 / 7;
  series = series * square + 1.0 / 5;
  series = series * square + 1.0 / 3;
  series = series * square + 1.0;
  return s * 2.0 * series + (as_double(raised) - 1023.0) * 0x1.62e42fefa39efp-1;
}

template <class T> struct Row {
  const T* x;
  const uint8_t* allowed;  // a bit for each token, or null
  double temperature;      // 0: no noise
  uint64_t stream;
};

// The first of the largest in [begin, end) of a row, and its score: -inf if nothing is allowed.
template <class T>
int64_t best_of(const Row<T>& row, int64_t begin, int64_t end, double* score) {
  int64_t best = begin;
  double most = -__builtin_inf();
  for (int64_t at = begin; at < end; at += kTogether) {
    uint32_t bits = row.allowed ? row.allowed[at / kTogether] : 0xFF;
    if (!bits) continue;
    double value[kTogether];
    int64_t count = min(kTogether, end - at);
    for (int64_t j = 0; j < kTogether; j++) value[j] = j < count ? (double)row.x[at + j] : 0.0;
    if (row.temperature > 0)
      for (int64_t j = 0; j < kTogether; j++) {
        uint64_t word = mix(row.stream + kGolden * (uint64_t)(at + j + 1));
        double u = (as_double(word >> 12) + 0.5) * 0x1p-52;
        value[j] = value[j] / row.temperature + -log(-log(u));
      }
    for (int64_t j = 0; j < count; j++)
      if (value[j] > most && bits >> j & 1) most = value[j], best = at + j;
  }
  *score = most;
  return best;
}

// Scores may be -inf, logits must be finite.
inline bool fine(const double*, int64_t) { return true; }
inline bool fine(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7FFFFFFF;
    largest = bits > largest ? bits : largest;
  }
  return largest < 0x7F800000;
}

template <class T>
int draw(const T* x, const uint8_t* allowed, const int64_t* streams, const double* temperature,
         const int64_t* positions, int64_t rows, int64_t vocab, int64_t bytes, int64_t* ids) {
  int64_t pieces = ceil_div(vocab, kPiece);
  double* score = scratch<double>(0, rows * pieces);
  int64_t* best = scratch<int64_t>(1, rows * pieces);
  if (!score || !best) return kNoMemory;
  split(rows * pieces, 1, [&](int64_t from, int64_t to) {
    for (int64_t task = from; task < to; task++) {
      int64_t at = task / pieces, begin = task % pieces * kPiece, end = min(vocab, begin + kPiece);
      Row<T> row = {x + at * vocab, allowed ? allowed + at * bytes : nullptr, 0.0, 0};
      if (streams) {
        row.temperature = temperature[at];
        row.stream = (uint64_t)streams[at];
        if (positions) row.stream = named(row.stream, (uint64_t)positions[at]);
      }
      best[task] = best_of(row, begin, end, score + task);
      if (!fine(row.x + begin, end - begin)) best[task] = -1;
    }
  });
  for (int64_t row = 0; row < rows; row++) {
    int64_t first = row * pieces, at = first;
    bool strange = false;
    for (int64_t p = first; p < first + pieces; p++) {
      strange |= best[p] < 0;
      if (score[p] > score[at]) at = p;
    }
    ids[row] = strange || score[at] == -__builtin_inf() ? -1 : best[at];
  }
  return kOk;
}

}  // namespace
}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// x float (logits) or, where `wide`, double (scores) [rows, vocab]; allowed uint8 [rows, bytes] or
// null; streams int64 and temperature double [rows], or null; positions int64 [rows] where streams
// are seeds, else null; ids int64 [rows].
DI_OP(draw)
(const void* x, const uint8_t* allowed, const int64_t* streams, const double* temperature,
 const int64_t* positions, int64_t rows, int64_t vocab, int64_t bytes, int64_t wide, int64_t* ids) {
  if (wide)
    return draw((const double*)x, allowed, streams, temperature, positions, rows, vocab, bytes, ids);
  return draw((const float*)x, allowed, streams, temperature, positions, rows, vocab, bytes, ids);
}
DI_CAPTURED(draw)
