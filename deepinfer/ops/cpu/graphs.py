"""Captured steps: the calls of a function with fixed shapes, kept and launched again as one.

Comes in: a function of tensors over the cpu back end's ops, and a key that says all of it that is
not a tensor's value. Goes out: its results, to the same bits. What it computes between the
kernels with torch is kept as well; it must not read a value on the host, and one that does runs as
it is written. Must not know the model, nor what is captured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.ops.cpu.library import PTR, Call, Library

Found = dict[str, torch.Tensor]
Function = Callable[..., Found]
_BEFORE = 2  # times that a key comes up before it is captured: what is made once is made then
_KEPT = 16
_MOST_BYTES = 32 << 20  # of what one function computes
_EMPTY = frozenset({"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided",
                    "aten::new_empty_strided"})  # fmt: skip
_FILLED = frozenset({"aten::zeros_like", "aten::new_zeros", "aten::new_full", "aten::full_like"})
_INTO = {f"aten::{f.__name__}": f for f in (torch.add, torch.sub, torch.mul, torch.div, torch.cat,
                                            torch.index_select)}  # fmt: skip
_COPIED = frozenset({"aten::to", "aten::_to_copy", "aten::contiguous", "aten::clone"})


class Graphs:
    """The graphs of one library, the ones launched last kept. One thread at a time."""

    def __init__(self, library: Library):
        self._library, self._capturing = library, False
        self._kept: OrderedDict[Hashable, int | _Graph | None] = OrderedDict()

    def run(self, key: Hashable, function: Function, *inputs: torch.Tensor) -> Found:
        """``function(*inputs)``. With the key and the shapes of the inputs alike, it makes the same
        calls but for the values of the inputs and of memory that it always finds in the same place.
        What a captured function runs is part of it.
        """
        if self._capturing:
            return function(*inputs)
        key = key, tuple((x.shape, x.dtype) for x in inputs)
        found = self._kept.pop(key, 0)
        if isinstance(found, _Graph) and found.confirmed:
            out = found.launch(inputs)
        elif found is None:
            out = function(*inputs)
        elif isinstance(found, int) and found < _BEFORE:
            out, found = function(*inputs), found + 1
        else:
            out, graph = self._captured(function, inputs)
            if graph is not None and isinstance(found, _Graph):
                # What differs from one step to the next a single capture would miss.
                graph.confirmed = graph.numbers == found.numbers
                graph = graph if graph.confirmed else None
            found = graph
        self._kept[key] = found
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return out

    def _captured(
        self, function: Function, inputs: Sequence[torch.Tensor]
    ) -> tuple[Found, _Graph | None]:
        """What the function gives, and its graph; None: it needs the host, or too much memory."""
        own = [x.clone() for x in inputs]
        capture = _Capture()
        self._capturing = True
        try:
            with self._library.capturing(capture.kernel), capture:
                outputs = function(*own)
        finally:
            self._capturing = False
        graph = _Graph(self._library, own, outputs, capture) if capture.complete else None
        return _copied(outputs), graph


class _Capture(TorchDispatchMode):
    """Keeps what a function calls, in order: (symbol, argument types, arguments) of a kernel, or a
    call of torch without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call | Callable[[], object]] = []
        self.held: list[torch.Tensor] = []  # so that no address is given to another
        self.names: list[str] = []
        self.complete, self._bytes = True, 0

    def kernel(self, symbol: str, types: tuple[type, ...], arguments: tuple[Any, ...]) -> None:
        self.calls.append((symbol, types, arguments))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        made = _listed(out)
        if not all(isinstance(x, torch.Tensor) for x in made) or not _fixed(function, args):
            self.complete = False
            return out
        ours = {x.untyped_storage().data_ptr() for x in _tensors(args)}
        new = [x for x in made if x.untyped_storage().data_ptr() not in ours]
        self.held += made
        self._bytes += sum(x.untyped_storage().nbytes() for x in new)
        self.complete &= self._bytes <= _MOST_BYTES
        name = function._schema.name
        if function._schema.is_mutable:
            self.calls.append(lambda: function(*args, **kwargs))
        elif new and name not in _EMPTY:
            self.calls.append(_again(function, args, kwargs, made))
        else:
            return out
        self.names.append(name)
        return out


def _fixed(function: Any, args: Sequence[Any]) -> bool:
    """Do the shapes of what it gives follow from those of what it takes, and nothing else?"""
    if function is torch.ops.aten.index.Tensor:  # by numbers, not by truth
        return all(x is None or x.dtype == torch.int64 for x in args[1])
    tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    return not any(tag in function.tags for tag in tags)


def _listed(found: Any) -> list[Any]:
    return [*found] if isinstance(found, (tuple, list)) else [found]


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    flat = [x for arg in args for x in _listed(arg)]
    return [x for x in flat if isinstance(x, torch.Tensor)]


def _again(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any], made: list[torch.Tensor]
) -> Callable[[], object]:
    """A call that makes the same again, in the same place; the common ones without a detour."""
    name, out = function._schema.name, made[0]
    if not _tensors(args) or name in _FILLED:
        return partial(out.copy_, out.clone())
    if name in _COPIED:
        return partial(out.copy_, args[0])
    if name in _INTO:
        return partial(_INTO[name], *args, **kwargs, out=out)
    if name == "aten::index" and len(args[1]) == 1 and args[1][0].dim() == 1:
        return partial(torch.index_select, args[0], 0, args[1][0], out=out)

    def again() -> None:
        found = function(*args, **kwargs)
        for old, new in zip(made, _listed(found), strict=True):
            old.copy_(new)

    return again


class _Graph:
    """A captured function and how to run it. numbers: all of it that is no address; confirmed: a
    second capture had the same."""

    def __init__(
        self,
        library: Library,
        inputs: Sequence[torch.Tensor],
        outputs: Found,
        capture: _Capture,
    ) -> None:
        self._inputs, self._outputs, self._held = inputs, outputs, capture.held
        self.confirmed = False
        self.numbers: list[object] = [*capture.names]
        self._parts: list[Callable[[], object]] = []
        for kernels, calls in groupby(capture.calls, lambda call: isinstance(call, tuple)):
            if not kernels:
                self._parts += calls
                continue
            together = [*calls]
            self._parts.append(library.launcher(together))
            for symbol, types, arguments in together:
                numbers = [x for kind, x in zip(types, arguments, strict=True) if kind is not PTR]
                self.numbers += symbol, *numbers

    def launch(self, inputs: Sequence[torch.Tensor]) -> Found:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        for part in self._parts:
            part()
        return _copied(self._outputs)


def _copied(found: Found) -> Found:
    """Results that the next launch does not change."""
    return {name: x.clone() for name, x in found.items()}
