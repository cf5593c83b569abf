"""`deepinfer spec-trace`: a run and what is kept of it, traces shown without torch, mistakes."""

import json
import re
import subprocess
import sys
import types
from dataclasses import replace

import pytest

import deepinfer
from deepinfer.core.request import Completion, FinishReason, Problem, Timing, Usage
from deepinfer.speculative import tracefile
from deepinfer.speculative.schedule import DraftRules
from tests import traces

# A machine where importing torch, or what belongs to a model, ends the process.
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "pandas", "safetensors", "tokenizers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
from deepinfer.cli.main import main
sys.exit(main())
"""
DRAFTS = {
    "num_nextn_predict_layers": 2, "dspark_block_size": 5, "dspark_noise_token_id": 5,
    "dspark_target_layer_ids": [7, 8, 9], "dspark_markov_rank": 64, "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with draft stages, as far as this command reads one itself."""
    from deepinfer.engine.assembly import EMBEDDED

    config = json.loads((EMBEDDED / "config.json").read_text())
    text = config["text_config"]
    text |= {**DRAFTS, "compress_ratios": text["compress_ratios"][:10] + [0, 0]}
    there = tmp_path / "model"
    there.mkdir()
    (there / "config.json").write_text(json.dumps(config))
    (there / "tokenizer.json").write_bytes((EMBEDDED / "tokenizer.json").read_bytes())
    return there


@pytest.fixture
def model(fake_llm, monkeypatch):
    """A scripted model that drafts; `model["spoil"]` changes its answers without drafts."""
    seen = {"calls": [], "tokens": 60, "spoil": lambda results: results}

    def results(llm, answers, params):
        many = params if isinstance(params, list) else [params] * len(answers)
        return [
            Completion(
                index=seq, sample=0, text="", token_ids=tuple(ids),
                finish_reason=FinishReason.LENGTH, usage=Usage(3, 0, 0, 3, len(ids)),
                timing_ms=Timing(1.0, 2.0, 3.0),
                seed=one.seq_seed if one.seq_seed is not None else 100 + seq,
                batch_invariant=False, settings=llm.settings.as_json(),
            )
            for seq, (ids, one) in enumerate(zip(answers, many, strict=True))
        ]  # fmt: skip

    def drafting(llm):
        at = llm.settings
        return types.SimpleNamespace(
            drafting=DraftRules(at.mtp, at.verify, at.mtp_varlen, at.mtp_threshold)
        )

    def trace(llm, prompts, params):
        seen["calls"].append(("trace", llm.settings, prompts, params))
        steps, answers, _ = traces.simulate(0, len(prompts), seen["tokens"])
        seen["answers"] = answers
        return results(llm, answers, params), steps

    def generate(llm, prompts, params):
        seen["calls"].append(("generate", llm.settings, prompts, params))
        return seen["spoil"](results(llm, seen["answers"], params))

    monkeypatch.setattr(fake_llm, "parts", property(drafting), raising=False)
    monkeypatch.setattr(fake_llm, "trace", trace, raising=False)
    monkeypatch.setattr(fake_llm, "generate", generate, raising=False)
    monkeypatch.setattr(deepinfer, "LLM", fake_llm, raising=False)
    return seen


@pytest.fixture
def spec(cli, folder, model):
    def run(*args, **env):
        if "--from" not in args:
            args = (*args, "-m", folder)
        return cli("spec-trace", *args, **env)

    return run


@pytest.fixture
def saved(tmp_path):
    """A trace of two prompts."""
    steps, answers, _ = traces.simulate(1, 2, 40, varlen=True)
    made = traces.trace(steps, answers, prompts=["[/INST] list[str]", "b"], varlen=True)
    tracefile.write(made, tmp_path / "saved.jsonl")
    return tmp_path / "saved.jsonl"


def document(done):
    assert done.status == 0, done.err
    return json.loads(done.out)


def test_one_prompt(spec, valid, model, fake_llm):
    done = spec("-p", "def", "--json")
    found = valid("spec-trace", document(done))
    [(what, settings, prompts, params)] = model["calls"]
    assert (what, prompts, params.temperature, params.max_tokens) == ("trace", ["def"], 0, 256)
    assert fake_llm.asked["closed"] and settings.source("mtp") == "default"
    assert found["summary"]["lossless"] is None and found["model"]["name"] == "model"
    [sequence] = found["sequences"]
    assert sequence["token_ids"] == model["answers"][0] and len(sequence["token_text"]) == 60
    assert sum(step["committed"] for step in found["steps"]) == 59 == found["summary"]["tokens"]
    for step in found["steps"]:
        at = step["pos"] - sequence["prompt_tokens"]
        texts = [*step["draft_text"][: step["accepted"]], step["target_text"]]
        assert texts == sequence["token_text"][at : at + len(texts)]


def test_the_text_is_the_default_view(spec):
    done = spec("-p", "def")
    assert done.status == 0 and "{+" in done.out and "[-" in done.out and "\x1b" not in done.out
    assert "accepted draft   [-rejected draft-]" in done.err
    assert re.search(r"accepted length \d\.\d\d = tokens committed / steps, bonus incl", done.err)
    coloured = spec("-p", "def", "--color", "always").out
    assert "\x1b[4;32m" in coloured and "\x1b[9;31m" in coloured and "[-" not in coloured
    summary = spec("-p", "def", "--view", "summary").out
    length = re.search(r"accepted length (\S+) = ", summary).group(1)
    assert f"{float(spec('-p', 'def', '-q').out):.2f}" == length


def test_sampling_reaches_the_model(spec, model):
    spec("-p", "x", "-n", "7", "-t", "0.5", "--top-k", "3", "--seed", "11", "--stop", "q")
    params = model["calls"][0][3]
    assert (params.max_tokens, params.temperature, params.top_k) == (7, 0.5, 3)
    assert (params.seq_seed, params.stop) == (11, ("q",))


def test_files_of_prompts(spec, model, tmp_path):
    (tmp_path / "one.txt").write_text("first\n\nstill first")
    spec("-f", tmp_path / "one.txt")
    (tmp_path / "many.jsonl").write_text(
        '{"prompt": "a\\nb", "id": 3}\n\n{"prompt": "c\\u2028d"}\n'
    )
    done = spec("-f", tmp_path / "many.jsonl")
    assert [call[2] for call in model["calls"]] == [["first\n\nstill first"], ["a\nb", "c\u2028d"]]
    assert "accepted length" in done.out and "draft\tdrafted\tverified" in done.out, "the summary"
    inline = spec("-f", tmp_path / "many.jsonl", "--view", "inline").out
    assert r"--- prompt 1: a\nb" in inline and r"--- prompt 2: c\u2028d" in inline
    assert spec("-f", tmp_path / "many.jsonl", "--view", "steps").out.startswith("step\tprompt\t")


def test_bad_prompts_are_listed_before_anything_runs(spec, model, tmp_path):
    bad = ["{", "[]", '{"prompt": 3}', '{"prompt": ""}', '{"text": "x"}'] + ["x"] * 20
    (tmp_path / "p.jsonl").write_text("\n".join(['{"prompt": "ok"}', *bad]))
    done = spec("-f", tmp_path / "p.jsonl")
    assert done.status == 2 and "has 25 bad lines of 26" in done.err and not model["calls"]
    assert "line 2: not JSON (column 2" in done.err and "and 15 more" in done.err
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "has no prompts" in spec("-f", tmp_path / "empty.jsonl").err


def test_a_trace_and_its_second_life(spec, valid, environment, tmp_path):
    """--from shows the same as the run did, where neither torch nor the model is."""
    first = spec("-p", "def", "-o", tmp_path / "t.jsonl", "--check", "--json")
    header, *rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    valid("trace", header)
    for row in rows:
        valid("trace-step", row)
    assert str(tmp_path) not in (tmp_path / "t.jsonl").read_text()
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, "spec-trace", "--from", tmp_path / "t.jsonl", "--json"],
        capture_output=True, text=True, env=environment(), timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == document(first)
    again = spec("--from", tmp_path / "t.jsonl", "-o", tmp_path / "again.jsonl")
    assert again.status == 0
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "t.jsonl").read_bytes()


def test_every_view_without_torch(environment, saved):
    for view in ("inline", "steps", "summary"):
        done = subprocess.run(
            [sys.executable, "-c", BLOCKED, "spec-trace", "--from", saved, "--view", view],
            capture_output=True, text=True, env=environment(), timeout=60,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0 and len(done.stdout.splitlines()) > 10, done.stderr


def test_a_half_written_trace_is_shown_with_a_warning(spec, saved):
    saved.write_bytes(saved.read_bytes()[:-20])
    done = spec("--from", saved)
    assert done.status == 0
    assert "warning: saved.jsonl: the last line is half-written and was dropped" in done.err


def test_a_trace_that_was_cut_says_so(spec, saved):
    whole = saved.read_text().splitlines(keepends=True)
    for lines in (0, 1, 10):
        saved.write_text("".join(whole[: 1 + lines]))
        done = spec("--from", saved, "--view", "inline")
        assert done.status == 0
        assert "first token" not in done.err
        assert f"warning: saved.jsonl has {lines} of {len(whole) - 1} steps" in done.err
        shown = done.out.count("more tokens, whose steps are not in the trace")
        assert shown == 2, "of both prompts"
    saved.write_text("".join(whole))
    done = spec("--from", saved, "--view", "inline")
    assert "warning" not in done.err and "more tokens" not in done.out


@pytest.mark.parametrize("columns", [80, 120])
def test_terminals(terminal, saved, columns):
    done = terminal("spec-trace", "--from", saved, "--view", "steps", columns=columns, fake=False)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", done.out).splitlines()
    assert done.status == 0 and "\x1b[4;32m" in done.out
    assert re.match(r"step +1  prompt 1  draft 5  verify \d  accepted \d   ", lines[4])
    assert re.search(r"^ +conf [.0-9 ]+  budget \d+, share \d → \d verified · ", lines[5])
    plain = terminal("spec-trace", "--from", saved, "--view", "inline", fake=False, NO_COLOR="1")
    assert "{+" in plain.out and "\x1b" not in plain.out
    table = terminal("spec-trace", "--from", saved, columns=columns, fake=False).out
    assert "…" not in table and "accepted length" in table


def test_ascii_streams_lose_nothing(child, saved):
    env = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    for view in ("inline", "steps", "summary"):
        done = child("spec-trace", "--from", saved, "--view", view, env=env, fake=False)
        assert done.status == 0 and done.out.isascii() and r"\u" not in done.out
    assert "######" in done.out


def test_model_text_never_styles(spec, saved):
    assert "--- prompt 1: [/INST] list[str]" in spec("--from", saved, "--view", "inline").out


def test_the_check_holds(spec, model):
    done = spec("-p", "x", "--check", "--mtp", "3", "--mtp-varlen", "--view", "summary")
    assert done.status == 0 and "lossless yes" in done.out
    (_, with_drafts, _, _), (what, plain, prompts, [params]) = model["calls"]
    assert what == "generate" and prompts == ["x"] and params.seq_seed == 100
    assert (with_drafts.mtp, plain.mtp, plain.mtp_varlen) == (3, 0, False)
    assert (plain.swa_keep, plain.max_rollback) == (140, 4)


def test_the_check_fails(spec, model, valid, tmp_path):
    def spoil(results):
        ids = results[0].token_ids
        return [replace(results[0], token_ids=(*ids[:16], ids[16] + 1, *ids[17:]))]

    model["spoil"] = spoil
    done = spec("-p", "x", "--check", "-o", tmp_path / "t.jsonl")
    assert done.status == 1 and "{+" in done.out
    assert "error: the ids differ from those without speculation" in done.err
    assert "prompt 1, token 17 of the answer" in done.err
    ids = model["answers"][0][16], model["answers"][0][16] + 1
    assert re.search(rf'with drafts: id {ids[0]} ".*"\n  without: id {ids[1]} "', done.err)
    again = spec("--from", tmp_path / "t.jsonl", "--json")
    found = valid("spec-trace", json.loads(again.out))
    assert again.status == 1 and found["summary"]["lossless"] is False
    assert found["difference"]["token"] == 16
    model["spoil"] = lambda results: [replace(results[0], token_ids=results[0].token_ids[:5])]
    done = spec("-p", "x", "--check")
    assert done.status == 1 and "without: the answer had ended" in done.err


def test_a_check_that_cannot_hold(spec, model):
    done = spec("-p", "x", "--check", "-t", "0.8")
    assert done.status == 2 and not model["calls"]
    assert "--check cannot be used with --verify rejection at temperature 0.8" in done.err
    assert "hint: --check -t 0, or --check --verify coupled" in done.err
    assert spec("-p", "x", "--check", "-t", "0.8", "--verify", "coupled").status == 0


def test_calibration(spec, model, valid, folder, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n' * 8)
    model["tokens"] = 600
    done = spec("-f", tmp_path / "p.jsonl", "--calibrate", "-o", tmp_path / "t.jsonl")
    assert done.status == 0, done.err
    written = valid(
        "calibration", json.loads((folder / "confidence_temperatures.json").read_text())
    )
    assert len(written["temperatures"]) == 5 and written["ece"]["after"] < written["ece"]["before"]
    assert "position\tdrafts\tECE before\tECE after\ttemperature" in done.out
    assert "those of the trace stay" not in done.err
    elsewhere = tmp_path / "c.json"
    found = document(spec("--from", tmp_path / "t.jsonl", "--calibrate-to", elsewhere, "--json"))
    assert valid("spec-trace", found)["calibration"] == written == json.loads(elsewhere.read_text())
    elsewhere.unlink()
    spec("--from", tmp_path / "t.jsonl", "--calibrate-to", elsewhere, "--dry-run")
    assert not elsewhere.exists()


def test_calibration_refuses_few_outcomes(spec, folder, tmp_path):
    done = spec("-p", "x", "--calibrate", "-o", tmp_path / "t.jsonl")
    assert done.status == 2 and "1,000 are needed at each position" in done.err
    assert "{+" in done.out, "what ran is shown"
    assert not (folder / "confidence_temperatures.json").exists()
    assert (tmp_path / "t.jsonl").exists(), "what ran is kept"


def test_calibration_replaces_a_damaged_file(child, tmp_path):
    """The real engine, which reads the file beside the checkpoint: not when it is made anew."""
    from tests import t6

    folder = t6.write(tmp_path / "t6", quantised=False)
    (folder / "confidence_temperatures.json").write_text("{}")
    args = ("spec-trace", "-p", "hello", "-n", "8", "-m", folder, "--page-tokens", t6.PAGE_TOKENS)
    done = child(*args, fake=False)
    assert done.status == 4 and "hint: delete it, or deepinfer spec-trace --calibrate" in done.err
    done = child(*args, "--calibrate", "-o", tmp_path / "t.jsonl", fake=False)
    assert done.status == 2 and "1,000 are needed at each position" in done.err
    header = json.loads((tmp_path / "t.jsonl").read_text().splitlines()[0])
    assert header["speculation"]["temperatures"] == [1.0]


def test_calibration_keeps_temperatures_that_were_chosen(spec, model):
    name = "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE"
    spec("-p", "x", "--calibrate", **{name: "2"})
    settings = model["calls"][0][1]
    assert settings.mtp_temperature == (2.0,) and settings.source("mtp_temperature") != "flag"


def test_calibration_says_when_it_changes_nothing(spec, tmp_path):
    steps, answers, _ = traces.simulate(0, 8, tokens=1000, temperatures=(2.0,))
    made = traces.trace(steps, answers, temperatures=[2.0])
    tracefile.write(made, tmp_path / "t.jsonl")
    done = spec("--from", tmp_path / "t.jsonl", "--calibrate-to", tmp_path / "c.json")
    assert done.status == 0 and "those of the trace stay" in done.err
    assert json.loads((tmp_path / "c.json").read_text())["temperatures"] == [2.0] * 5


def test_another_curve(spec, valid, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n' * 3)
    saved = tmp_path / "t.jsonl"
    spec("-f", tmp_path / "p.jsonl", "-o", saved)
    (tmp_path / "slow.json").write_text(json.dumps({"1": 20, "2": 40, "12": 240}))
    (tmp_path / "free.json").write_text(json.dumps({"1": 20, "2": 20, "12": 20}))
    chosen = {}
    for name in ("slow", "free"):
        args = ("--from", saved, "--replay-curve", tmp_path / f"{name}.json")
        found = valid("spec-trace", document(spec(*args, "--json")))
        replay = found["summary"]["replay"]
        assert replay["replayed_tokens_per_s"] >= replay["tokens_per_s"] * 0.95
        chosen[name] = replay["replayed_verified_per_step"]
        budgets = [s["replayed"]["budget"] for s in found["steps"] if "replayed" in s]
        drafted = {s["step"] for s in found["steps"] if s["draft_ids"]}
        assert len(budgets) >= replay["steps"] == len(drafted)
        assert f"with {name}.json: {chosen[name]:.2f} drafts a step" in spec(*args).out
        assert spec(*args, "--view", "steps").out.split("\n")[0].endswith("\treplayed")
    assert chosen["slow"] < chosen["free"]


def test_files_for_people(spec, saved, tmp_path, monkeypatch):
    from deepinfer.report import trace_plots

    drawn = []
    monkeypatch.setattr(trace_plots, "write", lambda *given: drawn.append(given) or [])
    spec("--from", saved, "--out", tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "trace.jsonl").read_bytes() == saved.read_bytes()
    spec("--from", saved, "--out", tmp_path / "c", "--no-plot")
    spec("--from", saved, "--out", tmp_path / "d", "--dry-run")
    assert len(drawn) == 1 and not (tmp_path / "d").exists()
    assert not list(tmp_path.rglob("*.part"))


def test_a_run_survives_a_full_disk(spec, valid, tmp_path, monkeypatch):
    def full(trace, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracefile, "write", full)
    for words in (["-o", tmp_path / "t.jsonl"], ["--out", tmp_path / "a"]):
        done = spec("-p", "x", *words)
        assert done.status == 2 and "{+" in done.out
        assert f"error: {words[1]} cannot be written\n  No space left" in done.err
        done = spec("-p", "x", *words, "--json")
        found = valid("spec-trace", valid("error", json.loads(done.out)))
        assert done.status == 2 and found["error"]["code"] == "out-not-written"


def test_no_place_for_temperatures_is_known_before_the_run(spec, model, folder):
    (folder / "confidence_temperatures.json.part").mkdir()
    done = spec("-p", "x", "--calibrate")
    assert done.status == 2 and not model["calls"] and "from --calibrate" in done.err


def test_pictures_come_from_the_file(spec, saved, tmp_path):
    pytest.importorskip("matplotlib")
    assert spec("--from", saved, "--out", tmp_path / "a").status == 0
    names = {path.name for path in (tmp_path / "a").iterdir()}
    stems = ("accepted-length", "acceptance-by-position", "calibration", "timeline")
    assert names == {"trace.jsonl", *(f"{s}.{kind}" for s in stems for kind in ("png", "csv"))}


def test_a_dry_run_runs_nothing(spec, model, monkeypatch):
    from deepinfer.cli import plan

    asked = []
    monkeypatch.setattr(plan, "print_plan", lambda *given: asked.append(given[2]) or 0)
    assert spec("-p", "x", "--dry-run").status == 0
    assert asked == ["x"] and not model["calls"]


def test_an_answer_without_a_step(spec, model):
    model["tokens"] = 1
    for view in ("inline", "steps", "summary"):
        done = spec("-p", "x", "-n", "1", "--view", view)
        assert done.status == 0 and "no step decoded with drafts" in done.out + done.err


def test_ctrl_c_says_that_nothing_was_kept(spec, fake_llm, monkeypatch, tmp_path):
    def trace(llm, prompts, params):
        raise KeyboardInterrupt

    monkeypatch.setattr(fake_llm, "trace", trace)
    done = spec("-p", "x", "-o", tmp_path / "t.jsonl")
    assert done.status == 130 and "stopped: no trace was kept" in done.err
    assert not list(tmp_path.glob("t.jsonl*"))


def test_a_prompt_that_failed(spec, model, fake_llm, monkeypatch):
    good = fake_llm.trace

    def trace(llm, prompts, params):
        results, steps = good(llm, prompts, params)
        problem = Problem("prompt-too-long", "the prompt is too long", (), "shorten it", 5)
        return [replace(results[0], error=problem)], steps

    monkeypatch.setattr(fake_llm, "trace", trace)
    done = spec("-p", "x")
    assert done.status == 5 and done.out == "" and "the prompt is too long" in done.err


MISTAKES = {
    "nothing to do": ([], "prompt-source", ""),
    "two prompts": (["-p", "x", "-f", "y"], "prompt-source", "-f"),
    "an empty prompt": (["-p", ""], "prompt-empty", "-p"),
    "no such file": (["-f", "gone"], "prompt-file", "-f"),
    "no such trace": (["--from", "gone"], "trace-missing", "--from"),
    "no trace": (["--from", "DIR/model/config.json"], "trace-invalid", "config.json"),
    "no such view": (["-p", "x", "--view", "all"], "bad-option", "--view"),
    "json and quiet": (["-p", "x", "--json", "-q"], "bad-usage", "--json"),
    "plot alone": (["-p", "x", "--no-plot"], "bad-usage", "--no-plot"),
    "two places": (["-p", "x", "--calibrate", "--calibrate-to", "f"], "bad-usage", "--calibrate"),
    "no drafts": (["-p", "x", "--mtp", "0"], "nothing-drafted", "--mtp"),
    "draft too long": (["-p", "x", "--mtp", "9"], "mtp-too-long", "--mtp 9"),
    "short block": (["-p", "x", "--mtp", "3", "--calibrate"], "calibration-needs-block",
                    "--calibrate"),
    "no curve": (["-p", "x", "--replay-curve", "gone"], "curve-invalid", "--replay-curve"),
    "no folder": (["-p", "x", "-o", "gone/t.jsonl"], "out-not-written", "gone/t.jsonl"),
    "no file": (["-p", "x", "-o", "/proc/t.jsonl"], "out-not-written", "/proc/t.jsonl"),
    "no place": (["-p", "x", "--out", "DIR/model/config.json/a"], "out-not-written", "--out"),
    "no place either": (["-p", "x", "--calibrate-to", "/proc/c.json"], "out-not-written",
                        "/proc/c.json"),
    "written over": (["-p", "x", "-o", "DIR/model/config.json"], "output-exists", "-o"),
    "a folder": (["-p", "x", "-o", "DIR/model"], "output-exists", "-o"),
    "bad temperature": (["-p", "x", "-t", "-1"], "bad-usage", "--temperature"),
    "trace and prompt": (["--from", "SAVED", "-p", "x"], "bad-usage", "-p"),
    "trace and check": (["--from", "SAVED", "--check"], "bad-usage", "--check"),
    "trace and model": (["--from", "SAVED", "--mtp", "3"], "bad-usage", "--mtp"),
    "trace and calibration": (["--from", "SAVED", "--calibrate"], "calibration-place",
                              "--calibrate"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "code", "names"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(spec, valid, model, saved, tmp_path, args, code, names):
    words = [w.replace("DIR", str(tmp_path)).replace("SAVED", str(saved)) for w in args]
    done = spec(*words)
    assert done.status == 2 and not model["calls"]
    if "--json" not in args:
        assert done.out == "" and "error: " in done.err and "hint: " in done.err
        assert names in done.err
        done = spec(*words, "--json")
    error = valid("error", json.loads(done.out))["error"]
    assert error["code"] == code and error["hint"]


def test_a_checkpoint_without_drafts(cli, tmp_path, folder, model):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"num_nextn_predict_layers": 0}
    config["text_config"]["compress_ratios"] = config["text_config"]["compress_ratios"][:10]
    (folder / "config.json").write_text(json.dumps(config))
    done = cli("spec-trace", "-p", "x", "-m", folder)
    assert done.status == 2 and "this checkpoint has no draft head" in done.err


def test_a_real_model(child, valid, tmp_path):
    """End to end: T6 has draft stages, and no draft of it may change an id."""
    from tests import t6

    folder = t6.write(tmp_path / "t6", quantised=False)
    args = ("-m", folder, "-p", "hello", "-n", "8", "--page-tokens", t6.PAGE_TOKENS)
    done = child("spec-trace", *args, "--check", "--json", "-o", tmp_path / "t.jsonl", fake=False)
    found = valid("spec-trace", document(done))
    assert found["summary"]["lossless"] is True and found["speculation"]["mtp"] == 5
    [sequence] = found["sequences"]
    assert found["summary"]["tokens"] == len(sequence["token_ids"]) - 1
    assert "".join(sequence["token_text"]) == sequence["text"]
