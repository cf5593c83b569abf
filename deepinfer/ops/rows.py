"""Which op gives a row other bits in another run: inputs and outputs of every row, compared.

Comes in: the op table of an engine and names for its weights. Goes out: a record of one run, or the
first op call of another run that gives a row something else than it gave in the record. A row is
recognised by the bits of everything its op reads for it, so the two runs may batch, order, pad and
cut their rows as they like. Must not know the model, requests or back ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deepinfer.ops.registry import Ops
from deepinfer.ops.specs import live, places

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x2545F4914F6CDD1D
_ELEMENTS = 1 << 22  # turned into 64-bit integers at once


@dataclass(frozen=True)
class Difference:
    """The first op that differs. where: the weight it took, or the last one before it; position:
    of the row in its sequence, None where the op does not tell."""

    op: str
    where: str
    position: int | None

    def __str__(self) -> str:
        row = "a row" if self.position is None else f"the row at position {self.position}"
        return f"{self.op} ({self.where}) on {row}"


@dataclass
class Record:
    """What ops gave in a run: fingerprints of inputs, of outputs, and positions, by op and
    weights."""

    calls: dict[tuple[str, str], list[torch.Tensor]] = field(default_factory=dict)
    _sorted: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def add(self, call: tuple[str, str], rows: torch.Tensor) -> None:
        """rows: int64 [3, M]."""
        self.calls.setdefault(call, []).append(rows)

    def differing(self, call: tuple[str, str], rows: torch.Tensor) -> int | None:
        """The position recorded for the first row whose inputs are known and whose output is
        another; -1: its position is not known; None: there is no such row."""
        if call not in self.calls:
            return None
        if call not in self._sorted:
            known = torch.cat(self.calls[call], 1)
            self._sorted[call] = known[:, known[0].argsort(stable=True)].contiguous()
        inputs, outputs, positions = self._sorted[call]
        at = torch.searchsorted(inputs, rows[0].contiguous()).clamp_max(len(inputs) - 1)
        other = (inputs[at] == rows[0]) & (outputs[at] != rows[1])
        if not other.any():
            return None
        return int(positions[at[other.nonzero()[0, 0]]])


class Watch:
    """Records what the ops of `table` give between `with Watch(...)` and the end of the block.

    names: id of a weight handle or tensor -> its name. known: the record of another run; then
    nothing is recorded and `difference` becomes the first difference from it, if there is one.
    """

    def __init__(self, table: Ops, names: Mapping[int, str], known: Record | None = None) -> None:
        self.record, self.difference = Record(), None
        self._table, self._names, self._known = table, names, known
        self._where = "before the first weight"
        self._positions: list[torch.Tensor] = []

    def __enter__(self) -> Watch:
        # Sequences are taken apart: the single op is named.
        held = {name for name, op in vars(self._table).items() if callable(op)}
        single = held - _UNWATCHED - self._table.apart().keys()
        self._replaced = self._table.replaced({name: self._watched(name) for name in single})
        self._replaced.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._replaced.__exit__(*exception)

    def _watched(self, name: str) -> Callable[..., Any]:
        plain = getattr(self._table, name)

        def op(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            if self.difference is None:
                self._saw(name, [*args, *(kwargs[key] for key in sorted(kwargs))], result)
            return result

        return op

    def _saw(self, name: str, args: list[Any], result: Any) -> None:
        if name == "rope_table":  # the positions of the rows that follow
            self._positions = [args[0], *self._positions[:7]]
        flat = list(_flat(args))
        weights = [self._names[id(x)] for x in flat if id(x) in self._names]
        if weights:
            self._where = weights[0]
        inputs, outputs = _PAIRS.get(name, _by_row)(flat, result, self._names)
        if not inputs.numel():
            return
        rows = torch.stack((inputs.flatten(), outputs.flatten(), self._places(inputs).flatten()))
        call = name, " ".join(weights)
        if self._known is None:
            self.record.add(call, rows)
            return
        position = self._known.differing(call, rows)
        if position is not None:
            self.difference = Difference(name, self._where, None if position < 0 else position)

    def _places(self, inputs: torch.Tensor) -> torch.Tensor:
        """Position of each row of an op call; -1 where it is not known.

        Rows are those of the newest rotary table that has as many, else its last ones (rows that
        get logits).
        """
        lead = inputs.shape if inputs.dim() < 3 else inputs.shape[:-1]
        rows = lead.numel()
        found = next((p for p in self._positions if p.numel() == rows), None)
        if found is None:
            found = next((p[-rows:] for p in self._positions[:1] if p.numel() > rows), None)
        if found is None:
            return torch.full_like(inputs, -1)
        places = found.reshape(lead)
        return places if lead == inputs.shape else places.unsqueeze(-1).expand_as(inputs)


def fingerprint(x: torch.Tensor, lead: int = 1) -> torch.Tensor:
    """int64 of the first `lead` dimensions: the bits of each row's elements, mixed and summed.

    A function of the bits and their places alone; zero bits at the end of a row change nothing.
    """
    shape = x.shape[:lead]
    if not x.numel():
        return torch.zeros(shape, dtype=torch.int64, device=x.device)
    bits = x.contiguous().view(_INTEGERS[x.element_size()]).reshape(shape.numel(), -1)
    factors = _factors(bits.shape[1], x.device)
    step = max(1, _ELEMENTS // bits.shape[1])
    parts = [(_mixed(part.long()) * factors).sum(-1) for part in bits.split(step)]
    return torch.cat(parts).reshape(shape)


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """A permutation of int64 that keeps 0 and moves high bits down."""
    bits = (bits ^ (bits >> 32)) * _ODD
    return bits ^ (bits >> 29)


@functools.lru_cache(maxsize=64)
def _factors(count: int, device: torch.device) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (count,), generator=draw)
    return (2 * factors + 1).to(device)


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    """One fingerprint of several, in order."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = _mixed(total + part) * _ODD
    return total


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _by_row(args: list[Any], result: Any, names: Mapping[int, str]) -> tuple:
    """Of an op whose tensors all have one row a row of the first output."""
    results = [x for x in _flat(result) if isinstance(x, torch.Tensor)]
    rows = results[0].shape[0]
    inputs = [
        fingerprint(x)
        for x in args
        if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == rows and id(x) not in names
    ]
    return _joined(*inputs), _joined(*map(fingerprint, results))


def _stored(args: list[Any], result: Any, names: Mapping[int, str]) -> tuple:
    """Of `store` and `extend`: the records of new rows."""
    x, fmt, target, places, *_ = args
    records = target[places] if result is None else result[len(places) :]
    return fingerprint(x), fingerprint(records)


def _selection(args: list[Any], result: torch.Tensor, names: Mapping[int, str]) -> tuple:
    """Of `select` and `candidate_blocks`: only visible entries are read."""
    scores, visible, *more = args
    lead = visible.dim()
    seen = torch.arange(scores.shape[-1], device=scores.device) < visible.unsqueeze(-1)
    bits = scores.contiguous().view(_INTEGERS[scores.element_size()])
    inputs = [fingerprint(torch.where(seen, bits, 0), lead), fingerprint(visible, lead)]
    inputs += [fingerprint(x & seen, lead) for x in more if isinstance(x, torch.Tensor)]
    return _joined(*inputs), fingerprint(result, lead)


def _scores(args: list[Any], result: torch.Tensor, names: Mapping[int, str]) -> tuple:
    """Of `index_scores`: every pair of a row and an entry for itself."""
    q, k, weights = args
    row = _joined(fingerprint(q, 2), fingerprint(weights, 2)).unsqueeze(-1).expand(result.shape)
    entry = fingerprint(k, 2).unsqueeze(1).expand(result.shape)
    return _joined(row, entry), fingerprint(result, 3)


def _chosen(args: list[Any], result: tuple[Any, Any], names: Mapping[int, str]) -> tuple:
    """Of `choose`: the keys that a row sees, in their order, and those of them that it chose."""
    q, weights, records, _, table, visible, *more = args
    slots, kept = result
    named = torch.cat((table.flatten(), slots.clamp_min(0).flatten()))
    used, where = torch.unique(named, return_inverse=True)
    found = fingerprint(records[used])[where]
    keys, best = found[: table.numel()].view_as(table), found[table.numel() :].view_as(slots)
    keys = (_mixed(keys) * _factors(keys.shape[1], keys.device)).cumsum(-1)
    seen = torch.nn.functional.pad(keys, (1, 0)).gather(-1, visible)
    inputs = [fingerprint(q, 2), fingerprint(weights, 2), fingerprint(visible, 2), seen]
    inputs += [fingerprint(x, 2) for x in more if isinstance(x, torch.Tensor)]
    best = fingerprint(torch.where(slots < 0, 0, best), 2)
    return _joined(*inputs), best if kept is None else _joined(best, fingerprint(kept, 2))


def _attention(args: list[Any], result: torch.Tensor, names: Mapping[int, str]) -> tuple:
    """Of `sparse_attention`: the records that each row's lists name."""
    q, window, window_slots, _, entries, entry_slots, _, _ = args
    inputs = [fingerprint(q)]
    for records, slots in ((window, window_slots), (entries, entry_slots)):
        if records is not None and slots.shape[1]:
            used, where = torch.unique(slots.clamp_min(0), return_inverse=True)
            found = fingerprint(records[used])[where]
            inputs.append(fingerprint(torch.where(slots < 0, 0, found)))
    return _joined(*inputs), fingerprint(result)


# Ops whose rows are no rows of the model: handles of weights, places, others in every run, and what
# requests get.
_UNWATCHED = {"prepare"} | {spec.name for spec in (*places.SPECS, *live.SPECS)}
_PAIRS: dict[str, Callable[..., tuple]] = {
    "store": _stored,
    "extend": _stored,
    "select": _selection,
    "candidate_blocks": _selection,
    "index_scores": _scores,
    "choose": _chosen,
    "sparse_attention": _attention,
}
