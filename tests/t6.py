"""T6: the tiny checkpoint of most tests, built from a seed, with its variants.

`config(**changes)` gives the object of `config.json`, `write(path, **changes)` a complete folder
(two shards, index, byte-level tokenizer, Engram token map). Six layers with a window of 16: 0-2 run
on every token (ratios 0, 2, 2; layer 1 owns the compressed KV), 3-5 are the decoder half (ratio 1;
layer 3 owns it); two draft stages with blocks of 5; float32 unless `quantised=True`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepinfer.model import engram_tables
from deepinfer.model.config import ModelConfig
from deepinfer.tokenizer.token_map import compute_token_map

DELETE = object()  # a change that takes the key out
KEEP = 28  # rows that truncated prefill keeps: window 16 + 2 * (draft block 5 + 1)
PAGE_TOKENS = 4
SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜image｜>",
)
VOCAB_SIZE = len(SPECIAL) + 256
TOP_KEYS = (
    "architectures model_type dtype bos_token_id eos_token_id pad_token_id image_token_id"
    " quantization_config vision_config text_config"
).split()
ENGRAM_KEYS = {
    "engram_layer_ids", "engram_max_ngram_size", "engram_n_heads", "engram_vocab_size",
}  # fmt: skip
QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
TEXT = {
    "model_type": "deepseek_v41_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-20,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "sliding_window": 16,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 4,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 64,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 5,
    "dspark_target_layer_ids": [4, 5],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}


def prompt(length: int, start: int = 1) -> list[int]:
    """Token ids without special ones; another ``start``, another text."""
    return [11 + (start * 13 + at * at * 3) % 256 for at in range(length)]


@functools.cache
def tokenizer_json() -> str:
    """A byte-level BPE with the special tokens first, 256 bytes and no merges."""
    # The usual byte alphabet: printable bytes stand for themselves, the others move above 255.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    moved = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + i) for i, byte in enumerate(moved)})
    vocab = {text: i for i, text in enumerate(SPECIAL)}
    vocab.update({letters[byte]: len(SPECIAL) + byte for byte in range(256)})
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
    }  # fmt: skip
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": i, "content": text, "special": True, **flags}
                for i, text in enumerate(SPECIAL)
            ],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False,
                "continuing_subword_prefix": None, "end_of_word_suffix": None,
                "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": [],
            },
        },
        ensure_ascii=False,
    )  # fmt: skip


@functools.cache
def token_map() -> tuple[tuple[int, ...], int]:
    """The Engram token map of the tokenizer and its number of classes."""
    classes, size = compute_token_map(tokenizer_json())
    return tuple(classes), size


def ids(text: str) -> list[int]:
    """Token ids of a text without special tokens."""
    return [len(SPECIAL) + byte for byte in text.encode()]


def config(
    *, quantised: bool = False, ratio: int = 2, draft: bool = True, **changes: Any
) -> dict[str, Any]:
    """The object of `config.json`. `changes`: keys of the text part or of the top level.

    `quantised`: the official FP8/FP4 format. `ratio`: of layers 1 and 2. `draft=False`: no stages.
    A change to `DELETE` removes the key. `engram_num_embeddings` follows the other Engram keys
    unless it is given.
    """
    top: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16" if quantised else "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 10,
    }
    text: dict[str, Any] = {**TEXT, "engram_compressed_vocab_size": token_map()[1]}
    stages = TEXT["num_nextn_predict_layers"] if draft else 0
    text["num_nextn_predict_layers"] = stages
    text["compress_ratios"] = [0, ratio, ratio, 1, 1, 1] + [0] * stages
    if not draft:
        text = {k: v for k, v in text.items() if not k.startswith("dspark_")}
    if quantised:
        top["quantization_config"] = {**QUANTIZATION}
    for key, value in changes.items():
        part = top if key in TOP_KEYS else text
        if value is DELETE:
            part.pop(key, None)
        else:
            part[key] = value
    if "engram_num_embeddings" not in changes and ENGRAM_KEYS <= set(text):
        tables = engram_tables.primes(_EngramKeys(text))
        text["engram_num_embeddings"] = [sum(map(sum, table)) for table in tables]
    return {**top, "text_config": {**text, **top.pop("text_config", {})}}


class _EngramKeys:
    def __init__(self, text: dict[str, Any]) -> None:
        self.__dict__.update(text)


def model_config(**changes: Any) -> ModelConfig:
    """The parsed configuration of a variant."""
    return ModelConfig.from_dict(config(**changes))


def tensors(seed: int = 6, **changes: Any) -> dict[str, Any]:
    """Float tensors of a variant by parameter name, experts stacked."""
    from deepinfer.checkpoint.synth import random_tensors

    return random_tensors(model_config(**changes), seed)


def write(
    path: Path | str,
    *,
    seed: int = 6,
    shards: int = 2,
    edit: Callable[[dict[str, Any]], None] | None = None,
    tokenizer: bool = True,
    **changes: Any,
) -> Path:
    """Writes a variant to `path` and returns it.

    `edit` may change the float tensors before they are written; `tokenizer=False` leaves
    `tokenizer.json` out; `changes` are those of `config`.
    """
    from deepinfer.checkpoint.synth import write_checkpoint

    values = tensors(seed, **changes)
    if edit is not None:
        edit(values)
    return write_checkpoint(
        path,
        config(**changes),
        values,
        shards=shards,
        tokenizer_json=tokenizer_json() if tokenizer else None,
        token_map=token_map()[0],
    )
