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
from deepinfer.model import config_rules, config_sections
from deepinfer.model.config_reader import Reader
from deepinfer.model.config_sections import QuantConfig, RopeScaling, VisionConfig

__all__ = ["LayerSpec", "ModelConfig", "QuantConfig", "RopeScaling", "VisionConfig"]

ARCHITECTURE = "DeepseekV41ForCausalLM"
# Keys that other tools write and that change nothing here (model spec §1.7).
HARMLESS_TOP = ("transformers_version", "_name_or_path")
HARMLESS_TEXT = ("initializer_range", "use_cache")


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
            **config_sections.top_level(top),
            **config_sections.geometry(text),
            **config_sections.topology(text),
            **config_sections.engram(text),
            **config_sections.experts(text),
            **config_sections.draft(text),
        }
        text.finish(HARMLESS_TEXT)
        top.finish(HARMLESS_TOP)
        config = cls(**values)
        config_rules.check(config, where)
        return config

    @cached_property
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
        """One spec per backbone layer, in order."""
        return tuple(self._layer(i) for i in range(self.num_hidden_layers))

    @cached_property
    def stages(self) -> tuple[LayerSpec, ...]:
        """One spec per draft stage, numbered after the layers: ratio 0, nothing shared."""
        first = self.num_hidden_layers
        return tuple(self._layer(first + s) for s in range(self.num_nextn_predict_layers))

    @cached_property
    def cut_obstacles(self) -> tuple[str, ...]:
        """Why the decoder half cannot be run on a tail of the prompt only; empty if it can."""
        start = self.decoder_start
        if start is None:
            return ("no layer has compression ratio 1",)
        if start == 0:
            return ("the boundary layer is the first, so there is no encoder half",)
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
