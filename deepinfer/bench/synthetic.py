"""Models of random weights for `bench --synthetic SIZE`: which layers, how many bytes, which parts.

A size in words comes in: `flash-slice[:E+D][:engram]`, or `tiny`. Goes out: its configuration, a
model without a folder, and the engine's `Parts`. It must not know axes or measures; torch is needed
only once weights are made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from deepinfer.checkpoint.names import tensors
from deepinfer.engine.assembly import (
    EMBEDDED,
    Folder,
    Model,
    Parts,
    assemble_model,
    embedded_model,
)
from deepinfer.errors import CapacityError, UsageError
from deepinfer.model import engram_tables
from deepinfer.model.config import ModelConfig

if TYPE_CHECKING:
    from deepinfer.checkpoint.load import Weights
    from deepinfer.settings import Settings
    from deepinfer.tokenizer.tokenizer import Tokenizer

__all__ = ["Size", "model_of", "parts", "read_size", "simulated"]

PUBLISHED = EMBEDDED / "v41-flash.json"
HALF = 20  # layers of each half of the published model
LAYERS = {"cpu": (1, 1), "nvidia": (6, 6), "ascend": (6, 6)}  # unless asked


@dataclass(frozen=True)
class Size:
    """What `--synthetic` names. encoder, decoder: layers of a slice; 0 for `tiny`."""

    encoder: int = 0
    decoder: int = 0
    engram: bool = False

    def __str__(self) -> str:
        if not self.encoder:
            return "tiny"
        return f"flash-slice:{self.encoder}+{self.decoder}" + ":engram" * self.engram


def read_size(text: str, accelerator: str) -> Size:
    """The size that a text names; layers nobody named are what the accelerator can hold.

    Raises UsageError `synthetic-invalid`.
    """
    if text == "tiny":
        return Size()
    found = re.fullmatch(r"flash-slice(?::(\d+)\+(\d+))?(:engram)?", text)
    if found:
        encoder, decoder, engram = found.groups()
        layers = (int(encoder), int(decoder)) if encoder else LAYERS[accelerator]
        if all(0 < count <= HALF for count in layers):
            return Size(*layers, engram=engram is not None)
    raise UsageError(
        "synthetic-invalid",
        f"--synthetic {text} is no size",
        [f"flash-slice:E+D has 1 to {HALF} encoder and 1 to {HALF} decoder layers at the published "
         "widths, :engram behind it its tables; tiny has the embedded sizes"],
        "--synthetic flash-slice:1+1",
    )  # fmt: skip


def slice_config(size: Size) -> dict[str, Any]:
    """`config.json` of the last E encoder and the first D decoder layers of the published model.

    Sources keep their places; the first layer becomes one where its source was cut off. Drafts look
    at the last three decoder layers, or at as many as there are.
    """
    config = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    del config["vision_config"]
    text, first = config["text_config"], HALF - size.encoder
    layers = size.encoder + size.decoder
    ratios, stages = text["compress_ratios"], text["num_nextn_predict_layers"]
    text["num_hidden_layers"] = layers
    text["compress_ratios"] = ratios[first : first + layers] + [0] * stages

    def inside(ids: Sequence[int]) -> list[int]:
        return [i - first for i in ids if first <= i < first + layers]

    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = inside(text[key])
        text[key] = ids if ids[0] == 0 or not ratios[first] else [0, *ids]
    text["candidate_source_layer_id"] = size.encoder
    seen = min(size.decoder, len(text["dspark_target_layer_ids"]))
    text["dspark_target_layer_ids"] = list(range(layers - seen, layers))
    tables = inside(text["engram_layer_ids"]) or [0]
    text["engram_layer_ids"] = tables if size.engram else []
    if size.engram:
        primes = engram_tables.primes(SimpleNamespace(**text))
        text["engram_num_embeddings"] = [sum(map(sum, table)) for table in primes]
    return config


@dataclass(frozen=True)
class Random:
    """A model of random weights; draft stages are counted where `drafts` says that they are made.

    like: the model whose tokenizer and token map are taken, None: there is none, ids alone are
    taken.
    """

    size: Size
    config: ModelConfig
    drafts: bool
    seed: int = 0
    like: Model | None = None

    @cached_property
    def weight_bytes(self) -> int:
        specs = tensors(self.config, vision=False).values()
        return sum(spec.nbytes for spec in specs if self.drafts or spec.group != "draft")

    def identity(self) -> bytes:
        return f"{self.size} {self.seed}".encode()

    def tokenizer(self) -> Tokenizer | None:
        return self.like.tokenizer() if self.like else None

    def token_map(self) -> Sequence[int] | None:
        if self.like or not self.config.engram_layer_ids:
            return self.like.token_map() if self.like else None
        classes = self.config.engram_compressed_vocab_size
        return [token % classes for token in range(self.config.vocab_size)]

    def temperatures(self) -> None:
        return None

    def weights(self, device: str, draft: bool) -> Weights:
        from deepinfer.checkpoint.noise import random_weights

        return random_weights(self.config, device, self.seed, draft)


def model_of(size: Size, drafts: bool, seed: int = 0) -> Random:
    """The model of a size: nothing is allocated, torch is not needed."""
    if not size.encoder:
        from deepinfer.checkpoint.layout import open_checkpoint

        like = Folder(open_checkpoint(embedded_model()))
        return Random(size, like.config, drafts, seed, like)
    config = ModelConfig.from_dict(slice_config(size), f"the configuration of {size}")
    return Random(size, config, drafts, seed)


def simulated(parts: Parts, length: float, block: int) -> Parts:
    """The parts of an engine whose drafts stand by a seeded draw, whatever they say.

    length: tokens a target step, bonus included, on average where it verifies `block` drafts; a
    shorter draft gets what such a drafter would give. Raises UsageError
    `accepted-length-impossible`; parts that draft nothing are given back.
    """
    chance = chance_of(length, block)
    if parts.drafting is None:
        return parts
    return replace(parts, drafting=replace(parts.drafting, chance=chance))


def chance_of(length: float, drafts: int) -> float:
    """The chance a of each draft, given that all before it stand: 1 + a + ... + a^drafts = length.

    Raises UsageError `accepted-length-impossible`.
    """
    if not 1 <= length <= drafts + 1:
        raise UsageError(
            "accepted-length-impossible",
            f"--accepted-length {length:g} cannot be reached",
            [f"a step that verifies {drafts} drafts gives 1 to {drafts + 1} tokens"],
            "--accepted-length 3.51",
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**j for j in range(drafts + 1)) < length:
            low = middle
        else:
            high = middle
    return high


def parts(settings: Settings, size: Size, warn: Callable[[str], object], seed: int = 0) -> Parts:
    """The parts of an engine around random weights, made in the device's memory.

    Raises CapacityError `weights-too-big` before anything is made, and what `assemble_model` does.
    """
    model = model_of(size, settings.mtp > 0, seed)
    try:
        return assemble_model(model, settings, warn)
    except CapacityError as problem:
        if problem.code != "weights-too-big":
            raise
        smaller = "--mtp 0, or --synthetic tiny" if model.drafts else "--synthetic tiny"
        raise CapacityError(
            problem.code, f"--synthetic {size}: {problem.message}", problem.facts, smaller
        ) from None
