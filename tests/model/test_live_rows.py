"""Rows of decoding requests, whose places only the device knows, against chunks: the same bits.

Two runners get the same tokens. One is told of every request by a chunk, the other by `LiveRows`,
with void rows, rows beyond the pages that a request owns, and pools of NaN patterns. The rings have
room for the window of 16 and 5 rows more, so that positions wrap every 21.
"""

from __future__ import annotations

import random

import pytest
import torch

from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.checkpoint.load import load_weights
from deepinfer.core.step import Chunk, StepPlan
from deepinfer.device import sync
from deepinfer.device.sync import SyncError, no_sync
from deepinfer.engine.runner import Runner
from deepinfer.kvcache.live import LiveRows, Spans
from deepinfer.ops import registry
from deepinfer.replay.plan import ReplayRule
from tests import golden, t6
from tests.golden import CHECKPOINTS, needs_golden

PAGE, PAGES, SLOTS, K = t6.PAGE_TOKENS, 24, 8, 5  # pages of each slot: up to 96 tokens
WINDOW_PAGES = 40


class Model:
    """A variant of T6; every runner it makes holds nothing but NaN patterns."""

    def __init__(self, folder, **changes):
        checkpoint = open_checkpoint(t6.write(folder, **changes))
        self.config, self.weights = checkpoint.config, load_weights(checkpoint)
        self.page = PAGE

    def runner(self, ops=None):
        made = Runner(
            self.config, self.weights, ops or registry.build("cpu"), slots=SLOTS,
            pages=SLOTS * PAGES, page_tokens=PAGE, token_map=t6.token_map()[0], rollback=K,
            draft=True, stateful=len(self.config.layers), window_pages=WINDOW_PAGES,
        )  # fmt: skip
        made.pools.poison()
        return made


class Golden:
    """A golden checkpoint, likewise."""

    def __init__(self, name):
        self.name, self.page = name, 128

    def runner(self):
        return golden.runner(self.name, rollback=K)


VARIANTS = {
    "ratio2": {}, "ratio4": {"ratio": 4}, "quantised": {"quantised": True},
    "no engram": {"engram_layer_ids": []},
}  # fmt: skip


@pytest.fixture(scope="module", params=VARIANTS)
def model(request, tmp_path_factory):
    return Model(tmp_path_factory.mktemp("t6") / "m", **VARIANTS[request.param])


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory):
    return Model(tmp_path_factory.mktemp("t6") / "m")


class Request:
    """A text in a slot, of which so many tokens are certain, and its page tables."""

    def __init__(self, slot, ids, certain, pages, replay=None):
        self.slot, self.ids, self.certain, self.pages = slot, ids, certain, pages
        self.replay, self.windows = replay, {}

    def chunk(self, page, tokens, logits=None, windows=None):
        """`tokens` from the last certain one on; logits of all of them."""
        start = self.certain
        end = start + len(tokens)
        kept = () if windows is None else tuple(
            (i, windows[i]) for i in range(start // page, -(-end // page)) if i in windows
        )  # fmt: skip
        return Chunk(
            self.slot, start, tuple(tokens), tuple(self.pages[: -(-end // page)]),
            len(tokens) if logits is None else logits, self.replay, kept,
        )  # fmt: skip


def live_rows(runner, page, requests, tokens, void, windows=False):
    """`LiveRows` of requests with so many tokens and void rows behind them each.

    Of a request's pages only those that its tokens need are owned; the table is one page longer
    than anything needs.
    """
    counts = [len(some) + more for some, more in zip(tokens, void, strict=True)]
    longest = max(r.certain + n for r, n in zip(requests, counts, strict=True))
    width = -(-longest // page) + 1
    pools = runner.pools
    pages = torch.full((len(requests), width), pools.pages)
    kept = torch.full((len(requests), width), pools.window_pages)
    for at, (r, some) in enumerate(zip(requests, tokens, strict=True)):
        owned = -(-(r.certain + len(some)) // page)
        pages[at, :owned] = torch.tensor(r.pages[:owned])
        for i, window_page in r.windows.items():
            if i < width:
                kept[at, i] = window_page
    starts = torch.tensor([r.certain for r in requests])
    spans = Spans.over(starts, torch.tensor(counts), sum(counts))
    ids = [t for some, n in zip(tokens, void, strict=True) for t in [*some, *[0] * n]]
    return LiveRows(
        **vars(spans),
        slots=torch.tensor([r.slot for r in requests]),
        ids=torch.tensor(ids),
        behind=spans.positions - spans.starts[spans.of],
        pages=pages,
        windows=kept if windows else None,
        most=1 + K,
        longest=longest,
    )


def right(rows, tokens, void):
    """Rows that are not void."""
    out, at = [], 0
    for some, more in zip(tokens, void, strict=True):
        out.append(rows[at : at + len(some)])
        at += len(some) + more
    return torch.cat(out)


def drafted(runner, requests):
    """x and base logits of a block behind the certain tokens of each request."""
    asked = [(r.slot, 40 + r.slot, r.certain - 1, 0) for r in requests]
    block = runner.draft_block(*torch.tensor(asked).unbind(1))
    return block.x, block.base


def prompt(length, start=0):
    return [11 + (start * 31 + at * at * 7 + at) % 256 for at in range(length)]


def started(model, lengths, slots, total=90):
    """Two runners that have run the same prompts, and the requests."""
    by_chunks, by_live = model.runner(), model.runner()
    requests = []
    for slot in slots:
        pages = list(range(slot * PAGES, (slot + 1) * PAGES))
        random.Random(slot).shuffle(pages)
        requests.append(Request(slot, prompt(total, slot), 0, pages))
    plan = StepPlan(
        tuple(r.chunk(model.page, r.ids[:n], 1) for r, n in zip(requests, lengths, strict=True))
    )
    assert torch.equal(by_chunks.forward(plan), by_live.forward(plan))
    for request, length in zip(requests, lengths, strict=True):
        request.certain = length
    return by_chunks, by_live, requests


def guesses(request, right, count, rng):
    """The next certain token and `count` drafts, of which the first are `right`."""
    text = request.ids[request.certain : request.certain + 1 + count]
    return text[: 1 + right] + [11 + rng.randrange(256) for _ in text[1 + right :]]


def same_blocks(by_chunks, by_live, requests):
    for mine, theirs in zip(drafted(by_live, requests), drafted(by_chunks, requests), strict=True):
        assert mine.isfinite().all() and torch.equal(mine, theirs)


def decode(model, by_chunks, by_live, requests, steps, rng, others=lambda step: ()):
    """Run both runners side by side; `others`: chunks that run in the same steps."""
    for step in range(steps):
        counts = [rng.randint(0, K) for _ in requests]
        rights = [rng.randint(0, n) for n in counts]
        tokens = [
            guesses(r, right, n, rng) for r, right, n in zip(requests, rights, counts, strict=True)
        ]
        void = [rng.randint(0, 1 + K - len(some)) for some in tokens]
        more = tuple(others(step))
        chunks = tuple(r.chunk(model.page, t) for r, t in zip(requests, tokens, strict=True))
        want = by_chunks.forward(StepPlan(chunks + more))
        live = live_rows(by_live, model.page, requests, tokens, void)
        got = by_live.forward(StepPlan(more), live)
        n = sum(map(len, tokens))
        rest = sum(c.logits for c in more)
        assert len(got) == n + sum(void) + rest
        assert torch.equal(right(got, tokens, void), want[:n]), step
        assert torch.equal(got[len(got) - rest :], want[n:]), step
        assert want.isfinite().all()
        for request, accepted in zip(requests, rights, strict=True):
            request.certain += 1 + accepted
        same_blocks(by_chunks, by_live, requests)


def test_the_same_bits_as_chunks(model):
    """Unequal counts, void rows, wrong drafts; over ends of groups, pages, windows and rings."""
    lengths, slots = (1, 2, 15, 21, 34, 62), (5, 0, 3, 7, 2, 6)
    by_chunks, by_live, requests = started(model, lengths, slots)
    decode(model, by_chunks, by_live, requests, 6, random.Random(1))


def test_one_request_alone(plain_model):
    """Every position up to the first wrap of the rings, then blocks of up to six."""
    by_chunks, by_live, requests = started(plain_model, (1,), (4,))
    [request] = requests
    for at in range(1, 24):
        chunk = request.chunk(PAGE, [request.ids[at]])
        live = live_rows(by_live, PAGE, requests, [[request.ids[at]]], [at % 6])
        got = by_live.forward(StepPlan(()), live)[:1]
        assert torch.equal(got, by_chunks.forward(StepPlan((chunk,)))), at
        request.certain += 1
    decode(plain_model, by_chunks, by_live, requests, 4, random.Random(2))


def test_beside_prompts(model):
    """Prefill in the same steps: whole, in pieces, cut, and resumed by replay."""
    by_chunks, by_live, requests = started(model, (3, 30, 17), (1, 4, 6))
    cut = ReplayRule(6, 3, 16, "compact", t6.KEEP).plan(60)
    mask = ReplayRule(6, 3, 16, "mask", t6.KEEP).plan(40)

    def piece(slot, start, end, logits, replay=None):
        pages = range(slot * PAGES, slot * PAGES + -(-end // PAGE))
        return Chunk(
            slot, start, tuple(prompt(60, slot)[start:end]), tuple(pages), logits, replay
        )  # fmt: skip

    plans = {
        0: [piece(0, 0, 25, 0, cut), piece(2, 0, 5, 5)],
        1: [piece(0, 25, 33, 0, cut), piece(2, 5, 6, 1), piece(3, 0, 40, 1, mask)],
        2: [piece(0, 33, 60, 1, cut), piece(5, 0, 13, 0), piece(7, 0, 13, 1)],
    }
    rng = random.Random(3)
    decode(model, by_chunks, by_live, requests, 4, rng, lambda step: plans.get(step, ()))
    # What ran as a chunk goes on as a live row, also where its prompt was cut.
    more = [Request(s, prompt(90, s), n, list(range(s * PAGES, (s + 1) * PAGES)), replay)
            for s, n, replay in ((0, 60, cut), (3, 40, mask), (7, 13, None))]  # fmt: skip
    for request in more:
        request.ids[: request.certain] = prompt(60, request.slot)[: request.certain]
    decode(model, by_chunks, by_live, requests + more, 3, rng)


def test_as_many_places_as_rows(plain_model):
    """Two requests of one row each have 12 places; with a chunk of ten the step has 12 rows."""
    by_chunks, by_live, requests = started(plain_model, (20, 41), (1, 4))
    tokens = [r.ids[r.certain :][:1] for r in requests]
    more = Chunk(6, 0, tuple(prompt(10, 6)), tuple(range(6 * PAGES, 6 * PAGES + 3)), 10)
    chunks = tuple(r.chunk(PAGE, t) for r, t in zip(requests, tokens, strict=True))
    want = by_chunks.forward(StepPlan((*chunks, more)))
    live = live_rows(by_live, PAGE, requests, tokens, [0, 0])
    assert live.most * len(requests) == len(want)
    assert torch.equal(by_live.forward(StepPlan((more,)), live), want)


def test_void_rows_leave_no_trace(plain_model):
    """What is certain is as if they had not been, and pages that nobody owns are untouched."""
    lengths, slots = (3, 18, 41), (1, 2, 5)
    by_chunks, by_live, requests = started(plain_model, lengths, slots)
    for step in range(5):
        tokens = [r.ids[r.certain :][:1] for r in requests]
        void = [K, 1 + step % 3, 0]
        chunks = tuple(r.chunk(PAGE, t) for r, t in zip(requests, tokens, strict=True))
        want = by_chunks.forward(StepPlan(chunks))
        live = live_rows(by_live, PAGE, requests, tokens, void)
        assert torch.equal(right(by_live.forward(StepPlan(()), live), tokens, void), want)
        for request in requests:
            request.certain += 1
    a, b = by_chunks.pools, by_live.pools
    pages = torch.arange(SLOTS * PAGES)
    owned = torch.tensor([p for r in requests for p in r.pages[: -(-r.certain // PAGE)]])
    for kind in ("entries", "index"):
        for layer, records in getattr(a, kind).items():
            ratio = plain_model.config.compress_ratios[layer]
            mine, theirs = getattr(b, kind)[layer], records
            for r in requests:
                j = torch.arange(r.certain // ratio)
                at = torch.tensor(r.pages)[j * ratio // PAGE] * (PAGE // ratio) + j % (
                    PAGE // ratio
                )
                assert torch.equal(mine[at], theirs[at]), (kind, layer)
            mine = mine.view(SLOTS * PAGES + 1, -1)
            assert (mine[pages[~torch.isin(pages, owned)]] == 0xFF).all(), "a page of nobody"
    for r in requests:
        p = torch.arange(max(0, r.certain - 16), r.certain)
        for mine, theirs in zip(b.windows + b.drafts, a.windows + a.drafts, strict=True):
            places = r.slot * a.ring + p % a.ring
            assert torch.equal(mine[places], theirs[places])
        p = torch.arange(max(0, r.certain - 3), r.certain) % a.history.shape[1]
        assert torch.equal(b.history[r.slot, p], a.history[r.slot, p])


def test_window_rows_are_kept_for_reuse(plain_model):
    by_chunks, by_live, requests = started(plain_model, (6, 19, 30), (1, 2, 5))
    tables = [{1: 7, 2: 3, 3: 11}, {5: 1, 6: 0, 7: 39}, {}]
    rng = random.Random(5)
    for request, windows in zip(requests, tables, strict=True):
        request.windows = windows
    for _ in range(4):
        tokens = [guesses(r, n, n, rng) for r, n in zip(requests, (2, 4, 0), strict=True)]
        chunks = tuple(
            r.chunk(PAGE, t, windows=r.windows) for r, t in zip(requests, tokens, strict=True)
        )
        by_chunks.forward(StepPlan(chunks))
        by_live.forward(
            StepPlan(()), live_rows(by_live, PAGE, requests, tokens, [1, 1, 3], windows=True)
        )
        for request, some in zip(requests, tokens, strict=True):
            request.certain += len(some)
    written = 0
    for mine, theirs in zip(by_live.pools.snapshots, by_chunks.pools.snapshots, strict=True):
        owned = WINDOW_PAGES * PAGE
        # Void rows may write behind the last certain token of a page, which is not complete then.
        assert torch.equal(mine[4 * 7 : 4 * 8], theirs[4 * 7 : 4 * 8])
        for page in (3, 1, 0):
            rows = slice(page * PAGE, (page + 1) * PAGE)
            assert torch.equal(mine[rows], theirs[rows])
            written += int((theirs[rows] != 0xFF).any(-1).sum())
        others = [p for p in range(WINDOW_PAGES) if p not in (7, 3, 11, 1, 0, 39)]
        assert (mine[:owned].view(WINDOW_PAGES, -1)[others] == 0xFF).all()
    assert written


def test_scratch_pages_are_nobodys(plain_model):
    """They are not counted, and no reading or writing of pages touches them."""
    pools = plain_model.runner().pools
    assert (pools.pages, pools.window_pages) == (SLOTS * PAGES, WINDOW_PAGES)
    for layer, records in pools.entries.items():
        ratio = plain_model.config.compress_ratios[layer]
        assert len(records) == (pools.pages + 1) * PAGE // ratio
    last = pools.pages - 1
    [payload] = pools.read("entries", [last])
    pools.write("entries", 0, bytes(len(payload)))
    assert pools.read("entries", [0]) == [bytes(len(payload))]
    assert pools.read("entries", [last]) == [payload]
    with no_sync("cpu"):  # pages come and go while a step runs
        pools.write("entries", 1, payload)
        held = pools.gather("entries", [1, 0])
        pools.write("entries", 1, bytes(len(payload)))
        pools.restore(0, 2 * PAGE, [0, 1], None)
    assert [row.tobytes() for row in held.numpy()] == [payload, bytes(len(payload))]


@needs_golden
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_golden_checkpoints(name):
    """The same on the golden checkpoints, in their own formats, around the end of a page."""
    model = Golden(name)
    by_chunks, by_live = model.runner(), model.runner()
    lengths = (2, 126)
    requests = [
        Request(s, prompt(300, s), 0, list(range(s * 3, s * 3 + 3))) for s in range(len(lengths))
    ]
    plan = StepPlan(
        tuple(r.chunk(128, r.ids[:n], 1) for r, n in zip(requests, lengths, strict=True))
    )
    by_chunks.forward(plan)
    by_live.forward(plan)
    for request, length in zip(requests, lengths, strict=True):
        request.certain = length
    decode(model, by_chunks, by_live, requests, 2, random.Random(7))


def test_spans_are_what_they_say():
    spans = Spans.over(torch.tensor([7, 0, 3]), torch.tensor([2, 0, 3]), 5)
    assert spans.of.tolist() == [0, 0, 2, 2, 2]
    assert spans.positions.tolist() == [7, 8, 3, 4, 5]
    assert spans.offsets.tolist() == [0, 2, 2]
    both = spans.before(Spans.over(torch.tensor([9]), torch.tensor([1]), 1))
    assert both.of.tolist() == [0, 0, 2, 2, 2, 3] and both.positions.tolist()[-1] == 9
    assert both.row(both.of, both.positions).tolist() == list(range(6))


# nothing waits


def test_nothing_waits(model, monkeypatch):
    """Neither the pass nor the draft block, for which the host knows nothing but sizes."""
    monkeypatch.setattr(sync, "waits", lambda x: True)
    runner = model.runner()
    requests = [
        Request(s, prompt(60, s), 0, list(range(s * PAGES, (s + 1) * PAGES))) for s in (2, 3)
    ]
    prefill = StepPlan(tuple(r.chunk(PAGE, r.ids[:20], 1) for r in requests))
    runner.forward(prefill)
    for request in requests:
        request.certain = 20
    tokens = [[5, 6], [7]]
    live = live_rows(runner, PAGE, requests, tokens, [0, 2], windows=True)
    asked = [torch.tensor(x) for x in ([2, 3], [9, 8], [20, 20], [0, 0])]
    with no_sync("cpu"):
        runner.forward(StepPlan(()), live)
        block = runner.draft_block(*asked)
        logits, _ = block.slot(0, asked[1])
        block.slot(1, logits.argmax(-1))
        runner.forward(prefill)  # nor chunks, but for what they bring
    with pytest.raises(SyncError), no_sync("cpu"):
        logits.tolist()
