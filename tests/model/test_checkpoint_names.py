"""The tensor table against the published totals (model spec §2.2)."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from deepinfer.checkpoint.header import encode_header, read_header
from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.checkpoint.names import is_draft_tie, is_vision, parameters, tensors
from deepinfer.model.config import ModelConfig
from tests import t6

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT.parent / "shared" / "golden"
needs_golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="the golden checkpoints are not beside the checkout"
)
LAYER, STAGE = r"layers\.\d+\.", r"mtp\.\d+\."
TOTALS = {
    "routed experts": (LAYER + r"ffn\.experts\.", 288_777_830_400),
    "Engram": (LAYER + r"engram\.", 203_073_076_240),
    "attention": (LAYER + r"attn\.(?!compressor|indexer)", 5_069_721_600),
    "compressor and indexer": (LAYER + r"attn\.(compressor|indexer)\.", 81_835_008),
    "shared experts": (LAYER + r"ffn\.shared_experts\.", 1_416_960_000),
    "routers": (LAYER + r"ffn\.gate\.", 157_409_280),
    "hc": (r".*\.hc_", 169_092_168),
    "draft, dense": (STAGE + r"(?!ffn\.(experts|shared_experts|gate)\.|hc_)", 591_424_512),
    "draft, experts": (STAGE + r"ffn\.experts\.", 7_219_445_760),
    "draft, shared": (STAGE + r"ffn\.shared_experts\.", 106_272_000),
    "draft, routers": (STAGE + r"ffn\.gate\.", 3_935_232),
    "vision": (r"(vision|aligner)\.", 970_506_240),
    "one routed expert": (r"layers\.7\.ffn\.experts\.383\.", 18_800_640),
}


@pytest.fixture(scope="module")
def published():
    text = (ROOT / "deepinfer/embedded/v41-flash.json").read_text()
    return tensors(ModelConfig.from_dict(json.loads(text)))


def test_published_count_and_total_size(published):
    assert len(published) == 96_085
    assert sum(spec.nbytes for spec in published.values()) == 510_286_023_000
    assert len([n for n in published if re.match("vision|aligner", n)]) == 263


@pytest.mark.parametrize("part", TOTALS)
def test_published_bytes_of_every_subsystem(published, part):
    pattern, total = TOTALS[part]
    assert sum(s.nbytes for n, s in published.items() if re.match(pattern, n)) == total


@needs_golden
@pytest.mark.parametrize("name", ["tiny-s", "tiny-k"])
def test_golden_folders_hold_exactly_this_table(name):
    folder = GOLDEN / name / "checkpoint"
    specs = tensors(ModelConfig.from_dict(json.loads((folder / "config.json").read_text())))
    held = {}
    for file in folder.glob("*.safetensors"):
        held |= read_header(file)
    assert {n: (t.dtype, t.shape) for n, t in held.items()} == {
        n: (s.dtype, s.shape) for n, s in specs.items()
    }


def test_where_the_optional_tensors_are():
    names = set(parameters(t6.model_config()))
    assert "layers.1.attn.compressor.wgate.weight" in names
    assert "layers.3.attn.compressor.wgate.weight" not in names  # ratio 1 pools nothing
    assert "layers.5.attn.indexer.wq_b.weight" in names
    assert "layers.5.attn.indexer.wk.weight" not in names  # keys belong to the KV source
    assert "mtp.0.main_proj.weight" in names and "mtp.1.main_proj.weight" not in names
    assert "mtp.1.norm.weight" in names and "mtp.0.norm.weight" not in names
    assert not [n for n in parameters(t6.model_config(draft=False)) if n.startswith("mtp")]


def test_formats_follow_the_configuration():
    plain = tensors(t6.model_config())
    assert {s.dtype for s in plain.values()} == {"F32"}
    half = tensors(t6.model_config(dtype="bfloat16"))
    assert half["layers.0.attn.wkv.weight"].dtype == "BF16"
    assert half["layers.0.hc_attn_fn"].dtype == "F32"
    fp8 = {**t6.QUANTIZATION, "expert_dtype": "fp8", "weight_block_size": [64, 64]}
    specs = tensors(t6.model_config(quantised=True, quantization_config=fp8))
    expert = "layers.0.ffn.experts.3.w2"
    assert (specs[f"{expert}.weight"].dtype, specs[f"{expert}.weight"].shape) == (
        "F8_E4M3",
        (64, 32),
    )
    assert specs[f"{expert}.scale"].shape == (1, 1)
    assert specs["layers.1.engram.embed.scale"].shape[1] == 1  # rows keep their own 1 x 32 blocks


def test_names_that_are_recognised_and_skipped():
    assert is_vision("vision.blocks.3.attn.wqkv.bias") and is_vision("image_newline")
    assert is_draft_tie("mtp.0.embed.weight") and is_draft_tie("mtp.2.head.weight")
    assert not is_draft_tie("mtp.1.markov_head.embed.weight") and not is_vision("embed.weight")


def test_a_folder_of_published_size_opens(published, tmp_path):
    """All 96,085 names in 48 files of 510 GB, sparse: the whole layout is checked, nothing read."""
    files: dict[str, list[str]] = {f"model-{i:05d}-of-00048.safetensors": [] for i in range(1, 49)}
    order = list(files)
    for i, name in enumerate(published):
        table = "engram.embed" in name
        files[order[46 + name.startswith("layers.14.")] if table else order[i % 46]].append(name)
    for file, names in files.items():
        header = encode_header({n: (published[n].dtype, published[n].shape) for n in names})
        with open(tmp_path / file, "wb") as out:
            out.write(header)
            out.truncate(len(header) + sum(published[n].nbytes for n in names))
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": 510_286_023_000}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(ROOT / "deepinfer/embedded/v41-flash.json", tmp_path / "config.json")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.warnings == ("text only: skipped the vision tower (266 tensors)",)
    assert "0 unused, 0 missing; draft: 2401 tensors loaded" in checkpoint.coverage.summary()
