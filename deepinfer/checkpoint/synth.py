"""Writes model folders in the official on-disk format, from trained or from random tensors.

Comes in: a configuration and one float tensor per parameter (or packed ones, taken as they are).
Goes out: a complete folder with `config.json`, shards, index, tokenizer and token map, put in place
in one rename. It must not know how the tensors were made, trained or used.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from deepinfer.checkpoint.header import encode_header, shown
from deepinfer.checkpoint.layout import CONFIG, INDEX, TOKEN_MAP, TOKENIZER
from deepinfer.checkpoint.names import Parameter, TensorSpec, parameters, stored_specs
from deepinfer.errors import UsageError
from deepinfer.model.config import ModelConfig
from deepinfer.quant import codec
from deepinfer.quant.formats import Packed

__all__ = ["deviation", "random_tensors", "scaled", "write_checkpoint"]

Values = Mapping[str, "torch.Tensor | Packed"]
TYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
BYTES = {"F32": 4, "BF16": 2}  # others are one byte; wide types first, so that all lie aligned


def write_checkpoint(
    path: str | os.PathLike[str],
    config_dict: Mapping[str, Any],
    tensors: Values,
    shards: int = 2,
    tokenizer_json: str | Mapping[str, Any] | None = None,
    token_map: Sequence[int] | None = None,
    extra_files: Mapping[str, str] | None = None,
) -> Path:
    """Writes a folder that `open_checkpoint` accepts; atomic, an unfinished one never shows.

    `tensors`: one entry per parameter under its checkpoint name. Routed experts may come one by one
    (`layers.L.ffn.experts.E.w1.weight` [out, in]) or stacked (`layers.L.ffn.experts.w1` [E, out,
    in]), as `load_weights` and a training run hold them. Floats are quantised as the configuration
    says; `Packed` entries are written bit for bit. `head.weight` may be absent where
    `tie_word_embeddings` is true. `shards=1` gives one `model.safetensors` without an index.
    `tokenizer_json` is the text or the object of a `tokenizer.json`. Without `token_map` a
    configuration whose compressed vocabulary is the whole vocabulary gets the identity.
    `extra_files`: further text files by name (a model card).

    Raises `CheckpointError` for a bad configuration, `UsageError` (`output-exists`) where the
    folder is not empty, `ValueError` for a missing, surplus or misshapen tensor.
    """
    target = Path(path)
    config = ModelConfig.from_dict(config_dict, CONFIG)
    values = _Source(config, tensors)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError("output-exists", f"{shown(target)} already exists and is not empty")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        draft.chmod(0o755)
        _write_shards(draft, config, values, shards)
        _write_texts(draft, config, config_dict, tokenizer_json, token_map, extra_files or {})
        os.replace(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target


class _Source:
    """The given tensors by stored name, quantised one parameter at a time."""

    def __init__(self, config: ModelConfig, given: Values) -> None:
        self.params = parameters(config, vision=False)
        if config.tie_word_embeddings and "head.weight" not in given:
            del self.params["head.weight"]
        self.given = given
        self.owners = {p.scale_name: p for p in self.params.values() if p.block is not None}
        self.packed: tuple[str, Packed] | None = None
        stacks = {p.stack[0] for p in self.params.values() if p.stack is not None}
        surplus = [n for n in given if n not in self.params and n not in stacks]
        if surplus:
            raise ValueError(f"not parameters of this configuration: {surplus[:8]}")
        for p in self.params.values():
            got = tuple(self._value(p).shape)
            if got != p.shape:
                raise ValueError(f"{p.name} has shape {list(got)}, expected {list(p.shape)}")

    def _value(self, p: Parameter) -> torch.Tensor | Packed:
        if p.name in self.given:
            return self.given[p.name]
        if p.stack is not None and p.stack[0] in self.given:
            return self.given[p.stack[0]][p.stack[1]]
        raise ValueError(f"{p.name} was not given")

    def specs(self) -> dict[str, TensorSpec]:
        """Stored tensors to write, by name."""
        return {s.name: s for p in self.params.values() for s in stored_specs(p)}

    def to_write(self, name: str) -> torch.Tensor:
        """The tensor as it goes to disk."""
        p = self.owners.get(name) or self.params[name]
        value = self._value(p)
        if p.block is None:
            if isinstance(value, Packed):
                raise ValueError(f"{name} is packed, but stored as {p.dtype}")
            return value.detach().to("cpu", TYPES[p.dtype])
        packed = self._packed(p, value, p.block)
        return packed.scales if name == p.scale_name else packed.codes

    def _packed(self, p: Parameter, value: torch.Tensor | Packed, block: tuple[int, int]) -> Packed:
        # Codes and scales are asked for one after the other: keep the last one quantised.
        if self.packed is None or self.packed[0] != p.name:
            if not isinstance(value, Packed):
                value = codec.pack(value.detach().to("cpu", torch.float32), p.kind, block)
            elif (value.kind, tuple(value.block)) != (p.kind, block):
                raise ValueError(f"{p.name} is packed as {value.kind} {value.block}, not {p.kind}")
            self.packed = (p.name, value.to("cpu"))
        return self.packed[1]


def _shard_of(name: str, position: float, shards: int) -> int:
    """Which file a tensor goes to: as published, experts are spread and Engram tables come last."""
    parts = name.split(".")
    if ".engram.embed." in name:
        return shards - 1
    if "experts" in parts:
        at = parts.index("experts")
        return (int(parts[at + 1]) + int(parts[at + 2][1:])) % shards
    return min(int(position * shards), shards - 1)


def _write_shards(folder: Path, config: ModelConfig, values: _Source, shards: int) -> None:
    if shards < 1:
        raise ValueError(f"shards is {shards}, expected at least 1")
    specs = values.specs()
    files: list[list[str]] = [[] for _ in range(shards)]
    for i, name in enumerate(specs):
        files[_shard_of(name, i / len(specs), shards)].append(name)
    files = [names for names in files if names]
    weight_map: dict[str, str] = {}
    for i, names in enumerate(files, 1):
        single = "model.safetensors" if len(files) == 1 else None
        file = single or f"model-{i:05d}-of-{len(files):05d}.safetensors"
        names.sort(key=lambda n: -BYTES.get(specs[n].dtype, 1))
        with open(folder / file, "wb") as out:
            out.write(encode_header({n: (specs[n].dtype, specs[n].shape) for n in names}))
            for name in names:
                _write_tensor(out, values.to_write(name))
        weight_map.update(dict.fromkeys(names, file))
    if len(files) > 1:
        total = sum(spec.nbytes for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _write_tensor(out: BinaryIO, tensor: torch.Tensor) -> None:
    out.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _write_texts(
    folder: Path,
    config: ModelConfig,
    config_dict: Mapping[str, Any],
    tokenizer_json: str | Mapping[str, Any] | None,
    token_map: Sequence[int] | None,
    extra_files: Mapping[str, str],
) -> None:
    texts = dict(extra_files)
    texts[CONFIG] = json.dumps(config_dict, indent=1, ensure_ascii=False) + "\n"
    if tokenizer_json is not None:
        given = tokenizer_json
        texts[TOKENIZER] = (
            given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        )
    if token_map is None and config.engram_layer_ids:
        if config.engram_compressed_vocab_size == config.vocab_size:
            token_map = range(config.vocab_size)
        elif tokenizer_json is None:
            raise ValueError("a model with Engram layers needs token_map or tokenizer_json")
    if token_map is not None:
        table = {
            "compressed_vocab_size": config.engram_compressed_vocab_size,
            "pad_token_id": config.engram_pad_token_id,
            "token_map": [int(i) for i in token_map],
        }
        texts[TOKEN_MAP] = json.dumps(table) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


# -- random weights ------------------------------------------------------------------------------

# Gains that keep a sublayer's output at 0.1 to 0.2 of the stream: with unit-size outputs a random
# model of this architecture is chaotic, and correct computations differ by percents (§9).
GAINS = {"attn.wo_b": 0.35, "w2": 0.2, "engram.wkv": 0.5}


def random_tensors(
    config: ModelConfig, seed: int = 0, hc_scale: float = 0.5
) -> dict[str, torch.Tensor]:
    """Float32 weights for every parameter, by checkpoint name, experts stacked (model spec §9).

    The same seed gives the same bits whatever else the configuration contains: every tensor draws
    from a stream of its own name. Sublayer outputs are 0.1 to 0.2 of the stream; `hc_scale` sets
    how strongly the mixes follow the stream (0.01 is nearly the identity, 1.0 is stress).
    """
    found: dict[str, torch.Tensor] = {}
    for name, shape in _entries(config):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        noise = torch.randn(shape, generator=generator)
        found[name] = scaled(config, name, noise, hc_scale)
    return found


def _entries(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters with the routed experts of a matrix as one stacked entry."""
    experts: dict[str, int] = {}
    params = parameters(config, vision=False)
    for p in params.values():
        if p.stack is not None:
            experts[p.stack[0]] = p.stack[1] + 1
    for p in params.values():
        if p.stack is None:
            yield p.name, p.shape
        elif p.stack[1] == 0:
            yield p.stack[0], (experts[p.stack[0]], *p.shape)


def _layer_of(name: str, config: ModelConfig) -> int:
    kind, number = name.split(".")[:2]
    return int(number) + (config.num_hidden_layers if kind == "mtp" else 0)


def _hc_base(config: ModelConfig, name: str, noise: torch.Tensor) -> torch.Tensor:
    """`pre` prefers one copy, `comb` the diagonal, `post` differs: the copies must diverge.

    In copies that are nearly equal a transposed `comb` or an unshifted `pre` would go unnoticed.
    """
    copies = config.hc_mult
    pre = torch.full((copies,), -1.0)
    pre[_layer_of(name, config) % copies] = 1.0
    comb = torch.full((copies, copies), -3.0) + 6.0 * torch.eye(copies)
    base = torch.cat([pre, torch.zeros(copies), comb.flatten()])
    spread = torch.full_like(base, 0.5)
    spread[copies : 2 * copies] = 1.5
    return base + spread * noise


def deviation(name: str, inputs: int) -> float:
    """Standard deviation of the random values of a matrix [..., inputs], by its checkpoint name."""
    if name == "embed.weight" or "engram.embed" in name or "markov_head.embed" in name:
        return 1.0
    plain = name.removesuffix(".weight")
    return next((g for end, g in GAINS.items() if plain.endswith(end)), 1.0) / math.sqrt(inputs)


def scaled(
    config: ModelConfig, name: str, noise: torch.Tensor, hc_scale: float = 0.5
) -> torch.Tensor:
    """Unit noise float32 of a parameter's shape, or of some rows of a matrix, as its values."""
    if "norm.weight" in name:
        return 1.0 + 0.1 * noise
    if name.endswith(("q_weight", "k_weight")):
        return 1.0 + 0.1 * noise
    if "hc_" in name:
        if name.endswith("_base"):
            return _hc_base(config, name, noise)
        if name.endswith("_scale"):
            return hc_scale * (1.0 + 0.2 * noise)
    if name.endswith(("gate.bias", "gate.bias_vl")):
        return 0.1 * noise
    if name.endswith("attn_sink"):
        return noise
    return noise * deviation(name, noise.shape[-1])
