"""What must hold between the keys of a model configuration (model spec §9).

Comes in: a parsed `ModelConfig`. Goes out: nothing, or a `CheckpointError` that names the key, the
value and what was expected. It must not know files, settings or devices. Limits that belong to
particular kernels (block counts of a multiple of 8, four residual copies, ...) are not limits of
the format: they are left to whoever brings such a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from deepinfer.errors import CheckpointError
from deepinfer.model import engram_tables
from deepinfer.model.config_reader import invalid

if TYPE_CHECKING:
    from deepinfer.model.config import ModelConfig

__all__ = ["check"]


class _Rules:
    def __init__(self, config: ModelConfig, where: str) -> None:
        self.c = config
        self.where = where

    def bad(self, key: str, got: object, expected: str) -> CheckpointError:
        return invalid(self.where, key, got, expected)

    def require(self, holds: bool, key: str, expected: str) -> None:
        if not holds:
            raise self.bad(f"text_config.{key}", getattr(self.c, key), expected)

    def multiple(self, key: str, value: int, of: int, why: str) -> None:
        if value % of:
            raise self.bad(f"text_config.{key}", value, f"a multiple of {of} ({why})")

    def ids(self, key: str) -> None:
        got: tuple[int, ...] = getattr(self.c, key)
        last = self.c.num_hidden_layers - 1
        rising = all(a < b for a, b in zip(got, got[1:], strict=False))
        self.require(rising, key, "layer ids in rising order")
        self.require(all(i <= last for i in got), key, f"layer ids of at most {last}")

    def tokens(self) -> None:
        c = self.c
        named: Iterable[tuple[str, int | None]] = (
            ("bos_token_id", c.bos_token_id),
            ("eos_token_id", c.eos_token_id),
            ("pad_token_id", c.pad_token_id),
            ("image_token_id", c.image_token_id),
        )
        for key, value in named:
            if value is not None and value >= c.vocab_size:
                raise self.bad(key, value, f"a token id below vocab_size {c.vocab_size}")

    def geometry(self) -> None:
        c = self.c
        rope = c.qk_rope_head_dim
        self.multiple("qk_rope_head_dim", rope, 2, "rotary channels are pairs")
        self.require(
            rope <= c.index_head_dim and rope <= c.head_dim,
            "qk_rope_head_dim",
            f"at most head_dim {c.head_dim} and index_head_dim {c.index_head_dim}",
        )
        width = c.num_attention_heads * c.head_dim
        self.require(
            width % c.o_groups == 0,
            "o_groups",
            f"a divisor of num_attention_heads * head_dim = {width}",
        )
        self.require(
            c.num_experts_per_tok <= c.n_routed_experts,
            "num_experts_per_tok",
            f"at most n_routed_experts {c.n_routed_experts}",
        )

    def quantised(self) -> None:
        c = self.c
        if c.quantization is None:
            return
        group = "activations are quantised in groups of 32"
        for key in ("hidden_size", "q_lora_rank", "moe_intermediate_size"):
            self.multiple(key, getattr(c, key), 32, group)
        self.multiple("o_groups * o_lora_rank", c.o_groups * c.o_lora_rank, 32, group)
        per_group = c.num_attention_heads * c.head_dim // c.o_groups
        self.multiple("num_attention_heads * head_dim / o_groups", per_group, 32, group)
        self.multiple("head_dim", c.head_dim, 32, "window entries have one scale per 32 channels")
        self.multiple("index_head_dim", c.index_head_dim, 32, "index keys are FP4 in groups of 32")
        if c.engram_layer_ids:
            self.multiple("engram_head_dim", c.engram_head_dim, 32, "one scale per 32 channels")

    def topology(self) -> None:
        c = self.c
        layers, stages = c.num_hidden_layers, c.num_nextn_predict_layers
        ratios = c.compress_ratios
        self.require(
            len(ratios) == layers + stages,
            "compress_ratios",
            f"{layers} layers + {stages} draft stages = {layers + stages} entries,"
            f" not {len(ratios)}",
        )
        self.require(
            not any(ratios[layers:]), "compress_ratios", f"0 for the last {stages} (draft stages)"
        )
        for key in ("kv_source_layer_ids", "index_source_layer_ids"):
            self.ids(key)
            flat = [i for i in getattr(c, key) if ratios[i] == 0]
            self.require(not flat, key, f"layers with a ratio; layer {flat[:1]} is window only")
        missing = [i for i in c.kv_source_layer_ids if i not in c.index_source_layer_ids]
        self.require(
            not missing, "index_source_layer_ids", f"every KV source in it; {missing} are not"
        )
        start = c.decoder_start
        self.require(
            start is None or start in c.kv_source_layer_ids,
            "kv_source_layer_ids",
            f"the first ratio-1 layer, {start}, in it",
        )
        for layer in range(layers):
            if ratios[layer] == 0:
                continue
            source = max((s for s in c.kv_source_layer_ids if s <= layer), default=None)
            self.require(
                source is not None,
                "kv_source_layer_ids",
                f"a source at or before layer {layer} (ratio {ratios[layer]})",
            )
            assert source is not None, "the rule above has raised"
            self.require(
                ratios[source] == ratios[layer],
                "compress_ratios",
                f"ratio {ratios[source]} at layer {layer}, as at its KV source {source}",
            )

    def candidates(self) -> None:
        c = self.c
        source = c.candidate_source_layer_id
        if source is None:
            return
        self.require(
            source in c.index_source_layer_ids,
            "candidate_source_layer_id",
            f"one of index_source_layer_ids {list(c.index_source_layer_ids)}, null or -1",
        )
        later = [i for i in c.index_source_layer_ids if i > source]
        other = [i for i in later if c.compress_ratios[i] != c.compress_ratios[source]]
        self.require(
            not other,
            "candidate_source_layer_id",
            f"a layer of the same ratio as the index sources after it; {other} differ",
        )
        self.require(
            c.candidate_topk_blocks * c.candidate_block_size >= c.index_topk,
            "candidate_topk_blocks",
            f"at least index_topk {c.index_topk} entries in blocks of {c.candidate_block_size}",
        )

    def engram(self) -> None:
        c = self.c
        self.ids("engram_layer_ids")
        if not c.engram_layer_ids:
            return
        self.require(
            c.engram_pad_token_id < c.vocab_size,
            "engram_pad_token_id",
            f"a token id below vocab_size {c.vocab_size}",
        )
        self.require(
            c.engram_compressed_vocab_size <= c.vocab_size,
            "engram_compressed_vocab_size",
            f"at most vocab_size {c.vocab_size}",
        )
        self.require(c.engram_max_ngram_size >= 2, "engram_max_ngram_size", "at least 2")
        sums = tuple(sum(map(sum, table)) for table in engram_tables.primes(c))
        self.require(
            c.engram_num_embeddings == sums,
            "engram_num_embeddings",
            f"{list(sums)}, the sums of the table primes",
        )

    def draft(self) -> None:
        c = self.c
        if c.num_nextn_predict_layers == 0:
            return
        self.ids("dspark_target_layer_ids")
        self.require(bool(c.dspark_target_layer_ids), "dspark_target_layer_ids", "at least one")
        self.require(
            c.dspark_noise_token_id < c.vocab_size,
            "dspark_noise_token_id",
            f"a token id below vocab_size {c.vocab_size}",
        )
        self.require(
            c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts,
            "dspark_num_experts_per_tok",
            f"at most dspark_n_routed_experts {c.dspark_n_routed_experts}",
        )


def check(config: ModelConfig, where: str) -> None:
    """Raises `CheckpointError` (`config-invalid`) for the first broken rule of model spec §9."""
    rules = _Rules(config, where)
    rules.tokens()
    rules.geometry()
    rules.quantised()
    rules.topology()
    rules.candidates()
    rules.engram()
    rules.draft()
