"""The training recipe: its ops against the reference, gradients, every phase, resume, export.

A small model of the same architecture trains a few steps on random tokens on the CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from deepinfer.checkpoint.layout import open_checkpoint  # noqa: E402
from deepinfer.checkpoint.load import load_weights  # noqa: E402
from deepinfer.checkpoint.synth import write_checkpoint  # noqa: E402
from deepinfer.model.transformer import Transformer  # noqa: E402
from deepinfer.ops import registry  # noqa: E402
from deepinfer.quant import codec  # noqa: E402
from examples.train_tiny import (  # noqa: E402
    attention_core,
    configuration,
    fake_quant,
    optim,
    schedule,
    state,
    train,
)
from examples.train_tiny.losses import cross_entropy  # noqa: E402
from examples.train_tiny.memory import SequenceMemory  # noqa: E402
from examples.train_tiny.ops import TrainingOps  # noqa: E402
from examples.train_tiny.parameters import Parameters  # noqa: E402

SMALL = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 2,
    "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 32,
    "sliding_window": 16, "compress_ratios": [0, 2, 2, 1, 1, 1, 1], "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5], "index_n_heads": 2, "index_head_dim": 32, "index_topk": 8,
    "candidate_source_layer_id": 3, "candidate_topk_blocks": 8, "candidate_block_size": 8,
    "engram_layer_ids": [1], "engram_vocab_size": 50, "engram_n_heads": 1,
    "engram_compressed_vocab_size": 256, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
BATCH, LENGTH = 2, 96


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    config = json.loads(configuration.TEMPLATE.read_text())
    config["text_config"].update(SMALL)
    config["image_token_id"] = 250
    path = tmp_path_factory.mktemp("template") / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def parameters(template) -> Parameters:
    config = configuration.complete(None, template)
    p = Parameters(configuration.model_config(config, True), torch.device("cpu"))
    p.initialise(0)
    # Values that the stored formats hold exactly, but for the norms' and mixes' own types.
    p.router_bias.normal_(std=0.1)
    return p


def forward(p: Parameters, template: Path, quantised: bool, sparse: bool, ops=None, weights=None):
    config = configuration.model_config(configuration.complete(None, template), quantised)
    training = TrainingOps(compiled=False)
    p.quantise = quantised
    p.refresh()
    model = Transformer(config, weights or p.weights(), ops or training)
    memory = SequenceMemory(config, BATCH, LENGTH, torch.arange(256), training, fused=False)
    memory.sparse = sparse
    memory.barriers = torch.tensor([[[LENGTH], [LENGTH]], [[40], [LENGTH]]])
    memory.sampled = torch.arange(20, 60).repeat(BATCH, 1)
    memory.teach = True
    tokens = torch.randint(3, 250, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    memory.start()
    memory.read(tokens)
    return model.forward(tokens.flatten(), memory), memory, tokens


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_training_ops_compute_what_the_reference_computes(
    parameters, template, tmp_path, quantised, sparse
):
    with torch.no_grad():
        got, _, _ = forward(parameters, template, quantised, sparse)
        config = configuration.complete(None, template)
        if not quantised:
            del config["quantization_config"]
        folder = write_checkpoint(
            tmp_path / "model", config, Parameters.exported(parameters.snapshot()),
            token_map=list(range(256)),
        )  # fmt: skip
        weights = load_weights(open_checkpoint(folder))
        reference = registry.build("cpu")
        want, _, _ = forward(parameters, template, quantised, sparse, reference, weights)
    assert torch.isfinite(got.float()).all()
    error = (got.float() - want).norm(dim=-1) / want.norm(dim=-1)
    # The median row: some rows flip a choice of experts or entries. Flipping the last bit of the
    # reference's embeddings moves its own median row by 0.014, by 0.13 with quantisers.
    assert error.median() < (0.14 if quantised else 0.02), error


@pytest.mark.parametrize("quantised", [False, True])
def test_gradients_reach_every_parameter(parameters, template, quantised):
    logits, memory, tokens = forward(parameters, template, quantised, True)
    weights = torch.ones(BATCH * LENGTH)
    loss, nll = cross_entropy(logits, tokens.flatten(), weights)
    assert nll.shape == weights.shape and len(memory.index_losses) == 3
    (loss + sum(memory.index_losses)).backward()
    silent = [n for n, t in parameters.tensors.items() if not t.grad.abs().sum() > 0]
    parameters.grad.zero_()
    assert not silent


def test_indexer_loss_does_not_bend_the_model(parameters, template):
    _, memory, _ = forward(parameters, template, False, True)
    sum(memory.index_losses).backward()
    moved = {n for n, t in parameters.tensors.items() if t.grad.abs().sum() > 0}
    parameters.grad.zero_()
    assert moved and all(".indexer." in name for name in moved)


def test_fake_quantisers_equal_the_codecs():
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 64)
    x[0] = 0.0
    same = torch.equal
    assert same(fake_quant.fp8(x).float(), codec.fp8_values(*codec.fp8_groups(x)))
    assert same(fake_quant.fp4_index(x).float(), codec.fp4_index_values(*codec.fp4_index_groups(x)))
    assert same(fake_quant.fp4_kv(x).float(), codec.fp4_kv_values(*codec.fp4_kv_groups(x)))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0])
    assert same(fake_quant.e2m1(ties), codec.e2m1_values(codec.e2m1_codes(ties)))
    w = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(0))
    for kind, block in (("fp8", (32, 32)), ("fp8", (1, 32)), ("fp4", (1, 32))):
        want = codec.unpack(codec.pack(w, kind, block))
        assert same(fake_quant.weight(w, kind, block), want)
        assert same(fake_quant.weight(want.float(), kind, block), want)


def test_muon_update_is_semi_orthogonal():
    g = torch.randn(3, 96, 32, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(optim.orthogonalise(g).float())
    assert values.min() > 0.5 and values.max() < 1.4


def test_barrier_hides_what_lies_before_it():
    window = attention_core.window_start(10, 4, "cpu")
    cut = attention_core.cut(window, torch.tensor([[10, 10], [5, 8]]))
    assert cut[0].tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6]
    assert cut[1].tolist() == [0, 0, 0, 0, 1, 5, 5, 5, 8, 8]


def test_plan_is_read_and_wrong_ones_are_named():
    plan = schedule.parse_plan("dense@10, tail@20.5")
    assert [(s.name, s.end) for s in plan] == [("dense", 10.0), ("tail", 20.5)]
    for bad in ("dense", "sunny@3", "dense@10,sparse@5"):
        with pytest.raises(ValueError, match="--plan"):
            schedule.parse_plan(bad)


def test_packed_state_comes_back(tmp_path):
    tensors = {"a": torch.randn(3, 5).bfloat16().float(), "b": torch.tensor([1.5])}
    state.pack(tmp_path, tensors, {"steps": 3})
    back, facts = state.unpack(tmp_path)
    assert facts == {"steps": 3} and all(torch.equal(back[n], t) for n, t in tensors.items())


def test_every_phase_trains_resumes_and_exports(tmp_path, template):
    def run(plan: str, folder: Path) -> None:
        train.main([
            "--plan", plan, "--state", str(folder), "--out", str(tmp_path / "out"),
            "--template", str(template), "--synthetic", "--device", "cpu", "--batch", "4",
            "--length", "64", "--steps", "3",
        ])  # fmt: skip

    first = tmp_path / "state"
    run("dense@900,sparse@901", first)
    run("quantised@900,tail@901", first)
    saved = state.load(first)
    names = [s["name"] for s in saved["facts"]["segments"]]
    assert names == ["dense", "sparse", "quantised", "tail"]
    # The files that travel continue too, in bfloat16.
    tensors, facts = state.unpack(tmp_path / "out")
    assert facts["steps"] == saved["facts"]["steps"] > 0
    name = "layers.0.attn.wq_a.weight"
    assert torch.allclose(tensors[name], saved["tensors"][name], rtol=1e-2)
    run("finish@900", tmp_path / "out")
    config = configuration.complete(None, template)
    exported = Parameters.exported(saved["tensors"])
    folder = write_checkpoint(tmp_path / "m", config, exported, token_map=list(range(256)))
    assert load_weights(open_checkpoint(folder)).report
