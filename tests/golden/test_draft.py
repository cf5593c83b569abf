"""The draft stages against the golden data: contexts, stages alone, logits, heads, greedy runs.

The contexts come from the engine's own prefill and the rings that it fills; the limits are those of
the golden README, its deliberate mistakes included.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.core.step import Chunk, StepPlan
from deepinfer.kvcache.draft import RingContext
from deepinfer.model import block as block_room
from deepinfer.model import draft as draft_room
from deepinfer.model import transformer as transformer_room
from deepinfer.model.draft import Draft
from deepinfer.model.transformer import Transformer
from tests import golden
from tests.golden import CHECKPOINTS, needs_golden
from tests.golden.layers import rms

pytestmark = needs_golden
PAGES = 6
ROLLBACK = 5


def pages(slot):
    return tuple(range(slot * PAGES, (slot + 1) * PAGES))


def prefilled(name, prompts):
    """(runner, last logits row of each prompt), prompt s in slot s."""
    runner = golden.runner(name, rollback=ROLLBACK)
    chunks = [Chunk(s, 0, tuple(ids), pages(s), 1) for s, ids in enumerate(prompts)]
    return runner, runner.forward(StepPlan(tuple(chunks)))


def drafted(runner, requests):
    """The block of (slot, anchor, last) requests."""
    slots, anchors, last = torch.tensor(requests).unbind(1)
    return runner.draft_block(slots, anchors, last, torch.zeros_like(last))


def greedy_drafts(runner, requests):
    """(drafts of every request, x and base logits of its block)."""
    block = drafted(runner, requests)
    drafts = [torch.tensor([anchor for _, anchor, _ in requests])]
    for i in range(block.base.shape[1]):
        drafts.append(block.slot(i, drafts[-1])[0].argmax(-1))
    return torch.stack(drafts[1:], 1).tolist(), block.x, block.base


def certain(margins):
    """How many drafts of a block no way of rounding may change."""
    clear = [m > 1.0 for m in margins]
    return clear.index(False) if False in clear else len(clear)


@dataclass(frozen=True)
class Figures:
    """Per case: error of base logits, of logits with bias, mean difference of confidences."""

    base: list[float]
    biased: list[float]
    confidence: list[float]
    other_drafts: list[str]

    def over(self, name):
        """The figures above their limit."""
        limit = golden.index(name)["tolerances"]["dspark"]
        found = {}
        for kind, errors in (("base", self.base), ("biased", self.biased)):
            if sum(errors) / len(errors) > limit["base_mean"]:
                found[f"{kind} mean"] = sum(errors) / len(errors)
            if max(errors) > limit["base_case_max"]:
                found[f"{kind} of a case"] = max(errors)
        if max(self.confidence) > limit["confidence_abs"]:
            found["confidence"] = max(self.confidence)
        if self.other_drafts:
            found["drafts"] = self.other_drafts
        return found


def error(mine, theirs):
    return (mine - theirs).square().mean(-1).sqrt().mean().item()


def measure(name):
    cases, scale = golden.cases(name, "dspark"), golden.index(name)["logit_scale"]
    runner, _ = prefilled(name, [c["context_ids"] for c in cases])
    requests = [(s, c["anchor"], c["P"]) for s, c in enumerate(cases)]
    drafts, x, base = greedy_drafts(runner, requests)
    figures = Figures([], [], [], [])
    for case, got, hidden, rows in zip(cases, drafts, x, base, strict=True):
        t = golden.case_tensors(name, case)
        want, want_biased, want_confidence = (t[key] for key in case["keys"])
        # The heads along the golden drafts, whatever ours are.
        e = runner.draft.markov(torch.tensor([case["anchor"], *case["drafts"][:-1]]))
        figures.base.append(error(rows, want) / scale)
        figures.biased.append(error(rows + runner.draft.bias(e), want_biased) / scale)
        confidence = runner.draft.confidence(hidden, e)
        figures.confidence.append((confidence - want_confidence).abs().mean().item())
        sure = certain(case["draft_margin"])
        if got[:sure] != case["drafts"][:sure]:
            figures.other_drafts.append(case["id"])
    return figures


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_drafts_and_confidences(name):
    figures = measure(name)
    print(name, {k: [f"{x:.4f}" for x in v] for k, v in vars(figures).items() if k[0] != "o"})
    assert figures.over(name) == {}


def details(name):
    """(case, its tensors without the case's own prefix) of the detailed cases."""
    for case in golden.cases(name, "dspark"):
        if "detail" in case:
            t, prefix = golden.case_tensors(name, case), case["id"].split(".")[1] + "."
            yield case, {k.removeprefix(prefix): v for k, v in t.items() if k.startswith(prefix)}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_context_keys_of_a_golden_target_row(name):
    """Bit for bit, from the concatenated entry streams to the packed record."""
    runner, checked = golden.runner(name, rollback=ROLLBACK), 0
    window = runner.pools.formats.window
    for case, t in details(name):
        keys = runner.draft.context(t["tau_last"], torch.tensor([case["P"]]))
        for got, want in zip(keys, t["context_kv"], strict=True):
            assert torch.equal(window.decode(window.encode(got)), want[-1:]), case["id"]
            checked += 1
    assert checked


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_prefill_fills_the_rings(name):
    """As far as two computations of the backbone agree; bit for bit after two tokens of tiny-s."""
    for case, t in details(name):
        runner, _ = prefilled(name, [case["context_ids"]])
        first, last = case["context_kv_positions"]
        for ring, want in zip(runner.pools.drafts, t["context_kv"], strict=True):
            got = runner.pools.formats.window.decode(ring[first : last + 1])
            assert rms(got, want) < (0.1 if (name, last) != ("tiny-s", 1) else 1e-9), case["id"]


def stages_alone(name, monkeypatch):
    """{kind: worst figure} of every stage fed with golden streams and golden context keys."""
    worst, now = {}, [0]

    def note(kind, figure):
        worst[kind] = max(worst.get(kind, 0.0), figure)

    def fed(streams, pre, w, layer, *rest):
        now[0] = layer.index - runner.config.num_hidden_layers
        stage = f"mtp.{now[0]}"
        if now[0]:
            note("S_out", rms(streams, t[f"{stage}.stream_in"]))
        else:
            assert torch.equal(streams, t[f"{stage}.stream_in"])
        assert torch.allclose(pre, t[f"{stage}.pre_in"], atol=1e-3)
        return block(t[f"{stage}.stream_in"], t[f"{stage}.pre_in"], w, layer, *rest)

    def attend(x, *rest):
        out = attention(x, *rest)
        note("attn_out", rms(out, t[f"mtp.{now[0]}.attn_out"]))
        return out

    def route(x, w, config, ops):
        ids, _ = ops.router(
            ops.linear_f32(x, w.gate) / config.gate_temp,
            w.bias, config.num_experts_per_tok, config.routed_scaling_factor,
        )  # fmt: skip
        want = t[f"mtp.{now[0]}.router_ids"]
        other = (ids.sort(-1).values != want.sort(-1).values).any(-1)
        note("router_ids", other.double().mean().item())
        out = moe(x, w, config, ops)
        note("ffn_out", rms(out, t[f"mtp.{now[0]}.ffn_out"]))
        return out

    block, attention, moe = draft_room.block, block_room.attention, block_room.moe
    for case, t in details(name):
        runner = golden.runner(name, rollback=ROLLBACK)
        first, last = case["context_kv_positions"]
        for ring, keys in zip(runner.pools.drafts, t["context_kv"], strict=True):
            ring[first : last + 1] = runner.pools.formats.window.encode(keys)
        with monkeypatch.context() as patch:
            patch.setattr(draft_room, "block", fed)
            patch.setattr(block_room, "attention", attend)
            patch.setattr(block_room, "moe", route)
            base = drafted(runner, [(0, case["anchor"], last)]).base
        scale = golden.index(name)["logit_scale"]
        note("base logits", error(base[0], t["base_logits"]) / scale)
    return worst


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_stage_alone(name, monkeypatch):
    """At the backbone's own limits for one layer."""
    limits = golden.index(name)["tolerances"]["layer_local"]["same_rounding"]
    worst = stages_alone(name, monkeypatch)
    print(name, {k: f"{v:.5f}" for k, v in worst.items()})
    assert set(worst) == {"S_out", "attn_out", "router_ids", "ffn_out", "base logits"}
    assert {k: v for k, v in worst.items() if v > limits.get(k, limits["S_out"])} == {}


def without(monkeypatch, hidden):
    """Hide the columns where hidden(slot of the row, slot of the key or -1: context) is true."""
    made = RingContext.__init__

    def wrong(self, config, *rest):
        made(self, config, *rest)
        slots, context = config.dspark_block_size, len(self._places)
        row = (torch.arange(len(self._columns)) % slots).unsqueeze(1)
        key = torch.where(self._columns < context, -1, (self._columns - context) % slots)
        self._columns = torch.where(hidden(row, key), -1, self._columns)

    monkeypatch.setattr(RingContext, "__init__", wrong)


def causal(monkeypatch):
    without(monkeypatch, lambda row, key: key > row)


def no_context(monkeypatch):
    without(monkeypatch, lambda row, key: key < 0)


def after_their_layers(monkeypatch):
    block, run = transformer_room.block, Transformer.hidden_and_targets
    left = []

    def wrapped(streams, pre, w, layer, *rest):
        out = block(streams, pre, w, layer, *rest)
        if layer.target:
            left.append(out[0].float().mean(1).to(out[0].dtype))
        return out

    def wrong(*args):
        left.clear()
        return run(*args)[0], torch.cat(left, -1)

    monkeypatch.setattr(transformer_room, "block", wrapped)
    monkeypatch.setattr(Transformer, "hidden_and_targets", wrong)


def one_position_late(monkeypatch):
    right = Draft.context
    monkeypatch.setattr(Draft, "context", lambda self, t, p: right(self, t, p + 1))


def normed_confidence(monkeypatch):
    right = Draft.confidence

    def wrong(self, x, e):
        return right(self, self.ops.rmsnorm(x, self.norm, self.config.rms_norm_eps), e)

    monkeypatch.setattr(Draft, "confidence", wrong)


MISTAKES = (causal, after_their_layers, one_position_late, normed_confidence, no_context)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_deliberate_mistakes_are_seen(mistake, monkeypatch):
    """The limits are tight enough: each mistake built in on purpose exceeds one of them."""
    mistake(monkeypatch)
    over = measure("tiny-s").over("tiny-s")
    print(mistake.__name__, over)
    assert over.keys() - {"drafts"}


def speculate(runner, prompts, length):
    """Greedy answers of ``length`` tokens with full blocks, side by side, and what each step did.

    (output, steps: (P, anchor, drafts, accepted)) per prompt, prompt s in slot s.
    """
    chunks = [Chunk(s, 0, tuple(ids), pages(s), 1) for s, ids in enumerate(prompts)]
    newest = runner.forward(StepPlan(tuple(chunks))).argmax(-1).tolist()
    outputs, steps = [[a] for a in newest], [[] for _ in prompts]
    running = list(range(len(prompts)))
    while running:
        requests = [(s, outputs[s][-1], len(prompts[s]) + len(outputs[s]) - 2) for s in running]
        drafts, _, _ = greedy_drafts(runner, requests)
        chunks = [
            Chunk(slot, last + 1, (anchor, *d), pages(slot), 1 + len(d))
            for (slot, anchor, last), d in zip(requests, drafts, strict=True)
        ]
        rows = runner.forward(StepPlan(tuple(chunks))).argmax(-1)
        rows = rows.view(len(running), -1).tolist()
        for (slot, anchor, last), d, row in zip(requests, drafts, rows, strict=True):
            k = next((i for i, y in enumerate(d) if y != row[i]), len(d))
            steps[slot].append((last, anchor, d, k))
            outputs[slot] += row[: k + 1]
        running = [s for s in running if len(outputs[s]) < length]
    return outputs, steps


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_speculative_runs(name):
    """Output, drafts and accepted counts; rejected rows leave no trace in what comes after."""
    cases = golden.cases(name, "speculative_run")
    prompts, length = [c["token_ids"] for c in cases], len(cases[0]["output"])
    runner = golden.runner(name, rollback=ROLLBACK)
    outputs, steps = speculate(runner, prompts, length)
    compared = clear = 0
    for case, output, mine in zip(cases, outputs, steps, strict=True):
        assert output[:length] == case["output"], case["id"]
        ours = {step[0]: step[1:] for step in mine}
        for want in case["steps"]:
            if want["P"] not in ours:
                continue  # an uncertain draft was accepted by one of the two
            anchor, drafts, accepted = ours[want["P"]]
            sure = certain(want["draft_margin"])
            assert anchor == want["anchor"]
            assert drafts[:sure] == want["drafts"][:sure], (case["id"], want)
            if sure > want["accepted"] or sure == len(drafts):
                assert accepted == want["accepted"], (case["id"], want)
            compared += 1
            clear += (drafts, accepted) == (want["drafts"], want["accepted"])
    total = sum(len(c["steps"]) for c in cases)
    print(f"{name}: {total} steps, {compared} compared, {clear} the same in everything")
    assert compared >= 0.9 * total
    assert clear >= 0.8 * total


@pytest.mark.parametrize(("mtp", "varlen"), [(5, False), (3, True)])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_engine_gives_the_golden_runs(name, mtp, varlen):
    """The same outputs out of `LLM`, all prompts side by side. Ten combinations hold; two stay in
    the suite, which is long."""
    cases = golden.cases(name, "speculative_run")
    prompts, length = [c["token_ids"] for c in cases], len(cases[0]["output"])
    params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
    with LLM(
        golden.GOLDEN / name / "checkpoint", accelerator="cpu", swa_keep="full", max_num_seqs=16,
        mtp=mtp, mtp_varlen=varlen,
    ) as llm:  # fmt: skip
        got = llm.generate(prompts, params)
    assert [list(one.token_ids) for one in got] == [c["output"] for c in cases]
    assert varlen or sum(one.speculation["accepted"] for one in got) > 0
