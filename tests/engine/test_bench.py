"""Sweeps on the tiny model: what rows say, and that a kill loses the running repeat alone."""

import random
import time

import pytest
import torch

from deepinfer.bench.ceilings import Floors
from deepinfer.bench.files import Folder, read_rows
from deepinfer.bench.job import Job, Method
from deepinfer.bench.run import Measuring, Sweep, TooSlow
from deepinfer.bench.workload import Prompts
from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.engine.assembly import assemble
from deepinfer.errors import DeepinferError, UsageError
from deepinfer.report.bench import csv
from deepinfer.settings import for_model, resolve
from deepinfer.settings.values import Value
from deepinfer.tokenizer.tokenizer import Tokenizer
from tests import t6

ROWS = {"max_num_batched_tokens": Value(40, "flag", "--max-num-batched-tokens")}


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
    # Three tokens behind the first: one step had room for two drafts and a token.
    assert row["accepted_length_uncut"]["n"] == row["acceptance_by_position"][0]["n"] == 3
    assert row["prefill_in_tpot"] is False
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


FLOORS = {"copy_gb_per_s": 10.0, "float32_gflop_per_s": 50.0}


def test_rows_that_prefill_while_others_decode_say_it(checkpoint, sweep, tmp_path):
    """Two prompts of 40 tokens and room for 40 rows: the second begins when the first decodes."""
    rows = []
    for tokens, room in ((7, {}), (10, ROWS), (2, ROWS)):
        [job] = jobs(checkpoint, mtps=(0,), batches=(2,), tokens=tokens)
        job = Job(job.axes, job.settings.changed(room))
        floors = Floors(checkpoint.config, FLOORS, "cpu")
        folder = tmp_path / str(len(rows))
        rows += sweep([job], folder, repeats=1, warmup=0, floors=floors).values()
    assert [row["prefill_in_tpot"] for row in rows] == [False, True, True]
    for row in rows[:2]:
        assert 0 < row["ceiling_fraction"]["decode"]["median"] < 1
        assert row["ceiling_fraction"]["prefill"]["n"] == row["decode_tok_s"]["n"] == 1
    assert rows[2]["decode_tok_s"] is None is rows[2]["ceiling_fraction"]["decode"]
    assert rows[2]["why"]["ceiling_fraction.decode"] == rows[2]["why"]["decode_tok_s"]


def test_the_drafts_of_uncut_steps_are_all_made(checkpoint, sweep):
    """What acceptance by position divides by."""
    row = next(iter(sweep(jobs(checkpoint, batches=(3,), tokens=12), repeats=1, warmup=0).values()))
    told = row["acceptance_by_position"]
    assert len(told) == 2 and told[0]["median"] >= told[1]["median"]
    by_length = 1 + sum(one["median"] for one in told)
    assert row["accepted_length_uncut"]["median"] == pytest.approx(by_length, rel=1e-4)


def test_a_session_counts_what_it_resumes_from(checkpoint, sweep):
    [job] = jobs(checkpoint, length=80, workload="agent")
    half = Job({**job.axes, "cached": 48}, job.settings)
    row = sweep([half], repeats=1)[half.row_id]
    for name in ("prefill_saved_rows", "prefill_saved_flops"):
        assert row[name]["measured"] == pytest.approx(row[name]["planned"], abs=1e-6)
    other = sweep([job], repeats=1)[job.row_id]
    assert row["prompt_digest"] != other["prompt_digest"], "the history is part of what is asked"


def test_a_share_of_a_users_text_is_known(checkpoint, sweep):
    [job] = jobs(checkpoint, batches=(2,), length=None, tokens=2)
    half = Job({**job.axes, "cached": "50%"}, job.settings)
    texts = ("x" * 79, "y" * 39)
    row = sweep([half], repeats=1, texts=texts, floors=Floors(checkpoint.config, FLOORS, "cpu"))
    row = row[half.row_id]
    assert row["prompt_tokens"] == {"cached": 40 + 12, "computed": 40 + 28, "replayed": 0}
    assert row["ceiling_fraction"]["prefill"] is None
    assert row["why"]["ceiling_fraction.prefill"] == "prompts of several lengths"


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


def test_rows_of_later_waves_count_for_patience_and_failures_wait_for_it(
    checkpoint, sweep, tmp_path, monkeypatch
):
    """One engine at a time: rows of a second each are too slow, though the first wave is not."""
    asked = jobs(checkpoint, keeps=(t6.KEEP, "full"), mtps=(0,), tokens=2)
    bad = Job({**asked[0].axes, "prompt_len": 100_000}, asked[0].settings)
    warm_up = Measuring.warm_up

    def second(self):
        warm_up(self)
        self.took = 1.0

    monkeypatch.setattr(Measuring, "warm_up", second)
    with pytest.raises(TooSlow):
        sweep([bad, *asked], patience=3.0, keep_going=True)
    assert not (tmp_path / "out" / "rows.jsonl").exists(), "nothing is kept of rows nobody wants"
    rows = sweep([bad, *asked], patience=7.0, keep_going=True)
    told = [rows[job.row_id]["status"] for job in (bad, *asked)]
    assert told == ["failed", "ok", "ok"], "a row that fits nowhere costs its neighbours nothing"


def test_a_full_disk_writes_no_row_twice(checkpoint, sweep, monkeypatch):
    written = []

    def add_row(self, row):
        written.append(row["row_id"])
        raise UsageError("out-not-written", "no space left")

    monkeypatch.setattr(Folder, "add_row", add_row)
    with pytest.raises(UsageError, match="no space"):
        sweep(jobs(checkpoint), repeats=1, keep_going=True)
    assert len(written) == 1


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
