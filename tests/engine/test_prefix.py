"""Prefix reuse under the real engine: a resumed prompt gives the bits of a fresh one, always."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.engine.assembly import Parts, Sizes
from deepinfer.kvcache import Reuse
from deepinfer.kvcache.tiers import HostTier
from deepinfer.replay import ReplayRule
from tests import t6
from tests.engine.fakes import EOS, VOCAB, ScriptedRunner, idle, one_hot
from tests.t6 import prompt

ROOT = Path(__file__).parents[2]
PAGE, WINDOW = t6.PAGE_TOKENS, 16
SMALL = dict(page_tokens=PAGE, max_num_seqs=6, accelerator="cpu", swa_keep=t6.KEEP)


def params(**more) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": 2, **more}
    )


def seen(result):
    return result.token_ids, result.logprobs


def resume_point(length: int) -> int:
    """Where a prompt of this length resumes if all of it is known."""
    return max(length - t6.KEEP, 0) // PAGE * PAGE


def test_a_stale_window_after_a_hit(folder):
    """DI-01: NaN over every window ring between two equal prompts; shared rows stay as they are."""
    with LLM(folder, **SMALL) as llm:
        pools = llm.parts.runner.pools
        first = llm.generate([prompt(50)], params(max_tokens=12))[0]
        for ring in pools.windows:
            ring.fill_(0xFF)
        for rows in pools.open.values():
            rows.fill_(torch.nan)
        shared = [llm._prefix.entries.find(name) for name in _names(llm, prompt(20))]
        assert len(shared) == 5 and None not in shared
        before = pools.read("entries", shared)
        second = llm.generate([prompt(50)], params(max_tokens=12))[0]
        assert pools.read("entries", shared) == before
        assert seen(second) == seen(first)
        assert (first.usage.cached_tokens, first.usage.computed_tokens) == (0, 50)
        assert (second.usage.cached_tokens, second.usage.computed_tokens) == (20, 30)
        assert second.usage.replayed_tokens == 0
        assert idle(llm)


def _names(llm, ids):
    from deepinfer.core.request import Request
    from deepinfer.core.sequence import Sequence

    sequence = Sequence(Request(0, 0, tuple(ids), params(), 0, 1), 0)
    llm._prefix._extend_names(sequence)
    return sequence.names


@pytest.mark.parametrize(
    "kind,mode,count",
    [("float", "compact", 60), ("quantised", "compact", 60), ("float", "mask", 40),
     ("float", "off", 40)],
)  # fmt: skip
def test_resumed_equals_fresh_over_random_conversations(tmp_path, kind, mode, count):
    """C2: conversations that grow, fork and come back in random chunks, sizes and company.

    200 turns in all over the variants of this test; each is compared with an engine that keeps
    nothing. With little memory most of it is evicted in between.
    """
    rng = random.Random(f"{mode}{kind}")
    folder = t6.write(tmp_path / "m", quantised=kind == "quantised")
    settings = {**SMALL, "replay_mode": mode, "swa_keep": t6.KEEP if mode != "off" else "full"}
    settings["mtp"] = 5 if (kind, mode) == ("float", "compact") else 0  # drafts once are enough
    fresh = LLM(folder, **settings, prefix_cache=False)
    cached = computed = 0
    roots = [prompt(rng.randrange(40, 70), n) for n in range(3)]
    turns = 0
    while turns < count:
        engine = LLM(
            folder, **settings, prefill_chunk=rng.choice([1, 3, 7, 16, 64]),
            kv_cache_tokens=rng.choice([280, 400, 4000]),
        )  # fmt: skip
        with engine as llm:
            talks = [list(root) for root in roots]
            for _ in range(6):
                some = rng.sample(range(3), rng.randrange(1, 4))
                texts = []
                for at in some:
                    if rng.random() < 0.3:  # fork: an earlier point, then other words
                        talks[at] = talks[at][: rng.randrange(30, len(talks[at]))]
                    talks[at] += prompt(rng.randrange(1, 30), rng.randrange(99))
                    talks[at] = talks[at][-150:] if rng.random() < 0.1 else talks[at][:150]
                    texts.append(list(talks[at]))
                asked = params(max_tokens=rng.randrange(1, 10))
                results = llm.generate(texts, asked)
                wanted = fresh.generate(texts, asked)
                assert [seen(r) for r in results] == [seen(r) for r in wanted], turns
                for at, text, result in zip(some, texts, results, strict=True):
                    talks[at] = text + list(result.token_ids)
                    cached += result.usage.cached_tokens
                    computed += result.usage.computed_tokens
                    turns += 1
            assert idle(llm)
    fresh.close()
    assert cached > 0.3 * computed, "most turns must have had something to resume from"


def test_the_answer_is_reused_too(folder):
    """A second turn resumes inside the first answer, at the boundary that the keep allows."""
    with LLM(folder, **SMALL) as llm:
        first = llm.generate([prompt(50)], params(max_tokens=60))[0]
        ids = prompt(50) + list(first.token_ids) + prompt(6, 9)
        second = llm.generate([ids], params())[0]
        # 60 tokens were generated, the last of which was never run.
        assert second.usage.cached_tokens == resume_point(len(ids)) == 88
    with LLM(folder, **SMALL, prefix_cache=False) as llm:
        assert seen(llm.generate([ids], params())[0]) == seen(second)


def test_every_length_resumes_where_it_may(folder):
    """All prompt lengths around window, keep and page edges, each after itself."""
    lengths = [1, 3, 4, 5, 27, 28, 29, 31, 32, 33, 35, 36, 43, 44, 45, 47, 48, 49, 60]
    with LLM(folder, **SMALL, max_num_batched_tokens=64) as llm:
        for length in lengths:
            ids = prompt(length, length)
            once, again = (llm.generate([ids], params())[0] for _ in range(2))
            assert seen(once) == seen(again), length
            assert once.usage.cached_tokens == 0
            assert again.usage.cached_tokens == resume_point(length), length


def test_equal_prompts_at_once_and_running_requests_share(folder):
    """Two equal prompts in one batch, and a third that arrives while they still talk."""
    ids = prompt(70)
    with LLM(folder, **SMALL, prefix_cache=False) as llm:
        want = seen(llm.generate([ids], params(max_tokens=20))[0])
    with LLM(folder, **SMALL, prefill_chunk=16) as llm:
        running = llm.stream([ids, ids], params(max_tokens=20))
        ends = [next(running) for _ in range(4)]
        late = llm.generate([ids], params(max_tokens=20))[0]
        assert late.usage.cached_tokens == resume_point(70), "shared while the owners run"
        results = [delta.result for delta in (*ends, *running) if delta.result]
        assert [seen(result) for result in results] == [want, want] and seen(late) == want
        assert idle(llm)


def test_a_half_written_page_is_never_shared(folder):
    """A request that ends in the middle of a page, by abort or error, leaves no name for it."""
    with LLM(folder, **SMALL, prefill_chunk=7) as llm:
        stream = llm.stream([prompt(60)], params())
        calls = 0
        forward = llm.parts.runner.forward

        def fails(*step):
            nonlocal calls
            calls += 1
            if calls == 4:
                forward(*step)
                raise KeyboardInterrupt
            return forward(*step)

        llm.parts.runner.forward = fails
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        llm.parts.runner.forward = forward
        known = [llm._prefix.entries.find(name) is not None for name in _names(llm, prompt(60))]
        assert known == [True] * 5 + [False] * 10, "21 tokens ran in whole steps"
        assert idle(llm)
        again = llm.generate([prompt(60)], params())[0]
    with LLM(folder, **SMALL, prefix_cache=False) as llm:
        assert seen(llm.generate([prompt(60)], params())[0]) == seen(again)


def test_encoder_replay_is_counted_and_stays_private(folder):
    """Without window rows a hit replays a window; what follows it is shared with nobody."""
    with LLM(folder, **SMALL, encoder_replay=True) as llm:
        ids = prompt(90)
        llm.generate([ids], params())
        for name in _names(llm, ids):
            llm._prefix.windows.drop(name)
        pools = llm.parts.runner.pools
        pages = [llm._prefix.entries.find(name) for name in _names(llm, prompt(60))]
        before = pools.read("entries", pages)
        for ring in pools.windows:
            ring.fill_(0xFF)
        result = llm.generate([ids], params())[0]
        assert result.usage.cached_tokens == 60 and result.usage.replayed_tokens == WINDOW
        assert result.usage.computed_tokens == 30
        assert pools.read("entries", pages) == before, "no shared byte is written again"
        assert all(lp.logprob == lp.logprob for lp in result.logprobs)
        # What the replay computed behind the hit has no name: nothing but exact state is found.
        longer = llm.generate([ids + prompt(40, 3)], params())[0]
        assert longer.usage.cached_tokens + longer.usage.computed_tokens == 130
        assert all(llm._prefix.windows.find(name) is None for name in _names(llm, ids)[15:22])
    with LLM(folder, **SMALL) as llm:
        llm.generate([ids], params())
        for name in _names(llm, ids):
            llm._prefix.windows.drop(name)
        plain = llm.generate([ids], params())[0]
        assert plain.usage.cached_tokens == plain.usage.replayed_tokens == 0, "off by default"


def test_host_memory_gives_back_what_the_device_lost(folder):
    texts = [prompt(70, n) for n in range(4)]
    with LLM(folder, **SMALL, prefix_cache=False) as llm:
        want = [seen(r) for r in llm.generate(texts, params())]
    # Room for one conversation at a time: every other prompt is pushed out.
    with LLM(folder, **SMALL, kv_cache_tokens=84) as llm:
        for _ in range(3):
            for text, expected in zip(texts, want, strict=True):
                assert seen(llm.generate([text], params())[0]) == expected
        assert llm.parts.tiers[0].nbytes > 0
        again = llm.generate([texts[0]], params())[0]
        assert again.usage.cached_tokens == resume_point(70) and seen(again) == want[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_pages_leave_while_a_step_runs(overlap):
    """Nothing is read between a plan and its launch; the tier gets the bytes when it is settled,
    but for those that were forgotten on their way."""

    class Runner(ScriptedRunner):
        def fetch(self, kind, pages):
            fetched.append(len(self.plans))
            return torch.tensor([[page] for page in pages], dtype=torch.uint8)

    fetched: list[int] = []
    tier = HostTier(1 << 20)
    runner = Runner(lambda prefix: one_hot(7))
    parts = Parts(
        runner=runner, tokenizer=None, vocab_size=VOCAB, eos_ids=(EOS,), overlap=overlap,
        sizes=Sizes(2, 8, 4, 32, 64, 64, window_pages=8), reuse=Reuse(True, b"m" * 32),
        rule=ReplayRule(layers=1, boundary=None, window=4), tiers=(tier,),
    )  # fmt: skip
    with LLM.from_parts(parts) as llm:
        run = functools.partial(llm.generate, sampling_params=params(max_tokens=6))
        run([[*range(20)]])
        keep, kept = llm._prefix.keep, []
        llm._prefix.keep = lambda key, payload: (kept.append(key), keep(key, payload))
        run([[*range(100, 120)]])
        assert fetched and kept and all(tier.contains(key) for key in kept)
        assert idle(llm) and not llm._sent and not llm._prefix._leaving
        keep(("entries", b"forgotten"), b"")
        assert not tier.contains(("entries", b"forgotten"))


def test_a_folder_outlives_the_process(folder, tmp_path):
    kept = tmp_path / "state"
    text = prompt(90)
    with LLM(folder, **SMALL, prefix_cache_dir=kept) as llm:
        first = llm.generate([text], params(max_tokens=40))[0]
    longer = text + list(first.token_ids) + prompt(5, 7)
    with LLM(folder, **SMALL, prefix_cache_dir=kept) as llm:
        second = llm.generate([longer], params())[0]
        assert second.usage.cached_tokens == resume_point(len(longer)) == 104
    with LLM(folder, **SMALL, prefix_cache=False) as llm:
        assert seen(llm.generate([longer], params())[0]) == seen(second)


def test_a_flipped_byte_is_a_miss_with_a_warning(folder, tmp_path):
    kept, text, lines = tmp_path / "state", prompt(90), []
    with LLM(folder, **SMALL, prefix_cache_dir=kept) as llm:
        first = llm.generate([text], params())[0]
    files = sorted(kept.glob("*/*/*.entries"))
    assert len(files) >= resume_point(90) // PAGE
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0x10
        file.write_bytes(data)
    with LLM(folder, **SMALL, prefix_cache_dir=kept, on_warning=lines.append) as llm:
        second = llm.generate([text], params())[0]
        assert second.usage.cached_tokens == 0 and seen(second) == seen(first)
        assert any("is damaged; it is computed again" in line for line in lines)
        # The bad page was written anew.
    with LLM(folder, **SMALL, prefix_cache_dir=kept, on_warning=lines.append) as llm:
        assert seen(llm.generate([text], params())[0]) == seen(first)


def test_another_checkpoint_and_another_mode_find_nothing(tmp_path):
    kept, text = tmp_path / "state", prompt(90)
    one = t6.write(tmp_path / "one")
    other = t6.write(tmp_path / "other", seed=7)
    with LLM(one, **SMALL, prefix_cache_dir=kept) as llm:
        llm.generate([text], params())
    for folder, change in ((other, {}), (one, {"replay_mode": "off"}), (one, {"page_tokens": 8})):
        with LLM(folder, **{**SMALL, **change}, prefix_cache_dir=kept) as llm:
            assert llm.generate([text], params())[0].usage.cached_tokens == 0


WORKER = """
import sys
from deepinfer import LLM, SamplingParams
folder, kept, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
llm = LLM(folder, page_tokens=4, max_num_seqs=6, accelerator="cpu", swa_keep=28,
          prefix_cache_dir=kept)
print("ready", flush=True)
for n in range(first, first + 500):
    text = [11 + (n * 13 + at * at * 3) % 256 for at in range(90)]
    print(*llm.generate([text], params)[0].token_ids, flush=True)
"""


def test_processes_share_a_folder_while_one_is_killed(tmp_path):
    """Writers are killed with SIGKILL again and again; readers get right answers and hits."""
    folder, kept = t6.write(tmp_path / "m"), tmp_path / "state"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    asked = params()
    want = {}
    with LLM(folder, **SMALL, prefix_cache=False) as llm:
        for n in range(12):
            want[n] = seen(llm.generate([prompt(90, n)], asked)[0])
    victims = []
    for _ in range(2):
        victim = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder), str(kept), "0"],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        victims.append(victim)
    cached, lines = 0, []

    def warned(line: str) -> None:
        if "compiled cpu kernels" not in line:
            lines.append(line)

    try:
        for victim in victims:
            assert victim.stdout.readline() == "ready\n"
        for round_ in range(12):
            if round_ < 10:  # one of them has been there, whatever else runs on this machine
                assert victims[1].stdout.readline()
            with LLM(folder, **SMALL, prefix_cache_dir=kept, on_warning=warned) as llm:
                result = llm.generate([prompt(90, round_)], asked)[0]
                cached += result.usage.cached_tokens
                assert seen(result) == want[round_]
            if round_ in (4, 9):
                time.sleep(random.random() / 20)
                victims[round_ // 5].send_signal(signal.SIGKILL)
    finally:
        for victim in victims:
            victim.kill()
            victim.wait()
            victim.stdout.close()
    assert cached > 0 and not lines, lines
    with LLM(folder, **SMALL, prefix_cache_dir=kept) as llm:
        result = llm.generate([prompt(90, 0)], asked)[0]
        assert result.usage.cached_tokens == resume_point(90) and seen(result) == want[0]


def test_requests_that_need_every_row_do_not_resume(folder):
    with LLM(folder, **SMALL) as llm:
        llm.generate([prompt(60)], params())
        result = llm.generate([prompt(60)], params(prompt_logprobs=0))[0]
        assert result.usage.cached_tokens == 0 and len(result.prompt_logprobs) == 60
        assert len(llm.logits(prompt(60))) == 60


def test_without_room_for_window_rows_nothing_breaks(folder):
    """No page for window rows at all: every prompt is computed from its start."""
    with LLM(folder, **SMALL) as llm:
        llm._prefix.windows.__init__(0, PAGE)
        first, second = (llm.generate([prompt(60)], params())[0] for _ in range(2))
        assert second.usage.cached_tokens == 0 and seen(first) == seen(second)


def test_other_activations_find_nothing(tmp_path):
    """fp32 and bf16 state of one checkpoint never meet in a folder."""
    folder, kept, text = t6.write(tmp_path / "m"), tmp_path / "state", prompt(90)
    for dtype in ("fp32", "bf16"):
        with LLM(folder, **SMALL, prefix_cache_dir=kept, dtype=dtype) as llm:
            assert llm.generate([text], params())[0].usage.cached_tokens == 0


def test_closing_keeps_what_an_open_stream_has_computed(tmp_path):
    folder, kept, text = t6.write(tmp_path / "m"), tmp_path / "state", prompt(60)
    llm = LLM(folder, **SMALL, prefix_cache_dir=kept)
    stream = llm.stream([text], params(max_tokens=40))
    for _ in range(3):
        next(stream)
    llm.close()
    assert [delta.result.finish_reason for delta in stream if delta.result] == ["abort"]
    llm.close()
    with LLM(folder, **SMALL, prefix_cache_dir=kept) as llm:
        assert llm.generate([text], params())[0].usage.cached_tokens == resume_point(60)


def test_a_model_without_an_encoder_half(tmp_path):
    folder = t6.write(
        tmp_path / "m", num_nextn_predict_layers=0, compress_ratios=[1] * 6,
        kv_source_layer_ids=[0], index_source_layer_ids=[0, 3, 4, 5], engram_layer_ids=[],
        candidate_source_layer_id=0,
    )  # fmt: skip
    lines = []
    with LLM(folder, **SMALL, on_warning=lines.append) as llm:
        first, second = (llm.generate([prompt(50)], params())[0] for _ in range(2))
        assert first.replay == "off" and any("no encoder half" in line for line in lines)
        assert second.usage.cached_tokens == 48 and seen(first) == seen(second)
