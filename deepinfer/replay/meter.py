"""What a prefill really did: the rows and keys of every layer, and FLOPs by component.

Comes in: a runner, whose op table and memories are watched while the meter is open. Goes out:
`Measured`, in the terms of the plan and of the cost model, but counted from what was called. It
must not know the plan that ran, requests or back ends. Source: performance ledger §1.3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from deepinfer.errors import InternalError
from deepinfer.replay.plan import LayerRanges, Range

HEAD, DRAFT = -1, -2  # layers of what belongs to none
MULTIPLY = (
    "linear", "linear_f32", "grouped_linear", "hc_mix", "moe", "sparse_attention", "choose",
)  # fmt: skip
"""The ops that multiply; all others move bytes."""


@dataclass(frozen=True)
class Measured:
    """layers: what became of tokens [0, tokens) in each layer; flops_by_layer: FP8-equivalent FLOPs
    by component of everything that ran, in each layer; head: those of the logits; flops_by_op: the
    same by the op that spent them, draft context with it."""

    layers: tuple[LayerRanges, ...]
    flops_by_layer: tuple[dict[str, int], ...]
    head: int
    flops_by_op: dict[str, int] = field(default_factory=dict)

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs by component over all layers, the head with them."""
        total: Counter[str] = Counter()
        for flops in self.flops_by_layer:
            total.update(flops)
        return {**total, **({"head": self.head} if self.head else {})}

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def layer_rows(self) -> int:
        """Rows of whole layers that ran for the prompt."""
        return sum(b - a for layer in self.layers for a, b in layer.computed)


class Meter:
    """Counts between `with Meter(runner) as meter:` and the end of the block.

    runner: has `config`, `model` (a `Transformer`), `draft` (a `Draft` or None) and `ops`, the
    table that model and memories call; draft blocks must not run meanwhile. One prompt at a time
    where ranges are wanted. rates: FLOPs of a multiplication and addition other than the
    FP8-equivalent ones, such as `cost.PLAIN`.
    """

    def __init__(self, runner: Any, rates: Mapping[str, int] | None = None) -> None:
        self.config, self._runner = runner.config, runner
        self._rates = rates or _rates(runner.config)
        self._parts = _parts(runner.model, self._rates)
        if runner.draft is not None:
            # Its context keys are made in the same pass; the meter leaves draft stages out.
            self._parts |= {id(held): (DRAFT, "draft", 0) for held in runner.draft.context_weights}
        self._layer = HEAD  # whose memory call is running
        self._op = ""  # which is being counted
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self._counts: Counter[tuple[int, str]] = Counter()
        self._by_op: Counter[str] = Counter()
        # Numbers still on their way from the device: (layer, component, op, times, number).
        self._awaited: list[tuple[int, str, str, int, torch.Tensor]] = []
        layers = self.config.num_hidden_layers
        self._rows: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._keys: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._oldest: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._seen: dict[int, tuple[torch.Tensor, ...]] = {}

    def __enter__(self) -> Meter:
        runner = self._runner
        self._replaced = runner.ops.replaced({name: self._counted(name) for name in MULTIPLY})
        self._replaced.__enter__()
        self._model = runner.model
        runner.model = _WatchedModel(self._model, self)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._replaced.__exit__(*exception)
        self._runner.model = self._model

    def measured(self, tokens: int) -> Measured:
        """What ran since the start or the last `reset`, seen from a prompt of `tokens` tokens.

        Raises InternalError where a row of a layer ran twice, or its keys were stored twice.
        """
        layers = range(self.config.num_hidden_layers)
        counts, by_op = Counter(self._counts), Counter(self._by_op)
        if self._awaited:
            numbers = torch.stack([number for *_, number in self._awaited]).tolist()
            for (layer, part, op, times, _), number in zip(self._awaited, numbers, strict=True):
                counts[layer, part] += times * number
                by_op[op] += times * number
        by_layer: list[dict[str, int]] = [{} for _ in layers]
        for (layer, part), flops in counts.items():
            if layer >= 0 and flops:
                by_layer[layer][part] = flops
        return Measured(
            layers=tuple(self._ranges(layer, tokens) for layer in layers),
            flops_by_layer=tuple(by_layer),
            head=counts[HEAD, "head"],
            flops_by_op=dict(by_op),
        )

    # ranges

    def _ranges(self, layer: int, tokens: int) -> LayerRanges:
        config = self.config
        start = config.decoder_start
        boundary = config.num_hidden_layers if start is None else start
        computed = _positions(self._rows[layer], tokens, f"rows of layer {layer}")
        stored = _positions(self._keys[layer], tokens, f"keys of layer {layer}")
        first = int(computed[0]) if computed.size else tokens
        state = min(first, int(stored[0])) if stored.size else first
        if layer > boundary and self._reach(layer) > self._reach(0):
            state = 0  # its windows were cut: nothing older was kept
        keys = np.setdiff1d(stored, computed)
        rest = np.setdiff1d(np.arange(state, tokens), np.union1d(computed, keys))
        role = "encoder" if layer < boundary else "decoder"
        return LayerRanges(
            index=layer,
            role="boundary" if layer == boundary else role,
            computed=_runs(computed),
            keys_only=_runs(keys),
            read=((0, state),) if state else (),
            skipped=_runs(rest),
        )

    def _reach(self, layer: int) -> int:
        """The oldest position whose window entry a row of the layer saw."""
        return min((int(oldest.min()) for oldest in self._oldest[layer]), default=0)

    # what the model and the memory do

    def _begin(self) -> None:
        """A forward pass begins: its tensors are others."""
        self._seen.clear()

    def _attends(self, layer: int, positions: torch.Tensor) -> None:
        self._layer = layer
        self._rows[layer].append(positions)

    def _selects(self, layer: int) -> None:
        self._layer = layer

    def _stores(self, layer: int, first: torch.Tensor, ratio: int) -> None:
        """Keys of the groups that begin at positions `first`."""
        group = torch.arange(ratio, device=first.device)
        self._keys[layer].append((first.unsqueeze(1) + group).flatten())

    # what the ops do

    def _counted(self, name: str) -> Callable[..., Any]:
        plain, count = getattr(self._runner.ops, name), getattr(self, f"_count_{name}")

        def op(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            self._op = name
            count(result, *args, **kwargs)
            return result

        return op

    def _count_linear(self, y: torch.Tensor, x: torch.Tensor, weight: Any) -> None:
        layer, part, times = self._parts[id(weight)]
        self._add(layer, part, times * x.numel() * y.shape[-1])

    _count_linear_f32 = _count_linear

    def _count_grouped_linear(self, y: torch.Tensor, x: torch.Tensor, weight: Any) -> None:
        layer, part, times = self._parts[id(weight)]
        self._add(layer, part, times * y.numel() * x.shape[-1])

    def _count_hc_mix(
        self, y: tuple[torch.Tensor, ...], streams: torch.Tensor, fn: Any, *rest: Any
    ) -> None:
        layer, part, times = self._parts[id(fn)]
        copies = streams.shape[1]
        self._add(layer, part, times * streams.numel() * copies * (2 + copies))

    def _count_moe(
        self, y: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
        experts: tuple[Any, ...], *rest: Any,
    ) -> None:  # fmt: skip
        layer, part, times = self._parts[id(experts[0])]
        chosen = ids.numel() + x.shape[0]  # the shared expert is chosen by every row
        width = x.shape[-1] * self.config.moe_intermediate_size
        self._add(layer, part, times * len(experts) * chosen * width)

    def _count_sparse_attention(
        self, y: torch.Tensor, q: torch.Tensor, window: torch.Tensor, window_slots: torch.Tensor,
        window_format: Any, entries: torch.Tensor | None, entry_slots: torch.Tensor | None,
        *rest: Any,
    ) -> None:  # fmt: skip
        heads, dim = q.shape[1:]
        positions = self._rows[self._layer][-1]
        if len(positions) != len(q):
            raise InternalError(
                "meter-rows",
                f"layer {self._layer} attends with {len(q)} rows at {len(positions)} positions",
            )
        visible = self._visible(window_slots)
        self._oldest[self._layer].append(positions - visible + 1)
        times = 2 * self._rates["wide"] * heads * dim  # scores and values
        self._await("attention", times, visible.sum())
        if entry_slots is not None:
            self._await("attention", times, self._visible(entry_slots).sum())

    def _count_choose(
        self, y: Any, q: torch.Tensor, weights: torch.Tensor, records: torch.Tensor, fmt: Any,
        table: torch.Tensor, visible: torch.Tensor, most: Any, k: int,
        candidates: tuple[int, int] | None = None, within: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        if candidates is not None and within is not None:
            # A block counts as a whole, also the newest one, which may not be full yet.
            visible = torch.minimum(visible, within.sum(-1) * candidates[1])
        self._await("indexer", self._index_flops, visible.sum())

    @property
    def _index_flops(self) -> int:
        """Of one score: a row's index query against one entry."""
        config = self.config
        return self._rates["scores"] * config.index_n_heads * config.index_head_dim

    def _visible(self, slots: torch.Tensor) -> torch.Tensor:
        """Keys in each row of a slot list [N, L]; layers share the lists."""
        if id(slots) not in self._seen:
            self._seen[id(slots)] = slots, (slots >= 0).sum(-1)
        return self._seen[id(slots)][1]

    def _add(self, layer: int, part: str, flops: int) -> None:
        self._counts[layer, part] += flops
        self._by_op[self._op] += flops

    def _await(self, part: str, times: int, number: torch.Tensor) -> None:
        self._awaited.append((self._layer, part, self._op, times, number))


class _WatchedModel:
    """A model that shows its memories to a meter."""

    def __init__(self, model: Any, meter: Meter) -> None:
        self._model, self._meter = model, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, tokens: torch.Tensor, memory: Any, *rest: Any) -> torch.Tensor:
        self._meter._begin()
        return self._model.forward(tokens, _WatchedMemory(memory, self._meter), *rest)

    def hidden_and_targets(self, tokens: torch.Tensor, memory: Any) -> Any:
        self._meter._begin()
        return self._model.hidden_and_targets(tokens, _WatchedMemory(memory, self._meter))


class _WatchedMemory:
    """A memory that tells a meter which layer asks, and for which rows."""

    def __init__(self, memory: Any, meter: Meter) -> None:
        self._memory, self._meter = memory, meter
        start, kept = meter.config.decoder_start, memory.kept
        self._start = meter.config.num_hidden_layers if start is None else start
        self._late = memory.positions if kept is None else memory.positions[kept]
        self._first: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def close_groups(self, layer: Any, v: torch.Tensor, z: torch.Tensor | None) -> Any:
        closed = self._memory.close_groups(layer, v, z)
        self._first = closed[2]
        return closed

    def store_entries(self, layer: Any, entries: torch.Tensor, keys: torch.Tensor) -> None:
        self._memory.store_entries(layer, entries, keys)
        self._meter._stores(layer.index, self._first, layer.ratio)

    def select(self, layer: Any, q: torch.Tensor, weights: torch.Tensor) -> None:
        self._meter._selects(layer.index)
        self._memory.select(layer, q, weights)

    def attend(self, layer: Any, *rest: Any) -> torch.Tensor:
        late = layer.index >= self._start
        self._meter._attends(layer.index, self._late if late else self._memory.positions)
        return self._memory.attend(layer, *rest)


def _rates(config: Any) -> dict[str, int]:
    """FP8-equivalent FLOPs of a multiplication and addition, by what the operands are stored as."""
    wide = 8 if config.dtype == "float32" else 4
    dense, scores = (2, 1) if config.quantised else (wide, wide)
    return {"dense": dense, "scores": scores, "wide": wide, "fp32": 8}


def _parts(model: Any, rates: Mapping[str, int]) -> dict[int, tuple[int, str, int]]:
    """Weight handle -> (layer, component, FLOPs of a multiplication and addition)."""
    found = {id(model.head): (HEAD, "head", rates["wide"])}
    for layer, w in enumerate(model.blocks):
        attention, compressor, indexer = w.attention, w.attention.compressor, w.attention.indexer
        parts = [
            ("projections", "dense", (attention.wq_a, attention.wq_b, attention.wkv)),
            ("projections", "dense", (attention.wo_a, attention.wo_b)),
            ("moe", "dense", w.ffn.experts),
            ("moe", "wide", (w.ffn.gate,)),
            ("hyper", "fp32", (w.hc_attn.fn, w.hc_ffn.fn)),
        ]
        if compressor is not None:
            parts.append(("compressor", "wide", (compressor.wkv, compressor.wgate, compressor.wk)))
        if indexer is not None:
            parts.append(("indexer", "dense", (indexer.wq_b,)))
            parts.append(("indexer", "wide", (indexer.weights_proj,)))
        if w.engram is not None:
            parts.append(("engram", "dense", (w.engram.wkv,)))
        found |= {id(h): (layer, part, rates[kind]) for part, kind, held in parts for h in held}
    return found


def _positions(found: list[torch.Tensor], tokens: int, what: str) -> np.ndarray:
    """The positions of a prompt among those found, ascending."""
    held = np.sort(torch.cat(found).cpu().numpy()) if found else np.empty(0, dtype=np.int64)
    held = held[held < tokens]
    if (held[1:] == held[:-1]).any():
        raise InternalError("computed-twice", f"{what} were computed more than once")
    return held


def _runs(positions: np.ndarray) -> tuple[Range, ...]:
    """Half-open ranges of ascending positions."""
    runs = np.split(positions, np.nonzero(np.diff(positions) > 1)[0] + 1)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs if run.size)
