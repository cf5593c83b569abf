// Routed and shared experts: clamped SwiGLU, each expert's rows together.
//
// A (row, choice) pair belongs to one expert; pairs are sorted by expert, rows ascending. The shared
// expert follows as one more, with all rows. Two passes of tasks over all of them: the hidden values,
// which become left operands at once, then the outputs in bf16. A row's outputs are added in
// ascending expert id, the shared one last. Source: model spec §3.9.
#include "deepinfer/panels.h"

namespace deepinfer {
namespace DI_NAME {
namespace {

// Pieces of one allocation, each at a multiple of 64 bytes; counts first, where `memory` is null.
struct Pieces {
  char* memory;
  size_t used;

  template <class T> T* take(int64_t count) {
    T* here = memory ? (T*)(memory + used) : nullptr;
    used += ((size_t)count * sizeof(T) + 63) / 64 * 64;
    return here;
  }
};

// An expert and its rows.
struct Job {
  Matrix w1, w3, w2;
  Rows x;
  int64_t first, rows;  // of the pairs
  int64_t hidden_tasks, output_tasks;  // with those of the jobs before it
};

struct Experts {
  int64_t rows, choices, pairs, experts, hidden, inner;  // inner: the most of any expert
  const Matrix *w1, *w3, *w2, *s1, *s3, *s2;
  Rows x;
  float limit;

  Job* jobs;
  int64_t *begin, *row_of, *place;  // of experts' pairs; pair -> row; (row, choice) -> pair
  float *weight, *gathered, *gathered_scales, *values, *scales;
  bf16* output;

  void lay_out(Pieces& p) {
    int64_t all = pairs + rows, groups = ceil_div(inner, kGroup);
    jobs = p.take<Job>(min(pairs, experts) + 1);
    begin = p.take<int64_t>(experts + 1);
    row_of = p.take<int64_t>(pairs);
    place = p.take<int64_t>(pairs);
    weight = p.take<float>(pairs);
    gathered = p.take<float>(rows > 1 ? pairs * x.stride : 0);
    gathered_scales = p.take<float>(rows > 1 ? pairs * x.groups : 0);
    values = p.take<float>(all * row_stride(groups));
    scales = p.take<float>(all * groups);
    output = p.take<bf16>(all * hidden);
  }

  bool sort(const int64_t* ids, const float* weights) {
    memset(begin, 0, (experts + 1) * sizeof *begin);
    for (int64_t i = 0; i < pairs; i++) {
      if (ids[i] < 0 || ids[i] >= experts) return false;
      begin[ids[i] + 1]++;
    }
    for (int64_t e = 0; e < experts; e++) begin[e + 1] += begin[e];
    for (int64_t i = 0; i < pairs; i++) {
      int64_t at = begin[ids[i]]++;
      row_of[at] = i / choices;
      weight[at] = weights[i];
      place[i] = at;
    }
    for (int64_t e = experts; e > 0; e--) begin[e] = begin[e - 1];
    begin[0] = 0;
    // Choices in ascending expert id: those of a row are few.
    for (int64_t* p = place; p < place + pairs; p += choices)
      for (int64_t i = 1; i < choices; i++)
        for (int64_t j = i; j > 0 && p[j] < p[j - 1]; j--) {
          int64_t other = p[j];
          p[j] = p[j - 1];
          p[j - 1] = other;
        }
    return true;
  }

  Rows gather() {
    if (rows == 1) return {x.values, x.scales, 0, 0};
    split(pairs, max(1, 65536 / x.stride), [&](int64_t from, int64_t end) {
      for (int64_t i = from; i < end; i++) {
        Rows row = x.from(row_of[i]);
        memcpy(gathered + i * x.stride, row.values, x.stride * sizeof(float));
        if (x.scales)
          memcpy(gathered_scales + i * x.groups, row.scales, x.groups * sizeof(float));
      }
    });
    return {gathered, x.scales ? gathered_scales : nullptr, x.stride, x.groups};
  }

  // SwiGLU of the first 16 columns at `gate` and `up`, in bf16.
  void activate(const float* gate, const float* up, const float* row_weight, bf16* out) const {
    F g = rounded(load(gate)), u = rounded(load(up)), most = splat(limit);
    g = min(most, g);
    u = max(splat(-limit), min(most, u));
    F h = g / (splat(1.0f) + exp(zero() - g)) * u;
    store(out, row_weight ? h * splat(*row_weight) : h);
  }
  static DI_INLINE F rounded(F x) {
    bf16 some[kLanes];
    store(some, x);
    return load(some);
  }

  bool make_hidden(const Job& job, const Grid::Piece& a) const {
    int64_t size = a.panels * a.rows * kLanes, groups = ceil_div(inner, kGroup);
    float* gate = scratch<float>(0, 2 * size);
    if (!gate) return false;
    float* up = gate + size;
    multiply(job.x.from(a.row), a.rows, job.w1, a.panel, a.panels, gate);
    multiply(job.x.from(a.row), a.rows, job.w3, a.panel, a.panels, up);
    for (int64_t p = 0; p < a.panels; p += 2)
      for (int64_t r = 0; r < a.rows; r++) {
        int64_t pair = job.first + a.row + r, group = (a.panel + p) / 2;
        const float* row_weight = pair < pairs ? weight + pair : nullptr;
        bf16 h[kGroup] = {};
        for (int64_t i = 0; i < min(2, a.panels - p); i++) {
          int64_t at = ((p + i) * a.rows + r) * kLanes;
          activate(gate + at, up + at, row_weight, h + i * kLanes);
        }
        float* out = values + pair * row_stride(groups) + group * kGroup;
        make_left(x.scales ? kQuantised : kAsIs, h, kGroup, out, scales + pair * groups + group);
      }
    return true;
  }

  bool make_output(const Job& job, const Grid::Piece& a) const {
    float* totals = scratch<float>(0, a.panels * a.rows * kLanes);
    if (!totals) return false;
    int64_t groups = ceil_div(inner, kGroup), first = job.first + a.row;
    Rows h{values, x.scales ? scales : nullptr, row_stride(groups), groups};
    multiply(h.from(first), a.rows, job.w2, a.panel, a.panels, totals);
    for (int64_t p = 0; p < a.panels; p++) {
      int64_t column = (a.panel + p) * kLanes, lanes = hidden - column;
      for (int64_t r = 0; r < a.rows; r++)
        store(output + (first + r) * hidden + column, load(totals + (p * a.rows + r) * kLanes),
              lanes);
    }
    return true;
  }

  void combine(int64_t row, bf16* out) const {
    for (int64_t at = 0; at < hidden; at += kLanes) {
      F total = load(output + place[row * choices] * hidden + at, hidden - at);
      for (int64_t c = 1; c < choices; c++)
        total = total + load(output + place[row * choices + c] * hidden + at, hidden - at);
      total = total + load(output + (pairs + row) * hidden + at, hidden - at);
      store(out + row * hidden + at, total, hidden - at);
    }
  }

  int run_all(const int64_t* ids, const float* weights, bf16* out) {
    if (!sort(ids, weights)) return kUnsupported;
    Rows left = gather();
    int64_t count = 0, hidden_tasks = 0, output_tasks = 0, work = 0;
    auto add = [&](Job job) {
      hidden_tasks += Grid(job.rows, job.w1.panels(), job.w1).tasks();
      output_tasks += Grid(job.rows, job.w2.panels(), job.w2).tasks();
      work += 2 * cycles(job.rows, job.w1, job.w1.panels());
      work += cycles(job.rows, job.w2, job.w2.panels());
      job.hidden_tasks = hidden_tasks;
      job.output_tasks = output_tasks;
      jobs[count++] = job;
    };
    for (int64_t e = 0; e < experts; e++)
      if (begin[e + 1] > begin[e])
        add({w1->at(e), w3->at(e), w2->at(e), left.from(begin[e]), begin[e],
             begin[e + 1] - begin[e], 0, 0});
    add({*s1, *s3, *s2, x, pairs, rows, 0, 0});

    bool alone = work < kAlone, failed = false;
    run(hidden_tasks, alone, [&](int64_t task) {
      const Job* job = jobs;
      while (job->hidden_tasks <= task) job++;
      Grid grid(job->rows, job->w1.panels(), job->w1);
      int64_t first = job->hidden_tasks - grid.tasks();
      if (!make_hidden(*job, grid.at(task - first))) __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    });
    run(output_tasks, alone, [&](int64_t task) {
      const Job* job = jobs;
      while (job->output_tasks <= task) job++;
      Grid grid(job->rows, job->w2.panels(), job->w2);
      int64_t first = job->output_tasks - grid.tasks();
      if (!make_output(*job, grid.at(task - first))) __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    });
    if (failed) return kNoMemory;
    split(rows, max(1, 65536 / (choices + 1) / hidden), [&](int64_t from, int64_t end) {
      for (int64_t row = from; row < end; row++) combine(row, out);
    });
    return kOk;
  }
};

}  // namespace
}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// x, out bf16 [rows, k of w1]; ids int64 and weights float [rows, choices]; w1, w3, w2 stacks, s1,
// s3, s2 single matrices, all quantised or none.
DI_OP(moe)
(const bf16* x, int64_t rows, const int64_t* ids, const float* weights, int64_t choices,
 const Matrix* w1, const Matrix* w3, const Matrix* w2, const Matrix* s1, const Matrix* s3,
 const Matrix* s2, double limit, bf16* out) {
  Experts all{};
  all.rows = rows, all.choices = choices, all.pairs = rows * choices;
  all.experts = w1->count, all.hidden = w1->k, all.inner = max(w1->n, s1->n);
  all.w1 = w1, all.w3 = w3, all.w2 = w2, all.s1 = s1, all.s3 = s3, all.s2 = s2;
  all.limit = (float)limit;
  all.x = prepared(w1->quantised() ? kQuantised : kAsIs, x, rows, w1->k, w1->k);
  if (!all.x.values) return kNoMemory;
  Pieces size{nullptr, 0};
  all.lay_out(size);
  Pieces real{scratch<char>(5, (int64_t)size.used), 0};
  if (!real.memory) return kNoMemory;
  all.lay_out(real);
  return all.run_all(ids, weights, out);
}
DI_CAPTURED(moe)
