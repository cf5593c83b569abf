"""Chooses an implementation for every op, explains the choice, and hands the model its op table.

Comes in: a device type and overrides ("op=back end", "all=back end"). Goes out: ``Ops``. A back
end is a package ``deepinfer.ops.<name>`` with one module a family; an op without a torch
reference cannot exist. The package's ``FIXED_ORDER`` names, per device type, the ops that keep the
promise of model spec §7.2: a row's bits depend on no other row, batch size or chunk. What a back
end does not name it does not promise. Must not know the model or settings.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from deepinfer.errors import EnvironmentProblem, UsageError
from deepinfer.ops import fused
from deepinfer.ops.specs import (
    OpSpec,
    engram,
    hyper,
    linear,
    live,
    memory,
    moe,
    places,
    rowwise,
    sampling,
)  # fmt: skip

SPECS: dict[str, OpSpec] = {
    spec.name: spec
    for family in (rowwise, linear, hyper, memory, moe, engram, places, live, sampling)
    for spec in family.SPECS
}
# Back end -> device types it serves; later entries are preferred where they hold the op.
BACKENDS: dict[str, tuple[str, ...]] = {"torch": ("cpu", "cuda", "npu"), "cpu": ("cpu",)}
# Back ends that run a library that has to be built first. Their functions are made for an open one:
# in their modules, an op's name is a function from `Library` to the op.
COMPILED = frozenset({"cpu"})


@dataclass(frozen=True)
class Choice:
    """One line of the explanation: the chosen back end, those that hold the op, and why.

    fixed_order: the back end promises that a row's bits do not depend on its company.
    """

    op: str
    backend: str
    available: tuple[str, ...]
    why: str
    fixed_order: bool


class Ops:
    """The op table: one attribute per op name, callable as its spec says, and the sequences of
    ``deepinfer.ops.fused``. graphs: keeps steps of fixed shapes as graphs
    (``deepinfer.ops.cpu.graphs``), or None."""

    def __init__(self, table: Mapping[str, Callable[..., Any]]):
        self.graphs: Any = None
        self.__dict__.update(self.apart())
        self.__dict__.update(table)

    def apart(self) -> dict[str, Callable[..., Any]]:
        """The sequences as calls of the table's other ops."""
        return fused.composed(self)

    @contextmanager
    def replaced(self, others: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """While the block runs, these stand in place of the ops of their names, sequences call
        them one by one, and no graph hides a call."""
        plain = dict(vars(self))
        vars(self).update({**self.apart(), "graphs": None, **others})
        try:
            yield
        finally:
            vars(self).update(plain)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"no such op: {name}")


def implementation(spec: OpSpec, backend: str) -> Callable[..., Any] | None:
    """The function of ``spec`` in ``backend``, or None if that back end does not hold it."""
    name = f"deepinfer.ops.{backend}.{spec.family}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if not name.startswith(missing.name or name):
            raise  # the module is there; something that it needs is not
        return None
    return getattr(module, spec.name, None)


def fixed_order(backend: str, device: str) -> frozenset[str]:
    """Ops whose rows keep their bits in any company, as the back end declares for a device type."""
    package = importlib.import_module(f"deepinfer.ops.{backend}")
    return getattr(package, "FIXED_ORDER", {}).get(device, frozenset())


def parse_overrides(overrides: Iterable[str]) -> dict[str, str]:
    """{"op": "back end"} of "op=back end" strings. Raises ``UsageError`` on unknown names."""
    chosen = {}
    for item in overrides:
        op, _, backend = item.partition("=")
        if backend not in BACKENDS:
            raise UsageError(
                "backend-unknown",
                f"--backend {item}: there is no back end {backend!r}",
                facts=[f"back ends: {', '.join(BACKENDS)}"],
                hint="deepinfer doctor --ops",
            )
        if op != "all" and op not in SPECS:
            near = difflib.get_close_matches(op, SPECS, 1)
            raise UsageError(
                "op-unknown",
                f"--backend {item}: there is no op {op!r}",
                facts=[f"did you mean {near[0]}?"] if near else [f"ops: {', '.join(SPECS)}"],
                hint="deepinfer doctor --ops",
            )
        chosen[op] = backend
    return chosen


def explain(
    device: str, overrides: Iterable[str] = (), built: Collection[str] = ()
) -> list[Choice]:
    """One ``Choice`` per op for a device type ("cpu", "cuda", "npu").

    built: the compiled back ends whose library is here. Raises ``UsageError``, and
    ``EnvironmentProblem`` where one was asked for that is not built.
    """
    asked = parse_overrides(overrides)
    usable = [b for b, on in BACKENDS.items() if device in on and _usable(b, built)]
    for op, backend in asked.items():
        if device in BACKENDS[backend] and backend not in usable:
            raise EnvironmentProblem(
                "extension-not-built",
                f"the compiled kernels for {backend} are not built",
                [f"--backend {op}={backend} asks for them"],
                hint=f"deepinfer build --accelerator {backend}, or --backend all=torch",
            )
    lines = []
    for name, spec in SPECS.items():
        held = [b for b in usable if implementation(spec, b)]
        want = asked.get(name, asked.get("all"))
        if want is None:
            backend = held[-1]
            why = "the only one here" if len(held) == 1 else f"preferred on {device}"
        elif want in held:
            backend, why = want, "asked for"
        elif name in asked:
            raise UsageError(
                "backend-missing",
                f"--backend {name}={want}: {want} does not hold {name} on {device}",
                facts=[f"held by: {', '.join(held)}"],
                hint="deepinfer doctor --ops",
            )
        else:
            backend, why = held[-1], f"{want} does not hold it"
        lines.append(Choice(name, backend, tuple(held), why, name in fixed_order(backend, device)))
    return lines


def _usable(backend: str, built: Collection[str]) -> bool:
    return backend in built or backend not in COMPILED


def order_dependent(
    device: str, overrides: Iterable[str] = (), built: Collection[str] = ()
) -> tuple[str, ...]:
    """Ops whose chosen back end has no fixed-order version. Raises as ``explain``."""
    return tuple(c.op for c in explain(device, overrides, built) if not c.fixed_order)


def packed(device: str, overrides: Iterable[str] = (), built: Collection[str] = ()) -> bool:
    """Does the chosen back end multiply with weights as they are stored? Raises as ``explain``."""
    choices = {choice.op: choice.backend for choice in explain(device, overrides, built)}
    return choices["prepare"] in COMPILED


def build(
    device: str,
    overrides: Iterable[str] = (),
    *,
    keep_weights: bool = True,
    libraries: Mapping[str, Any] = MappingProxyType({}),
) -> Ops:
    """The op table for a device type.

    ``keep_weights``: the torch back end holds unpacked weights (eight bytes each) for speed.
    ``libraries``: the open library of each compiled back end that may be chosen.
    """
    table: dict[str, Callable[..., Any]] = {}
    chosen: dict[str, str] = {}
    for choice in explain(device, overrides, libraries):
        chosen[choice.op] = choice.backend
        function = implementation(SPECS[choice.op], choice.backend)
        assert function is not None, f"{choice.backend} lost {choice.op}"
        if choice.backend in COMPILED:
            function = function(libraries[choice.backend])
        table[choice.op] = function
    table["prepare"] = partial(table["prepare"], keep=keep_weights)
    ops = Ops(table)
    for sequence, parts in fused.PARTS.items():
        backends = {chosen[part] for part in parts}
        if backends <= libraries.keys() and len(backends) == 1:
            [backend] = backends
            module = importlib.import_module(f"deepinfer.ops.{backend}.fused")
            made = getattr(module, sequence.__name__)(libraries[backend], partial(sequence, ops))
            setattr(ops, sequence.__name__, made)
    for backend in libraries.keys() & {*chosen.values()}:
        ops.graphs = importlib.import_module(f"deepinfer.ops.{backend}.graphs").Graphs(
            libraries[backend]
        )
    return ops
