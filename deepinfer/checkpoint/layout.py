"""A model folder, checked as a whole before a weight byte is read.

Comes in: a path. Goes out: a `Checkpoint` (configuration, where every tensor lies, tokenizer files,
warnings), or an error that says what is wrong with the folder. It must not know what a tensor means
to the model, and needs no torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from deepinfer.checkpoint.header import StoredTensor, read_header, shown
from deepinfer.checkpoint.match import Coverage, match, some
from deepinfer.errors import CheckpointError, UsageError
from deepinfer.model.config import ModelConfig

__all__ = ["Checkpoint", "open_checkpoint", "read_token_map"]

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
TOKENIZER, TOKEN_MAP = "tokenizer.json", "engram_token_map.json"
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file
PART_OF_MANY = re.compile(r"-\d+-of-(\d+)\.safetensors$")


@dataclass(frozen=True)
class Checkpoint:
    """A folder that holds a complete model.

    `tensors`: every stored tensor that the index accounts for, by checkpoint name (a `model.`
    prefix removed). `coverage`: which of them are loaded and which nobody uses. `warnings`: lines
    for the user. `config_dict` is `config.json` as it stands.
    """

    path: Path
    config: ModelConfig
    config_dict: dict[str, Any]
    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]
    coverage: Coverage
    tokenizer_file: Path | None
    token_map_file: Path | None
    warnings: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the tensors that will be loaded."""
        return sum(t.nbytes for t in self.coverage.used.values())

    def identity(self) -> bytes:
        """A digest of the configuration, of what every file holds where, and of samples of its
        bytes: other weights in the same files are told apart, without reading all of them."""
        seen = blake2b(json.dumps(self.config_dict, sort_keys=True).encode(), digest_size=32)
        for name, tensor in sorted(self.tensors.items()):
            seen.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.begin}".encode())
        for file in self.files:
            size = file.stat().st_size
            with file.open("rb") as data:
                for part in range(_SAMPLES):
                    data.seek(size * part // _SAMPLES)
                    seen.update(data.read(_SAMPLE_BYTES))
        return seen.digest()


def open_checkpoint(path: str | os.PathLike[str], origin: str = "") -> Checkpoint:
    """Checks a model folder completely; no weight is read and nothing of its size is allocated.

    `origin` names where the path came from (a flag, a variable) and is shown when it does not
    exist. Raises `UsageError` (`model-dir-missing`), or `CheckpointError`:
    `model-dir-not-a-checkpoint`, `architecture-unsupported`, `config-invalid`,
    `checkpoint-incomplete`, `checkpoint-index-invalid`, `checkpoint-file-invalid`,
    `token-map-invalid` and the ones of `match`.
    """
    folder = Path(path)
    _check_folder(folder, origin)
    config_dict = _read_json(folder / CONFIG, "config-invalid")
    config = ModelConfig.from_dict(config_dict, CONFIG)
    warnings: list[str] = []
    files, raw = _stored_tensors(folder, warnings)
    stored = _without_prefix(raw)
    coverage = match(config, stored)
    warnings += _leftovers(config, coverage)
    token_map = folder / TOKEN_MAP
    tokenizer = folder / TOKENIZER
    if token_map.is_file():
        read_token_map(token_map, config)
    return Checkpoint(
        path=folder,
        config=config,
        config_dict=config_dict,
        files=files,
        tensors=stored,
        coverage=coverage,
        tokenizer_file=tokenizer if tokenizer.is_file() else None,
        token_map_file=token_map if token_map.is_file() else None,
        warnings=tuple(warnings),
    )


def _check_folder(folder: Path, origin: str) -> None:
    if not os.path.lexists(folder):
        raise UsageError(
            "model-dir-missing",
            f"{shown(folder)} does not exist",
            facts=[f"from {origin}"] if origin else [],
            hint="deepinfer run -m path/to/DeepSeek-V4.1-Flash-1017 ..., or leave it out for the"
            " embedded model",
        )
    if not folder.is_dir():
        dangling = folder.is_symlink() and not folder.exists()
        what = f"a dangling link to {shown(os.readlink(folder))}" if dangling else "a file"
        raise CheckpointError(
            "model-dir-not-a-checkpoint",
            f"{shown(folder)} is {what}, expected a directory",
            hint=f"-m {shown(folder.parent)}",
        )
    if (folder / CONFIG).is_file():
        return
    below = next((p for p in _children(folder) if (p / CONFIG).is_file()), None)
    found = f"; found one in {shown(below)}" if below else ""
    raise CheckpointError(
        "model-dir-not-a-checkpoint",
        f"{shown(folder)} is not a checkpoint",
        facts=[f"no {CONFIG} here{found}"],
        hint=f"-m {shown(below)}" if below else "",
    )


def _children(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(p for p in folder.iterdir() if p.is_dir())
    except OSError:
        return


def _read_json(path: Path, code: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        what = f"{shown(path.name)} cannot be read ({error.strerror})"
        raise CheckpointError(code, what) from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(code, f"{shown(path.name)} is not JSON ({reason})") from error
    if not isinstance(data, dict):
        raise CheckpointError(code, f"{shown(path.name)} is not a JSON object")
    return data


def _stored_tensors(
    folder: Path, warnings: list[str]
) -> tuple[tuple[Path, ...], dict[str, StoredTensor]]:
    """All tensors by their stored name; with an index, the index decides what counts."""
    here = sorted(p for p in folder.iterdir() if p.suffix == ".safetensors")
    if not os.path.lexists(folder / INDEX):
        file = _single_file(here)
        return (file,), read_header(file)
    weight_map = _weight_map(_read_json(folder / INDEX, "checkpoint-index-invalid"))
    files = tuple(folder / name for name in sorted(set(weight_map.values())))
    _check_complete(folder, files)
    headers = {file.name: read_header(file) for file in files}
    lost = [name for name, file in weight_map.items() if name not in headers[file]]
    if lost:
        more = f" ({len(lost) - 1:,} more like it)" if len(lost) > 1 else ""
        raise CheckpointError(
            "checkpoint-index-invalid",
            f"{lost[0]} is not in {weight_map[lost[0]]}, where {INDEX} puts it{more}",
            hint=f"copy {weight_map[lost[0]]} and {INDEX} again",
        )
    copies = [
        f"{name} in {shown(file)}"
        for file, header in headers.items()
        for name in header
        if weight_map.get(name) != file
    ]
    if copies:
        warnings.append(f"the index decides: ignored {some(copies, 3)}, assigned otherwise")
    stray = [shown(p.name) for p in here if p not in files]
    if stray:
        warnings.append(f"the index decides: ignored {some(stray, 3)}, not in {INDEX}")
    return files, {name: headers[file][name] for name, file in weight_map.items()}


def _single_file(here: list[Path]) -> Path:
    if len(here) == 1:
        many = PART_OF_MANY.search(here[0].name)
        if not many or int(many[1]) == 1:
            return here[0]
    if here:
        what = f"{len(here)} .safetensors files ({some([shown(p.name) for p in here], 3)})"
    else:
        what = "no .safetensors file"
    raise CheckpointError(
        "checkpoint-incomplete",
        "checkpoint is incomplete",
        facts=[f"{what}, and no {INDEX}"],
        hint="finish the download, then deepinfer doctor -m DIR",
    )


def _weight_map(index: Mapping[str, Any]) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("checkpoint-index-invalid", f"{INDEX} has no weight_map")
    for name, file in weight_map.items():
        # A plain name only: an index must not reach outside of its folder.
        if not isinstance(file, str) or file != os.path.basename(file) or file in ("", ".", ".."):
            raise CheckpointError(
                "checkpoint-index-invalid",
                f"{INDEX} puts {name} in {file!r}, expected the name of a file beside it",
            )
    return weight_map


def _check_complete(folder: Path, files: tuple[Path, ...]) -> None:
    missing = [p for p in files if not p.exists()]
    if not missing:
        return
    facts = [
        f"the index names {len(files)} shards, {len(files) - len(missing)} are here;"
        f" first missing: {shown(missing[0].name)}"
    ]
    if len(missing) > 1:
        facts.append(f"missing: {some([shown(p.name) for p in missing], 20)}")
    facts += [
        f"{shown(p.name)} is a dangling link to {shown(os.readlink(p))}"
        for p in missing[:20]
        if p.is_symlink()
    ]
    raise CheckpointError(
        "checkpoint-incomplete",
        "checkpoint is incomplete",
        facts=facts,
        hint=f"finish the download, then deepinfer doctor -m {shown(folder)}",
    )


def _without_prefix(raw: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Names without the `model.` that some exports put in front (model spec §2.1)."""
    stored: dict[str, StoredTensor] = {}
    for name, tensor in raw.items():
        plain = name.removeprefix("model.")
        if plain in stored:
            raise CheckpointError(
                "checkpoint-index-invalid", f"{plain} is there twice, with and without `model.`"
            )
        stored[plain] = tensor
    return stored


def _leftovers(config: ModelConfig, coverage: Coverage) -> list[str]:
    """Warnings about tensors that are present and not loaded."""
    lines = []
    if coverage.skipped_vision:
        lines.append(f"text only: skipped the vision tower ({coverage.skipped_vision:,} tensors)")
    draft = coverage.unused["draft"]
    if draft and not config.num_nextn_predict_layers:
        lines.append(f"no draft stages in {CONFIG}: skipped {len(draft):,} draft tensors")
        draft = ()
    unused = coverage.unused["target"] + draft
    if unused:
        noun = "tensor is" if len(unused) == 1 else "tensors are"
        lines.append(f"{len(unused):,} {noun} not part of the model and ignored: {some(unused)}")
    return lines


def read_token_map(path: Path, config: ModelConfig) -> tuple[int, ...]:
    """The Engram token map of a folder: one mapped id per token id (golden data, README).

    Raises `CheckpointError` (`token-map-invalid`) unless it has `vocab_size` ids below
    `engram_compressed_vocab_size`.
    """
    data = _read_json(path, "token-map-invalid")
    name = shown(path.name)
    ids = data.get("token_map")
    size = config.engram_compressed_vocab_size
    if config.engram_layer_ids and data.get("compressed_vocab_size") != size:
        raise CheckpointError(
            "token-map-invalid",
            f"{name}: compressed_vocab_size is {data.get('compressed_vocab_size')!r},"
            f" {CONFIG} says {size}",
        )
    if not isinstance(ids, list) or len(ids) != config.vocab_size:
        got = len(ids) if isinstance(ids, list) else "no list"
        raise CheckpointError(
            "token-map-invalid",
            f"{name}: token_map has {got} entries, expected vocab_size {config.vocab_size}",
        )
    for token, mapped in enumerate(ids):
        whole = isinstance(mapped, int) and not isinstance(mapped, bool)
        if not whole or mapped < 0 or (config.engram_layer_ids and mapped >= size):
            raise CheckpointError(
                "token-map-invalid",
                f"{name}: token {token} maps to {mapped!r}, expected an id below {size}",
            )
    return tuple(ids)
