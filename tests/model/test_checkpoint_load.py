"""Loading and writing: golden folders, round trips, memory, random weights."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer.checkpoint import load
from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.checkpoint.load import load_weights
from deepinfer.checkpoint.names import parameters
from deepinfer.checkpoint.synth import random_tensors, write_checkpoint
from deepinfer.errors import CheckpointError, UsageError
from deepinfer.quant import codec
from deepinfer.quant.formats import Packed
from tests import t6

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT.parent / "shared" / "golden"


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.fixture(scope="module", params=["tiny-s", "tiny-k"])
def golden(request):
    if not GOLDEN.is_dir():
        pytest.skip("the golden checkpoints are not beside the checkout")
    checkpoint = open_checkpoint(GOLDEN / request.param / "checkpoint")
    return checkpoint, load_weights(checkpoint)


def test_golden_loads_bit_for_bit(golden):
    checkpoint, weights = golden
    expected = stored(checkpoint.path)
    params = parameters(checkpoint.config)
    assert not checkpoint.warnings
    assert checkpoint.token_map_file is not None and checkpoint.tokenizer_file is None
    for p in params.values():
        value = weights[p.name] if p.stack is None else weights[p.stack[0]][p.stack[1]]
        assert tuple(value.shape) == p.shape
        if isinstance(value, Packed):
            assert torch.equal(raw(value.codes), raw(expected[p.name]))
            assert torch.equal(raw(value.scales), raw(expected[p.scale_name]))
        else:
            assert value.dtype == expected[p.name].dtype
            assert torch.equal(value, expected[p.name])


def test_golden_exports_bit_identically(golden, tmp_path):
    """Packed entries are written as they are: codes and scales of the copy are the original's."""
    checkpoint, weights = golden
    token_map = json.loads(checkpoint.token_map_file.read_text())["token_map"]
    copy = write_checkpoint(
        tmp_path / "copy", checkpoint.config_dict, weights, shards=3, token_map=token_map
    )
    assert open_checkpoint(copy).coverage.summary() == checkpoint.coverage.summary()
    expected, got = stored(checkpoint.path), stored(copy)
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and torch.equal(raw(got[name]), raw(value)), name


def test_golden_values_survive_unpacking_and_packing(golden, tmp_path):
    """Floats in, official format out: every value is equal, and a second time every byte."""
    checkpoint, weights = golden
    token_map = json.loads(checkpoint.token_map_file.read_text())["token_map"]
    floats = {
        name: codec.unpack(value, torch.float32) if isinstance(value, Packed) else value.float()
        for name, value in weights.items()
    }
    folders = [tmp_path / "once", tmp_path / "twice"]
    write_checkpoint(folders[0], checkpoint.config_dict, floats, token_map=token_map)
    once = load_weights(open_checkpoint(folders[0]))
    for name, value in once.items():
        got = codec.unpack(value, torch.float32) if isinstance(value, Packed) else value.float()
        assert torch.equal(got, floats[name]), name
    floats = {
        name: codec.unpack(value, torch.float32) if isinstance(value, Packed) else value.float()
        for name, value in once.items()
    }
    write_checkpoint(folders[1], checkpoint.config_dict, floats, token_map=token_map)
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_float_t6_round_trip_is_exact(tmp_path):
    values = t6.tensors()
    folder = t6.write(tmp_path / "t6")
    weights = load_weights(open_checkpoint(folder))
    assert set(weights) == set(values)
    assert all(torch.equal(weights[name], values[name]) for name in values)
    assert weights["layers.4.ffn.experts.w2"].shape == (4, 64, 32)
    files = [f.name for f in open_checkpoint(folder).files]
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_quantised_t6_entries_have_the_promised_shapes(tmp_path):
    weights = load_weights(open_checkpoint(t6.write(tmp_path / "t6", quantised=True)))
    experts = weights["mtp.1.ffn.experts.w1"]
    assert isinstance(experts, Packed) and experts.kind == "fp4" and experts.block == (1, 32)
    assert experts.codes.shape == (4, 32, 32) and experts.codes.dtype == torch.uint8
    assert experts.scales.shape == (4, 32, 2) and experts.shape == (4, 32, 64)
    dense = weights["layers.1.engram.wkv.weight"]
    assert dense.kind == "fp8" and dense.block == (32, 32) and dense.scales.shape == (10, 6)
    assert dense.codes.dtype == torch.float8_e4m3fn
    assert weights["layers.1.engram.embed.weight"].block == (1, 32)
    assert weights["norm.weight"].dtype == torch.bfloat16
    assert weights["layers.0.hc_attn_fn"].dtype == torch.float32


def test_experts_are_spread_and_engram_tables_lie_together(tmp_path):
    folder = t6.write(tmp_path / "t6", quantised=True)
    tensors = open_checkpoint(folder).tensors
    parts = {tensors[f"layers.2.ffn.experts.0.{w}.weight"].file.name for w in ("w1", "w2", "w3")}
    assert len(parts) == 2
    table, scale = (tensors[f"layers.1.engram.embed.{s}"].file for s in ("weight", "scale"))
    assert table == scale == folder / "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("draft", [True, False])
def test_report_counts_target_and_draft(tmp_path, draft):
    report = load_weights(open_checkpoint(t6.write(tmp_path / "t6")), draft=draft).report
    assert f"draft: {74 if draft else 0} tensors loaded, 0 unused, 0 missing" in report.summary()


MEMORY_CODE = """
import resource, sys
import torch
torch.set_num_threads(1)
from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.checkpoint.load import load_weights
load_weights(open_checkpoint(sys.argv[2]))  # warm: libraries and their buffers
checkpoint = open_checkpoint(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
weights = load_weights(checkpoint)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
shard = max(f.stat().st_size for f in checkpoint.files)
print((after - before) * 1024, weights.report.nbytes, shard)
"""


def test_peak_memory_is_the_weights_and_at_most_one_shard(tmp_path):
    small = t6.write(tmp_path / "small", draft=False)
    big = {"vocab_size": 200_000, "n_routed_experts": 64, "draft": False}
    values = {p.name: torch.zeros(p.shape) for p in parameters(t6.model_config(**big)).values()}
    token_map = [i % 238 for i in range(200_000)]
    folder = write_checkpoint(tmp_path / "big", t6.config(**big), values, 6, token_map=token_map)
    run = subprocess.run(
        [sys.executable, "-c", MEMORY_CODE, folder, small],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    peak, weights, shard = map(int, run.stdout.split())
    assert weights > 90e6 and shard < weights / 2
    assert peak <= weights + shard


def test_random_tensors_are_fast_and_seeded():
    started = time.monotonic()
    config = t6.model_config(n_routed_experts=380)  # about 15 million parameters
    values = random_tensors(config, 3)
    assert sum(v.numel() for v in values.values()) > 12e6
    assert time.monotonic() - started < 10
    again, other = random_tensors(t6.model_config(), 3), random_tensors(t6.model_config(), 4)
    name = "layers.3.attn.wq_b.weight"
    assert torch.equal(values[name], again[name]) and not torch.equal(again[name], other[name])


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_any_number_of_shards_holds_the_same_weights(tmp_path, shards):
    folder = t6.write(tmp_path / "t6", shards=shards, quantised=True)
    assert len(open_checkpoint(folder).files) == shards
    assert (folder / "model.safetensors.index.json").exists() == (shards > 1)
    reference = load_weights(open_checkpoint(t6.write(tmp_path / "one", quantised=True)))
    name = "layers.0.ffn.experts.w3"
    assert torch.equal(load_weights(open_checkpoint(folder))[name].codes, reference[name].codes)


def test_writing_is_atomic(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("deepinfer.checkpoint.synth._write_texts", fail)
    with pytest.raises(OSError, match="disk full"):
        t6.write(tmp_path / "t6")
    assert list(tmp_path.iterdir()) == []


def test_writing_never_overwrites(tmp_path):
    (tmp_path / "t6").mkdir()
    t6.write(tmp_path / "t6")  # an empty folder may be filled
    with pytest.raises(UsageError) as caught:
        t6.write(tmp_path / "t6")
    assert caught.value.code == "output-exists"


def test_writing_refuses_wrong_tensors(tmp_path):
    def write(values, config=None):
        config = config or t6.config()
        return write_checkpoint(tmp_path / "x", config, values, token_map=t6.token_map()[0])

    good = t6.tensors()
    with pytest.raises(ValueError, match=r"norm\.weight was not given"):
        write({k: v for k, v in good.items() if k != "norm.weight"})
    with pytest.raises(ValueError, match="not parameters.*foo"):
        write({**good, "foo": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"norm\.weight has shape \[3\], expected \[64\]"):
        write({**good, "norm.weight": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="index_topk"):
        write(good, t6.config(index_topk=0))
    with pytest.raises(ValueError, match="needs token_map or tokenizer_json"):
        write_checkpoint(tmp_path / "x", t6.config(), good)
    assert list(tmp_path.iterdir()) == []


def test_experts_may_be_given_one_by_one(tmp_path):
    values = t6.tensors()
    for name in [n for n in values if n.endswith("experts.w1")]:
        prefix, part = name.rsplit(".", 1)
        for i, expert in enumerate(values.pop(name)):
            values[f"{prefix}.{i}.{part}.weight"] = expert
    folder = write_checkpoint(tmp_path / "x", t6.config(), values, token_map=t6.token_map()[0])
    got = load_weights(open_checkpoint(folder))["layers.0.ffn.experts.w1"]
    assert torch.equal(got, t6.tensors()["layers.0.ffn.experts.w1"])


def test_the_way_to_a_device_goes_through_a_small_buffer(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "READ_BYTES", 1000)
    checkpoint = open_checkpoint(t6.write(tmp_path / "t6"))
    name = "layers.1.engram.embed.weight"
    stored = checkpoint.tensors[name]
    view = torch.empty(stored.shape)
    with open(stored.file, "rb") as file:
        load._send(file.fileno(), stored, view, name)
    assert torch.equal(view, t6.tensors()[name])
    assert torch.equal(load_weights(checkpoint)[name], view)
