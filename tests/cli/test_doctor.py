"""`deepinfer doctor`: every check alone, exit codes, settings and ops tables, the bundle."""

import json
import re

import pytest

from deepinfer.cli import checks, doctor_invariance
from deepinfer.settings import resolve
from deepinfer.toolchain import built
from deepinfer.toolchain.built import Built
from tests import native
from tests.planted import by_rows, plant


@pytest.fixture(autouse=True)
def quick_torch(monkeypatch):
    """What the child process would say about torch."""
    facts = {"version": "2.13.0", "cuda": None, "cxx11": True, "nvidia": 0, "ascend": 0}
    monkeypatch.setattr(checks, "_torch_facts", lambda environ: dict(facts))
    return facts


@pytest.fixture
def no_model(monkeypatch):
    good = checks.Check("checkpoint", "ok", "a model", area="checkpoint")
    monkeypatch.setattr(checks, "_checkpoint", lambda settings: good)


def test_all_is_well(cli, no_model):
    done = cli("doctor")
    assert done.status == 0
    header, *rows = done.out.splitlines()
    assert header == "check\tverdict\tfound\thelp"
    names = [row.split("\t")[0] for row in rows]
    for name in ("Python", "torch", "accelerator", "C++ compiler", "compiled kernels", "Triton",
                 "memory", "checkpoint", "variables"):  # fmt: skip
        assert name in names
    assert cli("doctor", "-q").out in ("ok\n", "warn\n")


def test_unknown_variables_are_a_warning_with_exit_0(cli, no_model):
    done = cli("doctor", DEEPINFER_SWA_KEEPS="1")
    assert done.status == 0
    assert "variables\twarn\tDEEPINFER_SWA_KEEPS is not a setting" in done.out


def test_an_accelerator_that_cannot_run_is_exit_3(cli, no_model):
    done = cli("doctor", "--accelerator", "ascend")
    assert done.status == 3
    assert "accelerator\tfail\tascend cannot run here" in done.out


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("ImportError: libhccl.so: cannot open shared object file", "set_env.sh"),
        ("ModuleNotFoundError: No module named 'torch'", "pip install"),
        ("TimeoutExpired", "pip install"),
    ],
)
def test_a_broken_torch_is_a_row(cli, no_model, monkeypatch, text, hint):
    monkeypatch.setattr(checks, "_torch_facts", lambda environ: {"problem": text})
    done = cli("doctor", "--json")
    row = next(r for r in json.loads(done.out)["checks"] if r["name"] == "torch")
    assert done.status == 3 and row["verdict"] == "fail" and hint in row["hint"]


def test_an_old_torch(cli, no_model, quick_torch, monkeypatch):
    monkeypatch.setattr(checks, "_torch_facts", lambda e: {**quick_torch, "version": "2.9.1+cpu"})
    assert cli("doctor").status == 3


def test_a_bad_model_folder_is_exit_4(cli, tmp_path):
    done = cli("doctor", "-m", tmp_path)
    assert done.status == 4
    assert "checkpoint\tfail" in done.out and "is not a checkpoint" in done.out


def test_bad_temperatures_beside_a_checkpoint_are_exit_4(cli, quick_torch, tmp_path):
    from tests import t6

    folder = t6.write(tmp_path / "t6")
    assert cli("doctor", "-m", folder).status == 0
    (folder / "confidence_temperatures.json").write_text('{"temperatures": [1, 2]}')
    done = cli("doctor", "-m", folder)
    assert done.status == 4 and "does not hold 5 temperatures" in done.out


def test_a_missing_model_folder_is_exit_2(cli):
    done = cli("doctor", "-m", "gone")
    assert done.status == 2
    assert "error: gone does not exist\n  from --model-dir" in done.err


def test_a_check_that_breaks_is_a_row(cli, no_model, monkeypatch):
    monkeypatch.setattr(checks, "_memory", lambda: 1 / 0)
    done = cli("doctor")
    assert done.status == 0
    assert "memory\twarn\tthe check broke: ZeroDivisionError: division by zero" in done.out


def test_settings_table_has_values_and_sources(cli, no_model, tmp_path):
    (tmp_path / "deepinfer.toml").write_text("max_num_seqs = 4\n")
    done = cli("doctor", "--settings", "--accelerator", "cpu", DEEPINFER_USE_NEXTN_DECODE="3")
    assert done.status == 0
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in done.out.splitlines()}
    assert rows["setting"] == ["value", "source", "from"]
    assert rows["DEEPINFER_USE_NEXTN_DECODE"] == ["3", "environment", "DEEPINFER_USE_NEXTN_DECODE"]
    assert rows["DEEPINFER_ACCELERATOR"] == ["cpu", "flag", "--accelerator"]
    assert rows["max_num_seqs"] == ["4", "file", "deepinfer.toml"]
    assert rows["DEEPINFER_MAX_BACKTRACKING_TOKENS"][:2] == ["4", "default"]


def test_ops_table(cli, no_model):
    done = cli("doctor", "--ops", "--accelerator", "cpu")
    assert done.status == 0
    header, *rows = [line.split("\t") for line in done.out.splitlines()]
    assert header == ["operation", "back end", "available", "fixed order", "why"]
    assert rows and all(row[1] == "torch" and row[3] == "yes" and row[4] for row in rows)


def compiled(done):
    line = next(x for x in done.out.splitlines() if x.startswith("compiled kernels"))
    return line.split("\t")[1:]


def test_compiled_kernels_that_are_missing_or_stale(cli, no_model, tmp_path):
    help = "deepinfer build --accelerator cpu"
    assert compiled(cli("doctor")) == ["warn", "cpu: not built; the torch back end serves", help]
    other = built.folder(tmp_path) / "0123456789abcdef"
    other.mkdir(parents=True)
    (other / "manifest.json").write_text("{}")
    found = "cpu: built from other sources; the torch back end serves"
    assert compiled(cli("doctor", "--build-dir", tmp_path)) == ["warn", found, help]


def test_compiled_kernels_that_are_fresh(cli, no_model, monkeypatch):
    path = native.library_path()
    built_in = ("--build-dir", native.BUILD_DIR, "--accelerator", "cpu")
    verdict, found, _ = compiled(cli("doctor", *built_in))
    assert verdict == "ok" and found.startswith("cpu: runs at ") and path.name in found
    assert not re.search(r"(?<![\w.~])/", found), "no absolute path"
    _, found, _ = compiled(cli("doctor", *built_in, "--cpu-level", "portable"))
    assert found.startswith("cpu: runs at portable, built are portable")
    rows = [line.split("\t") for line in cli("doctor", "--ops", *built_in).out.splitlines()[1:]]
    ops = {row[0]: row[1:] for row in rows}
    assert ops["rmsnorm"] == ["cpu", "torch, cpu", "yes", "preferred on cpu"]
    broken = Built("fresh", path.with_name("manifest.json"), "0", ("portable",), "g++")
    monkeypatch.setattr(built, "find", lambda build_dir: broken)
    verdict, found, help = compiled(cli("doctor", *built_in))
    assert verdict == "warn" and "invalid ELF header" in found and help.endswith("--clean")


def test_an_accelerator_without_compiled_kernels(cli, no_model, quick_torch):
    quick_torch["nvidia"] = 1
    assert compiled(cli("doctor"))[:2] == [
        "ok", "none for this accelerator in this version; torch serves it",
    ]  # fmt: skip


@pytest.fixture
def small_check(monkeypatch, tmp_path_factory):
    """A check of two compositions of a small float checkpoint."""
    from tests import t6

    for name, value in (("BATCHES", (2,)), ("CELLS", 2), ("PROMPTS", 3), ("TOKENS", 2)):
        monkeypatch.setattr(doctor_invariance, name, value)
    folder = t6.write(tmp_path_factory.mktemp("t6") / "m")
    return ("doctor", "--check-invariance", "-m", folder, "--accelerator", "cpu",
            "--set", "swa_keep=28", "--log-level", "error")  # fmt: skip


def test_invariance_kept(cli, valid, small_check):
    done = cli(*small_check)
    assert done.status == 0
    assert done.out.startswith("batch invariance kept: 2 of ") and done.out.count("\n") == 1
    assert [line.split(":")[0] for line in done.err.splitlines()] == [
        "3 prompts alone, then 2 compositions", "1 of 2", "2 of 2",
    ]  # fmt: skip
    done = cli(*small_check, "--json")
    document = valid("doctor", json.loads(done.out))
    assert done.status == 0 and done.err == "", "no progress beside JSON"
    assert (document["invariant"], document["cells"], document["failures"]) == (True, 2, [])
    assert document["settings"]["DEEPINFER_BATCH_INVARIANT"]["value"] is True, "as it ran"
    done = cli(*small_check, "--set", "batch_invariant=0")
    assert done.status == 2 and "was switched off" in done.err


def test_invariance_broken_is_exit_1_and_names_op_and_row(cli, valid, small_check, monkeypatch):
    plant(monkeypatch, "linear", by_rows)
    done = cli(*small_check)
    assert done.status == 1
    verdict, first, *_ = done.out.splitlines()
    assert verdict.startswith("batch invariance broken in 2 of 2 of ")
    assert "first differing op: linear (blocks.0.attention.wq_a) on the row at position" in first
    document = valid("doctor", json.loads(cli(*small_check, "--json").out))
    assert document["invariant"] is False and len(document["failures"]) == 2
    assert document["failures"][0]["op"] == "linear"


def test_invariance_without_talk(cli, small_check):
    done = cli(*small_check, "-q")
    assert (done.status, done.err) == (0, "") and done.out in ("ok\n", "warn\n")


def test_an_unpromised_op_and_a_bad_machine_are_not_checked(cli, small_check, monkeypatch):
    plant(monkeypatch, "linear", by_rows, promised=False)
    done = cli(*small_check)
    assert done.status == 2
    assert "batch-invariant mode is not available on cpu" in done.err
    assert "ops without a fixed-order version: linear" in done.err
    done = cli(*small_check, "--set", "verify=rejection")
    assert done.status == 2 and "cannot be used with --verify rejection" in done.err
    done = cli("doctor", "--check-invariance", "--accelerator", "ascend")
    assert done.status == 3 and "batch invariance" not in done.out


def test_json_and_bundle(cli, valid, no_model, tmp_path):
    target = tmp_path / "report.txt"
    done = cli("doctor", "--json", "--bundle", target, DEEPINFER_HF_MODEL_DIR="/root/x/model")
    document = valid("doctor", json.loads(done.out))
    assert document["ops"]
    bundle = valid("doctor", json.loads(target.read_text()))
    assert bundle["schema"] == "deepinfer.doctor/1"
    assert not list(tmp_path.glob("*.part"))


def test_a_bundle_has_no_home_folders_and_no_secrets(tmp_path):
    report = {
        "a": "/home/someone/models/x and /Users/someone/y and /root/z",
        "b": "hf_" + "A" * 30,
        "c": "API_KEY=verysecret, token: abcdef",
    }
    target = tmp_path / "report.txt"
    checks.write_bundle(target, report)
    text = target.read_text()
    for word in ("someone", "/root", "AAAA", "verysecret", "abcdef"):
        assert word not in text
    assert "~/models/x" in text


def test_a_bundle_that_cannot_be_written(cli, no_model, tmp_path):
    done = cli("doctor", "--bundle", tmp_path / "no" / "where.txt")
    assert done.status == 2 and "cannot be written" in done.err


def test_the_torch_check_survives_a_child_that_hangs(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(checks, "_TORCH", "import time; time.sleep(60)")
    monkeypatch.setattr(checks, "_TIMEOUT_S", 0.5)
    assert checks._torch_facts({})["problem"] == "TimeoutExpired"
    monkeypatch.setattr(checks, "_TORCH", "raise SystemExit(7)")
    monkeypatch.setattr(checks, "_TIMEOUT_S", 30)
    assert checks._torch_facts({})["problem"] == "exit 7"


def test_run_all_never_raises_on_odd_settings(no_model):
    settings = resolve({}, environ={})
    assert len(checks.run_all(settings, {})) >= 8
