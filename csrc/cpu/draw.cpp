// The token of each row: arg-max of float64 scores, and for rows that are drawn of scores plus the
// Gumbel noise of their stream. The noise is deepinfer/ops/noise.py, one IEEE operation at a time,
// hence the same bits everywhere.
#include "deepinfer/op.h"

namespace deepinfer {
namespace DI_NAME {
namespace {

constexpr int kTogether = 8;       // tokens in one go
constexpr int64_t kPiece = 4096;   // tokens of a task

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
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

// The first of the largest in [begin, end) of a row, and its score.
int64_t best_of(const double* x, uint64_t stream, bool drawn, int64_t begin, int64_t end,
                double* score) {
  int64_t best = begin;
  double most = -__builtin_inf();
  for (int64_t at = begin; at < end; at += kTogether) {
    double value[kTogether];
    int64_t count = min(kTogether, end - at);
    for (int64_t j = 0; j < kTogether; j++) value[j] = j < count ? x[at + j] : 0.0;
    if (drawn)
      for (int64_t j = 0; j < kTogether; j++) {
        uint64_t word = mix(stream + 0x9E3779B97F4A7C15ull * (uint64_t)(at + j + 1));
        double u = (as_double(word >> 12) + 0.5) * 0x1p-52;
        value[j] = value[j] + -log(-log(u));
      }
    for (int64_t j = 0; j < count; j++)
      if (value[j] > most) most = value[j], best = at + j;
  }
  *score = most;
  return best;
}

}  // namespace
}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// x double [rows, vocab], no NaN; streams int64 [rows]; drawn bool [rows]; ids int64 [rows].
DI_OP(draw)
(const double* x, const int64_t* streams, const bool* drawn, int64_t rows, int64_t vocab,
 int64_t* ids) {
  int64_t pieces = ceil_div(vocab, kPiece);
  double* score = scratch<double>(0, rows * pieces);
  int64_t* best = scratch<int64_t>(1, rows * pieces);
  if (!score || !best) return kNoMemory;
  split(rows * pieces, 1, [&](int64_t from, int64_t to) {
    for (int64_t task = from; task < to; task++) {
      int64_t row = task / pieces, begin = task % pieces * kPiece;
      best[task] = best_of(x + row * vocab, (uint64_t)streams[row], drawn[row], begin,
                           min(vocab, begin + kPiece), score + task);
    }
  });
  for (int64_t row = 0; row < rows; row++) {
    int64_t first = row * pieces, at = first;
    for (int64_t p = first + 1; p < first + pieces; p++)
      if (score[p] > score[at]) at = p;
    ids[row] = best[at];
  }
  return kOk;
}
DI_CAPTURED(draw)
