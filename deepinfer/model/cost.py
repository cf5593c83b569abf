"""What a prompt costs and what a step moves: FP8-equivalent FLOPs and bytes, layer by layer.

Comes in: a model configuration and a replay plan, or a number of rows. Goes out: exact integers of
FLOPs, bytes of weights and bytes of state by component. Source: performance ledger §1.1 to §1.3,
model spec §4. It must not know tensors, pages or time; draft stages are not counted.

The meter counts 2 FLOPs per multiply-accumulate times the class of its number format: FP4 x FP4
1/2, FP8 1, BF16 2, FP32 4. With quantised weights (FP8 or FP4, activations always FP8) the linears
of attention, experts, index queries and Engram are of class 1 and index scores of class 1/2;
router, compressor, index keys, head weights of the indexer, attention core and head read the
configuration's `dtype`: 2, or 4 where it is float32. Without quantisation everything reads `dtype`.
The mHC projections are always of class 4. Norms, RoPE, gates, the mHC sums, softmax and selection
count nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.replay.plan import ReplayPlan

COMPONENTS = (
    "attention", "indexer", "compressor", "projections", "moe", "hyper", "engram", "head",
)  # fmt: skip
"""attention: scores and values. indexer: queries, head weights, scores. compressor: latents, gates
and index keys of a KV source. projections: query, window key and output. hyper: mHC. engram: its
wkv."""


PLAIN = {"dense": 2, "expert": 2, "wide": 2, "scores": 2, "fp32": 2}
"""FLOPs whatever the number format: for devices that multiply everything in one."""


def rates(config: ModelConfig) -> dict[str, int]:
    """FP8-equivalent FLOPs per multiply-accumulate: twice the class of the number format.

    "dense": linears that are quantised where the configuration says so; "expert": routed ones.
    "wide": what reads `dtype`. "scores": index scores. "fp32": mHC projections.
    """
    wide = 8 if config.dtype == "float32" else 4
    dense, scores = (2, 1) if config.quantised else (wide, wide)
    return {"dense": dense, "expert": dense, "wide": wide, "scores": scores, "fp32": 8}


@dataclass(frozen=True, slots=True)
class Saving:
    """Layer-token rows and FLOPs of a plan beside those of the same prompt uncut and uncached.

    A row counts where the whole layer computes it; rows whose keys alone are made are saved rows
    with FLOPs. Fractions are 0 for an empty prompt.
    """

    rows_full: int
    rows: int
    flops_full: int
    flops: int

    @property
    def rows_saved(self) -> float:
        return 1 - self.rows / self.rows_full if self.rows_full else 0.0

    @property
    def flops_saved(self) -> float:
        return 1 - self.flops / self.flops_full if self.flops_full else 0.0


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A weight [outputs, inputs]. kind: a key of `rates`. on: what runs through it, "rows"
    (computed), "present" (also those whose keys alone are made) or "groups" (those closed). uses:
    how many matrices of this shape each of them runs through."""

    component: str
    outputs: int
    inputs: int
    kind: str
    on: str = "rows"
    uses: int = 1


def _matrices(config: ModelConfig, layer: LayerSpec) -> Iterator[_Matrix]:
    c, hidden, inner = config, config.hidden_size, config.moe_intermediate_size
    width, grouped = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
    for outputs, inputs in (
        (c.q_lora_rank, hidden),
        (width, c.q_lora_rank),
        (c.head_dim, hidden),
        (grouped, width // c.o_groups),
        (hidden, grouped),
    ):
        yield _Matrix("projections", outputs, inputs, "dense")
    if layer.owns_kv:
        uses = 1 if layer.ratio == 1 else 2  # a group of one token has nothing to weigh
        yield _Matrix("compressor", c.head_dim, hidden, "wide", "present", uses)
        yield _Matrix("compressor", c.index_head_dim, c.head_dim, "wide", "groups")
    if layer.owns_index:
        yield _Matrix("indexer", c.index_n_heads * c.index_head_dim, c.q_lora_rank, "dense")
        yield _Matrix("indexer", c.index_n_heads, hidden, "wide")
    yield _Matrix("moe", c.n_routed_experts, hidden, "wide")
    for kind, uses in (("expert", c.num_experts_per_tok), ("dense", c.n_shared_experts)):
        yield _Matrix("moe", inner, hidden, kind, uses=2 * uses)
        yield _Matrix("moe", hidden, inner, kind, uses=uses)
    yield _Matrix("hyper", c.hc_mult * (2 + c.hc_mult), c.hc_mult * hidden, "fp32", uses=2)
    if layer.engram is not None:
        yield _Matrix("engram", (c.hc_mult + 1) * hidden, c.engram_width, "dense")


def layer_flops(
    config: ModelConfig, plan: ReplayPlan, layer: int, rate: Mapping[str, int] | None = None
) -> dict[str, int]:
    """FP8-equivalent FLOPs of one layer for the plan's prompt [0, tokens), by component.

    Components without work are left out. Row p sees its window back to `plan.sees_from`,
    min(index_topk, (p + 1) // ratio) entries, and is scored against (p + 1) // ratio index keys, in
    the layers that choose among candidates against as many as the candidate blocks hold. A KV
    source compresses every row that is present, also where its keys alone are needed; index keys
    are made once per group closed behind `plan.cached`. rate: other `rates`, such as `PLAIN`.
    """
    spec, rate = config.layers[layer], rate or rates(config)
    start, end = min(plan.rows_from(layer), plan.tokens), plan.tokens
    counts = {"rows": end - start, "present": end - plan.first, "groups": 0}
    window, sees = config.sliding_window, plan.sees_from(layer)
    keys = _windows(end - sees, window) - _windows(start - sees, window)
    scored = 0
    if spec.ratio:
        counts["groups"] = end // spec.ratio - plan.cached // spec.ratio
        keys += _entries(start, end, spec.ratio, config.index_topk)
    if spec.owns_index:
        scored = _entries(start, end, spec.ratio, _index_limit(config, spec, end))
    flops = dict.fromkeys(COMPONENTS, 0)
    # Every key is multiplied twice, as key and as value.
    flops["attention"] = 2 * config.num_attention_heads * config.head_dim * keys * rate["wide"]
    flops["indexer"] = config.index_n_heads * config.index_head_dim * scored * rate["scores"]
    for m in _matrices(config, spec):
        flops[m.component] += counts[m.on] * m.uses * m.outputs * m.inputs * rate[m.kind]
    return {name: count for name, count in flops.items() if count}


def plan_flops(
    config: ModelConfig, plan: ReplayPlan, rate: Mapping[str, int] | None = None
) -> tuple[dict[str, int], ...]:
    """`layer_flops` of every layer, in order; the head is `head_flops`."""
    return tuple(layer_flops(config, plan, i, rate) for i in range(config.num_hidden_layers))


def head_flops(config: ModelConfig, rows: int, rate: Mapping[str, int] | None = None) -> int:
    """FP8-equivalent FLOPs of the logits of `rows` rows."""
    return config.vocab_size * config.hidden_size * rows * (rate or rates(config))["wide"]


def total_flops(
    config: ModelConfig, plan: ReplayPlan, rate: Mapping[str, int] | None = None
) -> int:
    """FP8-equivalent FLOPs of the plan's prompt with the logits of its last row."""
    layers = sum(sum(flops.values()) for flops in plan_flops(config, plan, rate))
    return layers + head_flops(config, min(plan.tokens, 1), rate)


def saving(config: ModelConfig, plan: ReplayPlan) -> Saving:
    """What a plan saves against all layers on all rows (serving semantics §8)."""
    full = replace(plan, mode="off", cached=0, refill=0, kept=0)
    return Saving(
        rows_full=plan_rows(full),
        rows=plan_rows(plan),
        flops_full=total_flops(config, full),
        flops=total_flops(config, plan),
    )


def plan_rows(plan: ReplayPlan) -> int:
    """Layer-token rows that a plan computes."""
    return sum(plan.tokens - min(plan.rows_from(i), plan.tokens) for i in range(plan.layers))


def weight_bytes(config: ModelConfig, layer: int, rows: int) -> dict[str, float]:
    """Bytes of weights, scales included, that a step of `rows` rows reads in one layer.

    Of E experts with k chosen per row, E (1 - (1 - k / E) ** rows) distinct ones are expected. The
    Engram table counts one read per row and column. Vectors (norms, sinks, biases) are left out.
    The ledger's column (performance ledger §1.1) is the sum without "hyper".
    """
    spec, found = config.layers[layer], dict.fromkeys(COMPONENTS, 0.0)
    experts, per_row = config.n_routed_experts, config.num_experts_per_tok
    touched = experts * (1 - (1 - per_row / experts) ** rows)
    for m in _matrices(config, spec) if rows else ():
        copies = m.uses * touched / per_row if m.kind == "expert" else m.uses
        found[m.component] += copies * _matrix_bytes(config, m.kind, m.outputs, m.inputs)
    if spec.engram is not None:
        record = _matrix_bytes(config, "table", 1, config.engram_head_dim)
        found["engram"] += rows * config.engram_columns * record
    return {name: size for name, size in found.items() if size}


def state_bytes(config: ModelConfig, layer: int, context: int) -> dict[str, float]:
    """Bytes of state that one token reads in one layer, itself the last of `context` tokens.

    "window": the layer's own ring. "entries": chosen compressed entries. "index": index keys that
    are scored, in the layers that choose (performance ledger §1.2).
    """
    spec = config.layers[layer]
    window, entry, index = _record_bytes(config)
    read = {"window": float(min(context, config.sliding_window) * window)}
    if spec.ratio:
        visible = context // spec.ratio
        read["entries"] = float(min(visible, config.index_topk) * entry)
        if spec.owns_index:
            read["index"] = float(min(visible, _index_limit(config, spec, context)) * index)
    return {name: size for name, size in read.items() if size}


def growing_bytes_per_token(config: ModelConfig) -> float:
    """Bytes that a context token adds for good: 890 at the real sizes (model spec §4)."""
    _, entry, index = _record_bytes(config)
    return sum((entry + index) / config.compress_ratios[i] for i in config.kv_source_layer_ids)


def fixed_bytes(config: ModelConfig, rollback: int = 0, stages: int = 0) -> int:
    """Bytes of a request at any length: window rows of all layers and open groups (C7's ledger).

    rollback: rows that a ring holds beside the window. stages: draft stages with a ring of theirs.
    """
    rings = (config.sliding_window + rollback) * (config.num_hidden_layers + stages)
    opened = sum(config.compress_ratios[i] - 1 for i in config.kv_source_layer_ids)
    # An open row holds latent and gate in float32.
    return rings * _record_bytes(config)[0] + opened * 2 * 4 * config.head_dim


def held_bytes(config: ModelConfig, tokens: int, rollback: int, drafts: bool) -> int:
    """Bytes that the state of a request of `tokens` tokens takes, draft windows with it if it
    drafts."""
    stages = config.num_nextn_predict_layers if drafts else 0
    return round(fixed_bytes(config, rollback, stages) + growing_bytes_per_token(config) * tokens)


def _windows(rows: int, window: int) -> int:
    """Window keys of the first `rows` rows that see one another: sum of min(i, window)."""
    rows = max(rows, 0)
    ramp = min(rows, window)
    return ramp * (ramp + 1) // 2 + (rows - ramp) * window


def _entries(start: int, end: int, ratio: int, limit: int) -> int:
    """Sum over rows start <= p < end of min(limit, (p + 1) // ratio)."""

    def up_to(n: int) -> int:
        """Sum of min(limit, m // ratio) over 0 <= m <= n."""
        ramp = min(n + 1, limit * ratio)
        whole, rest = divmod(ramp, ratio)
        return ratio * whole * (whole - 1) // 2 + rest * whole + (n + 1 - ramp) * limit

    return up_to(end) - up_to(start)


def _index_limit(config: ModelConfig, layer: LayerSpec, tokens: int) -> int:
    """Most index keys that a row of a prompt of `tokens` tokens is scored against."""
    limited = config.candidate_topk_blocks * config.candidate_block_size
    return limited if layer.uses_candidates else tokens


def _record_bytes(config: ModelConfig) -> tuple[int, int, int]:
    """Bytes of a window entry, a compressed entry and an index key: 528, 288, 68 at 512 and 128."""
    w, d = config.head_dim, config.index_head_dim
    if not config.quantised:
        size = _wide_bytes(config)
        return w * size, w * size, d * size
    return w + w // 32, w // 2 + w // 16, d // 2 + d // 32


def _matrix_bytes(config: ModelConfig, kind: str, rows: int, cols: int) -> int:
    """Codes plus one scale byte per block (model spec §2.3), or plain numbers."""
    quant = config.quantization
    if kind == "fp32":
        return 4 * rows * cols
    if kind == "wide" or quant is None:
        return _wide_bytes(config) * rows * cols
    fp4 = kind == "expert" and quant.expert_dtype == "fp4"
    tall, wide = (1, 32) if fp4 or kind == "table" else quant.weight_block_size
    scales = -(-rows // tall) * -(-cols // wide)
    return rows * (cols // 2 if fp4 else cols) + scales


def _wide_bytes(config: ModelConfig) -> int:
    return 4 if config.dtype == "float32" else 2
