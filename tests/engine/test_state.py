"""State of running requests under the real engine: constant windows, poison, recompute."""

from __future__ import annotations

import pytest
import torch

from deepinfer import LLM, SamplingParams
from tests import plain, t6
from tests.engine.fakes import idle
from tests.t6 import prompt

# The state of plain decoding; that drafts leave no trace in it has tests of its own.
SMALL = dict(page_tokens=t6.PAGE_TOKENS, max_num_seqs=6, accelerator="cpu", mtp=0)


def params(**more) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **more})


def poison_what_nobody_owns(llm: LLM, plan, live) -> int:
    """NaN patterns in free pages, in free slots, and in what the owners have not written yet, at
    the start of a step.

    Returns how many records it overwrote.
    """
    pools, config = llm.parts.runner.pools, llm.parts.runner.config
    lengths = {chunk.slot: chunk.start for chunk in plan.chunks}
    if live is not None:
        lengths |= dict(zip(live.slots.tolist(), live.starts.tolist(), strict=True))
    running = [sequence for sequence in llm._policy.running if sequence.slot in lengths]
    count = 0
    for ring in pools.windows:
        kept = torch.zeros(len(ring), dtype=torch.bool)
        for slot, length in lengths.items():
            start = slot * pools.ring
            kept[start : start + min(length, pools.ring)] = True
        ring[~kept] = 0xFF
        count += int((~kept).sum())
    for held in (pools.entries, pools.index):
        for layer, records in held.items():
            ratio = config.compress_ratios[layer]
            per_page = pools.page_tokens // ratio
            kept = torch.zeros(len(records), dtype=torch.bool)
            for sequence in running:
                for entry in range(lengths[sequence.slot] // ratio):
                    page = sequence.pages[entry // per_page]
                    kept[page * per_page + entry % per_page] = True
            records[~kept] = 0xFF
            count += int((~kept).sum())
    for layer, rows in pools.open.items():
        ratio = config.compress_ratios[layer]
        for slot in range(rows.shape[1]):
            rows[:, slot, lengths.get(slot, 0) % ratio :] = torch.nan
    for slot in range(len(pools.history)):
        if slot not in lengths:
            pools.history[slot] = 1 << 40
    return count


def test_window_memory_of_a_long_answer(tmp_path):
    """DI-05, speculation off: what a request holds is constant but for the pages of its context."""
    ids = prompt(9)
    rows, slots, pages, deltas = [], [], [], []
    with LLM(t6.write(tmp_path / "m"), **SMALL) as llm:
        pools, blocks = llm.parts.runner.pools, llm._policy.blocks
        pools.poison()
        size, free = pools.nbytes, blocks.free
        for delta in llm.stream([ids], params(max_tokens=300)):
            deltas.append(delta)
            slots.append(llm._policy.slots_in_use)
            pages.append(free - blocks.free)
            if len(pages) % 50 == 0:
                rows.append([int((ring != 0xFF).any(-1).sum()) for ring in pools.windows])
        tokens = deltas[-1].result.token_ids
        assert idle(llm) and blocks.free == free and pools.nbytes == size
        assert len(tokens) == 300
        # 16 records of the window in each of six layers, from token 50 to the last.
        assert rows == [[16] * 6] * 6
        assert slots[99:-1] == [1] * 200
        assert pages[:-1] == [-(-(9 + n) // t6.PAGE_TOKENS) for n in range(299)]
        # The same tokens as a model that has no state at all.
        logits = llm.logits([*ids, *tokens])[len(ids) - 1 : -1]
        assert tuple(logits.argmax(-1).tolist()) == tokens


def test_answers_equal_the_reference_path(tmp_path):
    """Log-probabilities and greedy tokens of the engine against `tests.plain`, chunked and not."""
    with LLM(t6.write(tmp_path / "m"), prefill_chunk=7, **SMALL) as llm:
        texts = [prompt(n, n) for n in (1, 18, 43)]
        results = llm.generate(texts, params(logprobs=0, prompt_logprobs=0))
        model = llm.parts.runner.model
        for ids, result in zip(texts, results, strict=True):
            rows = plain.logits(model, t6.token_map()[0], [*ids, *result.token_ids])
            torch.testing.assert_close(
                llm.logits([*ids, *result.token_ids]), rows, rtol=0, atol=1e-4
            )
            rows = rows.log_softmax(-1)
            for at, entry in enumerate(result.logprobs, start=len(ids) - 1):
                assert entry.token_id == int(rows[at].argmax())
                assert entry.logprob == pytest.approx(rows[at].max().item(), abs=1e-4)
            for at, entry in enumerate(result.prompt_logprobs[1:]):
                assert entry.logprob == pytest.approx(rows[at, ids[at + 1]].item(), abs=1e-4)


def test_nan_in_storage_that_nobody_owns(folder):
    """DI-38: before the start, and again before every step, while requests come and go."""
    texts = [prompt(n, n) for n in (3, 30, 11, 18, 6)]
    asked = [params(max_tokens=n, logprobs=2) for n in (9, 4, 12, 2, 7)]
    sizes = {**SMALL, "max_num_seqs": 3, "prefill_chunk": 8}
    with LLM(folder, **sizes) as llm:
        clean = llm.generate(texts, asked)
    with LLM(folder, **sizes) as llm:
        runner = llm.parts.runner
        runner.pools.poison()
        forward, poisoned = runner.forward, []

        def after_poison(plan, live=None):
            poisoned.append(poison_what_nobody_owns(llm, plan, live))
            return forward(plan, live)

        runner.forward = after_poison
        got = llm.generate(texts, asked)
        assert min(poisoned) > 0 and idle(llm)
    assert [r.token_ids for r in got] == [r.token_ids for r in clean]
    assert [r.logprobs for r in got] == [r.logprobs for r in clean]


def test_table_rows_after_a_preemption(folder, monkeypatch):
    """DI-09 (c): each position asks for the same Engram rows before and after a recompute."""
    texts = [prompt(24, start) for start in range(4)]
    asked, config = params(max_tokens=16), t6.model_config()

    def run(**sizes):
        """Results, and the set of row lists that each position of each slot's owner asked for."""
        found: dict[tuple[tuple[int, ...], int], set[tuple[int, ...]]] = {}
        with LLM(folder, **SMALL, **sizes) as llm:
            runner = llm.parts.runner
            forward, engram_rows = runner.forward, runner.ops.engram_rows
            plans = []

            def watched(plan, live=None):
                plans.append((plan, live))
                return forward(plan, live)

            def recorded(*args):
                rows = engram_rows(*args)
                owners = {s.slot: s for s in llm._policy.running}
                at, (plan, live) = 0, plans[-1]
                if live is not None:
                    slots = live.slots[live.of].tolist()
                    for slot, position in zip(slots, live.positions.tolist(), strict=True):
                        text = tuple(owners[slot].tokens[:24])
                        found.setdefault((text, position), set()).add(tuple(rows[at].tolist()))
                        at += 1
                for chunk in plan.chunks:
                    text = tuple(owners[chunk.slot].tokens[:24])
                    for position in range(chunk.start, chunk.end):
                        found.setdefault((text, position), set()).add(tuple(rows[at].tolist()))
                        at += 1
                return rows

            monkeypatch.setattr(runner, "forward", watched)
            monkeypatch.setattr(runner.ops, "engram_rows", recorded)
            monkeypatch.setattr(runner.ops, "graphs", None)  # one would pass by
            return llm.generate(texts, asked), found

    calm, expected = run()
    busy, found = run(kv_cache_tokens=24 * t6.PAGE_TOKENS)
    assert sum(r.usage.recomputed_tokens for r in busy) > 24
    assert [r.token_ids for r in busy] == [r.token_ids for r in calm]
    assert found == expected and all(len(rows) == 1 for rows in found.values())
    for ids, result in zip(texts, calm, strict=True):
        rows = plain.engram_rows(config, t6.token_map()[0], [*ids, *result.token_ids[:-1]])
        for position, row in enumerate(rows):
            assert found[tuple(ids), position] == {tuple(row)}


def test_a_prompt_of_whole_pages_again_and_one_free_token(folder):
    """DI-35: the resend, the prompt that leaves room for one token, and no token at all."""
    with LLM(folder, max_model_len=24, kv_cache_tokens=24, **SMALL) as llm:
        one, two = (llm.generate([prompt(16)], params(logprobs=1))[0] for _ in range(2))
        assert one.token_ids == two.token_ids and one.logprobs == two.logprobs
        assert len(one.token_ids) == 8
        [last] = llm.generate([prompt(23)], params())
        assert len(last.token_ids) == 1 and last.finish_reason == "length" and not last.error
        [none] = llm.generate([prompt(16)], params(max_tokens=0))
        assert none.token_ids == () and none.finish_reason == "length" and not none.error
        assert idle(llm)
