"""The strict model configuration of a DeepSeek-V4.1 checkpoint, and what follows from it.

Comes in: the JSON object of `config.json` (the wrapper with `text_config`). Goes out: a frozen
`ModelConfig` whose fields carry the names of the file, with one `LayerSpec` per layer that says who
owns what and who reads whom. It must not know settings, files, tensors or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deepinfer.errors import CheckpointError
from deepinfer.model import config_rules
from deepinfer.model.config_reader import Reader

__all__ = ["LayerSpec", "ModelConfig", "QuantConfig", "RopeScaling", "VisionConfig"]

ARCHITECTURE = "DeepseekV41ForCausalLM"
# Keys that other tools write and that change nothing here (model spec §1.7).
HARMLESS_TOP = ("transformers_version", "_name_or_path")
HARMLESS_TEXT = ("initializer_range", "use_cache")


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


@dataclass(frozen=True)
class LayerSpec:
    """The part of one layer in the cross-layer sharing (model spec §1.4).

    `ratio` 0 is window only. `kv_source` and `index_source` are the nearest sources at or before
    the layer, None where the ratio is 0. `candidate_source` chooses candidate blocks;
    `uses_candidates` marks the later index owners of the same compressed KV, which select inside
    these blocks. `engram` is the index of the layer's Engram table. `target`: its entry stream
    feeds the draft.
    """

    index: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    owns_kv: bool
    owns_index: bool
    candidate_source: bool
    uses_candidates: bool
    engram: int | None
    target: bool


@dataclass(frozen=True)
class ModelConfig:
    """Every key of `config.json` that the text model needs, under its own name (model spec §1)."""

    # top level
    dtype: str
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    quantization: QuantConfig | None
    vision: VisionConfig | None
    # geometry
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    max_position_embeddings: int
    rms_norm_eps: float
    swiglu_limit: float
    tie_word_embeddings: bool
    # rotary
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    # attention topology
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    # residual streams
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    # Engram; all 0 or empty where no layer has one
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    # mixture of experts
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    scoring_func: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    gate_temp: float
    # draft stages; all 0 or empty where num_nextn_predict_layers is 0
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int

    @classmethod
    def from_dict(cls, data: object, where: str = "config.json") -> ModelConfig:
        """Parses the wrapper configuration strictly.

        Raises `CheckpointError`: `architecture-unsupported` for another model, `config-invalid` for
        a missing, unknown or malformed key and for every broken rule of model spec §9.
        """
        top = Reader(data, where)
        _check_architecture(top)
        text = top.section("text_config")
        assert text is not None, "section without a default never gives None"
        values: dict[str, Any] = {
            **_top_level(top),
            **_geometry(text),
            **_topology(text),
            **_engram(text),
            **_experts(text),
            **_draft(text),
        }
        text.finish(HARMLESS_TEXT)
        top.finish(HARMLESS_TOP)
        config = cls(**values)
        config_rules.check(config, where)
        return config

    @property
    def decoder_start(self) -> int | None:
        """First ratio-1 layer: all global KV of the decoder half is a projection of its input."""
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return ratios.index(1) if 1 in ratios else None

    @property
    def quantised(self) -> bool:
        """Whether weights are stored quantised and the activation and KV quantisers run."""
        return self.quantization is not None

    @property
    def engram_columns(self) -> int:
        """Rows looked up per token and table: one per n-gram size and head."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def engram_width(self) -> int:
        """Channels of the concatenated rows, the input of `engram.wkv`."""
        return self.engram_columns * self.engram_head_dim

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """One spec per backbone layer, in order (draft stages are ratio 0 and share nothing)."""
        return tuple(self._layer(i) for i in range(self.num_hidden_layers))

    @cached_property
    def cut_obstacles(self) -> tuple[str, ...]:
        """Why the decoder half cannot be run on a tail of the prompt only; empty if it can."""
        start = self.decoder_start
        if start is None:
            return ("no layer has compression ratio 1",)
        found = [
            f"layer {i} owns compressed KV after the boundary layer {start}"
            for i in self.kv_source_layer_ids
            if i > start
        ]
        found += [
            f"layer {i} of the decoder half (from {start}) has an Engram table"
            for i in self.engram_layer_ids
            if i >= start
        ]
        found += [
            f"draft target layer {i} lies before the boundary layer {start}"
            for i in self.dspark_target_layer_ids
            if i < start
        ]
        return tuple(found)

    def _layer(self, i: int) -> LayerSpec:
        ratio = self.compress_ratios[i]

        def nearest(sources: tuple[int, ...]) -> int | None:
            return max((s for s in sources if s <= i), default=None) if ratio else None

        kv_source = nearest(self.kv_source_layer_ids)
        owns_kv, owns_index = i in self.kv_source_layer_ids, i in self.index_source_layer_ids
        origin = self.candidate_source_layer_id
        limited = False
        if origin is not None and owns_index and not owns_kv and i > origin:
            limited = kv_source == max(s for s in self.kv_source_layer_ids if s <= origin)
        return LayerSpec(
            index=i,
            ratio=ratio,
            kv_source=kv_source,
            index_source=nearest(self.index_source_layer_ids),
            owns_kv=owns_kv,
            owns_index=owns_index,
            candidate_source=i == origin,
            uses_candidates=limited,
            engram=self.engram_layer_ids.index(i) if i in self.engram_layer_ids else None,
            target=i in self.dspark_target_layer_ids,
        )


def _check_architecture(top: Reader) -> None:
    names = top.raw("architectures", None)
    if names == [ARCHITECTURE]:
        top.fixed("model_type", "deepseek_v41")
        return
    if isinstance(names, list) and names:
        shown = ", ".join(str(n) for n in names)
    else:
        shown = f"a model of type {top.raw('model_type', None)!r} without an architecture name"
    raise CheckpointError(
        "architecture-unsupported",
        f"{shown} is not supported",
        facts=[f"supported: DeepSeek-V4.1-Flash ({ARCHITECTURE})"],
    )


def _top_level(top: Reader) -> dict[str, Any]:
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


def _geometry(text: Reader) -> dict[str, Any]:
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


def _topology(text: Reader) -> dict[str, Any]:
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


def _engram(text: Reader) -> dict[str, Any]:
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


def _experts(text: Reader) -> dict[str, Any]:
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


def _draft(text: Reader) -> dict[str, Any]:
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
