"""Single ops: what a step spends in each, by back end and number of rows.

An engine for each back end runs one prompt chunk of so many rows behind a context; the calls of
every op that multiplies are kept and then timed again, all of one op's calls in a row, from memory
and not from the last step's cache. Rows go out. Times are of a step, over all layers; bytes are
those that must be read or written at least once. It must not know options, tables or pictures.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer.bench.axes import row_id
from deepinfer.bench.ceilings import Floors
from deepinfer.bench.files import ROW, Folder
from deepinfer.bench.metrics import STEADY, outliers, self_ratio, spread
from deepinfer.bench.workload import Prompts
from deepinfer.core.request import SamplingParams
from deepinfer.engine.assembly import Parts
from deepinfer.engine.device import Clock
from deepinfer.engine.engine import LLM
from deepinfer.errors import CapacityError
from deepinfer.replay.meter import MULTIPLY, Meter

__all__ = ["Cold", "Side", "measure"]

# Seconds that the steps of one timing take at least, and at most with what is done between them.
_LEAST, _MOST = 5e-3, 50e-3
_CACHE = {"cpu": 32 << 20, "cuda": 75 << 20}  # bytes of a last-level cache that does not tell

Call = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Arguments of a call, and its result."""


@dataclass
class Work:
    """The calls of one op in a step, their FLOPs and bytes; steps: of one timing, None: not known
    yet."""

    axes: dict[str, Any]
    op: Callable[..., Any]
    calls: list[Call]
    flops: int
    bytes: int
    steps: int | None = None

    @property
    def row_id(self) -> str:
        return row_id(self.axes)

    def run(self) -> None:
        for args, kwargs, _ in self.calls:
            self.op(*args, **kwargs)


class Side:
    """An engine of one back end. axes: what its rows share; rates: what a FLOP is on its device."""

    def __init__(self, parts: Parts, axes: Mapping[str, Any], rates: Mapping[str, int] | None,
                 warn: Callable[[str], object]) -> None:  # fmt: skip
        self.parts, self.axes, self._rates = parts, dict(axes), rates
        self.llm = LLM.from_parts(parts, on_warning=warn)

    def works(self, ids: Sequence[int], context: int) -> list[Work]:
        """What a chunk of the ids behind the first `context` of them spends."""
        runner: Any = self.parts.runner
        rows, most = len(ids) - context, min(self.parts.sizes.chunk, self.parts.sizes.max_rows)
        if rows > most:
            raise CapacityError(
                "prompt-too-long", f"ops of {rows:,} rows: a step has {most:,} at most",
                hint=f"--batch-size {most}, or --max-num-batched-tokens {rows}",
            )  # fmt: skip
        with self._known(ids, context), Meter(runner, self._rates) as meter:
            self._run(ids)
            flops = meter.measured(len(ids)).flops_by_op
        with self._known(ids, context), _kept(runner.ops) as calls:
            self._run(ids)
        table = vars(runner.ops)
        return [
            Work(
                {"op": name, "rows": rows, "context": context, **self.axes},
                table[name], calls[name], flops[name],
                sum(_bytes(name, *call) for call in calls[name]),
            )
            for name in MULTIPLY if flops.get(name)
        ]  # fmt: skip

    @contextmanager
    def _known(self, ids: Sequence[int], context: int) -> Iterator[None]:
        with self.llm.fresh():
            if context:
                self._run(ids[:context])
            yield

    def _run(self, ids: Sequence[int]) -> None:
        [result] = self.llm.generate([ids], SamplingParams(max_tokens=1, temperature=0))
        if result.error is not None:
            raise result.error.raised()


class Cold:
    """Throws everything out of the device's caches. bytes: written for it, twice the largest."""

    def __init__(self, device: torch.device) -> None:
        self.bytes = 2 * _cache_bytes(device)
        self._buffer = torch.zeros(self.bytes // 4, device=device)

    def __call__(self) -> None:
        self._buffer.add_(1)


def _cache_bytes(device: torch.device) -> int:
    """Of the last level, at least what an ordinary device of its kind has."""
    found = 0
    if device.type == "cuda":
        found = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    elif device.type == "cpu":
        for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
            size = file.read_text().strip().removesuffix("K")
            found = max(found, int(size) << 10 if size.isdigit() else 0)
    return max(found, _CACHE.get(device.type, 0))


def measure(
    makes: Sequence[Callable[[], Side]], together: int, rows: Sequence[int],
    contexts: Sequence[int], prompts: Prompts, repeats: int, folder: Folder,
    floors: Floors | None, on_progress: Callable[[int, int, str], object],
) -> None:  # fmt: skip
    """Time every op of every side with every number of rows behind every context, `repeats` times;
    so many sides at once take turns. Repeats and rows go to the folder as they end, but for those
    that it has."""
    [ids] = prompts.make("code", max(contexts) + max(rows), 1)
    for at in range(0, len(makes), together):
        sides: list[Side] = []
        try:
            sides += (make() for make in makes[at : at + together])
            for context in contexts:
                for count in rows:
                    asked = ids[: context + count]
                    works = [work for side in sides for work in side.works(asked, context)]
                    todo = [work for work in works if work.row_id not in folder.rows]
                    _turns(todo, repeats, folder, floors, on_progress)
        finally:
            for side in sides:
                side.llm.close()


def _turns(
    works: Sequence[Work], repeats: int, folder: Folder, floors: Floors | None,
    on_progress: Callable[[int, int, str], object],
) -> None:  # fmt: skip
    """One repeat of each, then the next."""
    if not works:
        return
    cold = Cold(_device(works[0]))
    for work in works:
        _seconds(work, cold)  # to warm up
    for repeat in range(repeats):
        for at, work in enumerate(works):
            held = folder.samples.get(work.row_id, {})
            if repeat not in held:
                said = f"{work.axes['op']} {work.axes['rows']}"
                on_progress(repeat * len(works) + at, repeats * len(works), said)
                found = {"time_us": _seconds(work, cold) * 1e6}
                folder.add_sample(work.row_id, repeat, found)
                held = folder.samples[work.row_id]
            if all(one in held for one in range(repeats)):
                times = [held[one]["time_us"] for one in range(repeats)]
                folder.add_row(_row(work, times, cold.bytes, floors))


def _seconds(work: Work, cold: Callable[[], object]) -> float:
    """Of the op's calls in one step: the mean of some, each behind whatever empties the caches;
    how many is found out by the first timing, which warms up."""
    clock = Clock(_device(work), time.perf_counter)
    marks = []
    with torch.inference_mode():
        if work.steps is None:
            work.run()
        clock.wait(clock.mark())
        start = time.perf_counter()
        for _ in range(work.steps or 1):
            cold()
            first = clock.mark()
            work.run()
            marks.append((first, clock.mark()))
        clock.wait(marks[-1][1])
        whole = time.perf_counter() - start
    took = sum(clock.between(pair)[0] for pair in marks) / len(marks)
    if work.steps is None:
        work.steps = max(int(min(_LEAST / took, _MOST / whole)), 1)
    return took


def _device(work: Work) -> torch.device:
    found: torch.device = work.calls[0][0][0].device
    return found


def _row(
    work: Work, times: list[float], evicted: int, floors: Floors | None
) -> dict[str, Any]:  # fmt: skip
    """Of times in microseconds."""
    ratio = self_ratio(times)
    row: dict[str, Any] = {
        "schema": ROW, "row_id": work.row_id, "kind": "ops", "axes": work.axes,
        "status": "ok", "repeats": len(times), "warmup": 1, "calls": len(work.calls),
        "time_us": spread(times), "bytes": work.bytes, "flops": work.flops,
        "gb_per_s": spread([work.bytes / us / 1e3 for us in times]),
        "flop_per_s": spread([work.flops / us * 1e6 for us in times]),
        "ceiling_fraction": None, "evicted_bytes": evicted,
        "self_ratio": ratio, "outliers": len(outliers(times)),
        "steady": ratio is not None and STEADY[0] <= ratio <= STEADY[1],
        "samples": {"time_us": times},
    }  # fmt: skip
    if floors is None:
        row["why"] = {"ceiling_fraction": "unknown device: no ceiling"}
    else:
        least = floors.op(work.bytes, work.flops) * 1e6
        row["ceiling_fraction"] = float(f"{least / row['time_us']['median']:.4g}")
    return row


@contextmanager
def _kept(ops: Any) -> Iterator[dict[str, list[Call]]]:
    """Keep every call of what multiplies while the block runs, each for itself."""
    calls: dict[str, list[Call]] = defaultdict(list)

    def kept(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def op(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            calls[name].append((args, kwargs, result))
            return result

        return op

    with ops.replaced({name: kept(name, getattr(ops, name)) for name in MULTIPLY}):
        yield calls


def _bytes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Inputs, outputs and weights of a call, each once; of what is remembered what is looked at."""
    if name == "sparse_attention":
        q, window, slots, _, entries, entry_slots, *_ = args
        size = _nbytes(q) + _nbytes(result) + _looked_at(window, slots)
        return size + (0 if entry_slots is None else _looked_at(entries, entry_slots))
    if name == "choose":
        q, weights, records, _, _, visible, *_ = args
        keys = int(visible.max()) * records.shape[-1] * records.element_size()
        return _nbytes(q) + _nbytes(weights) + keys + _nbytes(result)
    if name == "moe":
        x, ids, weights, experts, *rest = args
        touched = ids.unique().numel()
        size = sum(_stored(held) * touched // _count(held) for held in experts)
        shared = sum(_stored(held) for held in _handles(rest))
        return size + shared + sum(map(_nbytes, (x, ids, weights, result)))
    held = sum(_stored(one) for one in _handles(args))
    return held + sum(_nbytes(one) for one in args) + _nbytes(result)


def _looked_at(records: torch.Tensor, slots: torch.Tensor) -> int:
    """Bytes of the records [slots, bytes] that a list names, each once."""
    named = slots[slots >= 0].unique().numel()
    return named * records.shape[-1] * records.element_size()


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, tuple) else 0


def _handles(values: Sequence[Any]) -> list[Any]:
    """Weights as `prepare` made them, also inside of tuples."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, tuple | list):
            found += _handles(value)
        elif hasattr(value, "source"):
            found.append(value)
    return found


def _stored(handle: Any) -> int:
    """Bytes of a weight as a checkpoint stores it."""
    return int(handle.source.nbytes)


def _count(handle: Any) -> int:
    """Matrices in a stack."""
    shape = handle.source.shape
    return shape[0] if len(shape) > 2 else 1
