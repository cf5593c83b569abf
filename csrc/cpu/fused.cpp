// Sequences of ops as one call: deepinfer/ops/fused.py. Each step is the op itself, on the same
// values, so that not a bit differs; what is between them stays in this thread's memory.
#include "deepinfer/panels.h"

using namespace deepinfer::DI_NAME;

// The ops, as the files of their names have them.
DI_OP(hc_mix)
(const void* streams, int type, const float* fn, const float* scale, const float* base,
 int64_t rows, int64_t copies, int64_t n, int64_t iterations, float hc_eps, double norm_eps,
 float* pre, float* post, float* comb);
DI_OP(hc_norm)
(const void* streams, int type, const float* pre, const void* weight, int weight_type, int64_t rows,
 int64_t copies, int64_t n, double eps, void* out);
DI_OP(linear)(const bf16* x, int64_t rows, const Matrix* w, bf16* out);
DI_OP(grouped_linear)
(const bf16* x, int64_t rows, int64_t groups, const Matrix* w, bf16* out);
DI_OP(linear_f32)(const void* x, int type, int64_t rows, const Matrix* w, float* out);
DI_OP(rmsnorm)
(const void* x, int type, const void* weight, int weight_type, int64_t rows, int64_t n, double eps,
 void* out);
DI_OP(rope)
(const void* x, int type, const float* cos, const float* sin, int64_t rows, int64_t heads,
 int64_t dim, int64_t pairs, int sign, void* out);
DI_OP(router)
(const float* logits, const float* bias, int64_t rows, int64_t experts, int64_t k, float scale,
 int normalise, int64_t* ids, float* weights);
DI_OP(moe)
(const bf16* x, int64_t rows, const int64_t* ids, const float* weights, int64_t choices,
 const Matrix* w1, const Matrix* w3, const Matrix* w2, const Matrix* s1, const Matrix* s3,
 const Matrix* s2, double limit, bf16* out);

#define DI_CALL(op, ...) DI_JOIN(di_##op, DI_NAME)(__VA_ARGS__)
#define DI_TRY(op, ...) \
  if (int status = DI_CALL(op, __VA_ARGS__)) return status

namespace {
constexpr int kBetween = 8;  // a slot that no single op uses
}

// streams [rows, copies, hidden]; pre float [rows, copies]; weight [hidden] of type `weight_type`;
// fn, scale, base as of hc_mix. x [rows, hidden], and the three mixes.
DI_OP(hc_enter)
(const void* streams, int type, const float* pre, const void* weight, int weight_type,
 const float* fn, const float* scale, const float* base, int64_t rows, int64_t copies,
 int64_t hidden, int64_t iterations, float hc_eps, double norm_eps, void* x, float* next,
 float* post, float* comb) {
  DI_TRY(hc_norm, streams, type, pre, weight, weight_type, rows, copies, hidden, norm_eps, x);
  return DI_CALL(hc_mix, streams, type, fn, scale, base, rows, copies, copies * hidden, iterations,
                 hc_eps, norm_eps, next, post, comb);
}
DI_CAPTURED(hc_enter)

// x bf16 [rows, k of wq_a]; cos, sin float [rows, pairs]. latent bf16 [rows, n of wq_a], q bf16
// [rows, heads, n of wkv], kv bf16 [rows, n of wkv].
DI_OP(qkv)
(const bf16* x, int64_t rows, const Matrix* wq_a, const void* q_norm, int q_type,
 const Matrix* wq_b, const Matrix* wkv, const void* kv_norm, int kv_type, double eps,
 int64_t heads, const float* cos, const float* sin, int64_t pairs, bf16* latent, bf16* q,
 bf16* kv) {
  DI_TRY(linear, x, rows, wq_a, latent);
  DI_TRY(rmsnorm, latent, kBf16, q_norm, q_type, rows, wq_a->n, eps, latent);
  DI_TRY(linear, latent, rows, wq_b, q);
  DI_TRY(rope, q, kBf16, cos, sin, rows, heads, wkv->n, pairs, 1, q);
  DI_TRY(linear, x, rows, wkv, kv);
  DI_TRY(rmsnorm, kv, kBf16, kv_norm, kv_type, rows, wkv->n, eps, kv);
  return DI_CALL(rope, kv, kBf16, cos, sin, rows, 1, wkv->n, pairs, 1, kv);
}
DI_CAPTURED(qkv)

// o bf16 [rows, heads, dim] = [rows, groups, k of wo_a]; out bf16 [rows, n of wo_b].
DI_OP(attention_output)
(const bf16* o, int64_t rows, int64_t heads, int64_t dim, const float* cos, const float* sin,
 int64_t pairs, const Matrix* wo_a, const Matrix* wo_b, int64_t groups, bf16* out) {
  int64_t wide = heads * dim;
  bf16* turned = scratch<bf16>(kBetween, rows * (wide + wo_a->n));
  if (!turned) return kNoMemory;
  bf16* joined = turned + rows * wide;
  DI_TRY(rope, o, kBf16, cos, sin, rows, heads, dim, pairs, -1, turned);
  DI_TRY(grouped_linear, turned, rows, groups, wo_a, joined);
  return DI_CALL(linear, joined, rows, wo_b, out);
}
DI_CAPTURED(attention_output)

// x, out bf16 [rows, k of gate]; bias float [n of gate].
DI_OP(ffn)
(const bf16* x, int64_t rows, const Matrix* gate, const float* bias, float temperature, int64_t k,
 float scale, const Matrix* w1, const Matrix* w3, const Matrix* w2, const Matrix* s1,
 const Matrix* s3, const Matrix* s2, double limit, bf16* out) {
  int64_t experts = gate->n;
  int64_t* ids = scratch<int64_t>(kBetween, rows * (k + experts + k));
  if (!ids) return kNoMemory;
  float *weights = (float*)(ids + rows * k), *logits = weights + rows * k;
  DI_TRY(linear_f32, x, kBf16, rows, gate, logits);
  for (int64_t i = 0; i < rows * experts; i++) logits[i] /= temperature;
  DI_TRY(router, logits, bias, rows, experts, k, scale, 1, ids, weights);
  return DI_CALL(moe, x, rows, ids, weights, k, w1, w3, w2, s1, s3, s2, limit, out);
}
DI_CAPTURED(ffn)
