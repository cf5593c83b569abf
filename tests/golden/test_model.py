"""The whole model against the golden data: logits, greedy runs, selections, in every chunking.

Everything runs with the key list of serving semantics §6 (W window columns, then index_topk
entries), at the tier *same rounding* of the golden README.
"""

from __future__ import annotations

import pytest
import torch

from deepinfer.core.step import Chunk, StepPlan
from deepinfer.ops.torch import memory
from tests import golden
from tests.golden import CHECKPOINTS, needs_golden

pytestmark = needs_golden
PAGES = 6
# The whole model runs where an accelerator is; the golden data are the same.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prefill(runner, ids, slot=0):
    """Logits of every row of one prompt, in one piece."""
    pages = tuple(range(slot * PAGES, (slot + 1) * PAGES))
    return runner.forward(StepPlan((Chunk(slot, 0, tuple(ids), pages, len(ids)),))).cpu()


def in_chunks(runner, prompts, sizes):
    """Logits of every row of all prompts, side by side: prompt s in chunks of sizes[s % n]."""
    rows = [[] for _ in prompts]
    done = [0] * len(prompts)
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        chunks = []
        for s, prompt in enumerate(prompts):
            ids = tuple(prompt[done[s] : done[s] + sizes[s % len(sizes)]])
            if ids:
                pages = tuple(range(s * PAGES, (s + 1) * PAGES))
                chunks.append(Chunk(s, done[s], ids, pages, len(ids)))
        logits = runner.forward(StepPlan(tuple(chunks))).cpu()
        for chunk, got in zip(chunks, logits.split([c.logits for c in chunks]), strict=True):
            rows[chunk.slot].append(got)
            done[chunk.slot] = chunk.end
    return [torch.cat(r) for r in rows]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def whole(request):
    """(name, cases, logits of every row of every golden prompt in one prefill each)."""
    name = request.param
    cases = golden.cases(name, "prefill_logits")
    runner = golden.runner(name, DEVICE)
    return name, cases, [prefill(runner, c["token_ids"]) for c in cases]


def errors(name, cases, logits):
    """Row errors of class A and class B as the golden README defines them."""
    scale, topk = golden.index(name)["logit_scale"], golden._parts(name)[0].index_topk
    a, b = [], []
    for case, got in zip(cases, logits, strict=True):
        rows = range(len(got)) if case["rows"] == "all" else case["rows"]
        want = golden.case_tensors(name, case)[case["key"]]
        error = (got[list(rows)] - want).square().mean(-1).sqrt() / scale
        for p, e in zip(rows, error.tolist(), strict=True):
            (a if p < topk else b).append(e)
    return a, b


def test_prefill_logits(whole):
    name, cases, logits = whole
    a, b = errors(name, cases, logits)
    mean_a, mean_b, worst = sum(a) / len(a), sum(b) / len(b), max(a + b)
    print(f"{name}: class A {mean_a:.4f}, class B {mean_b:.4f}, worst row {worst:.3f}")
    limit = golden.index(name)["tolerances"]["logits"]["same_rounding"]
    assert mean_a <= limit["A_mean"]
    assert mean_b <= limit["B_mean"]
    assert worst <= limit["row_max"]


def test_argmax_where_the_margin_is_clear(whole):
    name, cases, logits = whole
    margin = golden.index(name)["tolerances"]["logits"]["argmax_margin"]
    checked = 0
    for case, got in zip(cases, logits, strict=True):
        rows = list(range(len(got)) if case["rows"] == "all" else case["rows"])
        clear = torch.tensor(case["margin"]) > margin
        checked += int(clear.sum())
        assert torch.equal(got[rows].argmax(-1)[clear], torch.tensor(case["argmax"])[clear])
    assert checked > 100


@pytest.mark.parametrize("sizes", [[1], [7], [16, 33, 31], [127, 1000, 64, 129]])
def test_every_chunking_beside_others_equals_prefill_alone(whole, sizes):
    """Chunks of one token are decoding; every golden length runs, all prompts in one batch."""
    name, cases, logits = whole
    rows = in_chunks(golden.runner(name, DEVICE), [c["token_ids"] for c in cases], sizes)
    for case, got, want in zip(cases, rows, logits, strict=True):
        assert torch.equal(got, want), case["id"]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy(name):
    """32 tokens a prompt, all prompts decoding side by side after their prefills."""
    cases = golden.cases(name, "greedy")
    runner = golden.runner(name, DEVICE)
    pages = [tuple(range(s * PAGES, (s + 1) * PAGES)) for s in range(len(cases))]
    last = [prefill(runner, c["token_ids"], slot=s)[-1] for s, c in enumerate(cases)]
    rows = [[] for _ in cases]
    for step in range(32):
        for s, row in enumerate(last):
            rows[s].append(row)
        if step == 31:
            break
        last = runner.forward(
            StepPlan(
                tuple(
                    Chunk(s, len(c["token_ids"]) + step, (int(last[s].argmax()),), pages[s], 1)
                    for s, c in enumerate(cases)
                )
            )
        ).cpu()
    limit = golden.index(name)["tolerances"]["logits"]["same_rounding"]["row_max"]
    for case, got in zip(cases, rows, strict=True):
        got = torch.stack(got)
        assert got.argmax(-1).tolist() == case["continuation"], case["id"]
        if "key" in case:
            want = golden.case_tensors(name, case)[case["key"]]
            error = (got - want).square().mean(-1).sqrt() / golden.index(name)["logit_scale"]
            assert error.max() <= limit, case["id"]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_selection(name):
    """Scores, candidate blocks and chosen entries of the long prompt, exactly."""
    (case,) = golden.cases(name, "selection")
    config, t = golden._parts(name)[0], golden.case_tensors(name, case)
    rows, blocks, checked = torch.tensor(case["rows"]), None, 0
    for layer in config.layers:
        if not layer.owns_index:
            continue
        prefix = f"layers.{layer.index}."
        keys = t[f"layers.{layer.kv_source}.index_k"]
        visible = ((rows + 1) // layer.ratio)[None]
        scores = memory.index_scores(
            t[f"{prefix}index_q"][None], keys[None], t[f"{prefix}index_weights"][None]
        )
        seen = torch.arange(len(keys)) < visible.unsqueeze(-1)
        if layer.candidate_source:
            blocks = memory.candidate_blocks(
                scores, visible, config.candidate_topk_blocks, config.candidate_block_size
            )
            assert torch.equal(blocks[0], t[f"{prefix}candidate_blocks"])
        allowed = None
        if layer.uses_candidates:
            allowed = blocks.repeat_interleave(config.candidate_block_size, -1)[..., : len(keys)]
            seen &= allowed
        masked = scores.masked_fill(~seen, -torch.inf)
        assert torch.equal(masked[0], t[f"{prefix}index_scores"])
        chosen = memory.select(scores, visible, config.index_topk, allowed)
        assert torch.equal(chosen[0].int(), t[f"{prefix}index_list"])
        checked += 1
    assert checked == len(config.index_source_layer_ids)
