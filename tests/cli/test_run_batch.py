"""`deepinfer run --batch`: checked first, appended whole, resumed exactly; on a scripted model."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHAT = "/v1/chat/completions"


def line(name, text="Hi", url=CHAT, **body):
    asked = {"messages": [{"role": "user", "content": text}]}
    if url == "/v1/responses":
        asked = {"input": text}
    if url == "/v1/completions":
        asked = {"prompt": text}
    if url == "/v1/messages":
        asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 50}
    return {
        "custom_id": name,
        "method": "POST",
        "url": url,
        "body": {"model": "m", **asked, **body},
    }


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(row) for row in Path(path).read_text().splitlines()]


def answer(row):
    """What the model said, without the time it said it at."""
    if "result" in row:
        return row["result"]
    body = {**row["response"]["body"]}
    for name in ("created", "created_at", "completed_at"):
        body.pop(name, None)
    return {**row, "response": {**row["response"], "body": body}}


def answers(path):
    rows = {row["custom_id"]: answer(row) for row in read(path)}
    assert len(rows) == len(read(path)), "a custom_id twice"
    return rows


URLS = (CHAT, "/v1/responses", "/v1/messages", "/v1/completions")


@pytest.fixture
def requests(tmp_path):
    """Twelve requests of four kinds."""
    rows = [line(f"id {n}", f"text {n}", URLS[n % 4]) for n in range(12)]
    return write(tmp_path / "in.jsonl", rows)


def test_every_kind_has_its_vendors_shape(cli, requests):
    from anthropic.types.messages import MessageBatchIndividualResponse
    from openai.types import Completion
    from openai.types.chat import ChatCompletion
    from openai.types.responses import Response

    done = cli("run", "--batch", requests, "-o", "out.jsonl")
    assert done.status == 0 and done.out == "" and "12 results in out.jsonl" in done.err
    types = {"chatcmpl": ChatCompletion, "resp": Response, "cmpl": Completion}
    for row in read("out.jsonl"):
        if "result" in row:
            parsed = MessageBatchIndividualResponse.model_validate(row)
            assert parsed.result.message.model == "m"
            continue
        assert set(row) == {"id", "custom_id", "response", "error"} and row["error"] is None
        body = row["response"]["body"]
        kind = body["id"].split("-")[0].split("_")[0]
        assert types[kind].model_validate(body).model == "m"
        assert body["deepinfer"]["seed"] >= 0


def test_bad_lines_stop_everything_before_the_model(cli, fake_llm, tmp_path):
    wrong = line("d", response_format={"type": "regex", "regex": "[a"})
    rows = [line("a"), line("b", url="/v1/embeddings"), line("a"), line("c", n=3), wrong]
    write(tmp_path / "in.jsonl", rows)
    done = cli("run", "--batch", "in.jsonl", "-o", "out.jsonl")
    assert done.status == 2 and "settings" not in fake_llm.asked
    assert not (tmp_path / "out.jsonl").exists()
    for words in ("4 bad lines of 5", "line 2: url", "line 3: custom_id", "line 4: n=", "hint:",
                  "line 5: the regular expression"):  # fmt: skip
        assert words in done.err
    done = cli("run", "--batch", "in.jsonl", "-o", "out.jsonl", "--skip-invalid")
    assert done.status == 0 and list(answers("out.jsonl")) == ["a"]
    assert "line 2: url" in done.err and "skipped" in done.err


@pytest.mark.parametrize("words, code", [
    (("--batch", "in.jsonl"), "bad-usage"), (("--batch", "no", "-o", "x"), "batch-file"),
    (("--batch", "in.jsonl", "-o", "no/out"), "out-not-written"),
    (("--batch", "in.jsonl", "-o", "x", "--resume", "--overwrite"), "bad-usage"),
    (("Hi", "--batch", "in.jsonl", "-o", "x"), "prompt-source"),
    (("--messages", "f", "--batch", "in.jsonl", "-o", "x"), "prompt-source"),
    (("--batch", "in.jsonl", "-o", "-"), "bad-usage"), (("--batch", "empty", "-o", "x"),
                                                        "batch-invalid"),
    (("--batch", "/dev/null", "-o", "x"), "batch-file"),
    (("--batch", "in.jsonl", "-o", "x", "--top-p", "0"), "bad-sampling-parameter"),
])  # fmt: skip
def test_what_is_refused(cli, requests, tmp_path, words, code):
    (tmp_path / "empty").write_text("\n\n")
    done = cli("run", *words, "--json")
    assert (done.status, json.loads(done.out)["error"]["code"]) == (2, code)


def test_an_output_is_never_written_over_by_accident(cli, requests, tmp_path):
    assert cli("run", "--batch", requests, "-o", "out.jsonl").status == 0
    first = answers("out.jsonl")
    done = cli("run", "--batch", requests, "-o", "out.jsonl")
    assert done.status == 2 and "already has 12 results" in done.err
    assert "hint: --overwrite to start again" in done.err
    assert cli("run", "--batch", requests, "-o", "out.jsonl", "--overwrite").status == 0
    assert answers("out.jsonl") == first
    done = cli("run", "--batch", requests, "-o", "out.jsonl", "--resume")
    assert done.status == 0 and "12 were there" in done.err and answers("out.jsonl") == first


def test_what_is_no_file_of_answers_is_left_alone(cli, requests):
    notes = Path("notes.json")
    notes.write_text("no line ends here")
    for words in ((), ("--resume",)):
        done = cli("run", "--batch", requests, "-o", notes, *words)
        assert done.status == 2 and "hint: --overwrite" in done.err
        assert notes.read_text() == "no line ends here"
    assert not Path("notes.json.meta.json").exists()
    assert cli("run", "--batch", requests, "-o", notes, "--overwrite").status == 0
    assert len(read(notes)) == 12


@pytest.mark.parametrize("how", ["itself", "link", "hard link", "meta", "part"])
def test_the_requests_are_never_written_over(cli, requests, how):
    before, out = requests.read_bytes(), {"itself": "in.jsonl"}.get(how, "out")
    if how == "link":
        os.symlink(requests, out)
    if how == "hard link":
        os.link(requests, out)
    if how in ("meta", "part"):
        name = {"meta": "out.meta.json", "part": "out.meta.json.part"}[how]
        requests = requests.rename(name)
    there = sorted(os.listdir())
    for words in ((), ("--overwrite",), ("--resume",), ("--dry-run",)):
        done = cli("run", "--batch", requests, "-o", out, *words)
        assert done.status == 2 and "would write over the requests" in done.err
        assert requests.read_bytes() == before and sorted(os.listdir()) == there


def test_resume_answers_what_is_missing_as_it_would_have_been(cli, requests, fake_llm, monkeypatch):
    assert cli("run", "--batch", requests, "-o", "whole.jsonl").status == 0
    whole = answers("whole.jsonl")
    kept = Path("whole.jsonl").read_text().splitlines(keepends=True)
    meta = Path("whole.jsonl.meta.json").read_text()
    for count, slots in ((0, 1), (3, 2), (7, 64)):
        monkeypatch.setattr(fake_llm, "slots", slots)
        Path("out.jsonl").write_text("".join(kept[:count]) + kept[count][:30])
        Path("out.jsonl.meta.json").write_text(meta)
        done = cli("run", "--batch", requests, "-o", "out.jsonl", "--resume")
        assert done.status == 0 and "half-written" in done.err
        assert answers("out.jsonl") == whole


@pytest.mark.parametrize("words, said", [
    (("--swa-keep", "256"), "swa-keep was 140, now 256"),
    (("-t", "0.5"), "temperature was unset, now 0.5"), (("--seed", "3"), "seed was unset, now 3"),
    (("--thinking", "on"), "thinking was off, now on"),
])  # fmt: skip
def test_resume_refuses_other_settings(cli, requests, words, said):
    assert cli("run", "--batch", requests, "-o", "out.jsonl").status == 0
    before = Path("out.jsonl").read_bytes()
    done = cli("run", "--batch", requests, "-o", "out.jsonl", "--resume", *words)
    assert done.status == 2 and f"cannot resume: {said}" in done.err
    assert Path("out.jsonl").read_bytes() == before
    same = ("--threads", "1", "--no-progress", "--log-level", "info")
    assert cli("run", "--batch", requests, "-o", "out.jsonl", "--resume", *same).status == 0


def test_resume_needs_the_settings_of_the_first_run(cli, requests):
    assert cli("run", "--batch", requests, "-o", "out.jsonl").status == 0
    Path("out.jsonl.meta.json").unlink()
    done = cli("run", "--batch", requests, "-o", "out.jsonl", "--resume")
    assert done.status == 2 and "out.jsonl.meta.json is missing" in done.err


def test_resume_with_more_lines_answers_these(cli, requests):
    assert cli("run", "--batch", requests, "-o", "out.jsonl").status == 0
    with requests.open("a") as file:
        file.write(json.dumps(line("new")) + "\n")
    done = cli("run", "--batch", requests, "-o", "out.jsonl", "--resume")
    assert done.status == 0 and "is not what it was" in done.err
    assert len(answers("out.jsonl")) == 13


def test_a_line_that_fails_does_not_harm_the_others(cli, tmp_path):
    rows = [line("a"), line("long", "x " * 2000), line("b", url="/v1/messages"),
            line("long too", "x " * 2000, url="/v1/messages"), line("c")]  # fmt: skip
    write(tmp_path / "in.jsonl", rows)
    done = cli("run", "--batch", "in.jsonl", "-o", "out.jsonl")
    assert done.status == 1 and "2 are errors" in done.err
    made = {row["custom_id"]: row for row in read("out.jsonl")}
    assert made["long"]["error"] == {"code": "prompt-too-long", "message": "it is too long"}
    assert made["long"]["response"]["status_code"] == 400
    assert made["long too"]["result"]["error"]["error"]["type"] == "invalid_request_error"
    good = answers("out.jsonl")
    write(tmp_path / "in.jsonl", [rows[0], rows[2], rows[4]])
    assert cli("run", "--batch", "in.jsonl", "-o", "alone.jsonl").status == 0
    assert answers("alone.jsonl") == {name: good[name] for name in ("a", "b", "c")}
    write(tmp_path / "in.jsonl", rows)
    assert cli("run", "--batch", "in.jsonl", "-o", "out.jsonl", "--resume").status == 1


@pytest.mark.parametrize("fast", [False, True])
def test_an_answer_that_is_no_json_fails_alone(cli, requests, monkeypatch, fast):
    from deepinfer.protocol import batchfile

    def succeeded(row, document):
        line = real(row, document)
        return {**line, "odd": float("inf")} if row.custom_id in ("id 1", "id 2") else line

    real = batchfile.succeeded
    monkeypatch.setattr(batchfile, "succeeded", succeeded)
    words = ("--fail-fast",) if fast else ()
    done = cli("run", "--batch", requests, "-o", "out.jsonl", *words)
    rows = {row["custom_id"]: row for row in read("out.jsonl")}
    assert done.status == 1
    if fast:
        assert "1 are errors" in done.err
        return
    assert "2 are errors" in done.err and len(rows) == 12
    assert rows["id 1"]["error"]["code"] == "answer-not-json"
    assert rows["id 1"]["response"]["status_code"] == 500
    assert rows["id 2"]["result"]["error"]["error"]["type"] == "api_error"


def test_fail_fast(cli, tmp_path):
    rows = [line("long", "x " * 2000), *(line(str(n)) for n in range(50))]
    write(tmp_path / "in.jsonl", rows)
    done = cli("run", "--batch", "in.jsonl", "-o", "out.jsonl", "--fail-fast")
    assert done.status == 1 and "long" in answers("out.jsonl") and len(read("out.jsonl")) < 50


def test_answers_on_stdout(cli, requests):
    done = cli("run", "--batch", requests, "-o", "whole.jsonl")
    assert done.status == 0
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fake_llm.py")), "run", "--batch",
         str(requests), "-o", "-", "-q"],
        capture_output=True, text=True, timeout=120, env=_environment(),
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    rows = {row["custom_id"]: answer(row) for row in map(json.loads, done.stdout.splitlines())}
    assert rows == answers("whole.jsonl")


def _environment(**more):
    from tests.cli.conftest import clean_environment

    return clean_environment(**more)


def test_json_says_what_was_done(cli, requests, valid):
    done = cli("run", "--batch", requests, "-o", "out.jsonl", "--json")
    document = json.loads(done.out)
    assert document["schema"] == "deepinfer.batch/1" and document["results"] == 12
    assert document["errors"] == document["before"] == document["skipped"] == 0
    plan = cli("run", "--batch", requests, "-o", "other.jsonl", "--dry-run", "--json")
    assert json.loads(plan.out)["plan"] == {"requests": 12, "bad_lines": 0}
    assert not Path("other.jsonl").exists()


def test_flags_win_over_the_lines(cli, fake_llm, tmp_path):
    write(tmp_path / "in.jsonl", [line("a", temperature=0.9, seed=4), line("b", max_tokens=3)])
    words = ("-t", "0.1", "--seed", "7", "-n", "5")
    assert cli("run", "--batch", "in.jsonl", "-o", "out.jsonl", *words).status == 0
    first, second = (params for _, params in fake_llm.asked["flow"])
    assert (first.temperature, first.seed, first.max_tokens) == (0.1, 4, 5)
    assert second.seed not in (None, 4, 7) and second.max_tokens == 5
    record = read("out.jsonl")[0]["response"]["body"]["deepinfer"]["temperature"]
    assert record == {"value": 0.1, "source": "flag", "protocol": 0.9}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_a_clear_error(cli, requests):
    done = cli("run", "--batch", requests, "-o", "/dev/full")
    assert done.status == 2 and "No space left on device" in done.err


def test_progress_is_for_terminals(terminal, requests, tmp_path):
    done = terminal("run", "--batch", requests, "-o", tmp_path / "out.jsonl", FAKE_DELAY="0.2")
    assert done.status == 0 and "answers" in done.out and "12/12" in done.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_killed_and_resumed(cli, fake_script, environment, requests, tmp_path, number):
    assert cli("run", "--batch", requests, "-o", "whole.jsonl").status == 0
    words = [sys.executable, fake_script, "run", "--batch", requests, "-o", "out.jsonl"]
    env, draw = environment(FAKE_DELAY="0.1"), random.Random(int(number))
    process = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out.jsonl.meta.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5 + draw.random())
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    status = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert process.returncode == status, err
    if number != signal.SIGKILL:
        assert "--resume goes on" in err
        assert all(row["custom_id"] for row in read("out.jsonl"))
    done = cli("run", "--batch", requests, "-o", "out.jsonl", "--resume")
    assert done.status == 0 and answers("out.jsonl") == answers("whole.jsonl")
