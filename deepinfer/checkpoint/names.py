"""Every tensor of a DeepSeek-V4.1 checkpoint: name, stored shape, stored type, which part owns it.

Comes in: a `ModelConfig`. Goes out: the table of parameters (logical shapes and formats) and the
table of stored tensors that follows from it (model spec §2.2, §2.3). It must not know files, torch,
or what a tensor is used for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from deepinfer.errors import InternalError
from deepinfer.model.config import ModelConfig, VisionConfig

__all__ = [
    "Parameter",
    "TensorSpec",
    "is_draft_tie",
    "is_vision",
    "parameters",
    "stored_specs",
    "tensors",
]

FP4_BLOCK = (1, 32)  # experts: one scale per row and 32 inputs
ENGRAM_BLOCK = (1, 32)  # Engram rows: one scale per 32 channels of the row
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
VISION_PREFIXES = ("vision.", "aligner.")
IMAGE_MARKS = ("image_start", "image_end", "image_newline")


@dataclass(frozen=True)
class Parameter:
    """One parameter as the model sees it.

    `shape` is logical, in elements. `kind`: "plain" (stored as `dtype`), "fp8" or "fp4" (stored as
    codes plus E8M0 scales per `block`). `group`: "target", "draft" or "vision".
    `stack`: (name of the stacked entry, position in it) for the weights of routed experts.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    dtype: str
    group: str
    block: tuple[int, int] | None = None
    stack: tuple[str, int] | None = None

    @property
    def scale_name(self) -> str:
        return self.name.removesuffix(".weight") + ".scale"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """FP4 codes lie two to a byte along the inputs."""
        *lead, cols = self.shape
        return (*lead, cols // 2) if self.kind == "fp4" else self.shape

    @property
    def grid(self) -> tuple[int, int]:
        """Shape of the scales: one per block, the last block of a row or column may be partial."""
        if self.block is None:
            raise InternalError("no-scales", f"{self.name} has no scales")
        rows, cols = self.shape
        return (-(-rows // self.block[0]), -(-cols // self.block[1]))


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as the file holds it; `dtype` in the words of safetensors."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: str
    block: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def is_vision(name: str) -> bool:
    """Whether the tensor belongs to the vision tower, which a text engine skips."""
    return name.startswith(VISION_PREFIXES) or name in IMAGE_MARKS


def is_draft_tie(name: str) -> bool:
    """`mtp.S.embed.weight` and `mtp.S.head.weight`: copies of the global ones in some exports."""
    parts = name.split(".")
    return (
        len(parts) == 4
        and parts[0] == "mtp"
        and parts[1].isdigit()
        and parts[2] in ("embed", "head")
        and parts[3] == "weight"
    )


class _Table:
    """Collects parameters under one prefix, with the formats of one configuration."""

    def __init__(self, config: ModelConfig) -> None:
        self.c = config
        self.plain_dtype = "F32" if config.dtype == "float32" else "BF16"
        self.found: dict[str, Parameter] = {}
        self.group = "target"

    def plain(self, name: str, *shape: int) -> None:
        self._add(Parameter(name, shape, "plain", self.plain_dtype, self.group))

    def fp32(self, name: str, *shape: int) -> None:
        self._add(Parameter(name, shape, "plain", "F32", self.group))

    def dense(self, name: str, rows: int, cols: int, block: tuple[int, int] | None = None) -> None:
        """A linear: FP8 where the configuration quantises, else plain."""
        quant = self.c.quantization
        if quant is None:
            self.plain(f"{name}.weight", rows, cols)
            return
        block = block or quant.weight_block_size
        self._add(Parameter(f"{name}.weight", (rows, cols), "fp8", "F8_E4M3", self.group, block))

    def expert(self, prefix: str, index: int, part: str, rows: int, cols: int) -> None:
        """One matrix of one routed expert: FP4, FP8 or plain."""
        quant = self.c.quantization
        name, stack = f"{prefix}.{index}.{part}.weight", (f"{prefix}.{part}", index)
        shape = (rows, cols)
        if quant is None:
            parameter = Parameter(name, shape, "plain", self.plain_dtype, self.group, None, stack)
        elif quant.expert_dtype == "fp4":
            parameter = Parameter(name, shape, "fp4", "I8", self.group, FP4_BLOCK, stack)
        else:
            block = quant.weight_block_size
            parameter = Parameter(name, shape, "fp8", "F8_E4M3", self.group, block, stack)
        self._add(parameter)

    def _add(self, parameter: Parameter) -> None:
        self.found[parameter.name] = parameter

    # -- the parts of the model, in the order of model spec §2.2 ---------------------------------

    def block(self, p: str, experts: int) -> None:
        """What every layer and every draft stage has."""
        c = self.c
        hidden, mixes = c.hidden_size, c.hc_mult * (2 + c.hc_mult)
        for norm in ("attn_norm", "ffn_norm"):
            self.plain(f"{p}.{norm}.weight", hidden)
        for part in ("attn", "ffn"):
            self.fp32(f"{p}.hc_{part}_fn", mixes, c.hc_mult * hidden)
            self.fp32(f"{p}.hc_{part}_base", mixes)
            self.fp32(f"{p}.hc_{part}_scale", 3)
        width = c.num_attention_heads * c.head_dim
        self.fp32(f"{p}.attn.attn_sink", c.num_attention_heads)
        self.dense(f"{p}.attn.wq_a", c.q_lora_rank, hidden)
        self.plain(f"{p}.attn.q_norm.weight", c.q_lora_rank)
        self.dense(f"{p}.attn.wq_b", width, c.q_lora_rank)
        self.dense(f"{p}.attn.wkv", c.head_dim, hidden)
        self.plain(f"{p}.attn.kv_norm.weight", c.head_dim)
        self.dense(f"{p}.attn.wo_a", c.o_groups * c.o_lora_rank, width // c.o_groups)
        self.dense(f"{p}.attn.wo_b", hidden, c.o_groups * c.o_lora_rank)
        self.plain(f"{p}.ffn.gate.weight", experts, hidden)
        self.fp32(f"{p}.ffn.gate.bias", experts)
        self.fp32(f"{p}.ffn.gate.bias_vl", experts)
        inter = c.moe_intermediate_size
        for part, rows, cols in (
            ("w1", inter, hidden),
            ("w2", hidden, inter),
            ("w3", inter, hidden),
        ):
            for index in range(experts):
                self.expert(f"{p}.ffn.experts", index, part, rows, cols)
            self.dense(f"{p}.ffn.shared_experts.{part}", rows, cols)

    def kv_source(self, p: str, ratio: int) -> None:
        c = self.c
        self.plain(f"{p}.attn.compressor.wkv.weight", c.head_dim, c.hidden_size)
        if ratio != 1:  # a group of one token has nothing to weigh
            self.plain(f"{p}.attn.compressor.wgate.weight", c.head_dim, c.hidden_size)
        self.plain(f"{p}.attn.compressor.norm.weight", c.head_dim)
        self.plain(f"{p}.attn.indexer.wk.weight", c.index_head_dim, c.head_dim)
        self.plain(f"{p}.attn.indexer.k_norm.weight", c.index_head_dim)

    def index_source(self, p: str) -> None:
        c = self.c
        self.dense(f"{p}.attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        self.plain(f"{p}.attn.indexer.weights_proj.weight", c.index_n_heads, c.hidden_size)

    def engram(self, p: str, table: int) -> None:
        c = self.c
        rows = c.engram_num_embeddings[table]
        self.dense(f"{p}.engram.embed", rows, c.engram_head_dim, ENGRAM_BLOCK)
        self.dense(f"{p}.engram.wkv", (c.hc_mult + 1) * c.hidden_size, c.engram_width)
        self.plain(f"{p}.engram.q_weight", c.hc_mult, c.hidden_size)
        self.plain(f"{p}.engram.k_weight", c.hc_mult, c.hidden_size)

    def draft(self) -> None:
        c = self.c
        self.group = "draft"
        last = c.num_nextn_predict_layers - 1
        for stage in range(last + 1):
            self.block(f"mtp.{stage}", c.dspark_n_routed_experts)
        self.dense("mtp.0.main_proj", c.hidden_size, c.hidden_size * len(c.dspark_target_layer_ids))
        self.plain("mtp.0.main_norm.weight", c.hidden_size)
        rank = c.dspark_markov_rank
        self.plain(f"mtp.{last}.norm.weight", c.hidden_size)
        self.plain(f"mtp.{last}.markov_head.embed.weight", c.vocab_size, rank)
        self.plain(f"mtp.{last}.markov_head.head.weight", c.vocab_size, rank)
        self.plain(f"mtp.{last}.confidence_head.proj.weight", 1, c.hidden_size + rank)

    def vision(self, v: VisionConfig) -> None:
        hidden = self.c.hidden_size
        self.group = "vision"
        for mark in IMAGE_MARKS:
            self.plain(mark, hidden)
        width = v.hidden_size
        self.plain("vision.patch_embed.proj.weight", width, 3 * v.patch_size**2)
        self.plain("vision.patch_embed.proj.bias", width)
        for b in range(v.num_hidden_layers):
            p = f"vision.blocks.{b}"
            self.plain(f"{p}.norm1.weight", width)
            self.plain(f"{p}.attn.wqkv.weight", 3 * width, width)
            self.plain(f"{p}.attn.wqkv.bias", 3 * width)
            self.plain(f"{p}.attn.wo.weight", width, width)
            self.plain(f"{p}.attn.wo.bias", width)
            self.plain(f"{p}.norm2.weight", width)
            self.plain(f"{p}.mlp.w1.weight", 2 * v.intermediate_size, width)
            self.plain(f"{p}.mlp.w2.weight", width, v.intermediate_size)
        self.plain("vision.norm.weight", width)
        merged = width * v.downsample_ratio**2
        self.plain("aligner.w1.weight", hidden, merged)
        self.plain("aligner.w1.bias", hidden)
        self.plain("aligner.w2.weight", hidden, hidden)
        self.plain("aligner.w2.bias", hidden)


def parameters(config: ModelConfig, vision: bool = True) -> dict[str, Parameter]:
    """Every parameter by checkpoint name, in model order (model spec §2.2).

    With `tie_word_embeddings` the head is listed too; whether it may be absent is `layout`'s
    business. `vision=False` leaves the vision tower out.
    """
    table = _Table(config)
    table.plain("embed.weight", config.vocab_size, config.hidden_size)
    for layer in config.layers:
        p = f"layers.{layer.index}"
        table.block(p, config.n_routed_experts)
        if layer.owns_kv:
            table.kv_source(p, layer.ratio)
        if layer.owns_index:
            table.index_source(p)
        if layer.engram is not None:
            table.engram(p, layer.engram)
    table.plain("norm.weight", config.hidden_size)
    table.plain("head.weight", config.vocab_size, config.hidden_size)
    if config.num_nextn_predict_layers:
        table.draft()
    if vision and config.vision is not None:
        table.vision(config.vision)
    return table.found


def stored_specs(p: Parameter) -> Iterator[TensorSpec]:
    """What a file holds of one parameter: its values or codes, and the scales of the codes."""
    yield TensorSpec(p.name, p.stored_shape, p.dtype, p.group, p.block)
    if p.block is not None:
        yield TensorSpec(p.scale_name, p.grid, "F8_E8M0", p.group, p.block)


def tensors(config: ModelConfig, vision: bool = True) -> dict[str, TensorSpec]:
    """Every stored tensor by name: the parameters, and the scales of the quantised ones."""
    specs = (s for p in parameters(config, vision).values() for s in stored_specs(p))
    return {spec.name: spec for spec in specs}
