"""Sweeps on the tiny model: what rows say, and that a kill loses the running repeat alone."""

import random
import time

import pytest
import torch

from deepinfer.bench.files import Folder, read_rows
from deepinfer.bench.job import Job, Method
from deepinfer.bench.run import Sweep, TooSlow
from deepinfer.bench.workload import Prompts
from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.engine.assembly import assemble
from deepinfer.errors import DeepinferError
from deepinfer.report.bench import csv
from deepinfer.settings import for_model, resolve
from deepinfer.tokenizer.tokenizer import Tokenizer
from tests import t6


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return open_checkpoint(t6.write(tmp_path_factory.mktemp("models") / "t6", quantised=True))


def jobs(checkpoint, keeps=(t6.KEEP,), mtps=(2,), batches=(1,), length=40, tokens=4, **more):
    made = []
    for keep in keeps:
        for mtp in mtps:
            given = {"model_dir": str(checkpoint.path), "swa_keep": keep, "mtp": mtp,
                     "accelerator": "cpu", "page_tokens": 4}  # fmt: skip
            settings = for_model(resolve(given, {}), checkpoint.config)
            for batch in batches:
                axes = {
                    "prompt_len": length, "gen_len": tokens, "batch_size": batch, "cached": 0,
                    "swa_keep": keep, "replay_mode": settings.replay_mode, "mtp": mtp,
                    "workload": "code", "accelerator": "cpu", **more,
                }  # fmt: skip
                made.append(Job(axes, settings))
    return made


@pytest.fixture
def sweep(checkpoint, tmp_path):
    """`sweep(jobs, repeats=2)` runs in a fresh reading of one folder: the rows by id."""
    config = checkpoint.config
    tokenizer = Tokenizer(checkpoint.tokenizer_file, config.bos_token_id, config.vocab_size)
    place = tmp_path / "out"

    def run(asked, folder=place, repeats=2, **more):
        held = Folder(folder, csv)
        folder.mkdir(parents=True, exist_ok=True)
        held.load(lambda line: None)
        names = ("warmup", "patience", "keep_going", "together")
        method = Method(repeats, **{name: more.pop(name) for name in names if name in more})
        made = more.pop("make", lambda settings: assemble(settings, lambda line: None))
        Sweep(
            asked, held, method, make=made, config=config,
            prompts=Prompts(tokenizer, config.bos_token_id, config.vocab_size), **more,
        ).run()  # fmt: skip
        return held.rows

    return run


def test_a_row_says_what_happened(checkpoint, sweep):
    [job] = jobs(checkpoint)
    heard = []
    [row] = sweep([job], repeats=3, on_row=heard.append).values()
    assert heard == [row]
    assert row["row_id"] == job.row_id and row["axes"] == job.axes and row["status"] == "ok"
    for name in ("prefill_saved_rows", "prefill_saved_flops"):
        assert 0 < row[name]["planned"] < 0.5
        assert row[name]["measured"] == pytest.approx(row[name]["planned"], abs=1e-6)
    assert row["prompt_tokens"] == {"cached": 0, "computed": 40, "replayed": 0}
    assert row["output_tokens"] == 4
    assert row["ttft_ms"]["n"] == 3 and row["ttft_ms"]["median"] > row["queue_ms"]["median"] > 0
    assert row["host_ms_per_step"]["median"] > 0 and row["kv_bytes"] > 0
    assert len(row["acceptance_by_position"]) == 2
    assert 1 <= row["accepted_length"]["median"] <= 3
    assert row["same_answers"] is True and len(row["samples"]["ttft_ms"]) == 3
    assert row["ceiling_fraction"] is None
    assert row["why"]["ceiling_fraction"] == "unknown device: no ceiling"


def test_without_drafts_acceptance_is_null_and_says_why(checkpoint, sweep):
    [row] = sweep(jobs(checkpoint, mtps=(0,))).values()
    for name in ("accepted_length", "acceptance_rate", "acceptance_by_position"):
        assert row[name] is None and row["why"][name]


def test_one_token_has_no_time_per_token(checkpoint, sweep):
    [row] = sweep(jobs(checkpoint, tokens=1)).values()
    assert row["tpot_ms"] is None and row["why"]["tpot_ms"]


@pytest.mark.parametrize("workload", ["code", "agent"])
def test_what_is_asked_to_be_cached_is_reused(checkpoint, sweep, workload):
    asked = jobs(checkpoint, batches=(2,), length=80, tokens=2, workload=workload)
    warm = [Job({**job.axes, "cached": 48}, job.settings) for job in asked]
    rows = sweep([*asked, *warm], repeats=1)
    assert rows[asked[0].row_id]["prompt_tokens"] == {"cached": 0, "computed": 160, "replayed": 0}
    # The last token of an answer has not run when its session goes on: its page is not complete.
    known = 48 if workload == "code" else 44
    found = rows[warm[0].row_id]["prompt_tokens"]
    assert found == {"cached": 2 * known, "computed": 2 * (80 - known), "replayed": 0}


def test_repeats_of_all_rows_take_turns(checkpoint, sweep):
    asked = jobs(checkpoint, keeps=(t6.KEEP, "full"), batches=(1, 2))
    seen = []
    names = {}

    def progress(done, count, what):
        if what != "warming up":
            seen.append((done, what))
        names[what] = count

    sweep(asked, repeats=2, together=2, on_progress=progress)
    words = [what for _, what in seen]
    assert len(set(words)) == 4 and words == words[:4] * 2
    assert [done for done, _ in seen] == list(range(8)) and set(names.values()) == {8}


def test_a_failing_row_stops_or_becomes_a_row(checkpoint, sweep):
    good, bad = jobs(checkpoint, keeps=(t6.KEEP, "full"))
    bad = Job({**bad.axes, "prompt_len": 100_000}, bad.settings)
    with pytest.raises(DeepinferError):
        sweep([good, bad])
    rows = sweep([bad, good], keep_going=True)
    assert rows[bad.row_id]["status"] == "failed" and rows[bad.row_id]["error"]["code"]
    assert rows[good.row_id]["status"] == "ok"
    again = []
    sweep([bad, good], keep_going=True, on_row=again.append)
    assert [row["row_id"] for row in again] == [bad.row_id], "a failed row is tried again"


def test_too_slow_is_noticed_before_anything_is_measured(checkpoint, sweep, tmp_path):
    with pytest.raises(TooSlow):
        sweep(jobs(checkpoint), patience=1e-9)
    assert not (tmp_path / "out" / "samples.jsonl").exists()


class Killed(BaseException):
    """The process is gone: nothing after this point of it happens."""


def test_killed_at_random_moments_and_resumed(checkpoint, sweep, tmp_path):
    """Any reading of the clock may be the last one, and the last line may be cut anywhere."""
    asked = jobs(checkpoint, keeps=(t6.KEEP, "full"), mtps=(0,), batches=(1, 2), tokens=2)
    draw = random.Random(8)
    cut, kept, kills = tmp_path / "cut", 0, 0
    calls = [0]
    last = [10**9]

    def clock():
        calls[0] += 1
        if calls[0] == last[0]:
            raise Killed
        return time.perf_counter()

    whole = sweep(asked, tmp_path / "whole", together=2, clock=clock, warmup=0)
    most = calls[0]
    for _ in range(10):
        calls[0], last[0] = 0, draw.randrange(1, most)
        try:
            sweep(asked, cut, together=draw.choice((1, 2)), clock=clock, warmup=0)
        except Killed:
            kills += 1
        for name in ("rows.jsonl", "samples.jsonl"):
            file = cut / name
            if file.exists() and draw.random() < 0.5:
                lines = file.read_bytes()
                start = lines.rstrip(b"\n").rfind(b"\n") + 1
                file.write_bytes(lines[: draw.randrange(start, len(lines) + 1)])
        rows, _ = read_rows(cut / "rows.jsonl", lambda line: None)
        assert len(rows) >= kept - 1, "more than the row that was being written was lost"
        kept = len(rows)
    resumed = sweep(asked, cut, together=2, warmup=0)
    assert kills >= 5
    assert resumed.keys() == whole.keys()
    rows, bad = read_rows(cut / "rows.jsonl", pytest.fail)
    assert (len(rows), bad) == (len(whole), 0), "none twice"
    for identity, row in whole.items():
        for name in ("axes", "prompt_digest", "prefill_saved_flops", "output_tokens"):
            assert row[name] == resumed[identity][name]
        assert row["accepted_length"] == resumed[identity]["accepted_length"]
