"""Single ops on the tiny model: what a kill loses, how many engines there are, cold caches."""

from types import SimpleNamespace

import pytest
import torch

from deepinfer.bench import ops
from deepinfer.bench.files import Folder
from deepinfer.bench.workload import Prompts
from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.engine.assembly import assemble
from deepinfer.report.bench import csv
from deepinfer.settings import for_model, resolve
from deepinfer.tokenizer.tokenizer import Tokenizer
from tests import t6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return open_checkpoint(t6.write(tmp_path_factory.mktemp("models") / "t6", quantised=True))


@pytest.fixture
def measure(checkpoint, tmp_path, monkeypatch):
    """`measure(folder name, sides=2, together=2)`: the folder; `measure.open` counts engines."""
    config = checkpoint.config
    tokenizer = Tokenizer(checkpoint.tokenizer_file, config.bos_token_id, config.vocab_size)
    prompts = Prompts(tokenizer, config.bos_token_id, config.vocab_size)
    monkeypatch.setattr(ops, "_CACHE", {"cpu": 1 << 20})
    monkeypatch.setattr(ops, "_LEAST", 0.0)
    given = {"model_dir": str(checkpoint.path), "swa_keep": "full", "mtp": 0,
             "accelerator": "cpu", "page_tokens": 4, "backend": ["all=torch"]}  # fmt: skip
    settings = for_model(resolve(given, {}), config)
    now = []

    class Side(ops.Side):
        def __init__(self, name):
            super().__init__(assemble(settings, print), {"backend": name}, None, print)
            now.append(name)
            run.open.append(len(now))
            plain = self.llm.close
            self.llm.close = lambda: (now.pop(), plain())

    def run(name, sides=2, together=2):
        folder = Folder(tmp_path / name, csv)
        folder.path.mkdir(exist_ok=True)
        folder.load(print)
        makes = [lambda at=at: Side(f"side {at}") for at in range(sides)]
        ops.measure(
            makes, together, (2,), (8,), prompts, 3, folder, None, lambda done, count, what: None
        )
        return folder

    run.open = []
    return run


def test_no_more_engines_than_fit_and_each_is_closed(measure):
    measure("a", sides=3, together=2)
    assert measure.open == [1, 2, 1]


class Killed(BaseException):
    pass


def test_a_kill_loses_the_running_repeat_alone(measure, monkeypatch):
    whole = measure("whole")
    works = len(whole.rows)
    timings = (1 + 3) * works  # a warm-up each
    plain, count = ops._seconds, [0]

    def seconds(work, cold):
        count[0] += 1
        if count[0] == timings - 1:
            raise Killed
        return plain(work, cold)

    monkeypatch.setattr(ops, "_seconds", seconds)
    with pytest.raises(Killed):
        measure("cut")
    assert measure.open == [1, 2, 1, 2]
    count[0] = timings  # no more kills
    cut = measure("cut")
    assert count[0] == timings + 2 + 2, "the two that were missing, and their warm-up"
    assert sorted(cut.rows) == sorted(whole.rows)
    lines = (cut.path / "rows.jsonl").read_text().splitlines()
    assert len(lines) == works
    for row in cut.rows.values():
        assert row["time_us"]["n"] == 3 and row["axes"]["context"] == 8


@pytest.fixture
def spend(monkeypatch):
    """`spend(seconds)` on a clock that nothing else moves."""
    now = [0.0]

    def spend(seconds):
        now[0] += seconds

    monkeypatch.setattr(ops, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return spend


def work_of(run):
    return ops.Work({}, run, [((torch.zeros(1),), {}, None)], 1, 1)


def test_the_caches_are_emptied_before_every_step_and_not_timed(spend):
    done = []

    def run(x):
        done.append("run")
        spend(0.02)

    def cold():
        done.append("cold")
        spend(0.01)

    work = work_of(run)
    assert ops._seconds(work, cold) == pytest.approx(0.02)
    assert done == ["run", "cold", "run"]
    work.steps = 3
    assert ops._seconds(work, cold) == pytest.approx(0.02)
    assert done[3:] == ["cold", "run"] * 3


@pytest.mark.parametrize(
    ("step", "empty", "steps"),
    [(0.02, 0.0, 1), (1.1e-3, 1e-3, 4), (1e-5, 0.011, 4), (1e-5, 1e-5, 500)],
)
def test_steps_are_long_enough_but_not_all_of_them_emptying(spend, step, empty, steps):
    work = work_of(lambda x: spend(step))
    ops._seconds(work, lambda: spend(empty))
    assert work.steps == pytest.approx(steps, abs=1)


def test_a_buffer_is_larger_than_the_caches():
    cold = ops.Cold(torch.device("cpu"))
    assert cold.bytes >= 64 << 20
    cold()
