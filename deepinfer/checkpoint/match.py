"""Compares the tensors a folder holds with the tensors its configuration asks for.

Comes in: the stored tensors by name and the parameter table. Goes out: what will be loaded, what
nobody uses, or a `CheckpointError` that names the tensor, what was declared and what is stored. It
must not know files, indexes or torch, and reads no weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from deepinfer.checkpoint.header import StoredTensor
from deepinfer.checkpoint.names import (
    Parameter,
    TensorSpec,
    is_draft_tie,
    is_vision,
    parameters,
    stored_specs,
)
from deepinfer.errors import CheckpointError
from deepinfer.model.config import ModelConfig

__all__ = ["Coverage", "match", "some"]

# What a declared type may be stored as without losing a bit. Scales held as float32 must be powers
# of two, which is checked when they are read.
ACCEPTED = {
    "I8": ("I8", "U8"),
    "F8_E4M3": ("F8_E4M3",),
    "F8_E8M0": ("F8_E8M0", "U8", "F32"),
    "BF16": ("BF16",),
    "F32": ("F32", "BF16"),
}
WORDS = {"I8": "packed FP4", "U8": "bytes", "F8_E4M3": "FP8", "BF16": "BF16", "F32": "F32"}


@dataclass(frozen=True)
class Coverage:
    """How stored and expected tensors meet, by group ("target", "draft").

    `used` are the stored tensors that will be loaded, by name. `tied_head`: the head is absent and
    the embedding stands in for it. `skipped_vision` counts tensors of the vision tower.
    """

    used: dict[str, StoredTensor]
    counts: dict[str, int]
    unused: dict[str, tuple[str, ...]]
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tied_head: bool = False
    skipped_vision: int = 0

    def summary(self) -> str:
        """One line: loaded, unused and missing tensors, for target and draft separately."""
        parts = []
        for group in ("target", "draft"):
            unused, missing = self.unused.get(group, ()), self.missing.get(group, ())
            parts.append(
                f"{group}: {self.counts.get(group, 0)} tensors loaded,"
                f" {len(unused)} unused, {len(missing)} missing"
            )
        return "; ".join(parts)


def some(names: Iterable[str], limit: int = 6) -> str:
    """The first names of a list, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _storage(dtype: str, shape: tuple[int, ...]) -> str:
    word = WORDS.get(dtype)
    return f"{word} ({dtype} {list(shape)})" if word not in (None, dtype) else f"{dtype} {shape}"


def _check_formats(specs: Mapping[str, TensorSpec], stored: Mapping[str, StoredTensor]) -> None:
    wrong = [
        name
        for name, spec in specs.items()
        if name in stored and stored[name].dtype not in ACCEPTED[spec.dtype]
    ]
    if not wrong:
        return
    name = wrong[0]
    spec, got = specs[name], stored[name]
    more = f"; {len(wrong) - 1} more tensors alike" if len(wrong) > 1 else ""
    raise CheckpointError(
        "checkpoint-format-mismatch",
        f"{name}: config.json declares {_storage(spec.dtype, spec.shape)},"
        f" {got.file.name} stores {_storage(got.dtype, got.shape)}{more}",
        facts=["the formats follow from quantization_config and dtype in config.json"],
    )


def _check_shapes(
    params: Mapping[str, Parameter],
    specs: Mapping[str, TensorSpec],
    stored: Mapping[str, StoredTensor],
) -> None:
    owners = {p.scale_name: p for p in params.values() if p.block is not None}
    for name, spec in specs.items():
        if name not in stored or stored[name].shape == spec.shape:
            continue
        got = list(stored[name].shape)
        owner = owners.get(name)
        if owner is not None and owner.block is not None:
            raise CheckpointError(
                "checkpoint-scale-grid",
                f"{name} is {got}, expected the grid {list(spec.shape)}",
                facts=[
                    f"{owner.name} is {list(owner.shape)} with one scale per block of"
                    f" {owner.block[0]} x {owner.block[1]}"
                ],
            )
        raise CheckpointError(
            "checkpoint-shape-mismatch",
            f"{name} is {got}, expected {list(spec.shape)}",
            facts=[f"stored in {stored[name].file.name}; the shape follows from config.json"],
        )


def _check_engram(params: Mapping[str, Parameter], stored: Mapping[str, StoredTensor]) -> None:
    """A table and its scales are streamed together, so they must lie in one file."""
    for p in params.values():
        if not p.name.endswith("engram.embed.weight") or p.block is None:
            continue
        weight, scale = stored[p.name].file, stored[p.scale_name].file
        if weight != scale:
            raise CheckpointError(
                "checkpoint-engram-split",
                f"{p.name} is in {weight.name}, its scales are in {scale.name}",
                facts=["an Engram table and its scales belong into one file"],
            )


def _raise_missing(coverage: Coverage) -> None:
    target, draft = coverage.missing["target"], coverage.missing["draft"]
    names = target + draft
    if not names:
        return
    kind = "draft parameters" if not target else "tensors"
    if len(names) == 1:
        message = f"{names[0]} is missing from the checkpoint"
    else:
        message = f"{len(names):,} {kind} are missing from the checkpoint, first {names[0]}"
    facts = [f"{group}: {some(got)}" for group, got in coverage.missing.items() if got]
    unused = coverage.unused["target"] + coverage.unused["draft"]
    if unused:
        facts.append(f"present but not part of the model: {some(unused)}")
    facts.append(coverage.summary())
    raise CheckpointError("checkpoint-tensor-missing", message, facts=facts)


def match(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> Coverage:
    """Checks names, types, shapes and scale grids of every tensor that the text model needs.

    Raises `CheckpointError`: `checkpoint-format-mismatch`, `checkpoint-shape-mismatch`,
    `checkpoint-scale-grid`, `checkpoint-tensor-missing`, `checkpoint-engram-split`.
    """
    params = parameters(config, vision=False)
    specs = {s.name: s for p in params.values() for s in stored_specs(p)}
    _check_formats(specs, stored)
    _check_shapes(params, specs, stored)
    tied_head = config.tie_word_embeddings and "head.weight" not in stored
    missing: dict[str, list[str]] = {"target": [], "draft": []}
    counts = {"target": 0, "draft": 0}
    for name, spec in specs.items():
        if name in stored:
            counts[spec.group] += 1
        elif not (name == "head.weight" and tied_head):
            missing[spec.group].append(name)
    unused: dict[str, list[str]] = {"target": [], "draft": []}
    vision = 0
    for name in stored:
        if name in specs or is_draft_tie(name):
            continue
        if is_vision(name):
            vision += 1
        else:
            unused["draft" if name.startswith("mtp.") else "target"].append(name)
    coverage = Coverage(
        used={name: stored[name] for name in specs if name in stored},
        counts=counts,
        unused={group: tuple(names) for group, names in unused.items()},
        missing={group: tuple(names) for group, names in missing.items()},
        tied_head=tied_head,
        skipped_vision=vision,
    )
    _raise_missing(coverage)
    _check_engram(params, stored)
    return coverage
