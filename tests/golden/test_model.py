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


def prefill(runner, ids, sizes, slot=0):
    """Logits of every row, the prompt run in chunks of the given sizes (the last one repeats)."""
    pages = tuple(range(slot * PAGES, (slot + 1) * PAGES))
    out, start, sizes = [], 0, list(sizes)
    while start < len(ids):
        count = min(sizes.pop(0) if len(sizes) > 1 else sizes[0], len(ids) - start)
        chunk = Chunk(slot, start, tuple(ids[start : start + count]), pages, count)
        out.append(runner.forward(StepPlan((chunk,))))
        start += count
    return torch.cat(out)


def one_by_one(runner, prompts):
    """Logits of every row of all prompts, one token of each a step, all of them side by side."""
    rows = [[] for _ in prompts]
    for t in range(max(len(p) for p in prompts)):
        live = [s for s, p in enumerate(prompts) if t < len(p)]
        chunks = tuple(
            Chunk(s, t, (prompts[s][t],), tuple(range(s * PAGES, (s + 1) * PAGES)), 1) for s in live
        )
        for s, row in zip(live, runner.forward(StepPlan(chunks)), strict=True):
            rows[s].append(row)
    return [torch.stack(r) for r in rows]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def whole(request):
    """(name, cases, logits of every row of every golden prompt in one prefill each)."""
    name = request.param
    cases = golden.cases(name, "prefill_logits")
    runner = golden.runner(name)
    return name, cases, [prefill(runner, c["token_ids"], [len(c["token_ids"])]) for c in cases]


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


def test_decoding_token_by_token_beside_others_equals_prefill(whole):
    name, cases, logits = whole
    rows = one_by_one(golden.runner(name), [c["token_ids"] for c in cases])
    for case, got, want in zip(cases, rows, logits, strict=True):
        assert torch.equal(got, want), case["id"]


@pytest.mark.parametrize("sizes", [[7], [16], [1, 30], [31], [33], [127], [129, 1, 2]])
def test_chunks_equal_prefill(whole, sizes):
    name, cases, logits = whole
    runner = golden.runner(name)
    for case, want in list(zip(cases, logits, strict=True))[-4:]:
        got = prefill(runner, case["token_ids"], sizes, slot=3)
        assert torch.equal(got, want), case["id"]


def test_prompts_side_by_side_equal_alone(whole):
    name, cases, logits = whole
    runner = golden.runner(name)
    order = list(range(len(cases)))[::-1]
    chunks = tuple(
        Chunk(
            s, 0, tuple(cases[s]["token_ids"]), tuple(range(s * PAGES, (s + 1) * PAGES)),
            len(cases[s]["token_ids"]),
        )
        for s in order
    )  # fmt: skip
    got = runner.forward(StepPlan(chunks)).split([len(cases[s]["token_ids"]) for s in order])
    for s, rows in zip(order, got, strict=True):
        assert torch.equal(rows, logits[s]), cases[s]["id"]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy(name):
    """32 tokens a prompt, all prompts decoding side by side after their prefills."""
    cases = golden.cases(name, "greedy")
    runner = golden.runner(name)
    pages = [tuple(range(s * PAGES, (s + 1) * PAGES)) for s in range(len(cases))]
    last = [prefill(runner, c["token_ids"], [64], slot=s)[-1] for s, c in enumerate(cases)]
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
        )
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
