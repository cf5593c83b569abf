"""Speculation over the real network T6: the ids, the state and the counts of plain decoding.

T6's own drafter, of random weights, is nearly always wrong; `Oracle` makes it right as often as a
test wants, and everything behind the logits stays real.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.engine.device import Clock
from deepinfer.errors import UsageError
from tests import t6
from tests.engine.fakes import idle, requests_of
from tests.t6 import prompt

PAGE = t6.PAGE_TOKENS
SMALL = dict(page_tokens=PAGE, max_num_seqs=6, accelerator="cpu")
LENGTHS = (9, 2, 16, 30, 5, 17, 31, 3)  # of prompts: short of the window, at its end, beyond
TOKENS = 15


def greedy(**more) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **more})


def mixed(base: int) -> int:
    """0 to 5 drafts that agree, by position."""
    return base * 7 % 11 % 6


class Oracle:
    """Stands before a runner's drafter: the first `count(base)` drafts of the block whose first is
    at position `base` are those of the answers it knows (by prompt), the others the network's."""

    def __init__(self, llm: LLM, known, count=mixed) -> None:
        self.llm, self.count = llm, count
        self.known = {tuple(ids): [*ids, *answer] for ids, answer in known}
        self.real = llm.parts.runner.draft_block
        llm.parts.runner.draft_block = self

    def __call__(self, *asked):
        self.block, self.requests = self.real(*asked), requests_of(*asked)
        requests = self.requests
        owners = {s.slot: s for s in self.llm._policy.running}
        # One that has ended is drafted for once more.
        self.texts = [
            self.known[owners[r.slot].request.prompt_ids] if r.slot in owners else []
            for r in requests
        ]
        return self

    def slot(self, i, tokens):
        logits, confidence = self.block.slot(i, tokens)
        assert logits.isfinite().all() and confidence.isfinite().all()
        logits, confidence = logits.clone(), confidence.clone()
        for at, (request, text) in enumerate(zip(self.requests, self.texts, strict=True)):
            base = request.last + 2
            if i < self.count(base) and base + i < len(text):
                logits[at, text[base + i]] = 1e4
                confidence[at] = 6.0
        return logits, confidence


def known(results, prompts):
    return [(ids, r.token_ids) for ids, r in zip(prompts, results, strict=True)]


def seen(result):
    return result.token_ids, result.text, result.finish_reason, result.logprobs


def rules(llm: LLM, **changes) -> None:
    """Other rules for an engine that runs nothing."""
    assert idle(llm)
    llm._planner.rules = llm._device._rules = replace(llm._planner.rules, **changes)
    llm._planner._vain = 0  # of the rules before
    llm._policy._length = llm._planner.length


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    """The float checkpoint alone, where two would show nothing more."""
    return t6.write(tmp_path_factory.mktemp("t6") / "m")


@pytest.fixture(scope="module")
def texts(folder):
    """Prompts; of the quantised checkpoint the first 8 will do."""
    count = 32 if folder.name == "float" else 8
    return [prompt(LENGTHS[n % 8] + n // 8, n) for n in range(count)]


@pytest.fixture(scope="module")
def truth(folder, texts):
    """Greedy answers without speculation."""
    with LLM(folder, mtp=0, **{**SMALL, "max_num_seqs": 32}) as llm:
        return llm.generate(texts, greedy())


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **{**SMALL, "max_num_seqs": 32}) as llm:
        # Every step takes as long: no draft is too dear to be verified, on any machine.
        llm._device.clock = Clock(llm._device.live.device, itertools.count().__next__)
        yield llm
        assert idle(llm)


def test_greedy_equality(llm, texts, truth):
    """mtp 1 to 5, varlen on and off, 1, 3 and 32 requests; the answers cross ends of groups, pages
    and rings, where none to five drafts stand."""
    oracle = Oracle(llm, known(truth, texts))
    cases = [(n, v, 1 + 2 * ((n + v) % 2)) for n in range(1, 6) for v in (False, True)]
    if llm.parts.runner.config.quantised:
        cases = [(1, False, 1), (2, True, 1), (3, True, 3), (4, False, 3)]
    try:
        for length, varlen, count in (*cases, (5, False, 1), (5, True, len(texts))):
            first = length if count <= 3 else 0
            rules(llm, length=length, varlen=varlen)
            got = llm.generate(texts[first : first + count], greedy())
            want = truth[first : first + count]
            assert [r.token_ids for r in got] == [r.token_ids for r in want], (length, varlen)
            assert sum(r.speculation["accepted"] for r in got) > len(got)
    finally:
        llm.parts.runner.draft_block = oracle.real
        rules(llm, length=5, varlen=False)


# DI-25, DI-09 (b), DI-05: state


class Forced:
    """A runner whose logits say a given text, wherever the prompts begin in it, and whose drafter
    says it for the first `count(call)` drafts of a block; every number behind that is real.

    `rows`: the real logits of every row whose tokens are those of the text, by position.
    """

    def __init__(self, llm: LLM, text, count=lambda slot: 5, before=lambda: None) -> None:
        self.text, self.count, self.before = text, count, before
        self.rows: dict[int, list[torch.Tensor]] = {}
        self.drafted: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.calls = 0
        runner, self.device = llm.parts.runner, llm._device
        runner.ops.graphs = None  # one would pass by
        self.forward, self.draft_block = runner.forward, runner.draft_block
        runner.forward, runner.draft_block = self.ran, self.block

    def ran(self, plan, live=None):
        self.before()
        real = self.forward(plan, live)
        out, at = torch.zeros_like(real), 0
        may = self._may_stand(live)
        for start, p, ids in live_rows(live):
            if p + 1 < len(self.text):
                out[at, self.text[p + 1]] = 1.0
            if ids == self.text[start : p + 1] and p - start <= may[start]:  # not a void row
                self.rows.setdefault(p, []).append(real[at])
            at += 1
        for chunk in plan.chunks:
            for p in range(chunk.end - chunk.logits, chunk.end):
                out[at, self.text[p + 1]] = 1.0
                if list(chunk.token_ids[: p + 1 - chunk.start]) == self.text[chunk.start : p + 1]:
                    self.rows.setdefault(p, []).append(real[at])
                at += 1
        return out

    def _may_stand(self, live):
        """By a request's first position: how many of its drafts are verified."""
        if live is None:
            return {}
        may = self.device.live.may_stand(live.slots)
        if self.device._held is None or self.device._rules.threshold is not None:
            may = may * 0
        starts = live.starts.tolist()
        found = dict(zip(starts, may.tolist(), strict=True))
        for start, n in zip(starts, may.tolist(), strict=True):
            found[start] = min(found[start], n)
        return found

    def block(self, *asked):
        self.real, self.requests = self.draft_block(*asked), requests_of(*asked)
        self.counts = [self.count(self.calls + r.slot) for r in self.requests]
        self.calls += 1
        return self

    def slot(self, i, tokens):
        logits, confidence = self.real.slot(i, tokens)
        out = torch.zeros_like(logits)
        for at, request in enumerate(self.requests):
            p = request.last + 2 + i
            if i == 0:
                self.drafted.setdefault(p, []).append((logits[at], confidence[at]))
            out[at, self.text[p] if i < self.counts[at] else 11 + (self.text[p] + 1) % 256] = 1.0
        return out, torch.zeros_like(confidence)


def live_rows(live):
    """(position of the first row of its request, its own, ids of the request up to it) of each
    row of decoding requests."""
    if live is None:
        return
    starts, ids = live.starts.tolist(), live.ids.tolist()
    offsets = live.offsets.tolist()
    for at, (r, p) in enumerate(zip(live.of.tolist(), live.positions.tolist(), strict=True)):
        yield starts[r], p, ids[offsets[r] : at + 1]


def in_memory(llm: LLM, sequence) -> int:
    """Tokens of a decoding sequence whose state is in memory."""
    return int(llm._device.live.length[sequence.slot]) - 1


def decoding(llm: LLM):
    """Sequences that go on behind their prompt."""
    return [s for s in llm._running if s.slot is not None and s.generated]


def state(llm: LLM, sequence) -> dict[str, torch.Tensor]:
    """Everything that decoding the next token reads, in the order of positions."""
    runner, n, slot = llm.parts.runner, in_memory(llm, sequence), sequence.slot
    pools, config = runner.pools, runner.config
    out = {}
    p = torch.arange(max(0, n - config.sliding_window), n)
    for name, rings in (("window", pools.windows), ("draft", pools.drafts)):
        for at, ring in enumerate(rings):
            out[f"{name} {at}"] = ring[slot * pools.ring + p % pools.ring]
    for layer, records in pools.entries.items():
        ratio = config.compress_ratios[layer]
        size = pools.page_tokens // ratio
        j = torch.arange(n // ratio)
        pages = torch.tensor(sequence.pages)
        places = pages[j // size] * size + j % size
        out[f"entries {layer}"], out[f"keys {layer}"] = records[places], pools.index[layer][places]
        depth = pools.open[layer].shape[2]
        if depth:
            p = torch.arange(n // ratio * ratio, n)
            out[f"open {layer}"] = pools.open[layer][:, slot, p % depth]
    depth = pools.history.shape[1]
    p = torch.arange(max(0, n - (config.engram_max_ngram_size - 1)), n)
    out["n-grams"] = pools.history[slot, p % depth]
    return {name: value.clone() for name, value in out.items()}


def poison_all_but_the_state(llm: LLM) -> None:
    """NaN patterns over whatever plain decoding would not read: rings behind the rolled back end
    and before the window, entries of groups taken back, slots and pages of nobody."""
    runner = llm.parts.runner
    pools = runner.pools
    kept = [(sequence, state(llm, sequence)) for sequence in decoding(llm)]
    pools.poison()
    pools.history.fill_(1 << 40)
    for sequence, held in kept:
        put_back(llm, sequence, held)


def put_back(llm: LLM, sequence, held) -> None:
    runner, n, slot = llm.parts.runner, in_memory(llm, sequence), sequence.slot
    pools, config = runner.pools, runner.config
    p = torch.arange(max(0, n - config.sliding_window), n)
    for name, rings in (("window", pools.windows), ("draft", pools.drafts)):
        for at, ring in enumerate(rings):
            ring[slot * pools.ring + p % pools.ring] = held[f"{name} {at}"]
    for layer, records in pools.entries.items():
        ratio = config.compress_ratios[layer]
        size = pools.page_tokens // ratio
        j = torch.arange(n // ratio)
        pages = torch.tensor(sequence.pages)
        places = pages[j // size] * size + j % size
        records[places], pools.index[layer][places] = (
            held[f"entries {layer}"],
            held[f"keys {layer}"],
        )
        depth = pools.open[layer].shape[2]
        if depth:
            p = torch.arange(n // ratio * ratio, n)
            pools.open[layer][:, slot, p % depth] = held[f"open {layer}"]
    depth = pools.history.shape[1]
    p = torch.arange(max(0, n - (config.engram_max_ngram_size - 1)), n)
    pools.history[slot, p % depth] = held["n-grams"]


@pytest.mark.parametrize("kind,ratio,end", [("float", 2, 61), ("quantised", 4, 41)])
def test_di_25_and_09_state_after_partial_acceptance(tmp_path, kind, ratio, end):
    """Accepted counts that cycle 0 to 5, prompts of 1 to 8 tokens of one text, up to 60 new ones:
    after every step all state is, byte for byte, that of plain decoding at the same length, and so
    are the real logits, though all else is poisoned before every step. DI-09 (b): the n-gram
    history is of committed tokens alone."""
    folder = t6.write(tmp_path / "m", quantised=kind == "quantised", ratio=ratio)
    text = prompt(70, 3)
    sizes = {**SMALL, "max_num_seqs": 8, "prefix_cache": False, "kv_cache_tokens": 1024}
    states = {}
    with LLM(folder, **sizes, mtp_threshold=1.0) as llm:  # drafts, but none is ever verified
        want = llm.logits(text[:end])
        slow = Forced(llm, text)
        for _ in llm.stream([text[:1]], greedy(max_tokens=end - 1)):
            for sequence in decoding(llm):
                states[in_memory(llm, sequence)] = state(llm, sequence)
    assert sorted(states) == list(range(1, end - 1))
    for p, [row] in slow.rows.items():
        assert torch.equal(row, want[p])
    with LLM(folder, **sizes) as llm:
        fast = Forced(llm, text, lambda call: call % 6, lambda: poison_all_but_the_state(llm))
        llm.parts.runner.pools.poison()
        starts = range(1, 9)
        asked = [greedy(max_tokens=end - n) for n in starts]
        lengths, compared = {n: [] for n in starts}, set()
        results = {}
        for delta in llm.stream([text[:n] for n in starts], asked):
            if delta.result:
                results[delta.index + 1] = delta.result
            for sequence in decoding(llm):
                n = in_memory(llm, sequence)
                if lengths[sequence.prompt_tokens][-1:] != [n]:
                    lengths[sequence.prompt_tokens].append(n)
                    for name, value in state(llm, sequence).items():
                        assert torch.equal(value, states[n][name]), (n, name)
                        compared.add(name.split()[0])
        assert idle(llm)
    assert compared == {"window", "draft", "entries", "keys", "open", "n-grams"}
    for n in starts:
        assert results[n].token_ids == tuple(text[n:end])
        steps = [b - a for a, b in itertools.pairwise(lengths[n])]
        assert set(steps) >= {1, 2, 3, 4, 5, 6}, "every accepted count was there"
    for p, rows in fast.rows.items():
        assert all(torch.equal(row, want[p]) for row in rows), p
    assert set(fast.rows) >= set(range(8, end - 1))
    for p, found in fast.drafted.items():
        if p in slow.drafted:  # of a text alone, the drafter's numbers too
            assert all(torch.equal(a, b) for one in found for a, b in
                       zip(one, slow.drafted[p][0], strict=True)), p  # fmt: skip


def test_di_05_memory_of_a_long_answer(tmp_path):
    """300 tokens, drafts always accepted: what a request holds is constant but for the pages of
    its context, the real logits are those of a model without state, and everything comes back.
    (`test_state` has the run without speculation.)"""
    text = prompt(320, 5)
    windows, slots, sizes = [], [], set()
    with LLM(t6.write(tmp_path / "m"), **SMALL, prefill_chunk=320) as llm:
        want = llm.logits(text[:309])
        forced = Forced(llm, text)
        policy, held = llm._policy, llm._prefix.windows
        for delta in llm.stream([text[:9]], greedy(max_tokens=300)):
            result = delta.result
            for sequence in decoding(llm):
                if sequence.generated > 100:
                    slots.append(policy.slots_in_use)
                    windows.append(held.total - held.free)
                    more = policy.blocks.total - policy.blocks.free
                    more -= policy.blocks.pages_for(len(sequence.tokens))
                    assert 0 <= more <= 2, "pages of drafts, at most"
            sizes.add(llm.parts.runner.pools.nbytes)
        assert result.token_ids == tuple(text[9:309])
        assert result.speculation["steps"] == 50
        assert idle(llm) and len(sizes) == 1
    assert set(slots) == {1} and max(windows) <= 3
    assert all(torch.equal(row, want[p]) for p, [row] in forced.rows.items())
    assert set(forced.rows) >= set(range(8, 308))


# DI-19: seeds


@pytest.mark.parametrize("verify", ["rejection", "coupled"])
def test_di_19_seeds(floats, verify):
    """Alone, beside others, last of the queue, after 50 steps of the engine."""
    ids, mine = prompt(17), SamplingParams(max_tokens=7, ignore_eos=True, seed=7)
    free = SamplingParams(max_tokens=6, ignore_eos=True)
    others = [prompt(5, 1), prompt(30, 2), prompt(12, 3)]
    sizes = {**SMALL, "max_num_seqs": 2, "verify": verify}
    with LLM(floats, **sizes) as llm:
        [alone] = llm.generate([ids], mine)
        first = llm.generate([ids, *others], [mine, free, free, free])[0]
        last = llm.generate([*others, ids], [free, free, free, mine])[-1]
        assert llm._policy.planned > 12
        assert alone.token_ids == first.token_ids == last.token_ids
        other, one, two = llm.generate([ids] * 3, [replace(mine, seed=8), free, free])
        assert other.token_ids != alone.token_ids and one.token_ids != two.token_ids
        assert one.seed != two.seed and idle(llm)


# DI-23: log-probabilities


def test_di_23_logprobs_up_to_the_context_limit(floats):
    """Greedy and at T = 0.8, 20 tokens and up to the limit 22 tokens behind the prompt."""
    prompts = [prompt(10, n) for n in range(4)]
    asked = [
        SamplingParams(max_tokens=n, temperature=t, seed=3, ignore_eos=True, logprobs=5)
        for n in (20, 40)
        for t in (0, 0.8)
    ]
    sizes = {**SMALL, "max_model_len": 32, "verify": "coupled"}
    with LLM(floats, mtp=0, **sizes) as llm:
        off = llm.generate(prompts, asked)
    with LLM(floats, **sizes) as llm:
        for count in (mixed, lambda base: 5):
            oracle = Oracle(llm, known(off, prompts), count)
            for params, one, on in zip(asked, off, llm.generate(prompts, asked), strict=True):
                assert seen(on) == seen(one) and on.speculation["accepted"] > 3
                assert len(on.logprobs) == len(on.token_ids) == min(params.max_tokens, 22)
                for token, entry in zip(on.token_ids, on.logprobs, strict=True):
                    assert entry.token_id == token and len(entry.top) == 5
                    assert entry.logprob < 0
            llm.parts.runner.draft_block = oracle.real
        assert idle(llm)


# DI-24 (a): the length of a draft


def test_di_24_draft_length_against_the_block(tmp_path, monkeypatch):
    folder = t6.write(tmp_path / "m")
    for how in ("argument", "variable"):
        for value, code in ((7, "mtp-too-long"), (-1, None)):
            with pytest.raises(UsageError) as caught:
                if how == "argument":
                    LLM(folder, **SMALL, mtp=value)
                monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", str(value))
                LLM(folder, **SMALL)
            text = f"{caught.value.message} {caught.value.facts} {caught.value.hint}"
            assert str(value) in text and (code is None or caught.value.code == code)
            assert code is None or "5" in text
            monkeypatch.delenv("DEEPINFER_USE_NEXTN_DECODE", raising=False)
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "0")
    with LLM(folder, **SMALL) as llm:
        [result] = llm.generate([prompt(5)], greedy(max_tokens=4))
        assert result.speculation is None and not llm.parts.runner.pools.drafts


# DI-26: requests beside each other, slots that are used again


def test_di_26_drafts_do_not_depend_on_neighbours(floats):
    """T6's own drafter, unaided: ids, drafts and raw confidences of every step, bit for bit."""
    prompts = [prompt(n, n) for n in (2, 5, 17, 30, 31, 64)]
    lengths = (3, 8, 8, 8, 8, 8)
    seventh = prompt(9, 7)

    def steps_of(results, steps, seq):
        own = [
            (s.pos, s.draft_ids, s.logits, s.survival, s.verified, s.accepted, s.committed)
            for s in steps
            if s.seq == seq
        ]
        return results[seq].token_ids, own

    # Another engine for those alone: no prefix of the batch is found.
    with LLM(floats, **SMALL, prefix_cache=False) as llm:
        alone = []
        for ids, n in zip([*prompts, seventh], (*lengths, 6), strict=True):
            alone.append(steps_of(*llm.trace([ids], greedy(max_tokens=n)), 0))
    with LLM(floats, **SMALL, prefix_cache=False) as llm:
        asked = [greedy(max_tokens=n) for n in (*lengths, 6)]
        results, steps = llm.trace([*prompts, seventh], asked)
        assert idle(llm)
        for seq, want in enumerate(alone):
            assert steps_of(results, steps, seq) == want, seq
        # The seventh came when the first had ended, into its slot.
        assert min(s.step for s in steps if s.seq == 6) > max(s.step for s in steps if s.seq == 0)


# everything at once


def test_mixed_batches_with_preemption_and_chunks(floats):
    """Greedy and sampled, penalties, bias, stops, log-probabilities and min_tokens, coupled: every
    field as without speculation, in a small pool, in chunks, with requests that arrive later."""
    asked = [
        greedy(logprobs=1),
        SamplingParams(max_tokens=14, seed=1, ignore_eos=True),
        greedy(max_tokens=13, presence_penalty=1.0, frequency_penalty=0.5),
        SamplingParams(max_tokens=16, seed=2, top_k=5, logprobs=0, repetition_penalty=1.2),
        greedy(max_tokens=12, logit_bias={40: 3.0, 41: -math.inf}, prompt_logprobs=0),
        SamplingParams(max_tokens=15, seed=3, top_p=0.8, min_tokens=11, ignore_eos=True,
                       stop_token_ids=tuple(range(11, 60))),
        greedy(max_tokens=15, stop=("e", "t", "\n"), min_tokens=4),
    ]  # fmt: skip
    prompts = [prompt(n, n) for n in (24, 9, 31, 18, 12, 27, 5)]
    sizes = {**SMALL, "swa_keep": "full", "verify": "coupled"}
    with LLM(floats, mtp=0, **sizes) as llm:
        want = llm.generate(prompts, asked)
    for more in (dict(kv_cache_tokens=60, prefill_chunk=7), dict(max_num_batched_tokens=13,
                 mtp_varlen=True)):  # fmt: skip
        with LLM(floats, **sizes, **more) as llm:
            Oracle(llm, known(want, prompts))
            gone = llm.stream(prompts[4:6], asked[4:6])
            early = llm.stream(prompts[:4], asked[:4])
            results = {}
            next(gone)
            for delta in itertools.islice(early, 6):
                results[delta.index] = delta.result
            gone.close()
            late = llm.generate(prompts[4:], asked[4:])
            for delta in early:
                results[delta.index] = delta.result
            got = [results[at] for at in range(4)] + late
            for at, (one, two) in enumerate(zip(want, got, strict=True)):
                assert seen(one) == seen(two), at
                assert one.prompt_logprobs == two.prompt_logprobs
            again = sum(r.usage.recomputed_tokens for r in got)
            assert (again > 0) == ("kv_cache_tokens" in more)
            assert sum(r.speculation["accepted"] for r in got) > 10
            assert idle(llm)


@pytest.mark.parametrize("mode", ["compact", "mask", "off"])
def test_prefix_hits(floats, mode):
    """A resumed prompt drafts and verifies like a fresh one, and a finished answer whose drafts
    were rejected is found again. In mode off no draft context exists before the resume point: the
    drafts may differ, the ids may not."""
    keep = "full" if mode == "off" else t6.KEEP
    sizes = {**SMALL, "replay_mode": mode, "swa_keep": keep}
    first = prompt(50)
    with LLM(floats, mtp=0, prefix_cache=False, **sizes) as llm:
        [one] = llm.generate([first], greedy(logprobs=1))
        longer = [*first, *one.token_ids, *prompt(31, 9)]
        [two] = llm.generate([longer], greedy(max_tokens=8, logprobs=1))
    with LLM(floats, **sizes) as llm:
        Oracle(llm, [(first, one.token_ids), (longer, two.token_ids)])
        for ids, want, hit in ((first, one, 0), (first, one, 20), (longer, two, 60)):
            [got] = llm.generate([ids], greedy(max_tokens=len(want.token_ids), logprobs=1))
            assert seen(got) == seen(want), (len(ids), hit)
            assert got.usage.cached_tokens >= hit and (hit or not got.usage.cached_tokens)
            assert got.speculation["accepted"] > 2 and idle(llm)
        llm.parts.runner.draft_block = llm.parts.runner.draft_block.real
        # Unaided, and with NaN wherever nothing was restored.
        for ring in (*llm.parts.runner.pools.windows, *llm.parts.runner.pools.drafts):
            ring.fill_(0xFF)
        [got], steps = llm.trace([first], greedy(max_tokens=8, logprobs=1))
        assert got.token_ids == one.token_ids[:8] and got.usage.cached_tokens >= 20
        assert all(math.isfinite(x) for step in steps for x in step.logits)
        assert all(min(step.draft_ids, default=0) >= 0 for step in steps)


def test_end_of_sequence_inside_blocks(folder, truth, texts):
    """Stop ids chosen from known answers, at every place of a block."""
    with LLM(folder, **{**SMALL, "max_num_seqs": 16}) as llm:
        for count in (lambda base: 5, mixed):
            oracle = Oracle(llm, known(truth, texts), count)
            asked = [greedy(stop_token_ids=[truth[n].token_ids[n + 1]]) for n in range(8)]
            got = llm.generate(texts[:8], asked)
            llm.parts.runner.draft_block = oracle.real
            for n, result in enumerate(got):
                ids = truth[n].token_ids
                end = ids.index(ids[n + 1]) + 1
                assert result.token_ids == ids[:end] and result.finish_reason == "stop"
        assert idle(llm)


# what lasts


def test_step_times_are_kept_in_a_folder(tmp_path):
    folder, kept, lines = t6.write(tmp_path / "m"), tmp_path / "times", []
    sizes = {**SMALL, "decode_perf_cache_dir": kept, "mtp_varlen": True, "backend": "all=torch"}

    def run():
        with LLM(folder, on_warning=lines.append, **sizes) as llm:
            start = {n: len(some) for n, some in llm.parts.times.target.samples.items()}
            llm.generate([prompt(5)], greedy(max_tokens=4))
            assert llm._planner.times is llm.parts.times
            return start

    assert run() == {}
    [file] = kept.iterdir()
    document = json.loads(file.read_text())
    assert 0 < sum(map(len, document["target"].values())) <= 3
    assert run() == {int(n): len(some) for n, some in document["target"].items()}
    assert not lines
    file.write_text(file.read_text()[:-9])
    assert run() == {} and len(lines) == 1 and "damaged; measured anew" in lines[0]
    assert run() != {} and len(lines) == 1, "written anew"
    # Another model does not read it.
    other = t6.write(tmp_path / "other", seed=7)
    with LLM(other, **sizes) as llm:
        assert not llm.parts.times.target.samples
    assert [f for f in kept.iterdir() if f.name.endswith(".tmp")] == []
    with LLM(folder, **{**sizes, "decode_perf_cache_ttl_sec": 0}) as llm:
        assert not llm.parts.times.target.samples


def test_nan_from_the_target_under_speculation(folder, truth, texts):
    """DI-38: behind a rejected draft, and at a deciding row: the one harms nobody, the other its
    request alone."""
    with LLM(folder, **SMALL) as llm:
        Oracle(llm, known(truth, texts), lambda base: 2)
        runner, forward = llm.parts.runner, llm.parts.runner.forward
        texts_of = {tuple(ids): [*ids, *r.token_ids] for ids, r in zip(texts, truth, strict=True)}
        victims = {tuple(texts[1]): len(texts[1]) + 5}
        hurt = []

        def hooked(plan, live=None):
            logits, at = forward(plan, live).clone(), 0
            owners = {s.slot: s for s in llm._policy.running}
            slots = live.slots[live.of].tolist() if live is not None else []
            for slot, (start, p, given) in zip(slots, live_rows(live), strict=True):
                ids = owners[slot].request.prompt_ids
                right = given == texts_of[ids][start : p + 1]
                if not right or p >= victims.get(ids, 1 << 30):
                    logits[at] = math.nan
                    hurt.append(right)
                at += 1
            for chunk in plan.chunks:
                ids = owners[chunk.slot].request.prompt_ids
                text = texts_of[ids]
                for p in range(chunk.end - chunk.logits, chunk.end):
                    right = (
                        list(chunk.token_ids[: p + 1 - chunk.start]) == text[chunk.start : p + 1]
                    )
                    if not right or p >= victims.get(ids, 1 << 30):
                        logits[at] = math.nan
                        hurt.append(right)
                    at += 1
            return logits

        runner.forward = hooked
        got = llm.generate(texts[:4], greedy())
        assert idle(llm) and False in hurt and True in hurt
        for n in (0, 2, 3):
            assert got[n].token_ids == truth[n].token_ids and got[n].error is None
        assert got[1].error.code == "numeric-error"
        assert got[1].token_ids == truth[1].token_ids[:6]
