"""The whole command line over a tiny checkpoint in the real format, without any scripted part."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.cli import checks
from deepinfer.engine.assembly import _token_map
from deepinfer.errors import CheckpointError
from tests import t6

SMALL = ("--max-num-seqs", "2", "--kv-cache-tokens", "4096", "--page-tokens", "128")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The model is so small that a second thread only waits for the first."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return t6.write(tmp_path_factory.mktemp("models") / "t6", quantised=True)


@pytest.fixture
def deepinfer(cli, model, monkeypatch):
    """The command line in this process, with the engine it ships."""
    from deepinfer.engine.engine import LLM

    monkeypatch.setattr("deepinfer.LLM", LLM, raising=False)

    def run(command, *args, env=None):
        return cli(command, "-m", model, *args, **(env or {}))

    return run


def test_text_json_quiet_and_python_agree(deepinfer, child, model, valid):
    # What is not built is a warning of its own: tests/engine/test_compiled.py.
    asked = ("-p", "def f(x):", "-n", "12", "-t", "0", *SMALL, "--log-level", "error")
    text = child("run", "-m", model, *asked, fake=False, env={"OMP_NUM_THREADS": "1"})
    assert (text.status, text.err) == (0, "")
    document = deepinfer("run", *asked, "--json")
    result = valid("run", json.loads(document.out))
    assert result["text"] == text.out == deepinfer("run", *asked, "-q").out
    assert result["usage"]["completion_tokens"] == len(result["token_ids"]) <= 12
    assert result["finish_reason"] in ("stop", "length")
    assert result["settings"]["max_num_seqs"] == {
        "value": 2, "source": "flag", "origin": "--max-num-seqs",
    }  # fmt: skip
    assert result["settings"]["DEEPINFER_USE_NEXTN_DECODE"]["source"] == "model"
    from deepinfer import LLM, SamplingParams

    with LLM(str(model), max_num_seqs=2, kv_cache_tokens=4096) as llm:
        [again] = llm.generate("def f(x):", SamplingParams(max_tokens=12, temperature=0))
    assert list(again.token_ids) == result["token_ids"]


def test_the_recorded_seed_repeats_the_answer(deepinfer):
    asked = ("-p", "x = ", "-n", "16", "--json", *SMALL)
    first = json.loads(deepinfer("run", *asked).out)
    again = json.loads(deepinfer("run", *asked, "--seed", first["seed"]).out)
    assert again["token_ids"] == first["token_ids"]
    other = json.loads(deepinfer("run", *asked, "--seed", first["seed"] ^ 1).out)
    assert other["token_ids"] != first["token_ids"]


def test_zero_tokens(deepinfer):
    done = deepinfer("run", "-p", "x", "-n", "0", "--json", *SMALL)
    result = json.loads(done.out)
    assert (done.status, result["text"], result["finish_reason"]) == (0, "", "length")


def test_swa_keep_too_short(deepinfer, valid):
    done = deepinfer("run", "-p", "x", "--swa-keep", "20", env={"DEEPINFER_USE_NEXTN_DECODE": "5"})
    assert (done.status, done.out) == (2, "")
    assert "error: --swa-keep 20 is too short for this model" in done.err
    assert (
        "window 16 + longest rollback 6 = 22 (draft length 5 from DEEPINFER_USE_NEXTN_DECODE)"
    ) in done.err
    assert "hint: --swa-keep 140, or --swa-keep full" in done.err


def test_a_draft_longer_than_trained(deepinfer):
    done = deepinfer("run", "-p", "x", "--mtp", "9")
    assert done.status == 2 and "exceeds this checkpoint's draft head" in done.err


def test_incomplete_and_foreign_checkpoints(deepinfer, tmp_path):
    folder = t6.write(tmp_path / "broken")
    shard = sorted(folder.glob("*.safetensors"))[-1]
    shard.unlink()
    done = deepinfer("run", "-m", folder, "-p", "x", "--json")
    assert done.status == 4
    assert json.loads(done.out)["error"]["code"] == "checkpoint-incomplete"
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["DeepseekV3ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    done = deepinfer("run", "-m", folder, "-p", "x")
    assert (done.status, done.out) == (4, "")
    assert "error: DeepseekV3ForCausalLM is not supported" in done.err


@pytest.mark.parametrize("spoil", ["not json", "too many ids"])
def test_a_tokenizer_that_does_not_fit(deepinfer, tmp_path, monkeypatch, spoil):
    folder = t6.write(tmp_path / "spoilt")
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["model"]["vocab"]["foreign"] = 1 << 20
    path.write_text("garbage" if spoil == "not json" else json.dumps(document), encoding="utf-8")
    done = deepinfer("run", "-m", folder, "-p", "x", "-n", "1", *SMALL)
    assert (done.status, done.out) == (4, "") and "tokenizer.json" in done.err
    monkeypatch.setattr(checks, "_torch_facts", lambda environ: {"problem": "not asked"})
    done = deepinfer("doctor", "-m", folder, "--json")
    rows = {row["name"]: row for row in json.loads(done.out)["checks"]}
    assert rows["checkpoint"]["verdict"] == "fail"
    assert "tokenizer.json" in rows["checkpoint"]["found"]


def test_a_tokenizer_without_a_token_map(tmp_path):
    folder = t6.write(tmp_path / "gap")
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = document["model"]["vocab"]
    vocabulary[next(reversed(vocabulary))] += 1
    path.write_text(json.dumps(document), encoding="utf-8")
    (folder / "engram_token_map.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        _token_map(open_checkpoint(folder))
    assert caught.value.code == "token-map-invalid" and caught.value.hint


def test_a_prompt_that_is_too_long(deepinfer, valid):
    done = deepinfer("run", "-p", "x" * 5000, "--max-model-len", "256", "--json")
    assert done.status == 5
    assert valid("error", json.loads(done.out))["error"]["code"] == "prompt-too-long"
    done = deepinfer("run", "-p", "x" * 5000, "--max-model-len", "256", "--dry-run")
    assert (done.status, done.out) == (5, "")


def test_an_absent_accelerator(deepinfer):
    done = deepinfer("run", "-p", "x", "--accelerator", "ascend")
    assert (done.status, done.out) == (3, "")
    assert "error: --accelerator ascend was asked for, but no NPU was found" in done.err
    assert "hint: deepinfer doctor" in done.err


def test_dry_run_prints_the_plan_and_runs_nothing(deepinfer, valid):
    done = deepinfer("run", "-p", "def f(x):", "-n", "8", "--dry-run", "--json", *SMALL)
    plan = valid("run-plan", json.loads(done.out))["plan"]
    assert plan["prompt_tokens"] == 10 and plan["max_tokens"] == 8
    assert 0 < plan["state_bytes"] <= plan["pool_bytes"]
    done = deepinfer("run", "-p", "def f(x):", "--dry-run", *SMALL)
    assert done.status == 0 and done.out.startswith("plan\tvalue\nmodel\tt6\n")


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (("-p", "x", "-n", "1000", "--kv-cache-tokens", "128", "--page-tokens", "128"), 5),
        (("-p", "x", "-n", "2", "--backend", "foo=torch"), 2),
        (("-p", "", "-n", "2"), 2),
        (("-p", "x" * 5000, "--max-model-len", "256"), 5),
    ],
    ids=["memory", "backend", "empty", "length"],
)
def test_dry_run_refuses_what_run_refuses(deepinfer, args, status):
    done = deepinfer("run", *args, "--json")
    planned = deepinfer("run", *args, "--dry-run", "--json")
    assert done.status == planned.status == status
    assert json.loads(planned.out)["error"] == json.loads(done.out)["error"]


def test_doctor_reads_the_folder(deepinfer, valid, monkeypatch):
    done = deepinfer("doctor", "--json")
    rows = {row["name"]: row for row in valid("doctor", json.loads(done.out))["checks"]}
    assert done.status == 0
    assert rows["torch"]["verdict"] == "ok"
    assert rows["checkpoint"]["found"].startswith("t6: 6 layers, ")
    assert "draft blocks of 5" in rows["checkpoint"]["found"]
    assert checks.verdict([]) == "ok"


def test_ctrl_c_in_the_middle_of_an_answer(model, environment):
    process = subprocess.Popen(
        [sys.executable, "-m", "deepinfer", "run", "-m", str(model), "-p", "x", "-n", "3500",
         "--stop", "never said", *SMALL],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(),
    )  # fmt: skip
    try:
        os.read(process.stdout.fileno(), 1)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode in (130, 0)
    assert b"Traceback" not in err
    if process.returncode == 130:
        assert b"stopped after" in err
