"""The configuration of the embedded checkpoint, completed from its tokenizer.

Comes in: `config.json` of this folder and the number of classes of the tokenizer's Engram map. Goes
out: the configuration dictionary of the export and the `ModelConfig` that training builds on. It
must not know weights or data.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from deepinfer.model import engram_tables
from deepinfer.model.config import ModelConfig

TEMPLATE = Path(__file__).with_name("config.json")


def complete(classes: int | None = None, template: Path = TEMPLATE) -> dict:
    """config.json with the size of the compressed vocabulary and the tables' row counts."""
    config = json.loads(template.read_text(encoding="utf-8"))
    text = config["text_config"]
    if classes is not None:
        text["engram_compressed_vocab_size"] = classes
    sizes = SimpleNamespace(**{k: v for k, v in text.items() if k.startswith("engram_")})
    text["engram_num_embeddings"] = [
        sum(sum(heads) for heads in table) for table in engram_tables.primes(sizes)
    ]
    return config


def model_config(config: dict, quantised: bool) -> ModelConfig:
    """The parsed configuration; without ``quantised`` no quantiser is in the model."""
    if not quantised:
        config = {k: v for k, v in config.items() if k != "quantization_config"}
    return ModelConfig.from_dict(config)
