"""The likely mistakes: exit code, slug, flag and source named, hint, nothing on stdout."""

import json

import pytest

EXPECTED = []


def case(code, status, *words, args, env=None):
    EXPECTED.append(pytest.param(args, env or {}, code, status, words, id=code))


case("bad-variable", 2, 'DEEPINFER_USE_NEXTN_DECODE="five" is not a whole number',
     args=["run", "-p", "x"], env={"DEEPINFER_USE_NEXTN_DECODE": "five"})  # fmt: skip
case("bad-option", 2, '--swa-keep "some" is not a whole number and not `full`',
     args=["run", "-p", "x", "--swa-keep", "some"])  # fmt: skip
case("unknown-setting", 2, "mpt is not a setting; did you mean mtp", "from --set",
     args=["run", "-p", "x", "--set", "mpt=3"])  # fmt: skip
case("config-missing", 2, "no.toml does not exist", "from --config",
     args=["run", "-p", "x", "--config", "no.toml"])  # fmt: skip
case("invariant-verify-conflict", 2, "--batch-invariant", "--verify rejection",
     "DEEPINFER_BATCH_INVARIANT", args=["run", "-p", "x", "--verify", "rejection"],
     env={"DEEPINFER_BATCH_INVARIANT": "1"})  # fmt: skip
case("prompt-source", 2, "the prompt was given twice (argument and -f)",
     args=["run", "a", "-f", "b"])  # fmt: skip
case("bad-usage", 2, "No such option: --swa-kep", "--swa-keep", args=["run", "--swa-kep", "1"])
case("bad-usage", 2, "No such command 'rnu'", "run", args=["rnu"])
case("bad-usage", 2, "--top-p", args=["run", "-p", "x", "--top-p", "1.5"])
case("bad-option", 2, "is not one of auto, nvidia, ascend, cpu", "accepted: auto",
     args=["build", "--accelerator", "foo"])  # fmt: skip
case("toolchain-missing", 3, "the toolchain for ascend is not complete", "ASCEND_HOME_PATH",
     "set_env.sh", args=["build", "--accelerator", "ascend"])  # fmt: skip


@pytest.mark.parametrize(("args", "env", "code", "status", "words"), EXPECTED)
def test_message_and_document(args, env, code, status, words, cli, valid):
    done = cli(*args, **env)
    assert done.status == status
    assert done.err.startswith("error: ") or "\nerror: " in done.err
    assert "\n\nhint: " in done.err and not done.err.endswith("hint: \n")
    for word in words:
        assert word in done.err
    assert "Traceback" not in done.err
    if args[0] != "build" or status == 2:
        assert done.out == ""
    done = cli(*args, "--json", **env)
    document = valid("error", json.loads(done.out))
    assert (done.status, document["error"]["code"]) == (status, code)
    assert document["error"]["hint"]


def test_a_missing_model(cli, monkeypatch):
    import importlib

    real = importlib.import_module("deepinfer.engine.engine").LLM
    monkeypatch.setattr("deepinfer.LLM", real, raising=False)
    done = cli("run", "-p", "x", DEEPINFER_HF_MODEL_DIR="models/V41")
    assert (done.status, done.out) == (2, "")
    assert "error: models/V41 does not exist\n  from DEEPINFER_HF_MODEL_DIR\n" in done.err
    assert "hint: deepinfer run -m path/to/DeepSeek-V4.1-Flash-1017" in done.err
    done = cli("run", "-p", "x", "--json", "-m", "models/V41")
    assert json.loads(done.out)["error"]["code"] == "model-dir-missing"


def test_a_wrong_folder(cli, monkeypatch, tmp_path):
    import importlib

    real = importlib.import_module("deepinfer.engine.engine").LLM
    monkeypatch.setattr("deepinfer.LLM", real, raising=False)
    (tmp_path / "models" / "V41").mkdir(parents=True)
    (tmp_path / "models" / "V41" / "config.json").write_text("{}")
    done = cli("run", "-p", "x", "-m", "models")
    assert (done.status, done.out) == (4, "")
    assert "error: models is not a checkpoint" in done.err
    assert "no config.json here; found one in models/V41" in done.err
    assert "hint: -m models/V41" in done.err


def test_json_and_quiet_exclude_each_other(cli, valid):
    done = cli("run", "-p", "x", "--json", "-q")
    assert done.status == 2
    assert valid("error", json.loads(done.out))["error"]["code"] == "bad-usage"


def test_a_request_that_does_not_fit(child):
    done = child("run", "-p", "x", env={"FAKE_FAIL": "capacity"})
    assert done.status == 5
    assert "error: it does not fit\n  0 fit\n\nhint: smaller\n" in done.err
    assert "Traceback" not in done.err


def test_device_memory_is_a_capacity_error(child):
    done = child("run", "-p", "x", env={"FAKE_FAIL": "memory"})
    assert done.status == 5
    assert "out of memory" in done.err and "--max-num-seqs" in done.err


def test_our_bug_shows_where_and_how_to_report(child):
    done = child("run", "-p", "x", env={"FAKE_FAIL": "bug"})
    assert done.status == 70
    assert "Traceback" in done.err and "ZeroDivisionError" in done.err
    assert "deepinfer doctor --bundle" in done.err
    done = child("run", "-p", "x", "--json", env={"FAKE_FAIL": "bug"})
    assert json.loads(done.out)["error"]["code"] == "internal-error"


def test_debug_adds_the_traceback(child):
    done = child("run", "-p", "x", "--mtp", "five", env={"DEEPINFER_DEBUG": "1"})
    assert done.status == 2 and "Traceback" in done.err
    done = child("run", "-p", "x", "--mtp", "five", env={"DEEPINFER_DEBUG": "0"})
    assert done.status == 2 and "Traceback" not in done.err


def test_names_from_outside_do_not_steer_the_terminal(child):
    done = child("run", "-p", "x", "-m", "a\x1b[31mb\nc", "--mtp", "\x1b]0;t\x07")
    assert "\x1b" not in done.err and "\\x1b" in done.err


def test_exit_codes_are_printed_with_all_options(child):
    text = " ".join(child("run", "--help-all").out.split())
    for words in ("0 done", "2 usage or settings", "3 environment", "4 checkpoint", "5 does not"):
        assert words in text
    assert "130, 143 interrupted; 141 pipe closed" in text
