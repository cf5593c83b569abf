"""Writes a trained state as a checkpoint folder in the official format.

Comes in: a state folder, the data folder with tokenizer and token map. Goes out: a folder that
`deepinfer` runs. Weights trained with quantisers in the loop come out unchanged, because the
formats are idempotent. It must not know training.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from deepinfer.checkpoint.synth import write_checkpoint  # noqa: E402
from examples.train_tiny import configuration, state, streams  # noqa: E402
from examples.train_tiny.parameters import Parameters  # noqa: E402


def export(folder: Path, target: Path, data: Path, template: Path) -> Path:
    """Writes the checkpoint of the state in ``folder`` to ``target`` (which must not exist)."""
    token_map = json.loads((data / "engram_token_map.json").read_text(encoding="utf-8"))
    config = configuration.complete(max(token_map) + 1, template)
    saved = state.load(folder)
    if saved is None:
        raise SystemExit(f"no state in {folder}")
    tokenizer = (data / "tokenizer.json").read_text(encoding="utf-8")
    tensors = Parameters.exported(saved["tensors"])
    return write_checkpoint(
        target, config, tensors, tokenizer_json=tokenizer, token_map=token_map
    )


def main(argv: list[str] | None = None) -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    a.add_argument("--state", type=Path, required=True)
    a.add_argument("--to", type=Path, required=True)
    a.add_argument("--data", type=Path, default=streams.WORK)
    a.add_argument("--template", type=Path, default=configuration.TEMPLATE)
    args = a.parse_args(argv)
    with torch.no_grad():
        folder = export(args.state, args.to, args.data, args.template)
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
