"""Saved training states: one file on the training machine, or small packed files that travel.

Comes in: `Parameters.snapshot`, momenta and counters. Goes out: files, written whole or not at all,
and the same values back. Packed files hold bfloat16 weights, xz-compressed, each under 15 MiB. It
must not know what the values mean.
"""

from __future__ import annotations

import json
import lzma
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

PART = 12 << 20  # packed bytes in one travelling file, at most (before compression)


def save(path: Path, state: dict) -> None:
    """torch.save, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def pack(folder: Path, tensors: dict[str, torch.Tensor], facts: dict) -> list[Path]:
    """Writes `state.K.xz` and `state.json` (names, shapes, facts); returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("state.*"):
        old.unlink()
    flat = torch.cat([t.detach().reshape(-1).to("cpu", torch.bfloat16) for t in tensors.values()])
    # High bytes (sign and exponent) first: they are what compresses.
    data = flat.view(torch.uint8).numpy().reshape(-1, 2)[:, ::-1].T.tobytes()
    parts = [data[i : i + PART] for i in range(0, len(data), PART)]
    with ThreadPoolExecutor(8) as pool:
        packed = list(pool.map(lambda part: lzma.compress(part, preset=2), parts))
    files = []
    for i, part in enumerate(packed):
        files.append(folder / f"state.{i}.xz")
        files[-1].write_bytes(part)
    shapes = {name: list(t.shape) for name, t in tensors.items()}
    index = folder / "state.json"
    index.write_text(json.dumps({"shapes": shapes, "facts": facts}), encoding="utf-8")
    return [*files, index]


def unpack(folder: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """Tensors and facts of a packed folder."""
    index = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    files = sorted(folder.glob("state.*.xz"), key=lambda f: int(f.name.split(".")[1]))
    data = b"".join(lzma.decompress(f.read_bytes()) for f in files)
    both = np.frombuffer(data, np.uint8).reshape(2, -1)[::-1].T
    flat = torch.from_numpy(np.ascontiguousarray(both)).view(torch.bfloat16).squeeze(-1)
    tensors, at = {}, 0
    for name, shape in index["shapes"].items():
        count = int(np.prod(shape, dtype=np.int64))
        tensors[name] = flat[at : at + count].view(shape).float()
        at += count
    return tensors, index["facts"]


def load(folder: Path) -> dict | None:
    """`state.pt` of the folder, else its packed files, else None."""
    whole = folder / "state.pt"
    if whole.exists():
        return torch.load(whole, map_location="cpu", weights_only=True)
    if (folder / "state.json").exists():
        tensors, facts = unpack(folder)
        return {"tensors": tensors, "facts": facts}
    return None
