"""The parts of `config.json`, read one by one into plain values (model spec §1).

Comes in: readers over the top level and over `text_config`. Goes out: fields of `ModelConfig` under
the names of the file, each of the right type; optional keys get their defaults. It must not know
the rules between keys, nor what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepinfer.model.config_reader import Reader

__all__ = [
    "QuantConfig",
    "RopeScaling",
    "VisionConfig",
    "draft",
    "engram",
    "experts",
    "geometry",
    "top_level",
    "topology",
]


@dataclass(frozen=True)
class RopeScaling:
    """YaRN of the layers with a compression ratio (model spec §1.3, §3.0)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class QuantConfig:
    """Formats of the stored weights: FP8 in tiles, experts in FP4 or FP8 (model spec §2.3)."""

    weight_block_size: tuple[int, int]
    expert_dtype: str


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision tower: needed to recognise its tensors, which are skipped (§2.2)."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int


def top_level(top: Reader) -> dict[str, Any]:
    image = top.raw("image_token_id", None)
    quant = top.section("quantization_config", None)
    vision = top.section("vision_config", None)
    return {
        "dtype": top.choice("dtype", ("bfloat16", "float32")),
        "bos_token_id": top.integer("bos_token_id", minimum=0),
        "eos_token_id": top.integer("eos_token_id", minimum=0),
        "pad_token_id": top.integer("pad_token_id", minimum=0),
        "image_token_id": None if image is None else top.integer("image_token_id", minimum=0),
        "quantization": None if quant is None else _quantization(quant),
        "vision": None if vision is None else _vision(vision),
    }


def _quantization(quant: Reader) -> QuantConfig:
    quant.fixed("quant_method", "fp8")
    quant.fixed("activation_scheme", "dynamic", "dynamic")
    quant.fixed("scale_fmt", "ue8m0")
    block = quant.integers("weight_block_size")
    if len(block) != 2 or min(block) < 1:
        raise quant.error("weight_block_size", "two whole numbers of at least 1, rows and columns")
    expert = quant.choice("expert_dtype", ("fp4", "fp8"))
    quant.finish()
    return QuantConfig((block[0], block[1]), expert)


def _vision(vision: Reader) -> VisionConfig | None:
    for key in ("model_type", "num_attention_heads", "rope_theta", "max_image_tokens"):
        vision.raw(key, None)
    vision.raw("min_pixels", None)
    vision.raw("max_wh_ratio", None)
    layers = vision.integer("num_hidden_layers", minimum=0)
    if layers == 0:
        return None
    parsed = VisionConfig(
        num_hidden_layers=layers,
        hidden_size=vision.integer("hidden_size"),
        intermediate_size=vision.integer("intermediate_size"),
        patch_size=vision.integer("patch_size"),
        downsample_ratio=vision.integer("downsample_ratio"),
    )
    vision.finish()
    return parsed


def geometry(text: Reader) -> dict[str, Any]:
    text.fixed("model_type", "deepseek_v41_text")
    text.fixed("num_key_value_heads", 1)
    text.fixed("hidden_act", "silu")
    text.fixed("attention_bias", False)
    text.fixed("attention_dropout", 0)
    text.fixed("q_head_norm", False, False)
    whole = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim"
        " q_lora_rank o_groups o_lora_rank max_position_embeddings"
    )
    scaling = text.section("rope_scaling") if text.raw("rope_scaling") is not None else None
    return {
        **{key: text.integer(key) for key in whole.split()},
        "rms_norm_eps": text.number("rms_norm_eps"),
        "swiglu_limit": text.number("swiglu_limit"),
        "tie_word_embeddings": text.boolean("tie_word_embeddings"),
        "rope_theta": text.number("rope_theta", minimum=1.0),
        "compress_rope_theta": text.number("compress_rope_theta", minimum=1.0),
        "rope_scaling": None if scaling is None else _rope_scaling(scaling),
    }


def _rope_scaling(scaling: Reader) -> RopeScaling:
    scaling.fixed("rope_type", "yarn")
    parsed = RopeScaling(
        factor=scaling.number("factor", minimum=1.0),
        beta_fast=scaling.number("beta_fast"),
        beta_slow=scaling.number("beta_slow"),
        original_max_position_embeddings=scaling.integer("original_max_position_embeddings"),
    )
    scaling.finish()
    return parsed


def topology(text: Reader) -> dict[str, Any]:
    text.fixed("use_fp4_sparse_kv", True, True)
    text.fixed("tokenizer_compatibility", "release", "release")
    text.boolean("swa_bounded_replay", True)
    source = text.raw("candidate_source_layer_id", None)
    off = source is None or source == -1
    kv_sources = text.integers("kv_source_layer_ids")
    if text.integers("index_k_source_layer_ids", kv_sources) != kv_sources:
        raise text.error("index_k_source_layer_ids", f"kv_source_layer_ids {list(kv_sources)}")
    blocks = {"candidate_topk_blocks": 0, "candidate_block_size": 0}
    for key in blocks:
        given = text.raw(key, 0 if off else None)
        blocks[key] = 0 if off and given in (0, None) else text.integer(key)
    return {
        "sliding_window": text.integer("sliding_window"),
        "compress_ratios": text.integers("compress_ratios"),
        "kv_source_layer_ids": kv_sources,
        "index_source_layer_ids": text.integers("index_source_layer_ids"),
        "index_n_heads": text.integer("index_n_heads"),
        "index_head_dim": text.integer("index_head_dim"),
        "index_topk": text.integer("index_topk"),
        "candidate_source_layer_id": None
        if off
        else text.integer("candidate_source_layer_id", minimum=0),
        **blocks,
    }


def engram(text: Reader) -> dict[str, Any]:
    layers = text.integers("engram_layer_ids", ())
    sizes = (
        "engram_max_ngram_size engram_vocab_size engram_n_heads engram_head_dim"
        " engram_compressed_vocab_size"
    ).split()
    if not layers:
        for key in (*sizes, "engram_pad_token_id", "engram_num_embeddings"):
            text.raw(key, None)
        empty = dict.fromkeys((*sizes, "engram_pad_token_id"), 0)
        return {"engram_layer_ids": (), "engram_num_embeddings": (), **empty}
    return {
        "engram_layer_ids": layers,
        "engram_num_embeddings": text.integers("engram_num_embeddings"),
        "engram_pad_token_id": text.integer("engram_pad_token_id", minimum=0),
        **{key: text.integer(key) for key in sizes},
    }


def experts(text: Reader) -> dict[str, Any]:
    text.fixed("topk_method", "noaux_tc")
    text.fixed("hc_shifted", True, True)
    text.fixed("hc_pre_from_prev_sublayer", True, True)
    return {
        "hc_mult": text.integer("hc_mult"),
        "hc_sinkhorn_iters": text.integer("hc_sinkhorn_iters"),
        "hc_eps": text.number("hc_eps"),
        "n_routed_experts": text.integer("n_routed_experts"),
        "n_shared_experts": text.fixed("n_shared_experts", 1),
        "num_experts_per_tok": text.integer("num_experts_per_tok"),
        "moe_intermediate_size": text.integer("moe_intermediate_size"),
        "scoring_func": text.fixed("scoring_func", "sqrtsoftplus"),
        "norm_topk_prob": text.fixed("norm_topk_prob", True),
        "routed_scaling_factor": text.number("routed_scaling_factor"),
        "gate_temp": text.number("gate_temp", 1.0, minimum=1e-6),
    }


def draft(text: Reader) -> dict[str, Any]:
    text.fixed("dspark_target_attn_input", True, True)
    stages = text.integer("num_nextn_predict_layers", 0, minimum=0)
    sizes = (
        "dspark_block_size dspark_markov_rank dspark_n_routed_experts dspark_num_experts_per_tok"
    ).split()
    if stages == 0:
        # A checkpoint without draft stages may leave its keys out, empty or as they were.
        for key in (*sizes, "dspark_noise_token_id", "dspark_target_layer_ids"):
            text.raw(key, None)
        empty = dict.fromkeys((*sizes, "dspark_noise_token_id"), 0)
        return {"num_nextn_predict_layers": 0, "dspark_target_layer_ids": (), **empty}
    return {
        "num_nextn_predict_layers": stages,
        "dspark_noise_token_id": text.integer("dspark_noise_token_id", minimum=0),
        "dspark_target_layer_ids": text.integers("dspark_target_layer_ids"),
        **{key: text.integer(key) for key in sizes},
    }
