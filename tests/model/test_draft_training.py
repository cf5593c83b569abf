"""The recipe of the draft stages: the backbone's own text, the drafters' passes, their figures.

A small model of the same architecture on the CPU, random weights.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from deepinfer.checkpoint.layout import open_checkpoint  # noqa: E402
from deepinfer.checkpoint.load import load_weights  # noqa: E402
from deepinfer.checkpoint.synth import random_tensors, write_checkpoint  # noqa: E402
from deepinfer.model.draft import Draft  # noqa: E402
from deepinfer.model.transformer import Transformer  # noqa: E402
from deepinfer.ops import registry  # noqa: E402
from examples.train_tiny import (  # noqa: E402
    configuration,
    draft,
    draft_ablation,
    draft_compare,
    draft_parts,
    draft_quality,
)
from examples.train_tiny.frozen import DraftOps, frozen  # noqa: E402
from examples.train_tiny.memory import SequenceMemory  # noqa: E402
from examples.train_tiny.ops import Stored  # noqa: E402
from examples.train_tiny.own_text import StepMemory, Writer  # noqa: E402
from examples.train_tiny.parameters import Parameters  # noqa: E402
from examples.train_tiny.tokenizer import ASSISTANT, EOS  # noqa: E402

SMALL = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 2,
    "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 32,
    "sliding_window": 16, "compress_ratios": [0, 2, 2, 1, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 5], "index_n_heads": 2,
    "index_head_dim": 32, "index_topk": 8, "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 4, "candidate_block_size": 4, "engram_layer_ids": [1],
    "engram_vocab_size": 50, "engram_n_heads": 1, "engram_compressed_vocab_size": 256,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "num_nextn_predict_layers": 2, "dspark_block_size": 5, "dspark_noise_token_id": 5,
    "dspark_target_layer_ids": [4, 5, 6], "dspark_markov_rank": 8, "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}  # fmt: skip
ROWS, LENGTH = 2, 48


class World:
    """A random checkpoint, its frozen backbone, and anchors in two random rows."""

    def __init__(self, folder: Path):
        template = folder / "template.json"
        config = json.loads(configuration.TEMPLATE.read_text())
        config["text_config"].update(SMALL)
        config["image_token_id"] = 250
        template.write_text(json.dumps(config))
        self.config_dict = configuration.complete(None, template)
        self.config = configuration.model_config(self.config_dict, True)
        path = write_checkpoint(
            folder / "model", self.config_dict, random_tensors(self.config),
            token_map=list(range(256)),
        )  # fmt: skip
        self.stored = load_weights(open_checkpoint(path), draft=False)
        self.ops = DraftOps(compiled=False)
        self.model = Transformer(self.config, frozen(self.stored), self.ops)
        self.token_map = torch.arange(256)
        memory = SequenceMemory(self.config, ROWS, LENGTH, self.token_map, self.ops, fused=False)
        self.reader = draft.Reader(self.model, memory)
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(11, 250, (ROWS, LENGTH + 1), generator=generator)

    def anchors(self) -> draft_parts.Anchors:
        hidden, targets = self.reader(self.tokens[:, :-1])
        last = torch.tensor([[0, 3, 14, 15, 16, 42], [1, 2, 20, 30, 33, 40]])
        with torch.no_grad():
            return draft.anchors_in(
                self.model, self.ops, self.tokens, hidden, targets, last, torch.ones_like(last)
            )


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield World(tmp_path_factory.mktemp("draft"))
    torch.set_num_threads(before)


def test_steps_compute_what_whole_rows_compute(world):
    # Without quantisers: with them one flipped bit hides what is looked for.
    config = replace(world.config, quantization=None)
    weights = {
        name: replace(w, quantised=False) if isinstance(w, Stored) else w
        for name, w in frozen(world.stored).items()
    }
    model = Transformer(config, weights, world.ops)
    memory = StepMemory(config, ROWS, LENGTH, world.token_map, world.ops)
    for tokens in (world.tokens.flip(1), world.tokens):  # the first leaves its state behind
        memory.restart()
        steps = []
        with torch.no_grad():
            for t in range(LENGTH if tokens is world.tokens else 20):
                memory.read(tokens[:, t])
                steps.append(model.hidden(tokens[:, t], memory))
                memory.t.add_(1)
    whole = SequenceMemory(config, ROWS, LENGTH, world.token_map, world.ops, fused=False)
    want, _ = draft.Reader(model, whole)(world.tokens[:, :-1])
    error = ((torch.stack(steps, 1) - want).norm(dim=-1) / want.norm(dim=-1)).float()
    # Two orders of the same sums; a few rows flip a choice of experts or entries.
    assert error.median() < 0.01, error  # one hidden entry: 0.05


def test_greedy_text_is_what_steps_choose(world):
    writer = Writer(
        world.model, StepMemory(world.config, ROWS, LENGTH, world.token_map, world.ops), LENGTH
    )
    prompts = np.array([3, 17])
    rows, written = writer.write(
        world.tokens.numpy(), prompts, np.zeros(ROWS, np.float32), until=0.0
    )
    assert written == 17
    hidden, _ = world.reader(torch.from_numpy(rows[:, :-1]))
    with torch.no_grad():
        logits = world.model.logits(hidden.flatten(0, 1)).view(ROWS, LENGTH, -1)
    assert (rows[0, :3] == world.tokens[0, :3].numpy()).all()
    assert (rows[1, :17] == world.tokens[1, :17].numpy()).all()
    chosen = logits[0].gather(-1, torch.from_numpy(rows[0, 1:]).unsqueeze(-1)).squeeze(-1)
    behind = (logits[0].amax(-1) - chosen)[2 : written - 1]
    assert (behind < 0.02).float().mean() > 0.8, behind


def test_training_computes_what_the_draft_network_computes(world, tmp_path):
    p = Parameters(world.config, torch.device("cpu"), quantise=True, group="draft")
    p.initialise(0)
    p.router_bias.normal_(std=0.1)
    p.refresh()
    anchors = world.anchors()
    with torch.no_grad():
        trained = Draft(world.config, p.weights(), world.ops, world.model.embed, world.model.head)
        world.ops.start()
        got, seen = draft_parts.teacher_forced(trained, world.ops, anchors, markov=True)
        sure = draft_parts.raw_confidence(trained, seen)
        tensors = {**world.stored, **Parameters.exported(p.snapshot(), "draft")}
        folder = write_checkpoint(
            tmp_path / "model", world.config_dict, tensors, token_map=list(range(256))
        )
        weights = load_weights(open_checkpoint(folder))
        ops = registry.build("cpu")
        backbone = Transformer(world.config, weights, ops)
        network = Draft(world.config, weights, ops, backbone.embed, backbone.head)
        contexts = network.context(anchors.targets.flatten(0, 1), anchors.positions)
        memory = draft_parts.AnchorMemory(world.config, world.ops, anchors, contexts)
        x, want = network.block(anchors.tokens[:, 0], anchors.last.flatten(), memory)
        for i in range(draft.SLOTS):
            e = network.markov(anchors.tokens[:, i])
            want[:, i] += network.bias(e)
            known = network.confidence(x[:, i], e)
            assert (known - sure[:, i]).abs().median() < 0.05
    error = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.median() < 0.1, error


@pytest.mark.parametrize("name", draft.HEADS)
def test_every_drafter_learns_one_batch(world, name):
    anchors = world.anchors()
    head = draft.Head(name, world.config, world.model, world.ops, torch.device("cpu"), 0)
    head.optimiser.factor.fill_(1.0)
    draft_parts.draft_loss(*head(anchors), anchors)[0].backward()
    silent = {n for n, t in head.p.tensors.items() if not t.grad.abs().sum() > 0}
    assert silent == {n for n in head.p.tensors if name != "dspark" and "markov_head" in n}
    head.p.grad.zero_()
    # A teacher that knows the tokens: twelve blocks can be learnt by heart.
    known = torch.nn.functional.one_hot(anchors.tokens[:, 1:], world.config.vocab_size)
    anchors = replace(anchors, teacher=20.0 * known)
    first = head.learn(anchors)
    for _ in range(12):
        last = head.learn(anchors)
    assert last.mean() > 8 * first.mean(), (first, last)


def test_drafters_are_equal_in_parameters(world):
    sizes = {
        name: draft.Head(
            name, world.config, world.model, world.ops, torch.device("cpu"), 0
        ).p.master.numel()
        for name in draft.HEADS
    }
    assert all(abs(size / sizes["dspark"] - 1) < 0.05 for size in sizes.values()), sizes


def test_a_markov_head_is_made_up_for_by_experts(world):
    config = replace(world.config, dspark_markov_rank=96)
    other = draft_ablation.parallel_config(config)
    assert (config.dspark_n_routed_experts, other.dspark_n_routed_experts) == (4, 8)
    assert other.dspark_markov_rank == 1


def test_the_context_ends_at_the_anchor(world):
    """Later targets change nothing, the window's first does, the one before it does not."""
    anchors = world.anchors()
    head = draft.Head("dspark", world.config, world.model, world.ops, torch.device("cpu"), 0)

    def logits(at: int) -> torch.Tensor:
        targets = anchors.targets.clone()
        targets[0, at] += 3.0
        with torch.no_grad():
            return head(replace(anchors, targets=targets))[0][5]  # row 0, P = 42, window 16

    plain = logits(47)
    assert torch.equal(plain, logits(43))
    assert not torch.equal(plain, logits(42))
    assert not torch.equal(plain, logits(27))
    assert torch.equal(plain, logits(26))


def test_walk_is_what_rejection_sampling_does():
    """Along text from p, min(1, q / p) token by token gives the accepted length of the process."""
    rng = np.random.default_rng(0)
    v, slots, size = 4, 3, 40
    p, q = rng.dirichlet(np.ones(v), v), rng.dirichlet(np.ones(v), v)
    steps, runs = 0, 600
    for _ in range(runs):
        last, made = 0, 0
        while made < size:
            steps += 1
            for _ in range(slots):
                y = rng.choice(v, p=q[last])
                if rng.random() >= min(1.0, p[last, y] / q[last, y]):
                    rest = np.maximum(p[last] - q[last], 0)
                    y, accepted = rng.choice(v, p=rest / rest.sum()), False
                else:
                    accepted = True
                last, made = y, made + 1
                if not accepted:
                    break
            else:
                last, made = rng.choice(v, p=p[last]), made + 1
    want = runs * size / steps  # a last step may commit more than is counted: as in the walk
    texts = []
    for _ in range(400):
        text = [0]
        for _ in range(size + slots):
            text.append(rng.choice(v, p=p[text[-1]]))
        chance = np.minimum(1.0, q[text[:-1], text[1:]] / p[text[:-1], text[1:]])
        texts.append(np.stack([chance[k : k + size] for k in range(slots)], 1))
    got = draft_quality.summary(texts, [size] * len(texts))
    assert abs(got["accepted_length"] / want - 1) < 0.02


def test_walk_of_certain_slots():
    full = np.ones((12, 5))
    assert draft_quality.summary([full], [12])["accepted_length"] == 6.0
    none = np.zeros((12, 5))
    assert draft_quality.summary([none], [12])["accepted_length"] == 1.0
    # Two tokens behind the first take one step, whatever the slots behind them would hold.
    assert draft_quality.walk(full[:2], 2)[0] == 1.0


def test_calibration_finds_the_temperature():
    rng = np.random.default_rng(1)
    logits = [rng.normal(0.5, 2.0, (150, 2)) for _ in range(80)]
    chances = [draft_quality.sigmoid(x / 2.0) for x in logits]
    accepts = [(rng.random(c.shape) < c).astype(float) for c in chances]
    states = draft_quality.States.of(logits, accepts, chances, [150] * 80)
    found = draft_quality.calibration(states, ["a", "b"] * 40)
    assert all(1.9 < t < 2.1 for t in found["temperatures"]), found
    # Products of confidences count what was accepted before them, which was drawn.
    for name, part in (("ece", 20), ("noise", 20), ("survival", 3)):
        pairs = zip(found["ece_raw"], found[name], strict=True)
        assert all(b < a / part for a, b in pairs), (name, found)
    # By the tokens that were drawn, the same confidences are off by what chance makes of them.
    pairs = zip(found["drawn"], found["drawn_noise"], strict=True)
    assert all(0.005 < b < 0.04 and a < 1.6 * b for a, b in pairs), found
    assert set(found["kinds"]) == {"b"}  # every second text is fitted on
    assert all(0.6 < a < 0.95 for a in found["auc"])


def test_an_interval_holds_the_ratio():
    rng = np.random.default_rng(2)
    below = rng.uniform(1, 3, 300)
    low, high = draft_quality.interval(2 * below, below)
    assert low == high == 2.0
    low, high = draft_quality.interval(2 * below * rng.uniform(0.5, 1.5, 300), below)
    assert low < 2.0 < high and 0.05 < high - low < 0.25


def test_a_slot_is_worth_what_its_acceptance_adds():
    """The derivative of the expected accepted length."""
    a = torch.rand(7, 5, dtype=torch.float64, requires_grad=True)
    torch.cumprod(a, 1).sum().backward()
    want = draft_parts.LEAST + a.grad / 5
    got = draft_parts.slot_weights(a)
    assert torch.allclose(got, want / want.sum(1, keepdim=True))
    assert not got.requires_grad


def test_confidence_weights_are_found_again():
    generator = torch.Generator().manual_seed(0)
    seen = torch.randn(4000, 6, generator=generator) * torch.tensor([1.0, 30, 0.1, 2, 1, 1])
    want = torch.tensor([0.5, -0.05, 8.0, 0.0, 1.0, -1.0])
    weight = torch.rand(4000, generator=generator)
    got = draft_parts.fit_confidence(seen, torch.sigmoid(seen @ want), weight)
    assert torch.allclose(got, want, rtol=0.02, atol=0.01), got


def test_stages_are_taken_from_a_checkpoint(world, tmp_path):
    device = torch.device("cpu")
    one = draft.Head("dspark", world.config, world.model, world.ops, device, 0)
    one.p.router_bias.normal_(std=0.1)
    tensors = {**world.stored, **Parameters.exported(one.p.snapshot(), "draft")}
    path = write_checkpoint(
        tmp_path / "model", world.config_dict, tensors, token_map=list(range(256))
    )
    other = draft.Head("dspark", world.config, world.model, world.ops, device, 1)
    other.take(path)
    anchors = world.anchors()
    with torch.no_grad():
        pairs = zip(one(anchors), other(anchors), strict=True)
        assert all(torch.allclose(a, b, atol=0.05) for a, b in pairs)  # float32 leaves: bf16
        other.set_confidence(torch.zeros(64 + 8))
        logits, sure = other(anchors)
    assert not sure.any() and torch.allclose(logits, one(anchors)[0], atol=0.05)


def test_parts_give_each_other_their_texts(tmp_path):
    runs = []
    for part in range(2):
        run = object.__new__(draft.Run)
        run.args = draft.arguments(
            ["--out", str(tmp_path), "--shared", str(tmp_path / "shared"), "--parts", "2"]
            + ["--part", str(part), "--seconds", "1e9"]
        )
        runs.append(run)
    with ThreadPoolExecutor() as pool:
        values = [{"rows": np.full(3, part)} for part in range(2)]
        found = list(pool.map(lambda run, mine: run._exchange("text", mine), runs, values))
    for parts in found:
        assert [p["rows"].tolist() for p in parts] == [[0, 0, 0], [1, 1, 1]]


def test_comparison_of_runs():
    def run(**steps):
        rows = [{"kind": "code", "temperature": 0.0, "tokens": 12} for _ in range(2)]
        return {"texts": [r | {n: s[i] for n, s in steps.items()} for i, r in enumerate(rows)]}

    files = [run(dspark=(2.0, 4.0)), run(dspark=(4.0, 8.0), parallel=(3.0, 3.0))]
    row = draft_compare.table(*draft_compare.gather(files))["greedy code"]
    assert row["accepted_length"] == {"dspark": 4.0, "dspark 1": 2.0, "parallel": 4.0}
    assert row["ratio"]["dspark 1"] == [2.0, 2.0, 2.0]
    assert row["ratio"]["parallel"][0] == 1.0
    files[1]["texts"][0]["tokens"] = 13
    with pytest.raises(ValueError, match="same texts"):
        draft_compare.gather(files)


def test_auc_of_an_order():
    order = np.array([0.1, 0.2, 0.3, 0.4])
    one = np.ones(4)
    assert draft_quality.auc(order, np.array([0.0, 0, 1, 1]), one) == 1.0
    assert draft_quality.auc(order, np.array([1.0, 1, 0, 0]), one) == 0.0
    assert draft_quality.auc(one * 0.5, np.array([0.0, 1, 1, 0]), one) == 0.5


def test_anchors_stand_before_answers():
    a, e, x = ASSISTANT, EOS, 99
    tokens = np.array([[x, a, x, x, e, x, x, a, x, x, x, x, x, x]])
    said = draft.in_answer(tokens)
    assert said.tolist()[0] == [bool(c) for c in (0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1)]
    allowed = draft.may_anchor(said, tokens.shape[1])
    places = np.flatnonzero(allowed[0])
    # P + 2 is said, and P + 6 is still a token of the row.
    assert places.tolist() == [0, 1, 2, 6, 7]


def test_prompts_end_where_answers_start():
    weights = np.full((2, 65), 1.0, np.float32)
    weights[1, :20] = 0.1
    weights[1, 30:33] = 0.1
    prompts, code = draft.cut_prompts(weights, 64, np.random.default_rng(0))
    assert code.tolist() == [True, False]
    assert prompts[1] in (20, 33) and 16 <= prompts[0] < 32
