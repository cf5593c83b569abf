// Hyper-connections: mixes of the streams, their weighted sum, and their expansion. Sums over copies
// run from the first to the last, without fused roundings, as the reference has them.
#include "deepinfer/op.h"

namespace deepinfer {
namespace DI_NAME {

constexpr int kMostCopies = 8;

// sum_k pre[k] S[k] of one row of streams [copies, n].
template <class T> inline F collapsed(const T* s, const float* pre, int64_t copies, int64_t n,
                                      int64_t at) {
  F total = load(s + at, n - at) * splat(pre[0]);
  for (int64_t k = 1; k < copies; k++)
    total = total + load(s + k * n + at, n - at) * splat(pre[k]);
  return total;
}

template <class T>
void collapse(const T* s, const float* pre, int64_t rows, int64_t copies, int64_t n, T* out) {
  split(rows, max(1, 65536 / (copies * n)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      for (int64_t i = 0; i < n; i += kLanes)
        store(out + row * n + i,
              collapsed(s + row * copies * n, pre + row * copies, copies, n, i), n - i);
  });
}

// The same, then the RMS norm of the rounded sum.
template <class T, class W>
void collapse_norm(const T* s, const float* pre, const W* weight, int64_t rows, int64_t copies,
                   int64_t n, double eps, T* out) {
  split(rows, max(1, 65536 / (copies * n)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      T* x = out + row * n;
      D squares{};
      for (int64_t i = 0; i < n; i += kLanes) {
        store(x + i, collapsed(s + row * copies * n, pre + row * copies, copies, n, i), n - i);
        D v = widen(x + i, n - i);
        squares = fma(v, v, squares);
      }
      F inverse = splat((float)(1.0 / __builtin_sqrt(sum(squares) / n + eps)));
      for (int64_t i = 0; i < n; i += kLanes)
        store(x + i, load(x + i, n - i) * inverse * load(weight + i, n - i), n - i);
    }
  });
}

template <class T>
void expand(const T* x, const T* s, const float* post, const float* comb, int64_t rows,
            int64_t copies, int64_t n, T* out) {
  split(rows, max(1, 65536 / (copies * n)), [&](int64_t begin, int64_t end) {
    F old[kMostCopies];
    for (int64_t row = begin; row < end; row++) {
      const T* from = s + row * copies * n;
      const float *p = post + row * copies, *c = comb + row * copies * copies;
      for (int64_t i = 0; i < n; i += kLanes) {
        F added = load(x + row * n + i, n - i);
        for (int64_t k = 0; k < copies; k++) old[k] = load(from + k * n + i, n - i);
        for (int64_t j = 0; j < copies; j++) {
          F total = old[0] * splat(c[j]);
          for (int64_t k = 1; k < copies; k++) total = total + old[k] * splat(c[k * copies + j]);
          store(out + (row * copies + j) * n + i, splat(p[j]) * added + total, n - i);
        }
      }
    }
  });
}

// Products of `R` rows u (float64 [R, n]) with all `outputs` rows of fn, to m[output * kLanes + row].
template <int R>
inline void products(const double* u, const float* fn, int64_t outputs, int64_t n, float* m) {
  split(outputs, max(1, 65536 / n), [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; o++) {
      D total[R] = {};
      for (int64_t i = 0; i < n; i += kLanes) {
        D w = widen(fn + o * n + i, n - i);
        for (int r = 0; r < R; r++)
          total[r] = fma(w, load(u + r * ceil_div(n, kLanes) * kLanes + i), total[r]);
      }
      for (int r = 0; r < R; r++) m[o * kLanes + r] = (float)sum(total[r]);
    }
  });
}

// One row of u widened, and 1 / sqrt(mean(u^2) + eps).
template <class T> inline float widened(const T* u, int64_t n, double eps, double* out) {
  D squares{};
  for (int64_t i = 0; i < n; i += kLanes) {
    D v = widen(u + i, n - i);
    store(out + i, v);
    squares = fma(v, v, squares);
  }
  return (float)(1.0 / __builtin_sqrt(sum(squares) / n + eps));
}

// m: [outputs, 16] mixes of up to 16 rows, one row a lane; to pre, post, comb of `rows` rows.
inline void sinkhorn(const float* m, const float* scale, const float* base, int64_t rows,
                     int64_t copies, int64_t iterations, float eps, float* pre, float* post,
                     float* comb) {
  F e = splat(eps), a[kMostCopies][kMostCopies];
  float lane[kLanes];
  auto affine = [&](int64_t o, int part) {
    return load(m + o * kLanes) * splat(scale[part]) + splat(base[o]);
  };
  auto scatter = [&](F x, float* to, int64_t stride) {
    store(lane, x);
    for (int64_t r = 0; r < rows; r++) to[r * stride] = lane[r];
  };
  for (int64_t k = 0; k < copies; k++) {
    scatter(sigmoid(affine(k, 0)) + e, pre + k, copies);
    scatter(splat(2.0f) * sigmoid(affine(copies + k, 1)), post + k, copies);
  }
  for (int64_t i = 0; i < copies; i++) {
    F most = zero(), total = zero();
    for (int64_t j = 0; j < copies; j++) {
      a[i][j] = affine(2 * copies + i * copies + j, 2);
      most = j ? max(most, a[i][j]) : a[i][j];
    }
    for (int64_t j = 0; j < copies; j++) {
      a[i][j] = exp(a[i][j] - most);
      total = j ? total + a[i][j] : a[i][j];
    }
    for (int64_t j = 0; j < copies; j++) a[i][j] = a[i][j] / total + e;
  }
  for (int64_t round = 0; round < iterations; round++) {
    if (round)
      for (int64_t i = 0; i < copies; i++) {
        F total = a[i][0];
        for (int64_t j = 1; j < copies; j++) total = total + a[i][j];
        total = total + e;
        for (int64_t j = 0; j < copies; j++) a[i][j] = a[i][j] / total;
      }
    for (int64_t j = 0; j < copies; j++) {
      F total = a[0][j];
      for (int64_t i = 1; i < copies; i++) total = total + a[i][j];
      total = total + e;
      for (int64_t i = 0; i < copies; i++) a[i][j] = a[i][j] / total;
    }
  }
  for (int64_t i = 0; i < copies; i++)
    for (int64_t j = 0; j < copies; j++)
      scatter(a[i][j], comb + i * copies + j, copies * copies);
}

template <class T>
bool mix(const T* s, const float* fn, const float* scale, const float* base, int64_t rows,
         int64_t copies, int64_t n, int64_t iterations, float hc_eps, double norm_eps, float* pre,
         float* post, float* comb) {
  constexpr int kTogether = 2;  // rows that share the conversion of fn
  int64_t outputs = copies * (2 + copies), padded = ceil_div(n, kLanes) * kLanes;
  bool enough = true;
  split(rows, kLanes, [&](int64_t begin, int64_t end) {
    double* u = scratch<double>(0, kTogether * padded);
    float* m = scratch<float>(1, outputs * kLanes);
    if (!u || !m) return __atomic_store_n(&enough, false, __ATOMIC_RELAXED);
    memset(m, 0, (size_t)(outputs * kLanes) * sizeof(float));
    for (int64_t row = begin; row < end; row += kTogether) {
      int64_t count = min(kTogether, end - row), lane = row - begin;
      float inverse[kTogether];
      for (int64_t r = 0; r < count; r++)
        inverse[r] = widened(s + (row + r) * n, n, norm_eps, u + r * padded);
      if (count == kTogether)
        products<kTogether>(u, fn, outputs, n, m + lane);
      else
        products<1>(u, fn, outputs, n, m + lane);
      for (int64_t r = 0; r < count; r++)
        for (int64_t o = 0; o < outputs; o++) m[o * kLanes + lane + r] *= inverse[r];
    }
    sinkhorn(m, scale, base, end - begin, copies, iterations, hc_eps, pre + begin * copies,
             post + begin * copies, comb + begin * copies * copies);
  });
  return enough;
}

}  // namespace DI_NAME
}  // namespace deepinfer

using namespace deepinfer::DI_NAME;

// streams [rows, copies, n], out [rows, n]; pre float [rows, copies].
DI_OP(hc_collapse)
(const void* streams, int type, const float* pre, int64_t rows, int64_t copies, int64_t n,
 void* out) {
  if (type == kBf16)
    collapse((const bf16*)streams, pre, rows, copies, n, (bf16*)out);
  else
    collapse((const float*)streams, pre, rows, copies, n, (float*)out);
  return kOk;
}
DI_CAPTURED(hc_collapse)

// The same with weight [n] of type `weight_type`.
DI_OP(hc_norm)
(const void* streams, int type, const float* pre, const void* weight, int weight_type, int64_t rows,
 int64_t copies, int64_t n, double eps, void* out) {
  if (type == kBf16 && weight_type == kBf16)
    collapse_norm((const bf16*)streams, pre, (const bf16*)weight, rows, copies, n, eps, (bf16*)out);
  else if (type == kBf16)
    collapse_norm((const bf16*)streams, pre, (const float*)weight, rows, copies, n, eps,
                  (bf16*)out);
  else if (weight_type == kBf16)
    collapse_norm((const float*)streams, pre, (const bf16*)weight, rows, copies, n, eps,
                  (float*)out);
  else
    collapse_norm((const float*)streams, pre, (const float*)weight, rows, copies, n, eps,
                  (float*)out);
  return kOk;
}
DI_CAPTURED(hc_norm)

// x [rows, n], streams and out [rows, copies, n]; post float [rows, copies], comb [rows, copies,
// copies], whose first index is summed.
DI_OP(hc_expand)
(const void* x, const void* streams, int type, const float* post, const float* comb, int64_t rows,
 int64_t copies, int64_t n, void* out) {
  if (copies > kMostCopies) return kUnsupported;
  if (type == kBf16)
    expand((const bf16*)x, (const bf16*)streams, post, comb, rows, copies, n, (bf16*)out);
  else
    expand((const float*)x, (const float*)streams, post, comb, rows, copies, n, (float*)out);
  return kOk;
}
DI_CAPTURED(hc_expand)

// streams [rows, n], n = copies * hidden; fn float [copies (2 + copies), n]; scale [3]; base
// [copies (2 + copies)]; out pre, post [rows, copies], comb [rows, copies, copies].
DI_OP(hc_mix)
(const void* streams, int type, const float* fn, const float* scale, const float* base,
 int64_t rows, int64_t copies, int64_t n, int64_t iterations, float hc_eps, double norm_eps,
 float* pre, float* post, float* comb) {
  if (copies > kMostCopies) return kUnsupported;
  bool enough = type == kBf16 ? mix((const bf16*)streams, fn, scale, base, rows, copies, n,
                                    iterations, hc_eps, norm_eps, pre, post, comb)
                              : mix((const float*)streams, fn, scale, base, rows, copies, n,
                                    iterations, hc_eps, norm_eps, pre, post, comb);
  return enough ? kOk : kNoMemory;
}
DI_CAPTURED(hc_mix)
