"""Which model a measurement runs: the embedded checkpoint, or random weights of its sizes.

A folder goes out. Random weights take the byte-level tokenizer of the tests. It must not know what
is measured.
"""

from __future__ import annotations

from pathlib import Path

from deepinfer.engine.assembly import embedded_model
from deepinfer.errors import CheckpointError


def folder(scratch: Path, given: str | None = None) -> tuple[Path, str]:
    """The model's folder and its name in a report; `scratch` takes the random weights.

    `given`: a folder, or "random" for random weights where there is an embedded checkpoint too.
    """
    if given not in (None, "random"):
        return Path(given), Path(given).name
    if given is None:
        try:
            return embedded_model(), "embedded checkpoint"
        except CheckpointError:
            pass
    return _random(scratch / "random"), "random weights of the embedded sizes"


def _random(path: Path) -> Path:
    from deepinfer.checkpoint.synth import random_tensors, write_checkpoint
    from deepinfer.model.config import ModelConfig
    from deepinfer.tokenizer.token_map import compute_token_map
    from examples.train_tiny.configuration import complete
    from tests import t6

    classes, count = compute_token_map(t6.tokenizer_json())
    config = complete()
    text = config["text_config"]
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
