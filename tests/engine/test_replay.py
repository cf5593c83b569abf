"""Bounded replay under the real engine: what is kept, in every chunking, beside any neighbour."""

from __future__ import annotations

import warnings

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.errors import UsageError
from deepinfer.model import cost
from tests import plain, t6
from tests.t6 import prompt

WINDOW = 16
SMALL = dict(
    page_tokens=t6.PAGE_TOKENS, max_num_seqs=6, accelerator="cpu", prefix_cache=False,
    swa_keep=t6.KEEP,
)  # fmt: skip


def params(**more) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 10, "ignore_eos": True, "logprobs": 3, **more}
    )


def answer(folder, ids, sampling=None, **settings):
    """(ids, logprobs as bits of what the user sees) of each prompt."""
    with LLM(folder, **{**SMALL, **settings}) as llm:
        results = llm.generate(ids, sampling or params())
    return [(result.token_ids, result.logprobs) for result in results]


class Rows:
    """Positions that went through each layer's attention, seen at the model's memory."""

    def __init__(self, monkeypatch):
        from deepinfer.engine.runner import Runner
        from deepinfer.kvcache.memory import StepMemory

        attend, self.seen = StepMemory.attend, {}

        def recorded(memory, layer, q, kv, sink):
            rows = memory.positions
            if layer.index >= memory.config.decoder_start and memory.kept is not None:
                rows = rows[memory.kept]
            assert len(rows) == len(q)
            self.seen.setdefault(layer.index, []).extend(rows.tolist())
            return attend(memory, layer, q, kv, sink)

        monkeypatch.setattr(StepMemory, "attend", recorded)
        monkeypatch.setattr(Runner, "graphs", None)  # a graph would pass by


@pytest.mark.parametrize("size", [50, 16, 7, 1])
def test_kept_rows_follow_the_prompt_not_the_chunk(folder, monkeypatch, size):
    """DI-02: the decoder half runs positions 22 .. 49 and nothing else, the first half all."""
    whole = answer(folder, [prompt(50)])
    rows = Rows(monkeypatch)
    assert answer(folder, [prompt(50)], prefill_chunk=size, mtp=0) == whole
    for layer, seen in rows.seen.items():
        first = 22 if layer >= 3 else 0
        assert seen == [*range(first, 50), *range(50, 59)], layer


@pytest.mark.parametrize("size", [1, 7, WINDOW - 1, WINDOW, WINDOW + 1, 61])
def test_mask_equals_compact_in_every_chunking(folder, size):
    if size == 1 and folder.name == "quantised":
        pytest.skip("the chunking is that of the float checkpoint")
    texts = [prompt(n, n) for n in (61, 29, 28, 44)]
    assert answer(folder, texts, prefill_chunk=size, replay_mode="mask") == answer(
        folder, texts, replay_mode="compact"
    )


EDGES = sorted(
    {n for edge in (WINDOW, t6.KEEP, t6.KEEP + WINDOW, 32, 36) for n in range(edge - 2, edge + 3)}
    | {1, 2, 3, 4, 5}
)


def test_every_length_around_window_keep_and_page(folder):
    """All modes, in batches of another size and chunks; up to the keep they equal `off`."""
    texts = [prompt(n, n) for n in EDGES]
    together = answer(folder, texts, params(max_tokens=2), max_num_seqs=32)
    masked = answer(
        folder, texts, params(max_tokens=2), max_num_seqs=5, replay_mode="mask", prefill_chunk=9
    )
    off = answer(folder, texts, params(max_tokens=2), swa_keep="full")
    assert together == masked
    for ids, cut, full in zip(texts, together, off, strict=True):
        assert (cut == full) or len(ids) > t6.KEEP, len(ids)
    assert any(cut != full for cut, full in zip(together, off, strict=True))


def test_a_keep_beyond_the_prompt_or_the_halo_equals_off(folder):
    """K >= L, and K >= 1 + (W - 1) x decoder layers: the last row and all after it are equal."""
    exact = 1 + (WINDOW - 1) * 3
    for length, keep in ((50, 50), (50, 4000), (90, exact), (200, exact + 3)):
        cut = answer(folder, [prompt(length)], swa_keep=keep)
        assert cut[0] == answer(folder, [prompt(length)], swa_keep="full")[0], (length, keep)
    short = answer(folder, [prompt(200)], swa_keep=22)
    assert short != answer(folder, [prompt(200)], swa_keep="full"), "else this could not fail"


def test_prompt_logprobs_run_every_row(tmp_path, monkeypatch):
    """DI-03: A gets 49 exact values, B beside it is still cut to 28 rows."""
    folder, ids = t6.write(tmp_path / "m"), prompt(50)
    rows = Rows(monkeypatch)
    with LLM(folder, **SMALL) as llm:
        a, b = llm.generate([ids, prompt(50, 2)], [params(prompt_logprobs=0), params()])
        assert (a.replay, b.replay) == ("off (prompt_logprobs)", "compact")
        assert rows.seen[5][: 50 + 28] == [*range(50), *range(22, 50)]
        want = plain.logits(llm.parts.runner.model, t6.token_map()[0], ids).log_softmax(-1)
        assert len(a.prompt_logprobs) == 50 and a.prompt_logprobs[0] is None
        for at, entry in enumerate(a.prompt_logprobs[1:]):
            assert entry.token_id == ids[at + 1]
            assert entry.logprob == pytest.approx(want[at, ids[at + 1]].item(), abs=1e-4)
        assert llm.generate([prompt(50, 2)], params())[0].token_ids == b.token_ids


@pytest.mark.parametrize("keep,least", [(16, 17), (0, 17)])
def test_a_keep_below_window_and_rollback_is_refused(tmp_path, keep, least):
    """DI-04 (a), (b): before the weights are read, with the value and the least one."""
    folder = t6.write(
        tmp_path / "m", num_nextn_predict_layers=0, compress_ratios=[0, 2, 2, 1, 1, 1]
    )
    for shard in folder.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-8:] = b"\xff" * 8
        shard.write_bytes(data)
    with pytest.raises(UsageError) as refused:
        LLM(folder, **{**SMALL, "swa_keep": keep})
    assert refused.value.code == "swa-keep-too-short"
    assert str(keep) in refused.value.message and str(least) in " ".join(refused.value.facts)


def test_a_draft_block_needs_its_rollback(folder):
    """DI-04 (a) with the draft of T6: 16 + 5 + 1 = 22."""
    with pytest.raises(UsageError) as refused:
        LLM(folder, **{**SMALL, "swa_keep": 21})
    assert "22" in " ".join(refused.value.facts)
    LLM(folder, **{**SMALL, "swa_keep": 22}).close()


def test_a_layout_that_cannot_be_cut(tmp_path):
    """DI-04 (c): layer 4 owns compressed KV too: one warning with the reason, exact output."""
    folder = t6.write(
        tmp_path / "m", kv_source_layer_ids=[1, 3, 4], index_source_layer_ids=[1, 3, 4, 5]
    )
    ids = prompt(50)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm = LLM(folder, **SMALL)
    lines = [str(w.message) for w in caught if "truncation" in str(w.message)]
    assert len(lines) == 1 and "layer 4 owns compressed KV" in lines[0]
    with llm:
        [result] = llm.generate([ids], params())
        assert result.replay == "off"
        rows = plain.logits(llm.parts.runner.model, t6.token_map()[0], [*ids, *result.token_ids])
        assert rows[49:-1].argmax(-1).tolist() == list(result.token_ids)


def test_preemption_recomputes_the_same_tail(folder):
    """A request that lost its memory comes back with the rows its prompt keeps, not fewer."""
    texts = [prompt(40, 1), prompt(41, 2), prompt(42, 3)]
    calm = answer(folder, texts, params(max_tokens=24))
    with LLM(folder, **SMALL, kv_cache_tokens=160) as llm:
        results = llm.generate(texts, params(max_tokens=24))
        assert sum(result.usage.recomputed_tokens for result in results) > 0
    assert [(r.token_ids, r.logprobs) for r in results] == calm


def test_no_logit_row_is_asked_of_a_dropped_row(folder):
    """A prompt in chunks of which most keep nothing: empty decoder halves, alone and mixed."""
    with LLM(folder, **SMALL, prefill_chunk=5) as llm:
        alone = llm.generate([prompt(120)], params())
        mixed = llm.generate([prompt(120), prompt(3, 5), prompt(77, 6)], params())
    assert mixed[0].token_ids == alone[0].token_ids
    assert all(torch.isfinite(torch.tensor(r.logprobs[0].logprob)) for r in mixed)


@pytest.mark.parametrize("mode", ["compact", "mask", "off"])
@pytest.mark.parametrize("cached", [0, 20])
def test_what_is_measured_equals_the_plan_and_the_cost_model(folder, mode, cached):
    """C1, counters: rows, keys and FLOPs of every layer are those of the plan, as integers."""
    keep = "full" if mode == "off" else t6.KEEP
    with LLM(folder, **{**SMALL, "prefix_cache": True, "swa_keep": keep}, replay_mode=mode) as llm:
        for length in (50, 97):
            plan = llm.parts.rule.plan(length, cached=cached)
            measured = llm.measure(prompt(length), cached=cached)
            assert measured.layers == plan.all_ranges()
            config = llm.parts.runner.config
            assert list(measured.flops_by_layer) == list(cost.plan_flops(config, plan))
            assert measured.total_flops == cost.total_flops(config, plan)
