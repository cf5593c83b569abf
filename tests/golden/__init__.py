"""Reads the golden data that stands beside the project (``../shared/golden``)."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
CHECKPOINTS = ("tiny-s", "tiny-k")

needs_golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="the golden data does not stand beside the project"
)


@functools.cache
def index(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "index.json").read_text(encoding="utf-8"))


def cases(name: str, kind: str) -> list[dict[str, Any]]:
    return [c for c in index(name)["cases"] if c["kind"] == kind]


@functools.cache
def tensors(path: str) -> dict[str, Any]:
    """All tensors of one file, by name."""
    from safetensors.torch import load_file

    return load_file(GOLDEN / path)


def case_tensors(name: str, case: dict[str, Any]) -> dict[str, Any]:
    return tensors(f"{name}/{case['file']}")


@functools.cache
def _parts(name: str, device: str = "cpu", draft: bool = False):
    from deepinfer.checkpoint.layout import open_checkpoint, read_token_map
    from deepinfer.checkpoint.load import load_weights

    checkpoint = open_checkpoint(GOLDEN / name / "checkpoint")
    weights = load_weights(checkpoint, device, draft=draft)
    return checkpoint.config, weights, read_token_map(checkpoint.token_map_file, checkpoint.config)


def engram_layers(name: str) -> tuple[int, ...]:
    return _parts(name)[0].engram_layer_ids


def runner(name: str, device: str = "cpu", rollback: int | None = None):
    """A fresh runner over the golden checkpoint; its pools hold NaN patterns until written.

    ``rollback``: with the draft stages, and so many rows that may be taken back.
    """
    from deepinfer.engine.runner import Runner
    from deepinfer.ops import registry
    from tests import native

    draft = rollback is not None
    config, weights, token_map = _parts(name, device, draft)
    made = Runner(
        config, weights, registry.build(device, libraries=native.libraries()),
        slots=16, pages=128, page_tokens=128, device=device, token_map=token_map,
        draft=draft, rollback=rollback or 0,
    )  # fmt: skip
    made.pools.poison()
    return made
