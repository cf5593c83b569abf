"""Single operations against the golden unit files, at the tolerance each of them states."""

from __future__ import annotations

import pytest
import torch

from deepinfer.model import engram_tables
from deepinfer.model.norm_rope import rope_frequencies, yarn_bounds
from deepinfer.ops.torch import engram, hyper, linear, memory, moe, rowwise
from deepinfer.quant import Packed, codec
from tests import golden
from tests.golden import needs_golden

pytestmark = needs_golden


def unit(name):
    return golden.tensors(f"unit/{name}.safetensors")


def same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    different = (a.contiguous().view(width) != b.contiguous().view(width)).sum().item()
    assert different == 0, f"{different} of {a.numel()} differ"


def within_ulp(a, b, share=0.01):
    """At most one bf16 unit in the last place, on at most ``share`` of the elements."""
    assert a.dtype == b.dtype == torch.bfloat16
    distance = (_ordered(a) - _ordered(b)).abs()
    assert distance.max() <= 1, f"{distance.max()} units apart"
    assert (distance > 0).float().mean() <= share


def _ordered(x):
    bits = x.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -32768 - bits, bits)


def within_relative(a, b, limit=1e-5):
    error = ((a.double() - b.double()).abs() / b.double().abs().clamp_min(1e-30)).max()
    assert error <= limit, f"relative error {error:.2e}"


def within_rms(a, b, limit):
    a, b = a.double(), b.double()
    error = (a - b).square().mean().sqrt() / b.square().mean().sqrt()
    assert error <= limit, f"relative rms {error:.2e}"


def prepared(tensors, prefix, kind):
    block = (1, 32) if kind == "fp4" else (32, 32)
    codes, scales = tensors[f"{prefix}weight"], tensors[f"{prefix}scale"]
    codes = codes.view(torch.uint8) if kind == "fp4" else codes
    return linear.prepare(Packed(codes, scales.view(torch.uint8), block, kind), keep=True)


def test_fp8_activation_quantiser():
    t = unit("fp8_act_quant")
    codes, scales = codec.fp8_groups(t["x"])
    same_bits(codes, t["q"])
    same_bits(scales, t["scale"].view(torch.uint8))
    same_bits(codec.fp8_values(codes, scales).bfloat16(), t["fake"])


def test_fp4_index_quantiser():
    t = unit("fp4_index_quant")
    packed, scales = codec.fp4_index_groups(t["x"])
    same_bits(packed, t["packed"].view(torch.uint8))
    same_bits(scales, t["scale"].view(torch.uint8))
    same_bits(codec.fp4_index_values(packed, scales).bfloat16(), t["fake"])
    same_bits(memory.quantise_index(t["x"]), t["fake"])


def test_fp4_kv_quantiser():
    t = unit("fp4_kv_quant")
    packed, scales = codec.fp4_kv_groups(t["x"])
    same_bits(packed, t["packed"].view(torch.uint8))
    same_bits(scales, t["scale"])
    same_bits(codec.fp4_kv_values(packed, scales).bfloat16(), t["fake"])


def test_e2m1_rounding():
    t = unit("e2m1_round")
    same_bits(codec.e2m1_codes(t["x"]), t["code"])
    same_bits(codec.e2m1_values(t["code"]), t["value"])


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind, cases", [("fp8", "abcd"), ("fp4", "abc")])
def test_quantised_linear(kind, cases, keep):
    t = unit(f"linear_{kind}")
    for c in cases:
        weight = prepared(t, f"{c}.", kind)
        weight = linear.prepare(weight.source, keep=keep)
        within_ulp(linear.linear(t[f"{c}.x"], weight), t[f"{c}.y"])


def test_rmsnorm():
    t = unit("rmsnorm")
    within_ulp(rowwise.rmsnorm(t["x"], t["weight"], 1e-20), t["y"])


@pytest.mark.parametrize(
    "name, rotary, theta, original",
    [
        ("real_yarn", 64, 160000, 65536),
        ("real_plain", 64, 10000, 0),
        ("tiny_s_yarn", 32, 160000, 1024),
        ("tiny_k_yarn", 64, 160000, 1024),
        ("tiny_s_plain", 32, 10000, 0),
    ],
)
def test_rope(name, rotary, theta, original):
    t = unit("rope")
    freqs = rope_frequencies(rotary, theta, 16, 32, 1, original)
    ulps = (freqs.view(torch.int32) - t[f"{name}.freqs"].view(torch.int32)).abs().max()
    assert ulps <= 1
    if original:
        assert list(yarn_bounds(rotary, theta, 32, 1, original)) == t[f"{name}.lo_hi"].tolist()
    table = rowwise.rope_table(t["positions"], freqs)
    if f"{name}.cos" in t:
        assert (table[0] - t[f"{name}.cos"]).abs().max() <= 2e-7
        assert (table[1] - t[f"{name}.sin"]).abs().max() <= 2e-7
    x = t[f"{name}.x"]
    turned = rowwise.rope(x, table)
    within_ulp(turned, t[f"{name}.rotated"], share=1)
    within_ulp(rowwise.rope(turned, table, inverse=True), t[f"{name}.rotated_then_inverse"], 1)
    within_ulp(rowwise.rope(x, table, inverse=True), t[f"{name}.inverse_of_x"], share=1)


def test_hyper_connections():
    t = unit("mhc")
    split = hyper.hc_split(t["mixes"], t["scale"], t["base"], 4, 20, 1e-6)
    fn = linear.prepare(t["fn"], keep=True)
    mixed = hyper.hc_mix(t["stream"], fn, t["fn_scale"], t["fn_base"], 20, 1e-6, 1e-20)
    for name, a, b in zip(("pre", "post", "comb"), split, mixed, strict=True):
        within_relative(a, t[name])
        within_relative(b, t[f"stream_{name}"])
    within_ulp(hyper.hc_collapse(t["stream"], t["collapse_pre"]), t["collapsed"])
    out = hyper.hc_expand(t["sublayer_out"], t["stream"], t["stream_post"], t["stream_comb"])
    within_ulp(out, t["expanded"])


@pytest.mark.parametrize(
    "name, k, scale",
    [("e8k2", 2, 1.5), ("e16k6", 6, 1.5), ("e4k1", 1, 1.5), ("e8k3_vl", 3, 1.5),
     ("e10k3_scale2", 3, 2.0)],
)  # fmt: skip
def test_router(name, k, scale):
    t = unit("router")
    bias = t[f"{name}.bias"]
    if f"{name}.image_mask" in t:
        bias = torch.where(t[f"{name}.image_mask"][:, None], t[f"{name}.bias_vl"], bias)
    logits = linear.linear_f32(t[f"{name}.x"], linear.prepare(t[f"{name}.weight"], keep=True))
    ids, weights = moe.router(logits, bias, k, scale)
    assert torch.equal(ids.int(), t[f"{name}.ids"])
    within_relative(weights, t[f"{name}.weights"])


@pytest.mark.parametrize("name, limit", [("clamped", 10.0), ("small", 7.0)])
def test_expert(name, limit):
    t = unit("expert")
    w1, w3, w2 = (prepared(t, f"{name}.{w}.", "fp8") for w in ("w1", "w3", "w2"))
    x, weight = t[f"{name}.x"], t[f"{name}.route_weight"][:, 0]
    within_ulp(moe.expert(x, w1, w3, w2, limit), t[f"{name}.y_plain"])
    within_ulp(moe.expert(x, w1, w3, w2, limit, weight), t[f"{name}.y_weighted"])


def windows(mapped, is_image, pad, n):
    """Mapped ids [N, n] of each position and those before it, by the rule of model spec §3.4."""
    rows = []
    for p in range(len(mapped)):
        row, blocked = [], False
        for s in range(n):
            blocked = blocked or p < s or bool(is_image[p - s])
            row.append(pad if blocked else int(mapped[p - s]))
        rows.append(row)
    return torch.tensor(rows)


@pytest.mark.parametrize("name", ["real", "tiny_s"])
def test_engram_hash(name):
    t = unit("engram_hash")
    mapped = t[f"{name}.mapped_ids"]
    for rows, image in (
        ("rows_text", torch.zeros(len(mapped))),
        ("rows_with_images", t[f"{name}.is_image"]),
    ):
        ngrams = windows(mapped, image, 2, 4)
        for layer in range(2):
            primes = t[f"{name}.primes"][layer].reshape(3, -1)
            got = engram.engram_rows(ngrams, t[f"{name}.multipliers"][layer], primes)
            assert torch.equal(got, t[f"{name}.{rows}"][:, layer])


def test_engram_gate():
    t = unit("engram_gate")
    config, weights, _ = golden._parts("tiny-s")
    w = {k.split("engram.")[1]: v for k, v in weights.items() if k.startswith("layers.1.engram.")}
    values = engram.engram_lookup(w["embed.weight"], t["row_ids"].long(), torch.bfloat16)
    kv = linear.linear(values, linear.prepare(w["wkv.weight"], keep=True))
    args = (t["stream"], kv, w["q_weight"], w["k_weight"], config.rms_norm_eps)
    out, gate = engram.engram_gate(*args)
    within_rms(gate, t["gate"], 5e-3)
    within_rms(out, t["stream_out"], 5e-3)
    masked, gate = engram.engram_gate(*args, image=t["image_mask"])
    within_rms(masked, t["stream_out_masked"], 5e-3)
    assert (gate[t["image_mask"]] == 0).all()
    assert engram_tables.primes(config)[0][0][0] == 521


@pytest.mark.parametrize("layer, ratio", [(2, 2), (6, 1)])
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_compressor(layer, ratio, n):
    t = unit("compressor")
    p = f"ratio{ratio}.n{n}."
    if f"{p}x" not in t:
        pytest.skip("no such case")
    config, weights, _ = golden._parts("tiny-s")
    w = {
        k.split("compressor.")[1]: v
        for k, v in weights.items()
        if k.startswith(f"layers.{layer}.attn.compressor.")
    }
    wkv = linear.prepare(w["wkv.weight"], keep=True)
    x = t[f"{p}x"]
    if f"{p}next_x" in t:
        x = torch.cat((x, t[f"{p}next_x"]))
    v = linear.linear_f32(x, wkv)
    if ratio == 1:
        pooled = v
    else:
        z = linear.linear_f32(x, linear.prepare(w["wgate.weight"], keep=True))
        if n % 2:
            within_rms(v[n - 1 : n], t[f"{p}open_v"], 5e-3)
            within_rms(z[n - 1 : n], t[f"{p}open_z"], 5e-3)
        full = len(v) // 2 * 2
        pooled = memory.pool(v[:full].unflatten(0, (-1, 2)), z[:full].unflatten(0, (-1, 2)))
    latent = rowwise.rmsnorm(pooled.bfloat16(), w["norm.weight"], config.rms_norm_eps)
    if n > 1 or ratio == 1:
        want = [t[f"{p}latent"]] + ([t[f"{p}next_latent"]] if f"{p}next_latent" in t else [])
        within_rms(latent, torch.cat(want), 5e-3)
    else:
        assert latent.shape[0] == 0


@pytest.mark.parametrize("name", ["h4d64", "h32d128", "h6d32"])
def test_index_scores(name):
    t = unit("indexer")
    q, k = t[f"{name}.q"], t[f"{name}.k"]
    weights = t[f"{name}.weights_raw"] * (q.shape[1] * q.shape[2]) ** -0.5
    same_bits(weights, t[f"{name}.weights"])
    within_ulp(memory.index_scores(q[None], k[None], weights[None])[0], t[f"{name}.scores"])


def test_index_selection_with_ties():
    t = unit("indexer")
    scores, visible = t["select.scores"], t["select.visible"].long()
    assert torch.equal(memory.select(scores, visible, 16).int(), t["select.top16"])
    blocks = memory.candidate_blocks(scores, visible, 3, 8)
    mask = blocks.repeat_interleave(8, -1)[:, :50]
    seen = torch.arange(50) < visible[:, None]
    assert torch.equal(mask & seen, t["select.candidate_mask"] & seen)
    limited = memory.select(scores, visible, 16, mask)
    assert torch.equal(limited.int(), t["select.top16_in_candidates"])


@pytest.mark.parametrize("name", ["d64", "d128", "d512"])
def test_sparse_attention(name):
    t = unit("sparse_attention")
    slots = t[f"{name}.index"].long()
    keys = torch.nn.functional.pad(t[f"{name}.kv"], (0, 0, 0, 1))
    out = memory.attend(t[f"{name}.q"], keys, slots, t[f"{name}.sink"])
    within_rms(out, t[f"{name}.out"], 4e-3)
    assert (out[(slots < 0).all(1)] == 0).all()
