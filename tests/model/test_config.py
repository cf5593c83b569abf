"""The strict configuration: what parses, what is refused and in which words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepinfer.errors import CheckpointError
from deepinfer.model import engram_tables
from deepinfer.model.config import LayerSpec, ModelConfig
from tests import t6

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT.parent / "shared" / "golden"
needs_golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="the golden checkpoints are not beside the checkout"
)
REAL = json.loads((ROOT / "deepinfer/embedded/v41-flash.json").read_text())


def refused(**changes) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        t6.model_config(**changes)
    assert caught.value.exit_status == 4
    return caught.value


def test_published_config_gives_the_derived_layer_table():
    config = ModelConfig.from_dict(REAL)
    assert config.decoder_start == 20 and config.cut_obstacles == ()
    assert config.quantization.weight_block_size == (32, 32)
    assert (config.engram_columns, config.engram_width) == (24, 6144)
    assert [layer.kv_source for layer in config.layers] == (
        [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    )
    index = [2] * 6 + [8] * 6 + [14] * 6 + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert [layer.index_source for layer in config.layers] == [None] * 2 + index
    assert [i.index for i in config.layers if i.uses_candidates] == [24, 28, 32, 36]
    assert [i.index for i in config.layers if i.candidate_source] == [20]
    assert [i.index for i in config.layers if i.target] == [37, 38, 39]
    assert [(i.index, i.engram) for i in config.layers if i.engram is not None] == [(1, 0), (14, 1)]
    assert config.layers[20] == LayerSpec(20, 1, 20, 20, True, True, True, False, None, False)


def test_published_config_is_the_specified_one():
    shared = ROOT.parent / "shared/configs/v41-flash.json"
    if not shared.exists():
        pytest.skip("the specification is not beside the checkout")
    assert shared.read_bytes() == (ROOT / "deepinfer/embedded/v41-flash.json").read_bytes()


@needs_golden
@pytest.mark.parametrize("name", ["tiny-s", "tiny-k"])
def test_golden_configs_parse(name):
    config = ModelConfig.from_dict(
        json.loads((GOLDEN / name / "checkpoint/config.json").read_text())
    )
    assert config.cut_obstacles == () and config.vision is None and config.gate_temp == 1.0


def test_published_engram_tables():
    config = ModelConfig.from_dict(REAL)
    offsets = [[p - 16_000_000 for head in table for p in head] for table in
               engram_tables.primes(config)]  # fmt: skip
    assert offsets[0] == [
        57, 79, 81, 97, 121, 129, 133, 183, 189, 207, 211, 253, 277, 289, 307, 321,
        339, 381, 393, 399, 403, 409, 447, 463,
    ]  # fmt: skip
    assert offsets[1] == [
        477, 487, 499, 507, 511, 573, 609, 627, 667, 669, 693, 697, 711, 729, 759, 769,
        781, 799, 813, 819, 841, 877, 879, 889,
    ]  # fmt: skip
    assert engram_tables.multipliers(config) == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]


def rows(primes, multipliers, mapped: list[int]) -> list[int]:
    """Row ids of the last position, written out from model spec §3.4 for this test only."""
    found, start, r = [], 0, mapped[-1] * multipliers[0]
    for shift in range(1, len(multipliers)):
        r ^= mapped[-1 - shift] * multipliers[shift]
        for prime in primes[shift - 1]:
            found.append(r % prime + start)
            start += prime
    return found


def test_published_engram_rows():
    """Appendix A7 of the model spec: real layer 1, mapped ids 0..4, last position."""
    config = ModelConfig.from_dict(REAL)
    got = rows(engram_tables.primes(config)[0], engram_tables.multipliers(config)[0],
               [0, 1, 2, 3, 4])  # fmt: skip
    assert got == [
        4081432, 22739564, 47708662, 55460842, 67090288, 86967211, 104905801, 121139797, 128693894,
        148001538, 164736867, 188458757, 192873497, 211081792, 230394918, 248972548, 265266597,
        283771525, 291345208, 319132777, 321657476, 349445207, 365432170, 375533094,
    ]  # fmt: skip


@needs_golden
def test_tiny_engram_rows():
    """Appendix A8 of the model spec: tiny-S sizes, identity map."""
    config = ModelConfig.from_dict(
        json.loads((GOLDEN / "tiny-s/checkpoint/config.json").read_text())
    )
    primes, factors = engram_tables.primes(config), engram_tables.multipliers(config)
    assert factors[0] == [7415652013100227, 468352540858031, 3479800634247035, 7159719964284203]
    assert factors[1] == [2663772568973983, 7902126496534097, 1052652302374179, 6802602301162199]
    assert rows(primes[0], factors[0], [5, 9, 5, 9]) == [365, 1013, 1581, 1990, 2662, 2911]
    assert rows(primes[1], factors[1], [2, 2, 2, 0]) == [271, 582, 1554, 1925, 2406, 3433]


def test_engram_hash_never_leaves_int64():
    config = ModelConfig.from_dict(REAL)
    largest = max(max(table) for table in engram_tables.multipliers(config))
    assert largest * (config.engram_compressed_vocab_size - 1) < np.iinfo(np.int64).max


def test_t6_is_the_fixture_of_the_case_book():
    config = t6.model_config()
    assert [layer.ratio for layer in config.layers] == [0, 2, 2, 1, 1, 1]
    assert [layer.kv_source for layer in config.layers] == [None, 1, 1, 3, 3, 3]
    assert (config.sliding_window, config.index_topk, config.decoder_start) == (16, 4, 3)
    assert (config.dspark_block_size, config.hc_mult) == (5, 4)
    assert config.sliding_window + 2 * (config.dspark_block_size + 1) == t6.KEEP
    assert config.quantization is None and config.dtype == "float32"
    assert config.cut_obstacles == ()
    assert t6.model_config(quantised=True).quantization.expert_dtype == "fp4"


def test_any_ratio_of_at_least_one_is_allowed():
    assert [layer.ratio for layer in t6.model_config(ratio=4).layers] == [0, 4, 4, 1, 1, 1]
    assert t6.model_config(ratio=1).decoder_start == 1


def test_layouts_that_cannot_be_cut_parse_and_say_why():
    owns = t6.model_config(kv_source_layer_ids=[1, 3, 4], index_source_layer_ids=[1, 3, 4])
    assert "layer 4 owns compressed KV" in owns.cut_obstacles[0]
    assert "layer 4" in t6.model_config(engram_layer_ids=[1, 4]).cut_obstacles[0]
    assert "target layer 2" in t6.model_config(dspark_target_layer_ids=[2, 5]).cut_obstacles[0]


@pytest.mark.parametrize("off", [None, -1, t6.DELETE])
def test_candidates_can_be_off(off):
    config = t6.model_config(candidate_source_layer_id=off)
    assert config.candidate_source_layer_id is None
    assert not any(layer.uses_candidates for layer in config.layers)


def test_a_model_without_drafter_engram_or_yarn():
    config = t6.model_config(draft=False)
    assert config.num_nextn_predict_layers == 0 and config.dspark_target_layer_ids == ()
    kept = t6.model_config(num_nextn_predict_layers=0, compress_ratios=[0, 2, 2, 1, 1, 1])
    assert kept.dspark_block_size == 0  # draft keys may stay where they were
    assert t6.model_config(engram_layer_ids=[]).engram_columns == 0
    assert t6.model_config(rope_scaling=None).rope_scaling is None


def test_optional_keys_and_their_only_values():
    accepted = {
        "index_k_source_layer_ids": [1, 3],
        "hc_shifted": True,
        "hc_pre_from_prev_sublayer": True,
        "q_head_norm": False,
        "dspark_target_attn_input": True,
        "use_fp4_sparse_kv": True,
        "tokenizer_compatibility": "release",
        "swa_bounded_replay": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "gate_temp": 2.0,
    }
    assert t6.model_config(**accepted).gate_temp == 2.0
    for key, value in {
        "index_k_source_layer_ids": [1],
        "hc_shifted": False,
        "q_head_norm": True,
        "use_fp4_sparse_kv": False,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    }.items():
        assert f"`text_config.{key}`" in refused(**{key: value}).message


def test_other_architectures_are_named():
    error = refused(architectures=["DeepseekV3ForCausalLM"])
    assert error.code == "architecture-unsupported"
    assert error.message == "DeepseekV3ForCausalLM is not supported"
    assert error.facts[0].startswith("supported: DeepSeek-V4.1-Flash")
    assert error.hint == ""
    both = ["DeepseekV41ForCausalLM", "DeepseekV3ForCausalLM"]
    assert refused(architectures=both).code == "architecture-unsupported"
    assert refused(architectures=t6.DELETE).code == "architecture-unsupported"
    assert refused(architectures="DeepseekV41ForCausalLM").code == "architecture-unsupported"


def test_unknown_and_missing_keys_are_named():
    error = refused(index_top_k=4)
    assert "`text_config.index_top_k`" in error.message
    assert "did you mean `text_config.index_topk`?" in error.facts
    assert "`text_config.hidden_size` is missing" in refused(hidden_size=t6.DELETE).message
    top = t6.config()
    top["surprise"] = 1
    with pytest.raises(CheckpointError, match="`surprise` is not a key"):
        ModelConfig.from_dict(top)
    with pytest.raises(CheckpointError, match="a JSON object"):
        ModelConfig.from_dict([1])


BAD = [
    ("hidden_size", 0, "at least 1"),
    ("hidden_size", True, "at least 1"),
    ("hidden_size", "64", "at least 1"),
    ("hidden_size", 64.0, "at least 1"),
    ("rms_norm_eps", float("nan"), "finite"),
    ("tie_word_embeddings", 0, "true or false"),
    ("dtype", "float16", '"bfloat16" or "float32"'),
    ("compress_ratios", [0, 2, 2, 1, 1, 1], "6 layers + 2 draft stages = 8 entries, not 6"),
    ("compress_ratios", [0, 2, 2, 1, 1, 1, 0, 1], "0 for the last 2"),
    ("compress_ratios", [0, 2, 4, 1, 1, 1, 0, 0], "ratio 2 at layer 2, as at its KV source 1"),
    ("compress_ratios", [2, 2, 2, 1, 1, 1, 0, 0], "a source at or before layer 0"),
    ("compress_ratios", [0, 2, -2, 1, 1, 1, 0, 0], "at least 0"),
    ("compress_ratios", [0, 2, 1, 1, 1, 1, 0, 0], "the first ratio-1 layer, 2, in it"),
    ("kv_source_layer_ids", [1], "the first ratio-1 layer, 3"),
    ("kv_source_layer_ids", [3, 1], "in rising order"),
    ("kv_source_layer_ids", [1, 3, 6], "at most 5"),
    ("kv_source_layer_ids", [0, 1, 3], "window only"),
    ("index_source_layer_ids", [1, 5], "every KV source in it; [3] are not"),
    ("candidate_source_layer_id", 4, "one of index_source_layer_ids"),
    ("candidate_source_layer_id", 1, "same ratio as the index sources after it"),
    ("candidate_topk_blocks", 0, "at least 1"),
    ("index_topk", 65, "at least index_topk 65 entries"),
    ("qk_rope_head_dim", 15, "a multiple of 2"),
    ("qk_rope_head_dim", 34, "at most head_dim 32 and index_head_dim 32"),
    ("o_groups", 3, "a divisor of num_attention_heads * head_dim = 128"),
    ("num_experts_per_tok", 5, "at most n_routed_experts 4"),
    ("dspark_num_experts_per_tok", 5, "at most dspark_n_routed_experts 4"),
    ("dspark_noise_token_id", 267, "below vocab_size 267"),
    ("dspark_target_layer_ids", [], "at least one"),
    ("dspark_target_layer_ids", [4, 6], "at most 5"),
    ("bos_token_id", 267, "below vocab_size 267"),
    ("engram_layer_ids", [6], "at most 5"),
    ("engram_max_ngram_size", 1, "at least 2"),
    ("engram_num_embeddings", [500], "the sums of the table primes"),
    ("engram_compressed_vocab_size", 268, "at most vocab_size 267"),
]  # fmt: skip


@pytest.mark.parametrize("key, value, expected", BAD, ids=[f"{k}={v}" for k, v, _ in BAD])
def test_every_rule_names_key_got_and_expected(key, value, expected):
    error = refused(**{key: value})
    assert error.code == "config-invalid"
    text = str(error)
    assert expected in text and "got " in text and "config.json" in text


QUANTISED = [
    ("hidden_size", {"hidden_size": 48}),
    ("q_lora_rank", {"q_lora_rank": 40}),
    ("moe_intermediate_size", {"moe_intermediate_size": 40}),
    ("o_groups * o_lora_rank", {"o_lora_rank": 24}),
    ("num_attention_heads * head_dim / o_groups", {"num_attention_heads": 3, "o_groups": 2}),
    ("head_dim", {"head_dim": 48, "num_attention_heads": 4}),
    ("index_head_dim", {"index_head_dim": 48}),
    ("engram_head_dim", {"engram_head_dim": 16}),
]  # fmt: skip


@pytest.mark.parametrize("key, changes", QUANTISED, ids=[k for k, _ in QUANTISED])
def test_quantised_models_need_multiples_of_32(key, changes):
    error = refused(quantised=True, **changes)
    assert f"`text_config.{key}`" in error.message and "a multiple of 32" in str(error)
    t6.model_config(**changes)  # without quantisers the size does not matter


def test_quantization_config_is_checked():
    for changes in (
        {"quant_method": "awq"},
        {"scale_fmt": "float32"},
        {"weight_block_size": [32]},
        {"weight_block_size": [0, 32]},
        {"expert_dtype": "int4"},
        {"bits": 8},
    ):
        given = {**t6.QUANTIZATION, **changes}
        error = refused(quantised=True, quantization_config=given)
        assert f"quantization_config.{next(iter(changes))}" in error.message


def test_the_configuration_needs_no_torch():
    code = (
        "import sys, deepinfer.model.config, deepinfer.model.engram_tables,"
        " deepinfer.checkpoint.layout; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
