"""Hard inputs of scheduling with the loop that plans ahead: DI-09 (c), 31, 32, 34, 35, 37, 38.

The cases are those of the other files, with the overlapped engine put in the plain one's place; and
aborts in flight on the tiny checkpoint T6, free pages poisoned, in steps that may not wait.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.device import sync
from deepinfer.device.sync import no_sync
from deepinfer.engine.engine import _Call
from tests import t6
from tests.engine import fakes, test_generate, test_speculation, test_state, test_t6
from tests.engine.fakes import byte_tokenizer, idle
from tests.t6 import prompt

ROOT = Path(__file__).parents[2]
SCRIPTED = [
    (test_generate, "test_what_can_never_fit_ends_at_once_and_the_rest_completes"),  # DI-31
    (test_generate, "test_preempted_requests_say_so_and_answer_the_same"),  # DI-32
    (test_generate, "test_bad_members_do_not_harm_the_others"),  # DI-35
    (test_generate, "test_wrong_number_of_parameters_is_refused_before_any_work"),
    (test_generate, "test_page_aligned_resend_and_the_last_free_token"),
    (test_generate, "test_explicit_seeds_are_used_as_given"),  # DI-37
    (test_generate, "test_a_broken_row_ends_its_request_alone"),  # DI-38
    (test_generate, "test_a_broken_prompt_row_ends_its_request_alone"),
]
REAL = [
    (test_state, "test_nan_in_storage_that_nobody_owns"),  # DI-38
    (test_state, "test_table_rows_after_a_preemption"),  # DI-09 (c)
    (test_state, "test_a_prompt_of_whole_pages_again_and_one_free_token"),  # DI-35
    (test_t6, "test_preempted_requests_go_on_where_they_were"),  # DI-32
    (test_t6, "test_nan_stays_where_it_is"),  # DI-38
    (test_t6, "test_bad_members"),  # DI-35
    (test_t6, "test_requests_that_cannot_fit"),  # DI-31
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return t6.write(tmp_path_factory.mktemp("t6") / "float")


def call(case, given):
    """A test of another file, with the fixtures that it asks for."""
    names = inspect.signature(case).parameters
    case(**{name: given[name] for name in names})


@pytest.mark.parametrize("module,name", SCRIPTED, ids=lambda x: x if isinstance(x, str) else "")
def test_scripted(module, name, tokenizer, monkeypatch):
    monkeypatch.setattr(module, "engine", functools.partial(fakes.engine, overlap=True))
    call(getattr(module, name), {"tokenizer": tokenizer})


def test_samples_of_one_seed(monkeypatch):
    """DI-37: 8 samples differ and repeat in any order; 200 pairs with one seed each are not one."""
    make = functools.partial(fakes.engine, overlap=True, **test_generate.COIN)
    params = SamplingParams(n=8, seed=1, max_tokens=64)
    results = make(test_generate.coin).generate([[0]], params)
    assert len({r.token_ids for r in results}) == 8
    plain = fakes.engine(test_generate.coin, slots=3, **test_generate.COIN)
    assert [r.token_ids for r in plain.generate([[0]], params)] == [r.token_ids for r in results]
    llm, agree = make(test_generate.coin), 0
    for seed in range(200):
        one, two = llm.generate([[0], [1]], SamplingParams(seed=seed, max_tokens=1))
        agree += one.token_ids == two.token_ids
    assert abs(agree / 200 - 0.5) < 4 * 0.0354, "four standard deviations"


@pytest.mark.parametrize("pages", [8, 11])
def test_preemption_under_speculation(pages, monkeypatch):
    """DI-32."""
    module = test_speculation
    monkeypatch.setattr(module, "engine", functools.partial(fakes.engine, overlap=True))
    module.test_preemption_under_speculation(pages)


@pytest.mark.parametrize("module,name", REAL, ids=lambda x: x if isinstance(x, str) else "")
def test_real(module, name, folder, monkeypatch):
    with LLM(folder, **test_t6.SMALL) as plain:
        monkeypatch.setenv("DEEPINFER_ZERO_OVERHEAD_SCHEDULING", "1")
        with LLM(folder, **test_t6.SMALL) as probe:
            assert probe.parts.overlap and not plain.parts.overlap
        call(getattr(module, name), {"folder": folder, "llm": plain, "monkeypatch": monkeypatch})


# DI-34


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_di_34_an_interrupted_run(folder, overlap):
    """Exit code 130 and what was said so far, from the middle of an answer."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deepinfer", "run", "-m", str(folder), "-p", "hello",
         "--max-tokens", "3000", "--temperature", "0", "--accelerator", "cpu"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "DEEPINFER_ZERO_OVERHEAD_SCHEDULING": overlap, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and b"Traceback" not in said, said


class Guarded:
    """Stands before an engine's device: NaN in every page that nobody holds and nobody can find
    before each step, and no waiting for the device in steps without prompts, nor once what a step
    gave is there."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.steps, self.poisoned = llm, 0, 0
        device = llm._device
        self.judge, self.draft = device.judge, device.draft
        device.judge, device.draft = self.judged, self.drafted
        self.land = llm._land
        llm._land = self.landed

    def judged(self, step, drawing, told):
        pools, prefix = self.llm.parts.runner.pools, self.llm._prefix
        for kind, pool in (("entries", prefix.entries), ("windows", prefix.windows)):
            for part in pools._paged(kind):
                part[pool._free] = 0xFF
            self.poisoned += len(pool._free)
        if step.chunks or told:
            return self.judge(step, drawing, told)
        self.steps += 1
        with no_sync("cpu"):
            return self.judge(step, drawing, told)

    def landed(self, flight):
        device = self.llm._device
        outcome = device.read(flight)
        device.read = lambda flight: outcome
        try:
            with no_sync("cpu"):
                self.land(flight)
        finally:
            del device.read

    def drafted(self, flight, drawing, told):
        if flight.step.chunks or told:
            return self.draft(flight, drawing, told)
        with no_sync("cpu"):
            return self.draft(flight, drawing, told)


CASES = [
    dict(mtp=0),
    dict(mtp=0, kv_cache_tokens=100, prefill_chunk=9),
    dict(mtp=5),
    dict(mtp=3, mtp_threshold=0.4),
    dict(mtp=5, mtp_varlen=True),
    dict(mtp=5, mtp_varlen=True, kv_cache_tokens=100, max_num_batched_tokens=24),
    dict(mtp=5, verify="rejection", mtp_varlen=True),
]


@pytest.mark.parametrize("at", range(len(CASES)))
def test_di_34_aborts_in_flight(folder, at, monkeypatch):
    """Number 2 of four is aborted in flight and the same comes again at once; one is aborted before
    it was scheduled, one twice. The others, and the one that came again, answer as without aborts,
    with the loop that waits."""
    settings, temperature = CASES[at], (1.0, 0.0)[at % 2]
    monkeypatch.setattr(sync, "waits", lambda x: True)  # what runs where waiting costs something
    asked = [
        SamplingParams(max_tokens=n, temperature=temperature, seed=n, ignore_eos=True, logprobs=1)
        for n in (18, 17, 19, 16)
    ]
    texts = [prompt(n, n) for n in (21, 9, 30, 14)]
    # Truncated prompts that are computed again are not quite what they were.
    sizes = {
        "page_tokens": t6.PAGE_TOKENS, "max_num_seqs": 4, "accelerator": "cpu",
        "verify": "coupled", "swa_keep": "full", **settings,
    }  # fmt: skip
    with LLM(folder, **{**sizes, "kv_cache_tokens": 4000}) as llm:
        want = llm.generate(texts, asked)
    with LLM(folder, **sizes, overlap=True) as llm:
        guard = Guarded(llm)
        streams = [llm.stream([ids], one) for ids, one in zip(texts, asked, strict=True)]
        told = [[next(streams[0])], [next(streams[1])], [], []]
        told[1] += [next(streams[1]) for _ in range(4)]
        assert llm._flight is not None, "a step is on its way"
        streams[1].close()
        streams[1].close()
        again = llm.stream([texts[1]], asked[1])
        late = llm.stream([texts[3]], asked[3])
        told_again = [next(again)]
        # Another call that is withdrawn before it could be scheduled.
        never = _Call()
        llm._submit(never, llm._read([texts[2]], asked[2]))
        llm._withdraw(never)
        llm._withdraw(never)
        assert never.answers[0].result.finish_reason == "abort"
        assert never.answers[0].result.token_ids == ()
        late.close()
        for at in (0, 2, 3):
            told[at] += streams[at]
        told_again += again
        assert idle(llm) and guard.steps > 3 and guard.poisoned
    free = sizes["verify"] == "coupled" or not temperature
    for at, deltas in ((0, told[0]), (2, told[2]), (3, told[3]), (1, told_again)):
        result = deltas[-1].result
        assert sum((delta.token_ids for delta in deltas), ()) == result.token_ids
        assert len(result.token_ids) == asked[at].max_tokens and result.error is None
        if free:
            assert result.token_ids == want[at].token_ids, at
            assert result.logprobs == want[at].logprobs
    gone = sum((delta.token_ids for delta in told[1]), ())
    assert not free or gone == want[1].token_ids[: len(gone)]
