"""Costs in closed form against row-by-row counting, and against the published ledger."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.checkpoint import names
from deepinfer.kvcache.pools import Formats, bytes_per_token
from deepinfer.model import cost
from deepinfer.model.config import ModelConfig
from deepinfer.replay.plan import ReplayPlan, ReplayRule
from tests import t6

EMBEDDED = Path(__file__).parents[2] / "deepinfer" / "embedded"


def read(name: str) -> ModelConfig:
    return ModelConfig.from_dict(json.loads((EMBEDDED / name).read_text()))


FLASH, SMALL = read("v41-flash.json"), read("config.json")
T6, T6_FP8 = t6.model_config(), t6.model_config(quantised=True, dtype="float32")
T6_BF16 = t6.model_config(dtype="bfloat16", ratio=3)
UNCUT = t6.model_config(kv_source_layer_ids=[1, 3, 4], index_source_layer_ids=[1, 3, 4])


def rule(config: ModelConfig, mode: str, keep: int) -> ReplayRule:
    start = config.decoder_start
    return ReplayRule(config.num_hidden_layers, start, config.sliding_window, mode, keep)


# -- the ledger ------------------------------------------------------------------------------------

LEDGER = {
    256: (8.56, 6.66, 22.2),
    512: (17.7, 11.4, 35.8),
    1 << 10: (36.8, 20.9, 43.2),
    4 << 10: (153.4, 79.8, 48.0),
    8 << 10: (309.3, 158.4, 48.8),
    32 << 10: (1252, 632, 49.5),
    128 << 10: (5085, 2564, 49.6),
    512 << 10: (21_409, 10_887, 49.2),
    1 << 20: (45_638, 23_461, 48.6),
}
"""Tokens: full and compact 10^12 FP8-equivalent FLOPs, % saved (performance ledger §1.3)."""


@pytest.mark.parametrize("tokens", LEDGER)
def test_prefill_table(tokens):
    full, compact, saved = LEDGER[tokens]
    ours = cost.saving(FLASH, rule(FLASH, "compact", 140).plan(tokens))
    assert 100 * ours.flops_saved == pytest.approx(saved, abs=0.06)
    # The table counts the mHC sums as well, which its list of classes does not name: 24 multiples
    # of the hidden size, twice a layer, in FP32. With them only its rounding is left.
    sums = 2 * 24 * FLASH.hidden_size * cost.rates(FLASH)["fp32"]
    for flops, rows, ledger in (
        (ours.flops_full, ours.rows_full, full),
        (ours.flops, ours.rows, compact),
    ):
        assert flops / 1e12 == pytest.approx(ledger, rel=0.006)
        assert (flops + sums * rows) / 1e12 == pytest.approx(ledger, rel=4e-4, abs=0.05)


def test_prefill_cost_per_token_grows_as_published():
    def per_token(tokens: int) -> float:
        return cost.total_flops(FLASH, rule(FLASH, "compact", 140).plan(tokens)) / tokens

    assert per_token(128 << 10) / per_token(8 << 10) == pytest.approx(1.012, abs=6e-4)
    assert per_token(1 << 20) / per_token(8 << 10) == pytest.approx(1.157, abs=6e-4)


def test_no_loop_over_tokens():
    plan = rule(FLASH, "compact", 140).plan(10**15)
    assert 0.4 < cost.saving(FLASH, plan).flops_saved < 0.5


@pytest.mark.parametrize(("decoder", "saved"), [(20, 49.3), (19, 46.8)])
def test_savings_are_of_all_layers(decoder, saved):
    plan = ReplayRule(40, 40 - decoder, 128, "compact", 140).plan(10_000)
    ours = cost.saving(FLASH, plan)
    assert ours.rows_full == 400_000
    assert ours.rows_full - ours.rows == decoder * 9_860
    assert round(100 * ours.rows_saved, 1) == saved


WEIGHTS = {
    1: 0.279, 2: 0.390, 4: 0.607, 8: 1.02, 16: 1.77, 32: 3.02, 64: 4.75, 128: 6.42, 256: 7.26,
    512: 7.38,
}  # fmt: skip
"""Rows of a step: GB of one layer (performance ledger §1.1)."""


@pytest.mark.parametrize("rows", WEIGHTS)
def test_weight_table(rows):
    touched = cost.weight_bytes(FLASH, 3, rows)
    assert set(touched) == {"projections", "moe", "hyper"}
    gigabytes = (touched["projections"] + touched["moe"]) / 1e9
    assert gigabytes == pytest.approx(WEIGHTS[rows], abs=0.0006 if rows < 8 else 0.006)


STATE = {
    1 << 10: (5.60, 0.10, 0.07, 0.28, 2.70, 8.8, 3.6),
    4 << 10: (5.60, 0.42, 0.28, 1.11, 2.70, 10.1, 6.3),
    32 << 10: (5.60, 3.34, 2.23, 4.46, 2.70, 18.3, 31.9),
    128 << 10: (5.60, 13.4, 8.91, 4.46, 2.70, 35.0, 119),
    1 << 20: (5.60, 107, 71.3, 4.46, 2.70, 191, 936),
}
"""Context: MB of entries, index keys of the encoder, the boundary and the later layers, windows,
their sum, and what is resident (performance ledger §1.2)."""


@pytest.mark.parametrize("context", STATE)
def test_state_table(context):
    layers = [cost.state_bytes(FLASH, i, context) for i in range(40)]
    index = [found.get("index", 0) for found in layers]
    windows = sum(found["window"] for found in layers)
    resident = cost.growing_bytes_per_token(FLASH) * context + windows
    ours = (
        sum(found.get("entries", 0) for found in layers),
        sum(index[:20]), index[20], sum(index[21:]), windows,
        sum(sum(found.values()) for found in layers), resident,
    )  # fmt: skip
    for i, (got, published) in enumerate(zip(ours, STATE[context], strict=True)):
        assert got / 1e6 == pytest.approx(published, rel=4e-3, abs=0.006 if i < 5 else 0.06)


def test_state_sizes():
    assert cost.growing_bytes_per_token(FLASH) == 890
    opened = 3 * 4096
    assert cost.fixed_bytes(FLASH) == 2_703_360 + opened
    assert cost.fixed_bytes(FLASH, 6, 3) == 3_042_336 + opened
    for config in (FLASH, SMALL, T6, T6_FP8, T6_BF16):
        formats = Formats.of(config)
        known = formats.window.nbytes, formats.entry.nbytes, formats.index.nbytes
        assert cost._record_bytes(config) == known
        assert cost.growing_bytes_per_token(config) == pytest.approx(bytes_per_token(config))


def test_state_of_a_short_context():
    assert cost.state_bytes(FLASH, 2, 1) == {"window": 528.0}
    assert cost.state_bytes(FLASH, 20, 1) == {"window": 528.0, "entries": 288.0, "index": 68.0}


# -- against counting row by row -------------------------------------------------------------------

KINDS = {
    "attn.wq_a": ("projections", "dense"), "attn.wq_b": ("projections", "dense"),
    "attn.wkv": ("projections", "dense"), "attn.wo_a": ("projections", "dense"),
    "attn.wo_b": ("projections", "dense"), "attn.compressor.wkv": ("compressor", "wide"),
    "attn.compressor.wgate": ("compressor", "wide"), "attn.indexer.wk": ("compressor", "wide"),
    "attn.indexer.wq_b": ("indexer", "dense"), "attn.indexer.weights_proj": ("indexer", "wide"),
    "ffn.gate": ("moe", "wide"), "hc_attn_fn": ("hyper", "fp32"), "hc_ffn_fn": ("hyper", "fp32"),
    "engram.wkv": ("engram", "dense"),
}  # fmt: skip
HALVES = {  # twice the class of a FLOP: (dense, wide, index scores)
    "quantised bfloat16": (2, 4, 1), "quantised float32": (2, 8, 1),
    "plain bfloat16": (4, 4, 4), "plain float32": (8, 8, 8),
}  # fmt: skip


def matrices(config: ModelConfig, layer: int) -> dict[str, names.Parameter]:
    prefix = f"layers.{layer}."
    return {
        name.removeprefix(prefix).removesuffix(".weight"): parameter
        for name, parameter in names.parameters(config).items()
        if name.startswith(prefix) and len(parameter.shape) == 2
    }


def counted(config: ModelConfig, plan: ReplayPlan) -> list[dict[str, int]]:
    """FLOPs of every layer: each row, each weight it meets, each key it may see."""
    word = f"{'quantised' if config.quantised else 'plain'} {config.dtype}"
    dense, wide, scores = HALVES[word]
    halves = {"dense": dense, "wide": wide, "fp32": 8}
    result = []
    for layer in config.layers:
        found = dict.fromkeys(cost.COMPONENTS, 0)
        shapes = {name: p.shape for name, p in matrices(config, layer.index).items()}

        def run(name: str, shapes=shapes, found=found) -> None:
            component, kind = KINDS[name]
            found[component] += 2 * math.prod(shapes[name]) * halves[kind] // 2

        def expert(where: str, shapes=shapes, found=found) -> None:
            for part in ("w1", "w2", "w3"):
                found["moe"] += 2 * math.prod(shapes[f"ffn.{where}.{part}"]) * dense // 2

        [computed] = plan.ranges(layer.index).computed or [(0, 0)]
        for p in range(plan.cached - plan.refill, plan.tokens):
            if layer.owns_kv:
                run("attn.compressor.wkv")
                if layer.ratio > 1:
                    run("attn.compressor.wgate")
                if p >= plan.cached and (p + 1) % layer.ratio == 0:
                    run("attn.indexer.wk")
            if p not in range(*computed):
                continue
            for name in shapes:
                if name in KINDS and KINDS[name][0] not in ("compressor", "indexer"):
                    run(name)
            expert("shared_experts")
            for number in range(config.num_experts_per_tok):
                expert(f"experts.{number}")
            window = range(max(p - config.sliding_window + 1, plan.sees_from(layer.index)), p + 1)
            entries = (p + 1) // layer.ratio if layer.ratio else 0
            keys = len(window) + min(entries, config.index_topk)
            heads = config.num_attention_heads
            found["attention"] += keys * heads * config.head_dim * 4 * wide // 2
            if layer.owns_index:
                run("attn.indexer.wq_b")
                run("attn.indexer.weights_proj")
                if layer.uses_candidates:
                    kept = config.candidate_topk_blocks * config.candidate_block_size
                    entries = min(entries, kept)
                per_key = config.index_n_heads * config.index_head_dim * 2
                found["indexer"] += entries * per_key * scores // 2
        result.append({name: n for name, n in found.items() if n})
    return result


@st.composite
def plans(draw) -> tuple[ModelConfig, ReplayPlan]:
    config = draw(st.sampled_from((T6, T6_FP8, T6_BF16)))
    mode = draw(st.sampled_from(("off", "mask", "compact")))
    chosen = rule(config, mode, draw(st.integers(16, 60)))
    tokens = draw(st.integers(0, 150))
    page = 2 * t6.PAGE_TOKENS * 3  # whole groups of any ratio
    cached = draw(st.integers(0, chosen.latest_resume(tokens) // page)) * page
    refill = draw(st.sampled_from((0, min(config.sliding_window, cached))))
    return config, chosen.plan(tokens, cached=cached, refill=refill)


@given(plans())
def test_closed_forms_are_exact(case):
    config, plan = case
    assert list(cost.plan_flops(config, plan)) == counted(config, plan)


@pytest.mark.parametrize(
    ("mode", "tokens", "cached", "refill"),
    [("compact", 700, 0, 0), ("mask", 300, 0, 0), ("compact", 300, 128, 128), ("off", 129, 0, 0)],
)
def test_the_embedded_model_counts_exactly(mode, tokens, cached, refill):
    plan = rule(SMALL, mode, 140).plan(tokens, cached=cached, refill=refill)
    assert list(cost.plan_flops(SMALL, plan)) == counted(SMALL, plan)


def test_a_model_that_cannot_be_cut_counts_every_source():
    plan = ReplayRule(6, None, 16).plan(50, cached=8)
    assert list(cost.plan_flops(UNCUT, plan)) == counted(UNCUT, plan)


@given(plans())
def test_a_saving_compares_with_everything(case):
    config, plan = case
    ours = cost.saving(config, plan)
    full = rule(config, "off", 0).plan(plan.tokens)
    assert ours.flops_full == cost.total_flops(config, full) >= ours.flops
    assert ours.rows_full == plan.tokens * config.num_hidden_layers
    assert ours.rows == sum(b - a for r in plan.all_ranges() for a, b in r.computed)
    if plan.tokens:
        head = 2 * config.vocab_size * config.hidden_size * cost.rates(config)["wide"] // 2
        assert ours.flops == head + sum(sum(x.values()) for x in cost.plan_flops(config, plan))
    else:
        assert (ours.flops, ours.flops_saved, ours.rows_saved) == (0, 0.0, 0.0)


def test_keys_only_rows_cost_keys_only():
    config = T6
    short, long = (rule(config, "compact", 28).plan(n) for n in (100, 101))
    more = [
        {name: b[name] - a.get(name, 0) for name in b if b[name] != a.get(name, 0)}
        for a, b in zip(cost.plan_flops(config, short), cost.plan_flops(config, long), strict=True)
    ]
    boundary = config.decoder_start
    assert boundary is not None
    assert set(more[boundary]) == {"compressor", "indexer"}, "and scores over one more entry each"
    assert all(set(x) <= {"indexer"} for x in more[boundary + 1 :])
    assert {"projections", "moe", "hyper", "attention"} <= set(more[boundary - 1])


# -- weights against the checkpoint's tensors ------------------------------------------------------


@pytest.mark.parametrize("config", [FLASH, SMALL, T6, T6_FP8, T6_BF16], ids=range(5))
def test_all_experts_are_all_the_weights(config):
    specs = names.tensors(config, vision=False)
    stored: dict[int, int] = dict.fromkeys(range(config.num_hidden_layers), 0)
    for name, spec in specs.items():
        parts = name.split(".")
        vector = len(spec.shape) == 1 or parts[-1] in ("q_weight", "k_weight")
        if parts[0] == "layers" and not vector and ".engram.embed." not in name:
            stored[int(parts[1])] += spec.nbytes
    rows = 100_000  # enough for every expert
    for layer in config.layers:
        found = cost.weight_bytes(config, layer.index, rows)
        if layer.engram is not None:
            width = config.engram_head_dim
            record = (
                width + width // 32
                if config.quantised
                else width * (4 if config.dtype == "float32" else 2)
            )
            found["engram"] -= rows * config.engram_columns * record
        assert sum(found.values()) == pytest.approx(stored[layer.index], rel=1e-12)


def test_no_rows_touch_no_weights():
    assert cost.weight_bytes(FLASH, 14, 0) == {}
    assert set(cost.weight_bytes(FLASH, 14, 1)) == {
        "projections", "compressor", "indexer", "moe", "hyper", "engram",
    }  # fmt: skip
