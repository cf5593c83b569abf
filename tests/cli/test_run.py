"""`deepinfer run`: sources of a prompt, streaming, modes, JSON, footer, settings that arrive."""

import json
import os
import select
import subprocess
import sys

import pytest

HARD = [
    "[/INST] list[str] ", "x" * 200, "\n\t", "na", "\u00efve \U0001f469\u200d", "\U0001f680",
    "[bold]not markup[/bold] \\n end without newline",
]  # fmt: skip


def test_a_pipe_gets_the_text_byte_for_byte(child):
    done = child("run", "-p", "hi", env={"FAKE_PIECES": json.dumps(HARD)})
    assert (done.status, done.out) == (0, "".join(HARD))
    assert done.err == "using the embedded model; -m DIR runs another\n"


def test_an_ascii_stdout_loses_nothing(child):
    env = {"FAKE_PIECES": json.dumps(HARD), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = child("run", "-p", "hi", "--stats", env=env)
    assert done.status == 0
    assert done.out == "".join(HARD).encode("ascii", "backslashreplace").decode()
    assert "7 tokens | first 412 ms | 7.0 tok/s" in done.err


def test_quiet_says_nothing_else(cli):
    assert cli("run", "-p", "hi", "-q", DEEPINFER_TYPO="1") == (0, "one two\n", "")


def test_footer(cli):
    done = cli("run", "-p", "hi", "--stats")
    assert done.err.splitlines()[-1] == (
        "2 tokens \u00b7 first 412 ms \u00b7 2.0 tok/s \u00b7 "
        "prompt 9,120 (8,192 cached, 0 replayed) \u00b7 seed 18446"
    )


def test_no_footer_in_a_pipe(cli):
    assert "tokens" not in cli("run", "-p", "hi").err


def test_sampling_options_arrive(cli, fake_llm):
    done = cli(
        "run", "-p", "hi", "-n", 7, "-t", 0.5, "--top-p", 0.9, "--top-k", 3, "--min-p", 0.1,
        "--seed", 2**64 - 1, "--stop", "a", "--stop", "b", "--logprobs", 2,
    )  # fmt: skip
    assert done.status == 0, done.err
    params = fake_llm.asked["params"]
    assert (params.max_tokens, params.temperature, params.top_p) == (7, 0.5, 0.9)
    assert (params.top_k, params.min_p, params.seq_seed) == (3, 0.1, 2**64 - 1)
    assert (params.stop, params.logprobs) == (("a", "b"), 2)
    assert fake_llm.asked["closed"] is True


def test_what_an_answer_must_look_like_arrives(cli, fake_llm, tmp_path, valid):
    files = {"s.json": '{"type": "integer"}', "g.lark": "start: /a+/", "g.gbnf": 'root ::= "a"'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for option, value, kind, source in (
        ("--schema", '{"enum": ["ä"]}', "json_schema", '{"enum": ["ä"]}'),
        ("--schema", tmp_path / "s.json", "json_schema", files["s.json"]),
        ("--regex", "[a-z]{2}", "regex", "[a-z]{2}"),
        ("--grammar", tmp_path / "g.lark", "lark", files["g.lark"]),
        ("--grammar", tmp_path / "g.gbnf", "gbnf", files["g.gbnf"]),
    ):
        done = cli("run", "-p", "hi", option, value, "--json")
        assert done.status == 0, done.err
        given = fake_llm.asked["params"].structured
        assert (given.kind, given.source, given.after) == (kind, source, ())
        assert valid("run", json.loads(done.out))["complete"] is False
        assert "warning: cut after 2 tokens: the text is not complete" in done.err


@pytest.mark.parametrize(("args", "said"), [
    (("--schema", '{"properties": {"age": {"not": {}}}}'),
     ['error: the JSON schema uses "not" at #/properties/age, which is not supported',
      "  supported: type, enum,"]),
    (("--schema", "{"), ["error: the JSON schema cannot be used", "  it is not JSON"]),
    (("--schema", "nowhere.json"), ["error: nowhere.json cannot be read", "  from --schema"]),
    (("--grammar", "nowhere.lark"), ["error: nowhere.lark cannot be read", "hint: --grammar FILE"]),
    (("--regex", "["), ["error: the regular expression cannot be used", "unclosed", "  in ["]),
    (("--regex", "a", "--schema", "{}"), ["error: --schema cannot be used with --regex", "hint:"]),
])  # fmt: skip
def test_what_cannot_be_asked_of_an_answer_is_known_before_the_model(cli, fake_llm, args, said):
    fake_llm.asked = {}
    for more in ((), ("--dry-run",)):
        done = cli("run", "-p", "hi", *args, *more)
        assert (done.status, done.out) == (2, "") and not fake_llm.asked
        assert all(line in done.err for line in said), done.err


@pytest.mark.parametrize(("option", "value"), [
    ("-n", "-1"), ("-n", "x"), ("-t", "-0.1"), ("-t", "nan"), ("--top-p", "1.1"),
    ("--top-p", "0"), ("--top-k", "-1"), ("--seed", "-1"), ("--seed", str(2**64)), ("--stop", ""),
])  # fmt: skip
def test_sampling_values_out_of_range_exit_2(cli, option, value):
    done = cli("run", "-p", "hi", option, value)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: ") and "hint: " in done.err


def test_settings_arrive_with_their_sources(cli, fake_llm):
    done = cli(
        "run", "-p", "hi", "--swa-keep", 200, "--mtp", 3, "--no-prefix-cache", "--backend",
        "all=torch", "--set", "page_tokens=64", "-v", DEEPINFER_PREFILL_CHUNK="32",
    )  # fmt: skip
    assert done.status == 0
    settings = fake_llm.asked["settings"]
    assert (settings.swa_keep, settings.mtp, settings.prefix_cache) == (200, 3, False)
    assert settings.backend == {"all": "torch"} and settings.page_tokens == 64
    assert settings.prefill_chunk == 32 and settings.origin("prefill_chunk") == (
        "DEEPINFER_PREFILL_CHUNK"
    )
    assert settings.log_level == "info" and settings.origin("mtp") == "--mtp"


def test_a_warning_is_printed_once(cli, fake_llm):
    fake_llm.warning = "vision tensors are skipped"
    more = {"DEEPINFER_BATCH_INVARIENT": "1", "DEEPINFER_JIT_CACHE_DIR": "kernels"}
    done = cli("run", "-p", "hi", "--overlap", **more)
    lines = done.err.splitlines()
    assert lines.count("warning: vision tensors are skipped") == 1
    assert sum("JIT_CACHE_DIR is not in this version" in line for line in lines) == 1
    assert sum("did you mean DEEPINFER_BATCH_INVARIANT?" in line for line in lines) == 1


def test_json(cli, valid):
    done = cli("run", "-p", "hi", "--json", "--swa-keep", 150, "-m", "/some/where/model")
    document = valid("run", json.loads(done.out))
    assert done.out.count("\n") == 1
    assert document["text"] == "one two\n" and document["seed"] == 18446
    keep = document["settings"]["DEEPINFER_YOCO_PREFILL_KEEP_TOKENS"]
    assert keep == {"value": 150, "source": "flag", "origin": "--swa-keep"}
    assert document["settings"]["DEEPINFER_HF_MODEL_DIR"]["value"] == "model"
    assert document["command"][-1] == "model"
    assert "error:" not in done.err


def test_di_53_effective_values_and_sources_are_in_the_report(cli):
    done = cli(
        "run", "-p", "hi", "--json", "--swa-keep", 140, "--mtp", 5,
        DEEPINFER_YOCO_PREFILL_KEEP_TOKENS="200", DEEPINFER_USE_NEXTN_DECODE="3",
    )  # fmt: skip
    settings = json.loads(done.out)["settings"]
    assert settings["DEEPINFER_YOCO_PREFILL_KEEP_TOKENS"]["value"] == 140
    assert settings["DEEPINFER_USE_NEXTN_DECODE"]["value"] == 5
    assert settings["DEEPINFER_USE_NEXTN_DECODE"]["source"] == "flag"


def test_log_levels(cli):
    assert "the model was ready after" in cli("run", "-p", "hi", "-v").err
    assert "ready" not in cli("run", "-p", "hi").err
    noisy = {"DEEPINFER_BATCH_INVARIENT": "1"}
    assert "warning" in cli("run", "-p", "hi", **noisy).err
    assert "warning" not in cli("run", "-p", "hi", "--log-level", "error", **noisy).err


# sources of a prompt


def asked(child, tmp_path, *args, stdin=b""):
    report = tmp_path / "report.json"
    done = child("run", *args, stdin=stdin, env={"FAKE_REPORT": str(report)})
    assert done.status == 0, done.err
    return json.loads(report.read_text())["prompt"]


def test_prompt_sources(child, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes("from a file\r\n\u00e9".encode())
    assert asked(child, tmp_path, "as argument") == "as argument"
    assert asked(child, tmp_path, "above", stdin=b"below\n") == "above\nbelow\n"
    assert asked(child, tmp_path, stdin=b"only stdin\n") == "only stdin\n"
    assert asked(child, tmp_path, "-", stdin=b"dash") == "dash"
    assert asked(child, tmp_path, "-f", "-", stdin=b"file dash") == "file dash"
    assert asked(child, tmp_path, "-p", "option", stdin=b"not read") == "option"
    assert asked(child, tmp_path, "-f", file, stdin=b"not read") == "from a file\r\n\u00e9"
    assert asked(child, tmp_path, "--", "-n") == "-n"


@pytest.mark.parametrize("args", [("a", "-p", "b"), ("a", "-f", "b"), ("-p", "a", "-f", "b")])
def test_two_sources(child, args):
    done = child("run", *args)
    assert (done.status, done.out) == (2, "")
    assert "the prompt was given twice" in done.err


def test_no_source(child):
    done = child("run")
    assert (done.status, done.out) == (2, "")
    assert "nothing to do: no prompt, and stdin is empty" in done.err
    assert 'hint: deepinfer run "Hello", or pipe text in' in done.err


def test_files_that_cannot_be_a_prompt(child, tmp_path):
    done = child("run", "-f", tmp_path / "gone.txt")
    assert done.status == 2 and "gone.txt cannot be read" in done.err
    (tmp_path / "binary").write_bytes(b"ab\xff")
    done = child("run", "-f", tmp_path / "binary")
    assert done.status == 2 and "is not UTF-8 text" in done.err and "byte 2" in done.err
    done = child("run", stdin=b"\x80")
    assert done.status == 2 and "stdin is not UTF-8 text" in done.err


def test_a_silent_pipe_is_explained(fake_script, environment):
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, fake_script, "run", "hello"], stdin=reader, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    os.close(reader)
    try:
        assert select.select([process.stderr], [], [], 30)[0]
        assert b"reading stdin" in process.stderr.readline()
    finally:
        os.close(writer)
        out, _ = process.communicate(timeout=30)
    assert out == b"one two\n"


# a terminal


def test_a_terminal_gets_footer_colour_and_a_closed_line(terminal):
    done = terminal("run", "-p", "x", FAKE_PIECES=json.dumps(["no ", "newline"]))
    assert done.status == 0
    assert "no newline\n" in done.out
    assert "\x1b[2m2 tokens \u00b7 first 412 ms" in done.out


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_means_none(terminal, env):
    done = terminal("run", "-p", "x", **env)
    assert done.status == 0 and "\x1b" not in done.out and "2 tokens" in done.out
    done = terminal("run", "--mtp", "five", "-p", "x", **env)
    assert done.status == 2 and "\x1b" not in done.out and "error: --mtp" in done.out


def test_color_option(terminal):
    done = terminal("run", "-p", "x", "--color", "never")
    assert done.status == 0 and "\x1b" not in done.out
    assert terminal("run", "-p", "x", "--color", "sometimes").status == 2


def test_json_is_valid_on_a_terminal_too(terminal, valid):
    done = terminal("run", "-p", "x", "--json")
    [line] = [line for line in done.out.splitlines() if line.startswith("{")]
    assert done.status == 0
    valid("run", json.loads(line))
