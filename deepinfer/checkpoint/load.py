"""Streams the weights of a checked folder into tensors, file by file.

Comes in: a `Checkpoint`. Goes out: `Weights`, a mapping from checkpoint names to tensors, with the
routed experts of a layer stacked and quantised pairs packed. Every destination is allocated once
and the bytes of a file are read straight into it, so that memory never exceeds the weights plus one
tensor. It must not know model classes, nor what a tensor is used for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from deepinfer.checkpoint.header import StoredTensor, shown
from deepinfer.checkpoint.layout import Checkpoint
from deepinfer.checkpoint.match import Coverage
from deepinfer.checkpoint.names import Parameter, parameters
from deepinfer.errors import CheckpointError
from deepinfer.quant.formats import Packed

__all__ = ["Destinations", "LoadReport", "Weights", "load_weights", "scale_bytes"]

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
READ_BYTES = 1 << 26  # one read call, and the host buffer on the way to a device


@dataclass(frozen=True)
class LoadReport:
    """What became of the tensors of the folder; `warnings` are lines for the user."""

    coverage: Coverage
    nbytes: int
    warnings: tuple[str, ...] = ()

    def summary(self) -> str:
        """One line: loaded, unused and missing tensors, for target and draft separately."""
        return self.coverage.summary()


class Weights(Mapping[str, "torch.Tensor | Packed"]):
    """Tensors by name. `X.weight` with `X.scale` is one `Packed` under `X.weight`.

    The routed experts of a layer are one entry per matrix, `layers.L.ffn.experts.w1` (w2, w3;
    `mtp.S` alike), with a leading expert dimension. `head.weight` is always there.
    """

    def __init__(self, entries: Mapping[str, torch.Tensor | Packed], report: LoadReport) -> None:
        self._entries = dict(entries)
        self.report = report

    def __getitem__(self, name: str) -> torch.Tensor | Packed:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def handed_over(self) -> HandedOver:
        """The same tensors, of which nothing stays here; the report does."""
        entries, self._entries = self._entries, {}
        return HandedOver(entries, self.report)


class HandedOver(Weights):
    """Tensors of which each may be taken once; what was taken is not kept."""

    def take(self, name: str) -> torch.Tensor | Packed:
        return self._entries.pop(name)


def scale_bytes(values: torch.Tensor, name: str = "scale") -> torch.Tensor:
    """E8M0 bytes of float32 scales: 2^(b - 127) becomes b (model spec §2.3).

    A float32 scale filled from byte 120 holds 0.0078125 and comes back as 120. Raises
    `CheckpointError` (`checkpoint-scale-invalid`) for a value that is no power of two in range.
    """
    flat = values.float().contiguous().view(-1)
    bits = flat.view(torch.int32)
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    # 2^-127 is subnormal in float32: exponent field 0, highest fraction bit set; it is byte 0.
    lowest = bits == 1 << 22
    good = lowest | ((fraction == 0) & (exponent > 0) & (exponent < 255))
    if not bool(good.all()):
        value = float(flat[~good][0])
        raise CheckpointError(
            "checkpoint-scale-invalid",
            f"{name} holds {value!r}, expected powers of two from 2^-127 to 2^127",
        )
    return (
        torch.where(lowest, torch.zeros_like(exponent), exponent).to(torch.uint8).view(values.shape)
    )


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable in place."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _read(file: int, stored: StoredTensor, name: str, into: memoryview, offset: int = 0) -> None:
    """Reads exactly `len(into)` bytes of one tensor; a short read is an error, never zeros."""
    at = 0
    while at < len(into):
        got = os.preadv(file, [into[at : at + READ_BYTES]], stored.begin + offset + at)
        if got == 0:
            raise CheckpointError(
                "checkpoint-file-invalid",
                f"{shown(stored.file.name)}: ended inside {name},"
                f" {offset + at} of {stored.nbytes} bytes could be read",
                hint="the file changed after it was checked; copy it again",
            )
        at += got


class Destinations:
    """Allocates every entry of `Weights`, and knows for each stored tensor where its bytes belong.

    `entries` are the tensors by entry, `views` the places of the stored tensors in them by name.
    """

    def __init__(self, params: Mapping[str, Parameter], device: torch.device) -> None:
        self.device = device
        self.entries: dict[str, torch.Tensor | Packed] = {}
        self.views: dict[str, torch.Tensor] = {}
        stacks: dict[str, int] = {}
        for p in params.values():
            if p.stack is not None:
                stacks[p.stack[0]] = max(stacks.get(p.stack[0], 0), p.stack[1] + 1)
        for p in params.values():
            entry, index = p.stack or (p.name, None)
            if entry not in self.entries:
                lead = () if index is None else (stacks[entry],)
                self.entries[entry] = self._allocate(p, lead)
            self._assign(p, self.entries[entry], index)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _allocate(self, p: Parameter, lead: tuple[int, ...]) -> torch.Tensor | Packed:
        if p.block is None:
            return self._empty((*lead, *p.shape), DTYPES[p.dtype])
        code_type = torch.uint8 if p.kind == "fp4" else torch.float8_e4m3fn
        codes = self._empty((*lead, *p.stored_shape), code_type)
        scales = self._empty((*lead, *p.grid), torch.uint8)
        return Packed(codes, scales, p.block, p.kind)

    def _assign(self, p: Parameter, entry: torch.Tensor | Packed, index: int | None) -> None:
        def part(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if index is None else tensor[index]

        if isinstance(entry, Packed):
            self.views[p.name] = part(entry.codes)
            self.views[p.scale_name] = part(entry.scales)
        else:
            self.views[p.name] = part(entry)


def _converter(stored: StoredTensor, view: torch.Tensor, name: str) -> Callable | None:
    """How the stored type becomes the wanted one; None where the bytes are taken as they are.

    E8M0 bytes are reinterpreted, never converted: byte b means 2^(b - 127).
    """
    if stored.dtype == "F32" and view.dtype == torch.uint8:
        return lambda raw: scale_bytes(raw.view(torch.float32), name)
    if stored.dtype == "BF16" and view.dtype == torch.float32:
        return lambda raw: raw.view(torch.bfloat16).float()
    return None


def _fill(file: int, stored: StoredTensor, view: torch.Tensor, name: str) -> None:
    """Brings the bytes of one tensor to their destination."""
    convert = _converter(stored, view, name)
    if convert is not None:
        raw = torch.empty(stored.nbytes, dtype=torch.uint8)
        _read(file, stored, name, _memory(raw))
        view.copy_(convert(raw).view(view.shape))
    elif view.device.type == "cpu":
        _read(file, stored, name, _memory(view))
    else:
        _send(file, stored, view, name)


def _send(file: int, stored: StoredTensor, view: torch.Tensor, name: str) -> None:
    """Through a small host buffer onto a device: an Engram table alone may exceed host memory."""
    target = view.view(-1).view(torch.uint8)
    buffer = torch.empty(min(READ_BYTES, stored.nbytes), dtype=torch.uint8)
    for at in range(0, stored.nbytes, READ_BYTES):
        part = buffer[: stored.nbytes - at]
        _read(file, stored, name, _memory(part), at)
        target[at : at + len(part)].copy_(part)


def _check_scales(view: torch.Tensor, name: str) -> None:
    if bool((view == 255).any()):
        raise CheckpointError(
            "checkpoint-scale-invalid", f"{name} holds the scale byte 255, which means NaN"
        )


def _stream(checkpoint: Checkpoint, views: Mapping[str, torch.Tensor]) -> None:
    """Reads file by file, in the order of the bytes."""
    by_file: dict[str, list[str]] = {}
    for name, stored in checkpoint.coverage.used.items():
        if name in views:
            by_file.setdefault(str(stored.file), []).append(name)
    for path in sorted(by_file):
        file = os.open(path, os.O_RDONLY)
        try:
            for name in sorted(by_file[path], key=lambda n: checkpoint.tensors[n].begin):
                _fill(file, checkpoint.tensors[name], views[name], name)
                if name.endswith(".scale"):
                    _check_scales(views[name], name)
        finally:
            os.close(file)


def _settle_head(
    entries: dict[str, torch.Tensor | Packed], checkpoint: Checkpoint, warnings: list[str]
) -> None:
    """The rule of `tie_word_embeddings`: an absent head is the embedding; a stored one is kept.

    A stored head that equals the embedding shares its memory. One that differs wins, with a
    warning: it was trained, and replacing it would hide that the configuration is wrong.
    """
    if checkpoint.coverage.tied_head:
        entries["head.weight"] = entries["embed.weight"]
        return
    if not checkpoint.config.tie_word_embeddings:
        return
    embed, head = entries["embed.weight"], entries["head.weight"]
    if (
        isinstance(embed, torch.Tensor)
        and isinstance(head, torch.Tensor)
        and torch.equal(embed, head)
    ):
        entries["head.weight"] = embed
    else:
        warnings.append(
            "tie_word_embeddings is true, but head.weight differs from embed.weight: using the"
            " stored head"
        )


def load_weights(
    checkpoint: Checkpoint, device: torch.device | str = "cpu", draft: bool = True
) -> Weights:
    """Loads every parameter of the model onto `device`; `draft=False` leaves the stages out.

    Raises `CheckpointError`: `checkpoint-file-invalid` when a file changed since it was checked,
    `checkpoint-scale-invalid` for a scale that is no power of two.
    """
    params = parameters(checkpoint.config, vision=False)
    if checkpoint.coverage.tied_head:
        del params["head.weight"]
    if not draft:
        params = {name: p for name, p in params.items() if p.group != "draft"}
    destinations = Destinations(params, torch.device(device))
    _stream(checkpoint, destinations.views)
    warnings = list(checkpoint.warnings)
    _settle_head(destinations.entries, checkpoint, warnings)
    coverage = checkpoint.coverage
    if not draft:
        coverage = replace(coverage, counts={**coverage.counts, "draft": 0})
    nbytes = sum(v.nbytes for v in destinations.views.values())
    return Weights(destinations.entries, LoadReport(coverage, nbytes, tuple(warnings)))
