"""`deepinfer replay-inspect`: plan mode, its errors, its files, and what runs the model."""

import json
import os
import re
import subprocess
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import deepinfer
from deepinfer.replay.plan import ReplayRule
from deepinfer.report import replay

STATES = ("computed", "keys_only", "read", "skipped")
FLASH = ("--config-json", "v41-flash")
# A machine where importing torch, or anything else that takes long, ends the process.
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "pandas", "matplotlib", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
from deepinfer.cli.main import main
sys.exit(main())
"""


@pytest.fixture
def inspect(cli):
    def run(*args, **env):
        return cli("replay-inspect", *args, **env)

    return run


def document(done):
    assert done.status == 0, done.err
    return json.loads(done.out)


def without_torch(environment, *args):
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, "replay-inspect", *args],
        capture_output=True, text=True, env=environment(), timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_the_published_model_without_torch(environment, valid):
    done = without_torch(environment, *FLASH, "--prompt-len", "64k", "--cached", "56k", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = valid("replay", json.loads(done.stdout))
    assert (found["source"], found["keep"], found["mode"]) == ("plan", 140, "compact")
    assert (found["prompt_tokens"], found["cached_tokens"]) == (65_536, 57_344)
    assert found["thresholds"] == {"minimum": 134, "exact": 2541}
    assert [layer["role"] for layer in found["layers"]] == ["producer"] * 20 + ["boundary"] + [
        "consumer"
    ] * 19
    assert found["layers"][20]["keys_only"] == [[57_344, 65_396]]
    assert found["layers"][39] == {
        "index": 39, "role": "consumer", "computed": [[65_396, 65_536]], "keys_only": [],
        "read": [], "skipped": [[0, 65_396]], "flops": found["layers"][39]["flops"],
        "flops_full": found["layers"][39]["flops_full"],
    }  # fmt: skip
    for layer in found["layers"]:
        ranges = sorted(r for state in STATES for r in layer[state])
        ends = [0, *(stop for _, stop in ranges)]
        assert [start for start, _ in ranges] == ends[:-1] and ends[-1] == 65_536
    assert found["totals"]["flops_saved"] == pytest.approx(0.488, abs=0.003)


def test_the_embedded_model_and_a_dry_run_without_torch(environment):
    done = without_torch(environment, "--prompt-len", "1000", "--measure", "--dry-run", "-q")
    assert (done.returncode, done.stderr) == (0, "") and 0.40 < float(done.stdout) < 0.43


def test_start_is_quick(environment):
    """Processor time beyond what the same command line costs for an error."""

    def spent(*args):
        before = os.times()
        subprocess.run(
            [sys.executable, "-m", "deepinfer", "replay-inspect", *args],
            capture_output=True, env=environment(), stdin=subprocess.DEVNULL, timeout=60,
        )  # fmt: skip
        after = os.times()
        return (
            after.children_user
            + after.children_system
            - (before.children_user + before.children_system)
        )

    error = min(spent("--prompt-len", "many") for _ in range(3))
    plan = min(spent(*FLASH, "--prompt-len", "1m", "--cached", "512k") for _ in range(3))
    assert plan < error + 0.3


def test_text_for_people_and_pipes(inspect):
    done = inspect(*FLASH, "--prompt-len", "64k", "--cached", "56k")
    assert done.status == 0 and done.err == ""
    lines = done.out.splitlines()
    assert lines[0] == "v41-flash · prompt 65,536 · keep 140 · plan, nothing ran"
    assert "21-39 consumer  ··················│█████████████████  ████████ → ▏" in lines
    assert "minimum 134 (window 128 + rollback 6) · exact from 2,541 · here approximate" in lines
    assert "component\tfull TFLOP\tkeep 140 TFLOP\tsaved" in lines
    assert lines[-1].split("\t")[::3] == ["total", "48.8 %"]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("columns", [80, 120])
def test_terminals(terminal, columns):
    done = terminal("replay-inspect", *FLASH, "--prompt-len", "64k", columns=columns, fake=False)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", done.out).splitlines()
    assert done.status == 0 and max(map(len, lines)) <= columns
    assert ("65,536 → 140" in done.out) == (columns == 120)
    assert any(line.startswith("21-39 consumer") for line in lines) and "…" not in done.out


def test_ascii_streams_lose_nothing(child):
    env = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = child("replay-inspect", *FLASH, "--prompt-len", "64k", env=env, fake=False)
    assert done.status == 0 and done.out.isascii() and "\\u" not in done.out
    assert "# computed   : keys only   + cached   . skipped" in done.out
    assert "layer-rows -49.9 % | FLOPs -49.6 %" in done.out


def test_every_keep_is_shown(inspect, valid):
    args = (*FLASH, "--prompt-len", "8k", "--swa-keep", "140,256,full")
    found = valid("replay", document(inspect(*args, "--json")))
    assert [found["keep"]] + [view["keep"] for view in found["others"]] == [140, 256, "full"]
    assert [found["mode"]] + [view["mode"] for view in found["others"]] == [
        "compact", "compact", "off",
    ]  # fmt: skip
    rows = [int(rows) for rows in (20 * 140, 20 * 256, 20 * 8192)]
    totals = [found["totals"], *(view["totals"] for view in found["others"])]
    assert [total["rows"] - 20 * 8192 for total in totals] == rows
    quiet = [float(line) for line in inspect(*args, "-q").out.split()]
    assert quiet == pytest.approx([total["flops_saved"] for total in totals], abs=5e-5)
    assert quiet[0] == pytest.approx(0.488, abs=0.003) and quiet[2] == 0
    text = inspect(*args).out
    assert text.count("consumer") == 3 and "keep 256 TFLOP" in text


def test_a_hit_is_rounded_down_and_says_so(inspect):
    done = inspect("--prompt-len", "1000", "--cached", "999", "--json")
    found = document(done)
    assert (found["requested_cached_tokens"], found["cached_tokens"]) == (999, 768)
    assert "--cached 999 is used up to 768 (keep 140, pages of 128 tokens)" in done.err
    assert "used up to" not in inspect("--prompt-len", "1000", "--cached", "768").err
    replayed = document(
        inspect("--prompt-len", "1000", "--cached", "768", "--encoder-replay", "--json")
    )
    assert replayed["replayed_tokens"] == 128


def test_parts_of_the_map(inspect, valid):
    args = ("--layers", "4-6", "--tokens", "800-899", "--prompt-len", "1000", *FLASH)
    found = valid("replay", document(inspect(*args, "--json")))
    assert found["shown"] == {"layers": [4, 7], "tokens": [800, 900]}
    assert [layer["index"] for layer in found["layers"]] == [4, 5, 6]
    assert all(layer["computed"] == [[800, 900]] for layer in found["layers"])
    assert found["totals"]["rows_full"] == 40_000
    assert "only layers 4-6, tokens 800-899; totals are of all" in inspect(*args).out


def test_a_text_is_counted_as_run_would(inspect, tmp_path):
    (tmp_path / "prompt.txt").write_text("def fibonacci(n):\n" * 20)
    found = document(inspect("-f", tmp_path / "prompt.txt", "--json"))
    from deepinfer.engine.assembly import EMBEDDED
    from deepinfer.tokenizer.tokenizer import Tokenizer

    ids = Tokenizer(EMBEDDED / "tokenizer.json", 0).encode("def fibonacci(n):\n" * 20)
    assert found["prompt_tokens"] == len(ids)


def test_a_folder_needs_no_weights(inspect, tmp_path):
    from deepinfer.engine.assembly import EMBEDDED

    folder = tmp_path / "unfinished"
    folder.mkdir()
    (folder / "config.json").write_bytes((EMBEDDED / "v41-flash.json").read_bytes())
    found = document(inspect("-m", folder, "--prompt-len", "8k", "--json"))
    assert found["model"]["name"] == "unfinished" and found["thresholds"]["exact"] == 2541
    done = inspect("-m", folder, "-f", folder / "config.json")
    assert done.status == 2 and "-f needs a tokenizer" in done.err


def test_a_model_that_cannot_be_cut(inspect, tmp_path, valid):
    from tests import t6

    file = tmp_path / "odd.json"
    file.write_text(json.dumps(t6.config(engram_layer_ids=[1, 4])))
    done = inspect("--config-json", file, "--prompt-len", "50", "--swa-keep", "28", "--json")
    found = valid("replay", document(done))
    assert (
        done.err.count(
            "warning: truncation is off, every layer runs on every prompt token: layer 4"
        )
        == 1
    )
    assert (found["mode"], found["keep"], found["thresholds"]["exact"]) == ("off", "full", None)
    assert found["totals"]["flops_saved"] == 0


MISTAKES = {
    "nothing to do": ([], 2, "prompt-source", ""),
    "two prompts": (["--prompt-len", "8", "-f", "x"], 2, "prompt-source", "-f"),
    "no number": (["--prompt-len", "8q"], 2, "bad-option", "--prompt-len"),
    "no tokens": (["--prompt-len", "0"], 2, "prompt-empty", ""),
    "keep too short": ([*FLASH, "--prompt-len", "8k", "--swa-keep", "140,100"], 2,
                       "swa-keep-too-short", "--swa-keep"),
    "no keep": (["--prompt-len", "8", "--swa-keep", "140,,256"], 2, "bad-option", "--swa-keep"),
    "cached too much": (["--prompt-len", "8", "--cached", "9"], 2, "bad-option", "--cached"),
    "too long": (["--prompt-len", "16385"], 5, "prompt-too-long", "--prompt-len"),
    "no such layers": (["--prompt-len", "8", "--layers", "10-12"], 2, "bad-option", "--layers"),
    "tokens backwards": (["--prompt-len", "8", "--tokens", "5-3"], 2, "bad-option", "--tokens"),
    "two models": ([*FLASH, "-m", ".", "--prompt-len", "8"], 2, "bad-usage", "-m"),
    "no such file": (["--config-json", "gone", "--prompt-len", "8"], 2, "config-json-missing",
                     "--config-json"),
    "no such folder": (["-m", "gone", "--prompt-len", "8"], 2, "model-dir-missing", "-m"),
    "no weights": ([*FLASH, "--prompt-len", "8", "--measure"], 2, "measure-needs-weights",
                   "--measure"),
    "text without tokenizer": ([*FLASH, "-f", "x"], 2, "no-tokenizer", "-f"),
    "plot alone": (["--prompt-len", "8", "--plot"], 2, "bad-usage", "--plot"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "status", "code", "names"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(inspect, valid, args, status, code, names):
    done = inspect(*args)
    assert done.status == status and done.out == ""
    assert done.err.split("error: ")[1] and names in done.err and "hint: " in done.err
    error = valid("error", json.loads(inspect(*args, "--json").out))["error"]
    assert error["code"] == code and error["hint"]


def test_the_message_about_a_short_keep(inspect):
    done = inspect(*FLASH, "--prompt-len", "8k", "--swa-keep", "100")
    assert "error: --swa-keep 100 is too short for this model" in done.err
    assert "window 128 + longest rollback 6 = 134" in done.err
    done = inspect(
        *FLASH, "--prompt-len", "8k", DEEPINFER_YOCO_PREFILL_KEEP_TOKENS="100",
    )  # fmt: skip
    assert done.status == 2 and "from DEEPINFER_YOCO_PREFILL_KEEP_TOKENS" in done.err


def test_files(inspect, valid, tmp_path, monkeypatch):
    from deepinfer.report import plots

    drawn = []
    monkeypatch.setattr(plots, "write", lambda document, folder: drawn.append(document) or [])
    args = ("--prompt-len", "1000", "--out", tmp_path / "a" / "b")
    done = inspect(*args, "--json")
    saved = json.loads((tmp_path / "a" / "b" / "replay.json").read_text())
    assert valid("replay", saved) == document(done) == json.loads(json.dumps(drawn[0]))
    assert not list(tmp_path.rglob("*.part"))
    inspect(*args, "--no-plot")
    inspect("--prompt-len", "1000", "--out", tmp_path / "c", "--dry-run")
    assert len(drawn) == 1 and not (tmp_path / "c").exists()
    (tmp_path / "file").write_text("")
    done = inspect("--prompt-len", "8", "--out", tmp_path / "file" / "x")
    assert done.status == 2 and "from --out" in done.err


@dataclass
class Run:
    layers: tuple
    flops: dict


@pytest.fixture
def measured(fake_llm, monkeypatch):
    """A model that does what the plan says; `spoil` makes it do something else."""
    asked = {}

    def measure(llm, prompt_ids, cached=0):
        from deepinfer.engine.assembly import EMBEDDED
        from deepinfer.model.config import ModelConfig

        config = ModelConfig.from_dict(json.loads((EMBEDDED / "config.json").read_text()))
        keep = llm.settings.swa_keep
        rule = ReplayRule.of(config, "compact", keep)
        plan = rule.plan(len(prompt_ids), cached=cached)
        asked.setdefault("calls", []).append((keep, len(prompt_ids), cached))
        run = Run(plan.all_ranges(), replay.components(config, plan))
        return asked.get("spoil", lambda run: run)(run)

    monkeypatch.setattr(fake_llm, "measure", measure, raising=False)
    monkeypatch.setattr(deepinfer, "LLM", fake_llm, raising=False)
    return asked


def test_measured_equals_planned(inspect, valid, measured, fake_llm):
    args = ("--prompt-len", "1000", "--cached", "512", "--swa-keep", "140,full", "--measure")
    done = inspect(*args, "--json")
    found = valid("replay", document(done))
    assert found["source"] == "measured" and fake_llm.asked["closed"]
    assert measured["calls"] == [(140, 1000, 512), ("full", 1000, 512)]
    done = inspect(*args, DEEPINFER_SWA_KEEPS="1")
    assert "keep 140 · measured" in done.out
    assert done.err.count("warning: DEEPINFER_SWA_KEEPS is not a setting") == 1, done.err


def test_measured_differs_from_planned(inspect, valid, measured, fake_llm):
    def spoil(run):
        layers = list(run.layers)
        layers[5] = replace(layers[5], computed=((861, 1000),))
        return Run(tuple(layers), run.flops)

    measured["spoil"] = spoil
    done = inspect("--prompt-len", "1000", "--measure")
    assert done.status == 70 and done.out == "" and fake_llm.asked["closed"]
    assert "layer 5, computed" in done.err and "planned [860, 1000)" in done.err
    error = json.loads(inspect("--prompt-len", "1000", "--measure", "--json").out)["error"]
    assert error["code"] == "replay-plan-differs"


def test_drift(inspect, valid, monkeypatch):
    from deepinfer.engine import assembly

    seen = {}

    def drift(runner, sizes, prompts, keeps, tokens):
        seen.update(runner=runner, prompts=prompts, keeps=keeps, tokens=tokens)
        row = types.SimpleNamespace(max_abs_dlogit=0.5, kl=0.003, top1_agreement=0.98)
        return dict.fromkeys(keeps, row)

    sizes = types.SimpleNamespace(max_model_len=1040)
    parts = types.SimpleNamespace(runner="it", sizes=sizes, warnings=("odd weights",))
    module = types.SimpleNamespace(drift=drift)
    monkeypatch.setitem(sys.modules, "deepinfer.replay.drift", module)
    monkeypatch.setattr(assembly, "assemble", lambda settings, warn: parts)
    args = ("--prompt-len", "1000", "--swa-keep", "140,256,full", "--compare-full")
    found = valid("replay", document(inspect(*args, "--json")))
    assert found["drift"] == [
        {"keep": 140, "max_abs_dlogit": 0.5, "kl": 0.003, "top1_agreement": 0.98},
        {"keep": 256, "max_abs_dlogit": 0.5, "kl": 0.003, "top1_agreement": 0.98},
        {"keep": "full", "max_abs_dlogit": 0.0, "kl": 0.0, "top1_agreement": 1.0},
    ]
    assert found["source"] == "plan" and seen["keeps"] == [140, 256] and seen["tokens"] == 40
    assert len(seen["prompts"]) == 1 and len(seen["prompts"][0]) == 1000
    done = inspect(*args)
    assert "140\t0.5\t0.003\t98.0 %" in done.out and "warning: odd weights" in done.err
    done = inspect("--prompt-len", "1040", "--compare-full")
    assert done.status == 5 and "the prompt has 1,040 tokens" in done.err
    monkeypatch.setattr(assembly, "assemble", lambda settings, warn: pytest.fail("a dry run"))
    assert inspect(*args, "--dry-run").status == 0


def test_saved_pictures_need_no_model(inspect, tmp_path):
    """Pictures come from the document alone: drawn again from the file they are the same."""
    pytest.importorskip("matplotlib")
    from deepinfer.report import plots

    done = inspect("--prompt-len", "300", "--out", tmp_path / "a")
    assert done.status == 0
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {
        "replay.json", "heatmap-140.png", "heatmap-140.csv", "flops.png", "flops.csv",
    }  # fmt: skip
    again = tmp_path / "b"
    again.mkdir()
    plots.write(json.loads((tmp_path / "a" / "replay.json").read_text()), again)
    for path in again.iterdir():
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()


def test_nothing_private_is_saved(inspect, tmp_path):
    (tmp_path / "c.json").write_bytes(
        (Path(deepinfer.__file__).parent / "embedded" / "v41-flash.json").read_bytes()
    )
    done = inspect("--config-json", tmp_path / "c.json", "--prompt-len", "8", "--json")
    assert str(tmp_path) not in done.out and document(done)["model"]["name"] == "c"
