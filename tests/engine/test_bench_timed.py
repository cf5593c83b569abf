"""Host time of a step, with a clock and a device that the test moves."""

import itertools
import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.bench import metrics, timed
from deepinfer.bench.timed import Busy, Spent, Timed, union, watched
from tests.engine import fakes

SCHEMA = Path(__file__).parents[1] / "cli" / "schemas" / "bench-row.schema.json"


@pytest.mark.parametrize(
    ("spans", "covered"),
    [([], 0), ([(0, 5)], 5), ([(0, 5), (7, 9)], 7), ([(0, 5), (1, 2), (4, 9)], 9)],
)
def test_a_moment_is_busy_once(spans, covered):
    assert union(spans) == covered


def test_a_device_that_waits_for_its_next_kernel_is_not_busy():
    # Four steps in 80 ms; kernels ran for 20 ms, spread so that they touch both ends of each step.
    found = Spent(4, away=0.008, beside=True).per_step(0.080, Busy(0.008, 1, 0.004))
    assert found == {"host_ms_per_step": 15.0, "host_work_ms_per_step": 18.0}


def test_a_host_that_is_the_device_has_one_number():
    found = Spent(4, away=0.072, beside=False).per_step(0.080, None)
    assert found == {"host_ms_per_step": 2.0, "host_work_ms_per_step": 2.0}


def test_what_nobody_watched_is_null_and_says_why():
    found = Spent(4, away=0.008, beside=True).per_step(0.080, None)
    assert found == {"host_ms_per_step": None, "host_work_ms_per_step": 18.0}
    heard = metrics.Heard(0.0, 8, deliveries=[(1.0, 1), (2.0, 3)])
    row = metrics.summary([metrics.sample([heard]) | found])
    assert row["host_ms_per_step"] is None and "watch" in row["why"]["host_ms_per_step"]
    assert row["host_work_ms_per_step"]["median"] == 18.0


def test_a_device_that_is_never_idle_is_zero_and_the_schema_takes_it():
    found = Spent(4, away=0.060, beside=True).per_step(0.080, Busy(0.030, 1, 0.0167))
    assert found["host_ms_per_step"] == 0.0
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    part = schema["allOf"][1]["then"]["properties"]["host_ms_per_step"]
    spread = metrics.spread([0.0] * 3)
    jsonschema.validate(spread, {**part, "$defs": schema["$defs"]})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**spread, "p5": -0.1}, {**part, "$defs": schema["$defs"]})


def test_without_a_step_there_is_no_number():
    assert set(Spent(0, 0.0, True).per_step(1.0, Busy(0.0, 0, 0.0)).values()) == {None}


def test_steps_behind_the_watched_ones_take_as_long():
    busy = Busy(prompts=0.5, steps=2, step=0.01)
    assert [busy.of(steps) for steps in (1, 2, 12)] == pytest.approx([0.5, 0.5, 0.6])


class Event:
    """The device gets so far `takes` seconds after somebody began to wait."""

    def __init__(self, now, takes):
        self.now, self.takes = now, takes

    def synchronize(self):
        self.now[0] += self.takes


def test_waiting_for_the_device_is_no_work_of_the_host():
    now = [0.0]
    clock = timed._Waiting(torch.device("cuda"), lambda: now[0])
    now[0] += 0.010  # the host plans and launches
    clock.wait(Event(now, 0.030))
    now[0] += 0.005
    clock.wait(Event(now, 0.001))
    assert clock.waited == pytest.approx(0.031)
    assert now[0] - clock.waited == pytest.approx(0.015)


PROMPTS = [(1, 2, 3), (4, 5)]


@pytest.fixture(params=[False, True], ids=["lockstep", "overlap"])
def timing(request):
    """An engine of scripted tokens on a device that is timed."""
    parts = fakes.engine(fakes.hashed, overlap=request.param).parts
    ticks = itertools.count()
    device = Timed(parts, lambda: next(ticks) / 1e3)
    with LLM.from_parts(parts, device=device) as llm:
        yield llm, device


def test_steps_are_counted_and_computed_by_a_host_that_is_the_device(timing):
    llm, device = timing
    device.spent()
    llm.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True, temperature=0))
    found = device.spent()
    assert not found.beside and found.steps >= 6
    assert found.away == pytest.approx(0.001 * found.steps)
    assert device.spent() == Spent(0, 0.0, False)


class Profile:
    """A profiler that saw a kernel of 2 ms and one of 1 ms in it, every time it was on."""

    def __init__(self):
        self.profiler, self.kineto_results, self.on = self, self, 0

    @contextmanager
    def __call__(self):
        self.on += 1
        yield self

    def events(self):
        kind = torch.autograd.DeviceType
        return [
            SimpleNamespace(
                start_ns=lambda start=start: start, duration_ns=lambda long=long: long,
                device_type=lambda of=of: of,
            )
            for start, long, of in (
                (500, 1_000_000, kind.CUDA), (0, 2_000_000, kind.CUDA), (0, 9**9, kind.CPU),
            )
        ]  # fmt: skip


def test_prompts_and_the_steps_behind_them_are_watched_apart(timing):
    llm, device = timing
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    profile = Profile()
    busy = watched(llm, device, PROMPTS, params, profile)
    assert profile.on == 2 and fakes.idle(llm)
    assert busy.prompts == pytest.approx(2e-3) and 1 <= busy.steps <= 3
    assert busy.step == pytest.approx(2e-3 / timed._WATCHED)


def test_a_run_of_one_token_has_no_step_behind_its_prompts(timing):
    llm, device = timing
    params = SamplingParams(max_tokens=1, temperature=0)
    busy = watched(llm, device, PROMPTS, params, Profile())
    assert busy.step == 0.0 and busy.of(busy.steps) == pytest.approx(2e-3)


def test_a_profiler_that_saw_nothing_and_one_that_is_not_there_tell_nothing(timing, monkeypatch):
    llm, device = timing
    params = SamplingParams(max_tokens=4, temperature=0)
    assert watched(llm, device, PROMPTS, params) is None
    monkeypatch.setattr(Profile, "events", lambda self: [])
    assert watched(llm, device, PROMPTS, params, Profile()) is None
