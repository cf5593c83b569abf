"""Formats, scale grids, leftovers and the tied head: DI-11, DI-12, DI-15, DI-16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.checkpoint.load import load_weights, scale_bytes
from deepinfer.checkpoint.synth import write_checkpoint
from deepinfer.errors import CheckpointError
from deepinfer.quant import codec
from deepinfer.quant.formats import Packed
from tests import t6

SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return t6.write(tmp_path_factory.mktemp("plain") / "t6", shards=1)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return t6.write(tmp_path_factory.mktemp("packed") / "t6", shards=1, quantised=True)


def edited(original: Path, target: Path, change, **config) -> Path:
    """A copy of a one-file folder with other tensors, and other top-level or text keys."""
    shutil.copytree(original, target)
    tensors = load_file(original / SINGLE)
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, target / SINGLE)
    data = json.loads((target / "config.json").read_text())
    for key, value in config.items():
        (data["text_config"] if key in data["text_config"] else data)[key] = value
    (target / "config.json").write_text(json.dumps(data))
    return target


def refused(folder) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    return caught.value


def nothing(_):
    pass


# -- DI-11: nibbles, scale bytes, and a config that lies -------------------------------------------


def packed_of(data: list[int], scale: int) -> Packed:
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, : len(data)] = torch.tensor(data, dtype=torch.uint8)
    return Packed(codes, torch.tensor([[scale]], dtype=torch.uint8), (1, 32), "fp4")


def test_di11_low_nibble_first_and_scale_bytes_as_powers():
    got = codec.unpack(packed_of([0x21, 0x9A, 0x7F], 120), torch.float32)[0, :6]
    expected = [0.00390625, 0.0078125, -0.0078125, -0.00390625, -0.046875, 0.046875]
    assert got.tolist() == expected


@pytest.mark.parametrize("byte, value", [(0, 2.0**-127), (120, 0.0078125), (254, 2.0**127)])
def test_di11_byte_means_a_power_of_two_and_float32_scales_come_back(byte, value):
    scale = torch.tensor([byte], dtype=torch.uint8)
    assert codec.scale_from_bytes(scale).double().item() == value
    assert scale_bytes(torch.tensor([value], dtype=torch.float32)).tolist() == [byte]


@pytest.mark.parametrize("value", [120.0, 0.0, -1.0, 3.0, float("inf"), float("nan"), 2.0**-128])
def test_float32_scale_that_is_no_power_of_two_is_refused(value):
    with pytest.raises(CheckpointError, match="some.scale holds"):
        scale_bytes(torch.tensor([1.0, value], dtype=torch.float32), "some.scale")


def test_every_float32_scale_of_a_byte_returns_the_byte():
    bytes_ = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(scale_bytes(codec.scale_from_bytes(bytes_)), bytes_)


def test_di11_checkpoint_with_float32_scales_loads_the_same(packed, tmp_path):
    def to_float(tensors):
        for name in [n for n in tensors if n.endswith(".scale")]:
            tensors[name] = codec.scale_from_bytes(tensors[name].view(torch.uint8))

    expected, got = (
        load_weights(open_checkpoint(p)) for p in (packed, edited(packed, tmp_path / "x", to_float))
    )
    assert list(got) == list(expected)
    for name, value in expected.items():
        if isinstance(value, Packed):
            assert torch.equal(got[name].scales, value.scales)

    def as_numbers(tensors):  # the byte taken for a value: 120.0 instead of 0.0078125
        name = "layers.0.attn.wkv.scale"
        tensors[name] = tensors[name].view(torch.uint8).float()

    wrong = open_checkpoint(edited(packed, tmp_path / "y", as_numbers))
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wkv\.scale holds"):
        load_weights(wrong)


def test_di11_config_says_fp4_over_fp8_tensors_and_the_reverse(tmp_path):
    fp8 = {**t6.QUANTIZATION, "expert_dtype": "fp8"}
    for name, written, claimed, declares, stores in (
        ("a", fp8, t6.QUANTIZATION, "packed FP4 (I8 [32, 32])", "FP8 (F8_E4M3 [32, 64])"),
        ("b", t6.QUANTIZATION, fp8, "FP8 (F8_E4M3 [32, 64])", "packed FP4 (I8 [32, 32])"),
    ):
        original = t6.write(tmp_path / name, shards=1, quantised=True, quantization_config=written)
        error = refused(
            edited(original, tmp_path / f"{name}2", nothing, quantization_config=claimed)
        )
        assert error.code == "checkpoint-format-mismatch"
        assert error.message.startswith("layers.0.ffn.experts.0.w1.weight: config.json declares ")
        assert f"declares {declares}" in error.message and f"stores {stores}" in error.message


def test_di11_config_without_quantisation_over_packed_tensors_and_the_reverse(
    plain, packed, tmp_path
):
    error = refused(edited(packed, tmp_path / "a", nothing, quantization_config=None))
    assert "layers.0.attn.wq_a.weight" in error.message and "FP8 (F8_E4M3" in error.message
    error = refused(edited(plain, tmp_path / "b", nothing, quantization_config=t6.QUANTIZATION))
    assert error.code == "checkpoint-format-mismatch" and "stores F32" in error.message


def test_bf16_where_float32_is_declared_loads_exactly(packed, tmp_path):
    name = "layers.0.attn.attn_sink"

    def halve(tensors):
        tensors[name] = tensors[name].bfloat16()

    folder = edited(packed, tmp_path / "x", halve)
    got = load_weights(open_checkpoint(folder))[name]
    assert got.dtype == torch.float32
    assert torch.equal(got, load_file(folder / SINGLE)[name].float())

    def lose_bits(tensors):
        tensors["norm.weight"] = tensors["norm.weight"].half()

    error = refused(edited(packed, tmp_path / "y", lose_bits))
    assert "norm.weight: config.json declares BF16" in error.message


def test_scale_byte_255_is_refused(packed, tmp_path):
    def poison(tensors):
        tensors["layers.0.attn.wkv.scale"].view(torch.uint8)[0, 0] = 255

    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wkv\.scale holds the scale byte"):
        load_weights(open_checkpoint(edited(packed, tmp_path / "x", poison)))


# -- DI-12: block scales when the size is not a multiple of the block ------------------------------


def ones(rows: int, cols: int, scales: list[list[float]], block: tuple[int, int]) -> Packed:
    grid = scale_bytes(torch.tensor(scales, dtype=torch.float32))
    return Packed(torch.ones(rows, cols).to(torch.float8_e4m3fn), grid, block, "fp8")


def test_di12a_partial_last_block():
    # Powers of two stand for the six different scales: E8M0 holds nothing else.
    x = codec.unpack(ones(9, 6, [[1, 2], [4, 8], [16, 32]], (4, 4)), torch.float32)
    assert (x[3, 0], x[4, 0], x[8, 5], x[3, 4], x[8, 3]) == (1, 4, 32, 2, 16)


def test_di12b_fused_halves_keep_their_own_grids():
    top = ones(10, 4, [[1], [2], [4]], (4, 4))
    bottom = ones(10, 4, [[8], [16], [32]], (4, 4))
    fused = torch.cat([codec.unpack(half, torch.float32) for half in (top, bottom)])
    assert fused[:, 0].tolist() == [1] * 4 + [2] * 4 + [4] * 2 + [8] * 4 + [16] * 4 + [32] * 2


def test_di12c_grid_of_the_wrong_shape_is_named(packed, tmp_path):
    def shrink(tensors):
        tensors["layers.0.attn.wq_b.scale"] = tensors["layers.0.attn.wq_b.scale"][:2]

    error = refused(edited(packed, tmp_path / "x", shrink))
    assert error.code == "checkpoint-scale-grid"
    assert error.message == "layers.0.attn.wq_b.scale is [2, 1], expected the grid [4, 1]"
    assert error.facts == (
        "layers.0.attn.wq_b.weight is [128, 32] with one scale per block of 32 x 32",
    )


@pytest.mark.parametrize("size", [32, 64, 128])
def test_di12d_the_config_decides_the_block_size(tmp_path, size):
    quantization = {**t6.QUANTIZATION, "weight_block_size": [size, size]}
    folder = t6.write(tmp_path / "t6", quantised=True, quantization_config=quantization)
    value = load_weights(open_checkpoint(folder))["layers.0.attn.wo_b.weight"]
    assert value.shape == (64, 64) and value.block == (size, size)
    assert tuple(value.scales.shape) == (-(-64 // size), -(-64 // size))
    other = {**t6.QUANTIZATION, "weight_block_size": [16, 16]}
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "quantization_config": other}))
    assert refused(folder).code == "checkpoint-scale-grid"


def test_wrong_shape_is_named(plain, tmp_path):
    def cut(tensors):
        tensors["layers.2.attn.wkv.weight"] = tensors["layers.2.attn.wkv.weight"][:31]

    error = refused(edited(plain, tmp_path / "x", cut))
    assert error.code == "checkpoint-shape-mismatch"
    assert error.message == "layers.2.attn.wkv.weight is [31, 64], expected [32, 64]"


# -- DI-15: tensors that nobody consumed, parameters that nobody filled ----------------------------


def test_di15a_half_a_drafter_is_refused(plain, tmp_path):
    def rename(tensors):
        for part in ("w1", "w2", "w3"):
            old = f"mtp.0.ffn.shared_experts.{part}.weight"
            tensors[old.replace("shared_experts", "shared_expert")] = tensors.pop(old)

    error = refused(edited(plain, tmp_path / "x", rename))
    assert error.code == "checkpoint-tensor-missing"
    assert "3 draft parameters are missing" in error.message
    text = str(error)
    for part in ("w1", "w2", "w3"):
        assert f"mtp.0.ffn.shared_experts.{part}.weight" in text
    assert "mtp.0.ffn.shared_expert.w1.weight" in text  # what is there instead
    assert "draft: 71 tensors loaded, 3 unused, 3 missing" in text


def test_di15b_extra_tensor_is_a_warning_with_its_name(plain, tmp_path):
    def add(tensors):
        tensors["foo.bar"] = torch.zeros(3)

    checkpoint = open_checkpoint(edited(plain, tmp_path / "x", add))
    assert [w for w in checkpoint.warnings if "foo.bar" in w] == list(checkpoint.warnings)
    assert len(checkpoint.warnings) == 1
    report = load_weights(checkpoint).report
    assert report.summary() == (
        "target: 226 tensors loaded, 1 unused, 0 missing; draft: 74 tensors loaded, 0 unused,"
        " 0 missing"
    )


def test_di15c_removed_target_tensor_is_named(plain, tmp_path):
    def remove(tensors):
        del tensors["layers.3.attn.compressor.norm.weight"]

    error = refused(edited(plain, tmp_path / "x", remove))
    assert error.message == "layers.3.attn.compressor.norm.weight is missing from the checkpoint"


def test_draft_ties_and_vision_tensors_are_recognised(plain, tmp_path):
    def add(tensors):
        tensors["mtp.0.embed.weight"] = tensors["embed.weight"].clone()
        tensors["mtp.1.head.weight"] = tensors["head.weight"].clone()
        tensors["vision.norm.weight"] = torch.zeros(8)
        tensors["aligner.w1.bias"] = torch.zeros(8)
        tensors["image_start"] = torch.zeros(64)

    checkpoint = open_checkpoint(edited(plain, tmp_path / "x", add))
    assert checkpoint.warnings == ("text only: skipped the vision tower (3 tensors)",)
    assert "0 unused" in checkpoint.coverage.summary()


def test_draft_tensors_without_draft_stages_are_one_warning(plain, tmp_path):
    folder = edited(
        plain, tmp_path / "x", nothing,
        num_nextn_predict_layers=0, compress_ratios=[0, 2, 2, 1, 1, 1],
    )  # fmt: skip
    checkpoint = open_checkpoint(folder)
    assert checkpoint.warnings == ("no draft stages in config.json: skipped 74 draft tensors",)


def test_model_prefix_is_tolerated(plain, tmp_path):
    def prefix(tensors):
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    got = load_weights(open_checkpoint(edited(plain, tmp_path / "x", prefix)))
    expected = load_weights(open_checkpoint(plain))
    assert list(got) == list(expected)
    assert torch.equal(got["layers.5.ffn.experts.w2"], expected["layers.5.ffn.experts.w2"])

    def twice(tensors):
        tensors["model.norm.weight"] = tensors["norm.weight"].clone()

    assert "norm.weight is there twice" in str(refused(edited(plain, tmp_path / "y", twice)))


def test_engram_table_and_scales_must_share_a_file(packed, tmp_path):
    folder = Path(shutil.copytree(packed, tmp_path / "x"))
    tensors = load_file(folder / SINGLE)
    scale = {"layers.1.engram.embed.scale": tensors.pop("layers.1.engram.embed.scale")}
    (folder / SINGLE).unlink()
    save_file(tensors, folder / "a.safetensors")
    save_file(scale, folder / "b.safetensors")
    weight_map = {**dict.fromkeys(tensors, "a.safetensors"), next(iter(scale)): "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert refused(folder).code == "checkpoint-engram-split"


# -- DI-16: tied output head -----------------------------------------------------------------------


def tied(plain: Path, target: Path, head: torch.Tensor | None, tie: bool = True) -> Path:
    def change(tensors):
        if head is None:
            del tensors["head.weight"]
        else:
            tensors["head.weight"] = head.clone()

    return edited(plain, target, change, tie_word_embeddings=tie)


def test_di16_a_and_b_absent_or_equal_head_is_the_embedding(plain, tmp_path):
    embed = load_file(plain / SINGLE)["embed.weight"]
    for name, head in (("absent", None), ("equal", embed)):
        weights = load_weights(open_checkpoint(tied(plain, tmp_path / name, head)))
        assert weights["head.weight"] is weights["embed.weight"]
        assert weights.report.warnings == ()


def test_di16c_different_head_is_kept_with_a_warning(plain, tmp_path):
    head = load_file(plain / SINGLE)["head.weight"]
    weights = load_weights(open_checkpoint(tied(plain, tmp_path / "x", head)))
    assert torch.equal(weights["head.weight"], head)
    assert len(weights.report.warnings) == 1 and "head.weight" in weights.report.warnings[0]


def test_di16d_missing_head_is_named(plain, tmp_path):
    error = refused(tied(plain, tmp_path / "x", None, tie=False))
    assert error.message == "head.weight is missing from the checkpoint"


def test_di16_tied_folder_can_be_written(tmp_path):
    values = t6.tensors()
    del values["head.weight"]
    config = t6.config(tie_word_embeddings=True)
    folder = write_checkpoint(tmp_path / "x", config, values, token_map=t6.token_map()[0])
    weights = load_weights(open_checkpoint(folder))
    assert weights["head.weight"] is weights["embed.weight"]
