"""The draft stages on T6: against a reference without rings, beside others, wrapped, taken back.

Pools are poisoned first, so that what was never written shows as NaN. The rings have room for the
window of 16 and 6 rows more, so that positions wrap every 22.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import deepinfer
from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.checkpoint.load import load_weights
from deepinfer.core.step import Chunk, StepPlan
from deepinfer.engine.runner import Runner
from deepinfer.kvcache.pools import Pools, bytes_per_slot
from deepinfer.model import transformer as transformer_room
from deepinfer.model.config import ModelConfig
from deepinfer.ops import registry
from deepinfer.replay.plan import ReplayRule
from tests import plain, t6

PAGE, PAGES = t6.PAGE_TOKENS, 20  # of each slot: up to 80 tokens
SLOTS, ROLLBACK, WINDOW, BLOCK = 8, 6, 16, 5
LENGTHS = (1, 6, 16, 17, 23, 44)  # the last position is one less


class Model:
    """A variant of T6 with draft stages; every runner it makes holds nothing yet."""

    def __init__(self, folder, **changes):
        checkpoint = open_checkpoint(t6.write(folder, **changes))
        self.config, self.weights = checkpoint.config, load_weights(checkpoint)

    def runner(self, rollback=ROLLBACK, draft=True):
        made = Runner(
            self.config, self.weights, registry.build("cpu"), slots=SLOTS, pages=SLOTS * PAGES,
            page_tokens=PAGE, token_map=t6.token_map()[0], rollback=rollback, draft=draft,
        )  # fmt: skip
        made.pools.poison()
        return made


def step(runner, *chunks, replay=None):
    """Logits of every row that reaches the end, of one step of (slot, start, ids)."""
    plan = []
    for slot, start, ids in chunks:
        pages = tuple(range(slot * PAGES, slot * PAGES + -(-(start + len(ids)) // PAGE)))
        end = start + len(ids)
        first = start if replay is None else replay.rows_from(runner.config.num_hidden_layers - 1)
        rows = end - min(max(start, first), end)
        plan.append(Chunk(slot, start, tuple(ids), pages, rows, replay))
    return runner.forward(StepPlan(tuple(plan)))


def drafted(runner, *requests):
    """(x, base logits) of (slot, anchor, last[, first])."""
    asked = torch.tensor([(*r, 0)[:4] for r in requests])
    block = runner.draft_block(*asked.unbind(1))
    assert block.x.isfinite().all() and block.base.isfinite().all()
    return block.x, block.base


def prompt(length, start=0):
    return [11 + (start * 31 + at * at * 7 + at) % 256 for at in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model(tmp_path_factory.mktemp("t6") / "m")


@pytest.fixture(scope="module", params=["float", "quantised"])
def both(request, model, tmp_path_factory):
    if request.param == "float":
        return model
    return Model(tmp_path_factory.mktemp("t6") / "q", quantised=True)


class PlainContext:
    """`deepinfer.model.memory.DraftMemory` of one request: a list of keys for every row."""

    def __init__(self, contexts, last, first=0):
        self.contexts = [keys[max(first, last - WINDOW + 1) : last + 1] for keys in contexts]

    def attend(self, stage, q, kv, sink):
        keys = torch.cat((self.contexts[stage], kv)).double()
        scores = torch.einsum("nhd,kd->nhk", q.double(), keys) * keys.shape[1] ** -0.5
        sinks = sink.double()[:, None].expand(len(q), -1, -1)
        share = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return torch.einsum("nhk,kd->nhd", share, keys).to(q.dtype)


@torch.inference_mode()
def plain_block(runner, ids, anchor, first=0):
    """(x, base) of the block after `ids`, from one run of the backbone without state."""
    memory = plain.PlainMemory(runner.config, t6.token_map()[0], ids)
    _, targets = runner.model.hidden_and_targets(torch.tensor(ids), memory)
    contexts = runner.draft.context(targets, torch.arange(len(ids)))
    last = len(ids) - 1
    context = PlainContext(contexts, last, first)
    return runner.draft.block(torch.tensor([anchor]), torch.tensor([last]), context)


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_a_reference_without_rings(model, length):
    """One token, fewer than a window, its edges, and rings that wrapped."""
    runner, ids = model.runner(), prompt(length, length)
    step(runner, (3, 0, ids))
    got = drafted(runner, (3, 77, length - 1))
    for mine, theirs in zip(got, plain_block(runner, ids, 77), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-4)


def test_context_that_was_never_computed_is_not_read(model):
    """A prompt that resumes at 20 has no context keys before it."""
    runner, ids = model.runner(), prompt(30)
    step(runner, (0, 0, ids))
    for ring in runner.pools.drafts:
        ring[torch.arange(8, 20)] = 0xFF  # positions 14 to 29 are the window
    got = drafted(runner, (0, 77, 29, 20))[1]
    assert torch.allclose(got, plain_block(runner, ids, 77, 20)[1], rtol=0, atol=1e-4)
    step(runner, (0, 0, ids))
    assert not torch.allclose(drafted(runner, (0, 77, 29))[1], got, rtol=0, atol=1e-4)


def test_a_block_does_not_depend_on_the_others(both):
    """Alone, in a batch of six, in another order and slot: the same bits."""
    runner = both.runner()
    texts = [prompt(n, n) for n in LENGTHS]
    step(runner, *((s, 0, ids) for s, ids in enumerate(texts)))
    requests = [(s, 40 + s, len(ids) - 1) for s, ids in enumerate(texts)]
    together = drafted(runner, *requests)
    backwards = drafted(runner, *reversed(requests))
    other = both.runner()
    for s, request in enumerate(requests):
        alone = drafted(runner, request)
        step(other, (7, 0, texts[s]))
        moved = drafted(other, (7, *request[1:]))
        for part in range(2):
            assert torch.equal(together[part][s], alone[part][0])
            assert torch.equal(together[part][s], backwards[part][-1 - s])
            assert torch.equal(together[part][s], moved[part][0])


@pytest.mark.parametrize("size", [1, 7])
def test_chunks_of_the_prompt_do_not_show(both, size):
    ids, whole, cut = prompt(45), both.runner(), both.runner()
    step(whole, (0, 0, ids))
    for start in range(0, len(ids), size):
        step(cut, (2, start, ids[start : start + size]))
    for mine, theirs in zip(
        drafted(cut, (2, 50, 44)), drafted(whole, (0, 50, 44)), strict=True
    ):  # fmt: skip
        assert torch.equal(mine, theirs)


def verified(runner, ids, start, accepts):
    """Run `ids` in blocks of verified rows, of which only some are right: logits of the right ones.

    The block behind a right prefix of 1 + accepted rows is filled up with wrong ids.
    """
    rows, at = [step(runner, (1, 0, ids[:start]))], start
    for count in accepts:
        right = ids[at : at + 1 + count]
        wrong = [(i + 1) % 256 + 11 for i in right[:1] * (BLOCK - count)]
        rows.append(step(runner, (1, at, right + wrong))[: len(right)])
        at += len(right)
    return torch.cat(rows), at


ACCEPTS = (0, 0, 3, 5, 1, 2, 0, 4, 5, 5, 0, 1, 1, 3, 2, 0)


@pytest.mark.parametrize("start", [1, 6, 7])
@pytest.mark.parametrize("ratio", [2, 4])
def test_rejected_rows_leave_no_trace(tmp_path, ratio, start):
    """DI-09 (b): windows, open groups, n-grams, entries and context keys, at every phase."""
    model = Model(tmp_path / "m", ratio=ratio)
    runner, fresh, ids = model.runner(), model.runner(), prompt(70)
    rows, end = verified(runner, ids, start, ACCEPTS)
    assert end > 2 * (WINDOW + ROLLBACK)
    assert torch.equal(rows, step(fresh, (0, 0, ids[:end])))
    for mine, theirs in zip(
        drafted(runner, (1, 50, end - 1)), drafted(fresh, (0, 50, end - 1)), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kept", [0, 2])
def test_too_little_kept_for_a_rollback_is_seen(model, kept):
    runner, fresh, ids = model.runner(rollback=kept), model.runner(), prompt(70)
    rows, end = verified(runner, ids, 7, ACCEPTS)
    assert not torch.equal(rows, step(fresh, (0, 0, ids[:end])))


def test_a_cut_prompt_fills_the_rings(both):
    """The rows kept of a cut prompt are enough, whether the others run masked or not at all."""
    ids, blocks = prompt(60), []
    for mode, size in (("mask", 60), ("compact", 60), ("compact", 10)):
        runner = both.runner()
        plan = ReplayRule(6, 3, WINDOW, mode, t6.KEEP).plan(len(ids))
        for start in range(0, len(ids), size):
            step(runner, (0, start, ids[start : start + size]), replay=plan)
        blocks.append(drafted(runner, (0, 50, 59))[1])
    assert torch.equal(blocks[0], blocks[1]) and torch.equal(blocks[1], blocks[2])
    whole = both.runner()
    step(whole, (0, 0, ids))
    assert not torch.equal(drafted(whole, (0, 50, 59))[1], blocks[0])


def test_targets_are_entry_streams(model, monkeypatch):
    """The mean over the copies before each target layer; the rest of the pass is as without."""
    seen, block = [], transformer_room.block

    def wrapped(streams, pre, w, layer, *rest):
        if layer.target:
            seen.append(streams.mean(1))
        return block(streams, pre, w, layer, *rest)

    ids, runner = prompt(20), model.runner()
    memory = [plain.PlainMemory(model.config, t6.token_map()[0], ids) for _ in range(2)]
    monkeypatch.setattr(transformer_room, "block", wrapped)
    with torch.inference_mode():
        x, targets = runner.model.hidden_and_targets(torch.tensor(ids), memory[0])
        assert torch.allclose(targets, torch.cat(seen, -1), rtol=0, atol=1e-6)
        assert torch.equal(x, runner.model.hidden(torch.tensor(ids), memory[1]))


def test_keeping_the_context_changes_no_logits(both):
    ids = prompt(40)
    with_stages, without = both.runner(), both.runner(rollback=0, draft=False)
    assert torch.equal(step(with_stages, (0, 0, ids)), step(without, (0, 0, ids)))
    assert without.draft is None and without.pools.drafts == []


def test_bytes_of_a_slot(both):
    """The formula is what the pools hold, and gives the published size of 134 rows a ring."""
    pools = Pools(
        both.config, slots=3, pages=0, page_tokens=PAGE, rollback=ROLLBACK, stages=2
    )  # fmt: skip
    assert pools.nbytes == 3 * bytes_per_slot(both.config, ROLLBACK, 2)
    text = (Path(deepinfer.__file__).parent / "embedded" / "v41-flash.json").read_text()
    config = ModelConfig.from_dict(json.loads(text))
    assert bytes_per_slot(config, 6, 3) == 3_042_336 + 86_016 + 9 * 8
