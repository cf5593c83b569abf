// Weight matrices as the product kernels read them, and the product itself.
//
// A matrix [n, k] is cut into panels of 16 columns of the product (rows of the matrix). A panel is a
// run of units: each holds a few consecutive k of all 16 columns, in the order that decodes fastest
// (`Codes`). k is filled up with zeros to a multiple of 32, n to one of 16. Codes stay packed; they
// become floats in registers, or in a block that fits the first cache when many rows share it.
//
// Every value of a product is made in one order, whatever the number of rows: the 32 products of a
// group in k order, a chain of fma from 0; this sum times the weight's scale (exact); then, in group
// order, a fma with the row's scale of the group into the total.
#pragma once

#include "deepinfer/op.h"

// What takes or gives lanes has to be inlined: as an argument they go through memory.
#define DI_INLINE inline __attribute__((always_inline))

namespace deepinfer {
namespace DI_NAME {

enum Kind { kFp8 = 0, kFp4 = 1, kPlain = 2, kWide = 3 };  // plain: bf16, wide: float
constexpr int kGroup = 32;

// One matrix, or a stack of them: as the bindings pass it (`deepinfer/ops/cpu/linear.py`).
struct Matrix {
  const uint8_t* codes;   // [count, panels, units, bytes of a unit], readable from 3 bytes before
  const uint8_t* scales;  // E8M0; fp8 [count, ceil(n / 32), groups], fp4 [count, panels, groups, 16]
  int64_t kind, n, k, count;

  int64_t panels() const { return ceil_div(n, kLanes); }
  int64_t groups() const { return ceil_div(k, kGroup); }
  bool quantised() const { return kind <= kFp4; }
  int64_t group_bytes() const {
    return kind == kFp8 ? 512 : kind == kFp4 ? 256 : kind == kPlain ? 1024 : 2048;
  }
  Matrix at(int64_t index) const {
    Matrix m = *this;
    m.codes += index * panels() * groups() * group_bytes();
    if (kind == kFp8) m.scales += index * ceil_div(n, 32) * groups();
    if (kind == kFp4) m.scales += index * panels() * groups() * kLanes;
    return m;
  }
};

// Left operands: row r's values at `values + r * stride`. For packed weights they are what FP8
// values are before their scale, times 2^kCodeShift; the scale is scales[r * groups + group].
constexpr int kCodeShift = 60;
struct Rows {
  const float* values;
  const float* scales;
  int64_t stride, groups;

  Rows from(int64_t row) const {
    return {values + row * stride, scales ? scales + row * groups : nullptr, stride, groups};
  }
};

// How rows become left operands: FP8-quantised; as they are, for packed weights; as they are.
enum Form { kQuantised, kScaled, kAsIs };
// k elements of one row: groups of 32 filled up with zeros.
void make_left(Form form, const bf16* x, int64_t k, float* values, float* scales);
// Rows x [rows, k], `step` elements apart, in memory of this thread (slots 6, 7). Null values where
// there is no memory.
Rows prepared(Form form, const bf16* x, int64_t rows, int64_t step, int64_t k);
constexpr int64_t row_stride(int64_t groups) { return groups * kGroup + kLanes; }

// totals [panels, rows, 16] = x times the columns of `panels` panels from the first.
void multiply(const Rows& x, int64_t rows, const Matrix& w, int64_t first, int64_t panels,
              float* totals);

// Cycles that a product takes, roughly: six bytes of codes decoded in one, two fma of eight lanes.
// Below kAlone one thread does all: to wake another takes longer.
constexpr int64_t kAlone = 60000, kRowBlock = 96;
inline int64_t cycles(int64_t rows, const Matrix& w, int64_t panels) {
  return panels * w.groups() * (ceil_div(rows, kRowBlock) * w.group_bytes() / 6 + rows * 32);
}

// A product's rows and panels cut into tasks.
struct Grid {
  int64_t rows, panels;      // in all
  int64_t height, width;     // of a task
  struct Piece {
    int64_t row, rows, panel, panels;
  };

  Grid(int64_t rows, int64_t panels, const Matrix& w) : rows(rows), panels(panels) {
    int64_t bytes = w.groups() * w.group_bytes();
    height = kRowBlock;
    width = rows > 6 ? 8 : max(4, (1 << 16) / max(bytes, 1) / 4 * 4);
  }
  int64_t across() const { return ceil_div(panels, width); }
  int64_t tasks() const { return across() * ceil_div(rows, height); }
  Piece at(int64_t task) const {
    int64_t row = task / across() * height, panel = task % across() * width;
    return {row, min(height, rows - row), panel, min(width, panels - panel)};
  }
};

// body(task) for each, on this thread if `alone`.
template <class Body> inline void run(int64_t tasks, bool alone, const Body& body) {
  if (!alone) return parallel(tasks, body);
  for (int64_t t = 0; t < tasks; t++) body(t);
}

}  // namespace DI_NAME
}  // namespace deepinfer
