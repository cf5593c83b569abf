"""`deepinfer bench`: options, the plan, documents, folders, resuming, exit codes."""

import itertools
import json
from pathlib import Path

import pytest

from tests import native, t6

ROOT = Path(__file__).parents[2]
# Sizes that the tiny model can run: its window is 16 tokens, a page has 4.
TINY = ("--set", "page_tokens=4", "--prompt-len", "40", "--gen-len", "3", "--swa-keep", "28")
QUICK = (*TINY, "--mtp", "0", "--warmup", "0", "--gen-len", "2")
RATES = {"copy_gb_per_s": 10.0, "float32_gflop_per_s": 50.0}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return t6.write(tmp_path_factory.mktemp("models") / "t6", quantised=True)


@pytest.fixture
def bench(cli, model, monkeypatch):
    """`deepinfer bench` on the tiny model, with ceilings that nobody had to measure."""
    from deepinfer.bench import ceilings

    monkeypatch.setattr(ceilings, "measure", lambda device: dict(RATES))

    def run(*args, tiny=QUICK, **env):
        return cli("bench", "-m", model, "--accelerator", "cpu", *tiny, *args, **env)

    return run


def lines(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_the_document_and_the_folder(bench, valid, tmp_path):
    done = bench("--mtp", "0,2", "-r", "2", "--json", "--out", "o", "--no-plot", tiny=TINY)
    assert done.status == 0, done.err
    document = valid("bench", json.loads(done.out))
    assert document["rows"] == lines(tmp_path / "o")
    assert [row["axes"]["mtp"] for row in document["rows"]] == [0, 2]
    for row in document["rows"]:
        valid("bench-row", row)
        assert row["same_answers"] and len(row["answers"]) == 1
    meta = json.loads((tmp_path / "o" / "meta.json").read_text())
    assert meta["schema"] == "deepinfer.bench/1"
    assert document["ceilings"] == {"before": RATES, "after": RATES, "moved": 0.0}
    assert 0 < document["rows"][1]["ceiling_fraction"]["prefill"]["median"] < 1
    assert (tmp_path / "o" / "summary.csv").read_text().count("\n") == 3
    assert not (tmp_path / "o" / "samples.jsonl").exists()
    assert str(tmp_path) not in done.out + json.dumps(meta)


def test_the_default_folder_and_the_table(bench, tmp_path):
    done = bench("-r", "1", "--mtp", "2")
    assert done.status == 0
    [folder] = tmp_path.glob("bench-20*-t6")
    assert folder.name in done.err and lines(folder)
    assert "accepted length" in done.out and "TTFT ms" in done.out
    assert "ceilings, measured now: copy 10 GB/s" in done.err


def test_ceilings_are_measured_with_the_threads_of_the_rows(bench, monkeypatch):
    import torch

    from deepinfer.bench import ceilings

    seen = []

    def measure(device):
        seen.append(torch.get_num_threads())
        return dict(RATES)

    monkeypatch.setattr(ceilings, "measure", measure)
    try:
        assert bench("-r", "1", "--threads", "2", "-q").status == 0
    finally:
        torch.set_num_threads(1)
    assert seen == [2, 2]


def test_ceilings_that_moved_between_two_runs_of_a_sweep_are_told(bench, monkeypatch):
    from deepinfer.bench import ceilings

    ask = ("-r", "1", "--out", "o", "--no-plot", "--batch-size")
    assert bench(*ask, "1").status == 0
    slower = {name: rate / 2 for name, rate in RATES.items()}
    monkeypatch.setattr(ceilings, "measure", lambda device: dict(slower))
    done = bench(*ask, "1,2", "--resume")
    assert done.status == 0 and "the ceilings moved by more than 3" in done.err


def test_quiet_is_one_number_a_row(bench):
    done = bench("-r", "1", "--mtp", "0", "-q", "--batch-size", "1,2", "--no-plot")
    assert done.err == "" and len([float(line) for line in done.out.splitlines()]) == 2


@pytest.mark.parametrize("name", ["md", "csv", "json", "jsonl"])
def test_formats(bench, name):
    done = bench("-r", "1", "--warmup", "0", "--mtp", "0", "--format", name)
    assert done.status == 0
    if name in ("json", "jsonl"):
        assert json.loads(done.out)
    else:
        assert ("|" if name == "md" else ",") in done.out


def test_resume_runs_what_is_missing_only(bench, tmp_path):
    ask = ("-r", "1", "--out", "o", "--no-plot", "--json")
    first = json.loads(bench("--mtp", "0", *ask).out)
    again = bench("--mtp", "0", *ask)
    assert again.status == 2
    assert json.loads(again.out)["error"]["code"] == "output-exists"
    file = tmp_path / "o" / "rows.jsonl"
    file.write_bytes(file.read_bytes() + b'{"half')
    done = bench("--mtp", "0,2", *ask, "--resume")
    assert done.status == 0 and "half-written" in done.err
    rows = json.loads(done.out)["rows"]
    assert rows[0] == first["rows"][0] and rows == lines(tmp_path / "o")
    other = bench("--mtp", "0", "-r", "2", *ask[2:], "--resume")
    assert other.status == 2
    error = json.loads(other.out)["error"]
    assert error["code"] == "resume-mismatch" and "repeats was 1, now 2" in error["message"]


def test_a_table_that_a_kill_cut_short_is_made_again(bench, tmp_path):
    ask = ("--batch-size", "1,2", "-r", "1", "--out", "o", "--no-plot", "-q")
    assert bench(*ask).status == 0
    table = tmp_path / "o" / "summary.csv"
    whole = table.read_text()
    table.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    assert bench(*ask, "--resume").status == 0
    assert table.read_text() == whole


def test_a_failing_combination(bench, tmp_path):
    refused = bench("--swa-keep", "16,28", "-r", "1", "--json")
    assert refused.status == 2
    assert json.loads(refused.out)["error"]["code"] == "swa-keep-too-short"
    assert not list(tmp_path.glob("bench-*/rows.jsonl"))
    done = bench("--swa-keep", "16,28", "-r", "1", "--json", "--keep-going", "--no-plot")
    assert done.status == 1
    bad, good = json.loads(done.out)["rows"]
    assert bad["status"] == "failed" and bad["error"]["code"] == "swa-keep-too-short"
    assert good["status"] == "ok"


def test_alike_rows_are_one(bench):
    done = bench("--swa-keep", "28,full", "--replay-mode", "off,compact", "--mtp", "0",
                 "--mtp-varlen", "on,off", "--dry-run", "--json")  # fmt: skip
    assert done.status == 0 and "warning" not in done.err
    kept = {(r["axes"]["swa_keep"], r["axes"]["replay_mode"]) for r in json.loads(done.out)["rows"]}
    assert kept == {(28, "compact"), ("full", "off")}


def test_a_sweep_file_and_options_above_it(bench, tmp_path):
    (tmp_path / "s.toml").write_text(
        'repeats = 1\n[[axes]]\nmtp = [0, 2]\nbatch_size = "1-2"\n[[axes]]\nworkload = ["chat"]\n'
    )
    done = bench("--sweep", "s.toml", "--batch-size", "3", "--dry-run", "--json", tiny=TINY)
    rows = json.loads(done.out)["rows"]
    assert [(r["axes"]["mtp"], r["axes"]["workload"]) for r in rows] == [
        (0, "code"), (2, "code"), (5, "chat"),
    ]  # fmt: skip
    assert {r["axes"]["batch_size"] for r in rows} == {3}


def test_the_model_of_a_sweep_file_can_be_another(cli, tmp_path):
    (tmp_path / "s.toml").write_text('synthetic = "tiny"\naccepted_length = 2\n')
    ask = ("--sweep", "s.toml", "--accelerator", "cpu", "--dry-run", "--json")
    done = cli("bench", *ask, "--synthetic", "flash-slice:1+1", "--accepted-length", "3")
    assert done.status == 0, done.out
    [row] = json.loads(done.out)["rows"]
    told = row["axes"]["synthetic"], row["axes"]["accepted_length"]
    assert told == ("flash-slice:1+1", 3.0)


@pytest.mark.parametrize(
    "text",
    ["axes = []", "axes = 5", "axes = [1]", "[axes]\ngen_len = []", "repeats = 0", "repeats = '3'",
     "warmup = -1", "temperature = nan", "repeats = true"],
)  # fmt: skip
def test_a_sweep_file_that_says_nothing_or_nonsense(bench, tmp_path, text):
    (tmp_path / "s.toml").write_text(text + "\n")
    done = bench("--sweep", "s.toml", "--dry-run", "--json", tiny=())
    assert done.status == 2
    assert json.loads(done.out)["error"]["code"] == "sweep-unreadable"


def test_a_sweep_that_never_ends_is_refused(bench):
    many = ("--prompt-len", "1-999", "--gen-len", "1-999", "--batch-size", "1-999")
    done = bench(*many, "--dry-run", "--json", tiny=())
    assert done.status == 2
    assert "997,002,999 rows" in json.loads(done.out)["error"]["message"]


def test_a_plan_is_refused_where_the_run_would_be(bench, tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "rows.jsonl").touch()
    for args, status, code in (
        (("--out", "o"), 2, "output-exists"),
        (("--baseline", "nothing"), 2, "bench-missing"),
        (("--prompt-len", "1m"), 5, "prompt-too-long"),
        (("--prompt-len", "9" * 5000), 2, "bad-axis"),
    ):
        done = bench(*args, "--dry-run", "--json")
        assert (done.status, json.loads(done.out)["error"]["code"]) == (status, code)
    assert bench("--out", "new", "--dry-run").status == 0
    assert not (tmp_path / "new").exists()


def test_a_share_of_a_row_that_cannot_run(bench):
    ask = ("--swa-keep", "16", "--cached", "50%", "--keep-going", "-r", "1", "--json", "--no-plot")
    done = bench(*ask)
    assert done.status == 1, done.out
    [row] = json.loads(done.out)["rows"]
    assert (row["axes"]["swa_keep"], row["axes"]["cached"]) == (16, 20)


SWEEPS = sorted((ROOT / "benchmarks" / "sweeps").glob("*.toml"))


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_sweeps_of_the_clone_can_be_planned(cli, file):
    done = cli("bench", "--sweep", file, "--accelerator", "cpu", "--dry-run")
    assert done.status == 0, done.err
    rows = done.out.count("\n") - 1
    assert rows >= 3 and f"{rows} rows on" in done.err


def test_prompts_of_a_user(bench, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "def f(x):\\n"}\n{"prompt": "import os, sys"}\n')
    tiny = tuple(word for word in QUICK if word not in ("--prompt-len", "40"))
    done = bench("--prompts", "p.jsonl", "--batch-size", "2", "-r", "1", "--json", tiny=tiny)
    [row] = json.loads(done.out)["rows"]
    assert row["axes"]["prompt_len"] is None
    assert row["axes"]["workload"].startswith("p.jsonl#")
    assert row["prompt_tokens"]["computed"] == len("def f(x):\n") + len("import os, sys") + 2


def test_baseline(bench, tmp_path):
    ask = ("-r", "2", "--no-plot", "--json")
    assert bench(*ask, "--out", "a").status == 0
    fast = (tmp_path / "a" / "rows.jsonl").read_text()
    row = json.loads(fast)
    for name in ("output_tok_s", "ttft_ms", "tpot_ms"):
        better = 100 if name == "output_tok_s" else 0.01
        row[name] = {k: v * better if k != "n" else v for k, v in row[name].items()}
        row["samples"][name] = [value * better for value in row["samples"][name]]
    (tmp_path / "fast.jsonl").write_text(json.dumps(row) + "\n")
    lost = bench(*ask, "--out", "b", "--baseline", "fast.jsonl", "--max-regression", "10%")
    assert lost.status == 1 and json.loads(lost.out)["regressions"]["regressions"]
    kept = bench(*ask, "--out", "c", "--baseline", "a", "--max-regression", "99%")
    assert kept.status == 0
    other = ("--batch-size", "1,2", "--baseline", "c", "--max-regression", "99%")
    assert bench(*ask, "--out", "d", *other).status == 0
    gone = bench("-r", "2", "--no-plot", "--baseline", "d", "--max-regression", "99%")
    assert gone.status == 1 and "batch 2\tstatus\tok\tmissing" in gone.out


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("poems",), "bad-usage"), (("e2e", "x"), "bad-usage"), (("--resume",), "bad-usage"),
        (("--mtp", "x"), "bad-axis"), (("--format", "xml"), "bad-option"),
        (("--max-regression", "10%"), "bad-usage"), (("--sweep", "no.toml"), "sweep-unreadable"),
        (("--max-regression", "x", "--baseline", "y"), "bad-option"),
        (("--baseline", "nothing"), "bench-missing"),
        (("--prompts", "p.jsonl", "--workload", "code"), "bad-usage"),
        (("--accepted-length", "6.5"), "accepted-length-impossible"),
        (("--synthetic", "tiny"), "bad-usage"), (("--out", ""), "bad-option"),
        (("--backend", "nothing", "--dry-run"), "backend-unknown"),
        (("--backend", "sum=torch", "--dry-run"), "op-unknown"),
    ],
)  # fmt: skip
def test_mistakes(bench, args, code):
    done = bench(*args, "--json")
    assert done.status == 2
    assert json.loads(done.out)["error"]["code"] == code


def test_a_plan_has_no_format(bench):
    done = bench("--format", "md", "--dry-run")
    assert done.status == 2 and "--dry-run" in done.err


def test_prompts_that_cannot_be_read_name_their_option(bench):
    done = bench("--prompts", "no.jsonl", "--json", tiny=())
    error = json.loads(done.out)["error"]
    assert done.status == 2 and "from --prompts" in error["facts"]
    assert error["hint"] == "--prompts FILE, or --prompts - for stdin"


def test_a_plan_needs_neither_torch_nor_weights(child, model, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((model / "config.json").read_text())
    blocked = tmp_path / "blocked"
    (blocked / "torch").mkdir(parents=True)
    (blocked / "torch" / "__init__.py").write_text("raise ModuleNotFoundError('no torch')")
    paths = {"PYTHONPATH": f"{blocked}:{t6.__file__.rsplit('/', 2)[0]}"}
    ask = ("--mtp", "0-2", "--batch-size", "1,8", "--dry-run")
    done = child("bench", "-m", bare, *TINY, *ask, fake=False, env=paths)
    assert (done.status, len(done.out.splitlines())) == (0, 7), done.err
    assert "6 rows on 3 engines, about" in done.err


def test_an_interrupt_leaves_a_folder_to_go_on_with(bench, tmp_path, monkeypatch):
    from deepinfer.bench.run import Measuring

    plain, count = Measuring.repeat, [0]

    def repeat(self):
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt
        return plain(self)

    monkeypatch.setattr(Measuring, "repeat", repeat)
    ask = ("--mtp", "0", "--batch-size", "1,2", "-r", "2", "--out", "o", "--no-plot", "--json")
    done = bench(*ask)
    assert done.status == 130
    assert "stopped after 1 row and 1 repeat of others; --out o --resume goes on" in done.err
    assert len(lines(tmp_path / "o")) == 1
    assert json.loads((tmp_path / "o" / "meta.json").read_text())["ceilings"]["after"] is None
    count[0] = 100
    done = bench(*ask, "--resume")
    assert done.status == 0 and len(json.loads(done.out)["rows"]) == 2
    assert count[0] == 101, "the repeat that was missing, and no other"


# What ops are asked of: the tiny model, and nothing about requests.
BARE = ("--set", "page_tokens=4", "--no-plot")
OPS = ("ops", *BARE, "--prompt-len", "40", "--batch-size", "1,4")


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_single_ops(bench, valid, backend):
    """Those that a back end runs together too."""
    if backend == "cpu":
        native.library_path()
    ask = ("--backend", backend, "-r", "2", "--json")
    done = bench(*OPS, *ask, tiny=(), DEEPINFER_BUILD_DIR=str(native.BUILD_DIR))
    assert done.status == 0, done.err
    document = valid("bench", json.loads(done.out))
    rows = {(row["axes"]["op"], row["axes"]["rows"]): row for row in document["rows"]}
    assert {op for op, _ in rows} >= {"linear", "moe", "sparse_attention", "choose", "hc_mix"}
    assert {row["axes"]["backend"] for row in rows.values()} == {backend}
    assert {row["evicted_bytes"] for row in rows.values()} == {2 * 32 << 20}
    for op in ("moe", "hc_mix"):
        assert rows[op, 4]["flops"] == 4 * rows[op, 1]["flops"]
        assert rows[op, 1]["bytes"] < rows[op, 4]["bytes"] < 4 * rows[op, 1]["bytes"]


def test_every_axis_of_ops_has_its_rows(bench, monkeypatch):
    from deepinfer.bench import ops

    monkeypatch.setattr(ops, "_cache_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(ops, "_LEAST", 0.0)
    ask = ("--backend", "torch", "-r", "1", "--json", "--batch-size", "2", "--prompt-len", "8,40",
           "--dtype", "bf16,fp32", "--batch-invariant", "on,off")  # fmt: skip
    done = bench("ops", *BARE, *ask, tiny=())
    assert done.status == 0, done.err
    names = ("context", "dtype", "batch_invariant")
    found = {tuple(row["axes"][name] for name in names) for row in json.loads(done.out)["rows"]}
    quiet = bench("ops", *BARE, *ask[:4], "-q", "--batch-size", "2", "--prompt-len", "8", tiny=())
    assert all(float(line) > 0 for line in quiet.out.splitlines()) and quiet.out
    assert found == set(itertools.product((8, 40), ("bf16", "fp32"), (True, False)))


@pytest.mark.parametrize(
    "args",
    [("--swa-keep", "28"), ("--mtp", "0"), ("--gen-len", "4"), ("--cached", "0"),
     ("--workload", "chat"), ("--overlap", "on"), ("--verify", "coupled"), ("--temperature", "1"),
     ("--accepted-length", "2"), ("--mtp-varlen", "on"), ("--replay-mode", "mask")],
)  # fmt: skip
def test_an_axis_of_requests_is_refused_for_ops(bench, args):
    done = bench("ops", *BARE, *args, "--dry-run", "--json", tiny=())
    assert done.status == 2
    error = json.loads(done.out)["error"]
    assert error["code"] == "bad-usage" and args[0] in error["message"]


@pytest.mark.parametrize(
    "args",
    [("--prompt-len", "1m"), ("--batch-size", "64", "--max-num-batched-tokens", "32", "-r", "1")],
)
def test_more_rows_than_a_step_has_are_refused(bench, args):
    done = bench("ops", *BARE, "--backend", "torch", *args, "--json", tiny=())
    assert done.status == 5, done.out
    assert json.loads(done.out)["error"]["code"] == "prompt-too-long"


def test_the_plan_of_ops_has_a_schema(bench, valid):
    plain = valid("bench-plan", json.loads(bench("ops", "--dry-run", "--json", tiny=()).out))
    assert plain["rows"] == [] and plain["ops"]["rows"] == [1, 32, 256]
    assert plain["ops"]["backend"] == [] and plain["why"]["ops.backend"]
    both = bench("all", "--dry-run", "--json", "--backend", "torch", "--mtp", "0,2")
    found = valid("bench-plan", json.loads(both.out))
    assert len(found["rows"]) == 2 and found["ops"]["backend"] == ["torch"]
    one = bench("--dry-run")
    assert "1 row on 1 engine, about" in one.err
    said = bench("ops", "--dry-run", tiny=())
    assert said.status == 0 and "1, 32, 256 rows behind 512 tokens" in said.err


def test_a_folder_that_cannot_be_written_is_said_before_the_run(bench, tmp_path):
    (tmp_path / "f").write_text("")
    done = bench("--out", "f/x", "--json")
    assert done.status == 2
    assert json.loads(done.out)["error"]["code"] == "out-not-written"


@pytest.mark.parametrize("damage", ["missing", "damaged", "other"])
def test_rows_of_who_knows_what_are_refused_and_kept(bench, tmp_path, damage):
    ask = ("--mtp", "0", "-r", "1", "--warmup", "0", "--out", "o", "--json")
    assert bench(*ask).status == 0
    meta, rows = tmp_path / "o" / "meta.json", tmp_path / "o" / "rows.jsonl"
    held = json.loads(meta.read_text())
    held["fingerprint"]["threads"] += 1
    rows.write_text(rows.read_text() + "half")
    before = rows.read_text()
    if damage == "missing":
        meta.unlink()
    else:
        meta.write_text("{" if damage == "damaged" else json.dumps(held))
    done = bench(*ask, "--resume")
    assert done.status == 2
    error = json.loads(done.out)["error"]
    assert error["code"] == "resume-mismatch" and error["hint"]
    assert ("threads was 2, now 1" if damage == "other" else "o/meta.json") in error["message"]
    assert rows.read_text() == before


def test_the_driver_and_the_threads_are_of_the_machine():
    from types import SimpleNamespace

    from deepinfer.cli import bench_input
    from deepinfer.device.detect import Cpu, Device, Found
    from deepinfer.settings import resolve

    cpu = Cpu("a cpu", "x86_64", 2, (), None, None)

    def made(driver, threads=2):
        asked = SimpleNamespace(
            accelerator="nvidia", settings=resolve({}, {}), method={"repeats": 5, "warmup": 1}
        )
        found = Found((Device("nvidia", "a gpu", driver=driver),), cpu)
        return bench_input.fingerprint(asked, found, "model", threads)

    assert "triton" in made("1")
    problem = bench_input.unfit(made("550.1"), made("560.2"), "hint")
    assert "driver was ['550.1'], now ['560.2']" in problem.message
    assert "threads was 2, now 3" in bench_input.unfit(made("1"), made("1", 3), "hint").message
    assert bench_input.unfit(json.loads(json.dumps(made("1"))), made("1"), "hint") is None


def test_a_session_has_a_history_unless_told_otherwise(bench):
    def plan(*args):
        return json.loads(bench("--workload", "agent", *args, "--dry-run", "--json").out)["rows"]

    assert [row["axes"]["cached"] for row in plan()] == [30]
    assert [row["axes"]["cached"] for row in plan("--cached", "0,50%")] == [0, 20]
    both = plan("--workload", "code,agent")
    assert [row["axes"]["cached"] for row in both] == [0, 30], "of sessions alone"


def test_the_plan_has_a_schema(bench, valid):
    done = bench("--mtp", "0-2", "--dry-run", "--json")
    document = valid("bench-plan", json.loads(done.out))
    assert len({row["row_id"] for row in document["rows"]}) == 3


def test_a_bar_on_a_terminal_only(terminal, model):
    ask = ("bench", "-m", model, "--accelerator", "cpu", *TINY, "--mtp", "0", "-r", "1")
    shown = terminal(*ask, "--out", model.parent / "on", fake=False, OMP_NUM_THREADS="1")
    assert shown.status == 0 and "warming up" in shown.out and "TTFT ms" in shown.out
    bare = terminal(*ask, "--out", model.parent / "off", "--no-progress", fake=False)
    assert bare.status == 0 and "warming up" not in bare.out


def test_bars_of_a_sweep_file_are_judged_and_kept(bench, valid, tmp_path):
    (tmp_path / "s.toml").write_text(
        "repeats = 2\n[settings]\nprefill_chunk = 8\n[axes]\nmtp = 0\nbatch_size = [1, 2]\n"
        '[[bar]]\nname = "fast"\nfigure = "output_tok_s"\nat_least = 1e9\n'
        '[[bar]]\nname = "scales"\nfigure = "prompt_tok_s"\nrows = { batch_size = 2 }\n'
        "over = { batch_size = 1 }\nat_least = 1e-9\n"
        '[[bar]]\nname = "decodes"\nfigure = "decode_tok_s"\nat_least = 1.0\n'
    )
    ask = ("--sweep", "s.toml", "--no-plot", "--warmup", "0", "--report")
    done = bench(*ask, "--json", "--out", "o")
    assert done.status == 0, "a bar that is missed changes nothing unless it is asked for"
    document = valid("bench", json.loads(done.out))
    records = [json.loads(line) for line in (tmp_path / "o/bars.jsonl").read_text().splitlines()]
    assert document["bars"] == records
    assert document["settings"]["DEEPINFER_PREFILL_CHUNK"]["value"] == 8
    told = [one["verdict"] for one in records]
    assert told[0] in ("missed", "void") and told[1] in ("met", "void")
    assert told[2] == "not judged" and "no decode window" in records[2]["why"]
    assert records[1]["ratio"] > 0 and records[1]["peer"] == "batch 1"
    assert "| fast |" in (tmp_path / "o" / "report.md").read_text()
    done = bench(*ask, "--out", "p", "--check")
    assert done.status == 1
    lines_ = done.out.splitlines()
    assert json.loads(lines_[-7])["bar"] == "fast" and lines_[-3].startswith("fast\t")


@pytest.mark.parametrize(
    "bar",
    ["at_least = 1", 'figure = "x"\nat_least = 1', 'name = "n"\nfigure = "x"',
     'name = "n"\nfigure = "x"\nat_least = 1\nat_most = 2',
     'name = "n"\nfigure = "x"\nat_least = 1\nsize = 3',
     'name = "n"\nfigure = "x"\nat_least = 1\nrows = { colour = 3 }',
     'name = "n"\nfigure = "x"\nat_least = "much"',
     'name = "n"\nfigure = "x"\nat_least = 1\neach = 1',
    ],
)  # fmt: skip
def test_a_bar_that_is_none_is_refused(bench, tmp_path, bar):
    (tmp_path / "s.toml").write_text(f"[axes]\nmtp = 0\n[[bar]]\n{bar}\n")
    done = bench("--sweep", "s.toml", "--dry-run", "--json", tiny=())
    assert done.status == 2
    assert json.loads(done.out)["error"]["code"] == "sweep-unreadable"


def test_a_picture_that_fails_costs_no_number(bench, monkeypatch, tmp_path):
    from deepinfer.report import bench_plots

    def write(*args):
        raise RuntimeError("no font")

    monkeypatch.setattr(bench_plots, "write", write)
    done = bench("-r", "1", "--warmup", "0", "--plot", "--out", "o")
    assert done.status == 70 and "TTFT ms" in done.out and lines(tmp_path / "o")


def test_a_users_texts_can_be_known(bench, tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "def f(x):\n" * 8}) + "\n")
    tiny = tuple(word for word in QUICK if word not in ("--prompt-len", "40"))
    done = bench("--prompts", "p.jsonl", "--cached", "50%", "-r", "1", "--json", tiny=tiny)
    [row] = json.loads(done.out)["rows"]
    assert row["axes"]["cached"] == "50%" and row["prompt_tokens"]["cached"] == 40


def test_simulated_acceptance_is_said_in_every_row(bench, valid, tmp_path):
    ask = ("-r", "1", "--warmup", "0", "--no-plot", "--gen-len", "13", "--report")
    done = bench(*ask, "--mtp", "0,5", "--accepted-length", "6", "--json", "--out", "o")
    assert done.status == 0, done.err
    plain, drafted = valid("bench", json.loads(done.out))["rows"]
    assert (plain["axes"]["accepted_length"], drafted["axes"]["accepted_length"]) == (None, 6.0)
    # Every draft stands; the last step may have fewer.
    assert drafted["accepted_length"]["median"] >= 5
    assert plain["row_id"] != drafted["row_id"]
    page = (tmp_path / "o" / "report.md").read_text()
    assert "seeded draw of mean length 6" in page and "| simulated" in page


def test_a_sweep_of_random_weights_can_be_planned(cli):
    done = cli("bench", "--synthetic", "flash-slice:6+6", "--accepted-length", "3.51", "--dry-run",
               "--accelerator", "cpu", "--mtp", "0,5")  # fmt: skip
    assert done.status == 0, done.err
