"""The header of one safetensors file, read and written with plain file operations.

Comes in: a path, or a table of tensors to write. Goes out: where each tensor's bytes lie, or header
bytes; a damaged file is a one-line `CheckpointError` that names the file and the fault. Nothing is
allocated on the word of a length field, and no weight byte is read. It must not know tensor names.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from deepinfer.errors import CheckpointError

__all__ = ["StoredTensor", "encode_header", "read_header", "shown"]

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64,
}  # fmt: skip
HEADER_LIMIT = 100_000_000  # bytes; the limit that the safetensors format itself sets
HINT = "copy the file again, then deepinfer doctor -m DIR"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of one file: its own words for the type, and absolute byte offsets."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def shown(path: str | os.PathLike[str]) -> str:
    """A path as text that every stream can encode in UTF-8, whatever bytes the name is made of."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _fault(path: Path, what: str) -> CheckpointError:
    return CheckpointError("checkpoint-file-invalid", f"{shown(path.name)}: {what}", hint=HINT)


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKey(key)
        found[key] = value
    return found


def _header_bytes(path: Path) -> tuple[bytes, int]:
    """The raw JSON of the header and the size of the file; every read is bounded by the size."""
    try:
        info = os.stat(path)
    except FileNotFoundError as error:
        if path.is_symlink():
            what = f"dangling link to {shown(os.readlink(path))}"
        else:
            what = "no such file"
        raise _fault(path, what) from error
    except OSError as error:
        raise _fault(path, f"cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(info.st_mode):
        raise _fault(path, "is not a regular file")
    size = info.st_size
    try:
        with open(path, "rb") as file:
            head = file.read(8)
            if head.startswith(b"version "):
                raise _fault(path, f"a text pointer of {size} bytes, not the weights it stands for")
            if len(head) < 8:
                raise _fault(path, f"{size} bytes are too few for a safetensors file")
            length = int.from_bytes(head, "little")
            if length > size - 8:
                what = f"the header declares {length} bytes, the file has {size - 8} after its size"
                raise _fault(path, what + (" (a text file?)" if head.isascii() else ""))
            if length > HEADER_LIMIT:
                raise _fault(path, f"a header of {length} bytes is over the limit {HEADER_LIMIT}")
            raw = file.read(length)
    except OSError as error:
        raise _fault(path, f"cannot be read ({error.strerror})") from error
    if len(raw) != length:
        raise _fault(path, f"the header declares {length} bytes, {len(raw)} could be read")
    return raw, size


def _sizes(values: object) -> TypeGuard[list[int]]:
    # `type` and not `isinstance`: true and false are no sizes. Called 200,000 times at full size.
    return isinstance(values, list) and all([type(v) is int and v >= 0 for v in values])


def _entry(path: Path, name: str, value: object) -> tuple[str, tuple[int, ...], int, int]:
    """Checks one header entry; offsets are relative to the end of the header."""
    if not isinstance(value, Mapping):
        raise _fault(path, f"the header entry of {name} is not an object")
    dtype, shape, offsets = (value.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _fault(path, f"{name} has the unknown type {dtype!r}")

    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise _fault(path, f"{name} has a malformed shape or data_offsets")
    begin, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        what = f"{name} spans {end - begin} bytes, {dtype} {shape} takes {bits // 8}"
        raise _fault(path, what)
    return dtype, tuple(shape), begin, end


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All tensors of one file by name, with absolute offsets.

    Raises `CheckpointError` (`checkpoint-file-invalid`) when the file is missing, cut, longer than
    declared, no safetensors file, or when tensors overlap, leave holes or share a name.
    """
    raw, size = _header_bytes(path)
    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except _DuplicateKey as error:
        raise _fault(path, f"the header has the key {error.args[0]!r} twice") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise _fault(path, f"the header is not JSON ({reason})") from error
    if not isinstance(table, dict):
        raise _fault(path, "the header is not a JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _fault(path, "__metadata__ is not an object")
    entries = {name: _entry(path, name, value) for name, value in table.items()}
    at = 0
    for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if begin != at:
            fault = "overlaps the tensor before it" if begin < at else "leaves a hole before it"
            raise _fault(path, f"{name} {fault} (starts at {begin}, expected {at})")
        at = end
    data = 8 + len(raw)
    declared = data + at
    if declared > size:
        raise _fault(path, f"cut short: {declared} bytes declared, the file has {size}")
    if declared < size:
        what = f"{size - declared} bytes too many: {declared} bytes declared, the file has {size}"
        raise _fault(path, what)
    return {
        name: StoredTensor(path, dtype, shape, data + begin, data + end)
        for name, (dtype, shape, begin, end) in entries.items()
    }


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The length field and JSON header for tensors (type, shape) that follow in this order.

    Padded with spaces so that the data start at a multiple of 8, as the format asks.
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * BITS[dtype] // 8
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw
