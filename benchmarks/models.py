"""Which model a measurement runs: the embedded checkpoint, or random weights of its sizes.

A folder goes out. Random weights take the byte-level tokenizer of the tests. It must not know what
is measured.
"""

from __future__ import annotations

from pathlib import Path

from deepinfer.engine.assembly import embedded_model
from deepinfer.errors import CheckpointError

LONG = 262_144  # max_position_embeddings of the model for long contexts


def folder(scratch: Path, given: str | None = None) -> tuple[Path, str]:
    """The model's folder and its name in a report; `scratch` takes the random weights.

    `given`: a folder; "random" for random weights where there is an embedded checkpoint too; or
    "long" for such that take contexts of 262,144 tokens.
    """
    if given not in (None, "random", "long"):
        return Path(given), Path(given).name
    if given == "long":
        named = f"random weights of the embedded sizes, {LONG:,} positions"
        return _random(scratch / "long", LONG), named
    if given is None:
        try:
            return embedded_model(), "embedded checkpoint"
        except CheckpointError:
            pass
    return _random(scratch / "random"), "random weights of the embedded sizes"


def random_ids(count: int, vocab: int, seed: int = 0) -> list[int]:
    """Token ids without the special ones."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    return torch.randint(11, vocab, (count,), generator=draw).tolist()


def _random(path: Path, positions: int | None = None) -> Path:
    from deepinfer.checkpoint.synth import random_tensors, write_checkpoint
    from deepinfer.model.config import ModelConfig
    from deepinfer.tokenizer.token_map import compute_token_map
    from examples.train_tiny.configuration import complete
    from tests import t6

    if path.is_dir():
        return path
    classes, count = compute_token_map(t6.tokenizer_json())
    config = complete()
    text = config["text_config"]
    text["max_position_embeddings"] = positions or text["max_position_embeddings"]
    free = text["engram_compressed_vocab_size"] - count  # classes left for ids without text
    rest = (count + at % free for at in range(text["vocab_size"] - len(classes)))
    tensors = random_tensors(ModelConfig.from_dict(config), seed=0)
    # Only bytes win: a greedy answer is text.
    tensors["head.weight"][: len(t6.SPECIAL)] = 0
    tensors["head.weight"][len(classes) :] = 0
    return write_checkpoint(
        path,
        config,
        tensors,
        shards=1,
        tokenizer_json=t6.tokenizer_json(),
        token_map=[*classes, *rest],
    )
