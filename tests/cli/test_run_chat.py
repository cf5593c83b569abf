"""`deepinfer run` with a conversation: what is asked, where thinking goes, what is refused."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

MARK = "｜DSML｜"


@pytest.fixture
def says(fake_llm, monkeypatch):
    """`says(ids)`: the scripted model answers with these token ids."""
    from tests.unit.exchanges import ids

    def set_answer(text):
        monkeypatch.setattr(fake_llm, "said", True)
        monkeypatch.setattr(fake_llm, "pieces", [])
        real = fake_llm.open_call

        def open_call(self, prompts, params, follow):
            call = real(self, prompts, params, follow)
            call.ids = [*ids(text), 1]
            call.cut = False
            return call

        monkeypatch.setattr(fake_llm, "open_call", open_call)

    return set_answer


def asked(fake_llm):
    """The prompt's text and the parameters of the only request."""
    from tests.unit.exchanges import tokenizer

    [([ids], params)] = fake_llm.asked["flow"]
    return "".join(tokenizer()._added.get(t) or tokenizer().decode([t]) for t in ids), params


def chat(tmp_path, *messages, **more):
    place = tmp_path / "chat.json"
    rows = list(messages) or [{"role": "user", "content": "Hi"}]
    place.write_text(json.dumps({"messages": rows, **more} if more else rows))
    return place


def test_a_file_of_messages(cli, fake_llm, says, tmp_path):
    says("Hello")
    done = cli("run", "--messages", chat(tmp_path), "-q")
    assert (done.status, done.out) == (0, "Hello")
    text, params = asked(fake_llm)
    assert text == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"
    assert params.max_tokens == 256
    assert cli("run", "--messages", chat(tmp_path, max_tokens=9, stream=True)).status == 0
    assert fake_llm.asked["flow"][0][1].max_tokens == 9


@pytest.mark.parametrize("words, text", [
    (("Hi", "--chat"), "<｜User｜>Hi<｜Assistant｜></think>"),
    (("-p", "Hi", "--system", "S"), "<｜System｜>S<｜User｜>Hi<｜Assistant｜></think>"),
    (("Hi", "--thinking", "off"), "<｜User｜>Hi<｜Assistant｜></think>"),
    (("Hi", "--thinking", "on"), "Effort: 75 (range 1-100, the higher the value, the more thorough "
     "the reasoning)\n\n<｜User｜>Hi<｜Assistant｜><think>"),
    (("Hi", "--thinking", "max"), "Effort: 100 (range 1-100, the higher the value, the more "
     "thorough the reasoning)\n\n<｜User｜>Hi<｜Assistant｜><think>"),
])  # fmt: skip
def test_a_prompt_in_the_chat_format(cli, fake_llm, says, words, text):
    says("x")
    assert cli("run", *words).status == 0
    assert asked(fake_llm)[0].endswith(text)


def test_a_text_prompt_stays_a_text(cli, fake_llm):
    assert cli("run", "Hi").status == 0
    assert fake_llm.asked["prompt"] == "Hi"


def test_thinking_goes_to_stderr(cli, says):
    says("I should</think>ok")
    done = cli("run", "Hi", "--thinking", "on")
    assert (done.status, done.out) == (0, "ok") and "I should\n" in done.err
    done = cli("run", "Hi", "--thinking", "on", "--hide-thinking")
    assert (done.out, "I should" in done.err) == ("ok", False)
    assert "I should" not in cli("run", "Hi", "--thinking", "on", "-q").err


def test_thinking_is_dim_on_a_terminal(terminal):
    done = terminal("run", "Hi", "--thinking", "on", "-n", "3")
    assert "\x1b[2m" in done.out


def test_json_has_thinking_calls_and_both_temperatures(cli, says, valid, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"name": "f", "parameters": {"type": "object"}}]))
    block = (f"\n\n<{MARK} calls>\n<{MARK} invoke name=\"f\">\n"
             f"</{MARK} invoke>\n</{MARK} calls>")  # fmt: skip
    says(f"think</think>text{block}")
    words = ("run", "Hi", "--thinking", "on", "--tools", tools, "-t", "0.2")
    done = cli(*words, "--json")
    document = valid("run", json.loads(done.out))
    assert (document["thinking"], document["text"]) == ("think", "text")
    [call] = document["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "{}"}
    wanted = {"value": 0.2, "source": "flag", "protocol": 1.0}
    assert document["sampling"]["temperature"] == wanted
    assert document["usage"]["reasoning_tokens"] == 2
    done = cli(*words)
    assert done.out == 'text\n{"name": "f", "arguments": "{}"}\n'


def test_without_the_conversion_library(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    done = cli("run", "Hi", "--chat")
    assert done.status == 3 and "deepseek_recipe is not installed" in done.err
    assert cli("run", "Hi").status == 0


def test_stop_strings_end_the_answer(cli, says):
    says("a STOP b</think>c STOP d")
    assert cli("run", "Hi", "--thinking", "on", "--stop", "STOP").out == "c "


def test_dry_run_counts_the_prompt_of_the_chat(cli):
    done = cli("run", "Hi", "--chat", "--dry-run", "--json")
    assert json.loads(done.out)["plan"]["prompt_tokens"] == 6


@pytest.mark.parametrize("words, code", [
    (("Hi", "--messages", "FILE"), "prompt-source"),
    (("-p", "Hi", "--messages", "FILE"), "prompt-source"),
    (("--messages", "nowhere"), "prompt-file"),
    (("Hi", "--thinking", "loud"), "bad-option"),
    (("Hi", "--tools", "nowhere"), "tools-file"),
    (("Hi", "--tools", "BAD"), "tools-invalid"),
    (("--messages", "BAD"), "messages-invalid"),
    (("--messages", "NUMBER"), "messages-invalid"),
    (("--messages", "EMPTY"), "request-invalid"),
    (("--messages", "SYSTEM", "--system", "S"), "system-twice"),
    (("--messages", "TOOLS", "--tools", "FILE"), "tools-twice"),
    (("--messages", "IMAGE"), "request-unsupported"),
    (("Hi", "-o", "x"), "bad-usage"), (("Hi", "--resume"), "bad-usage"),
    (("Hi", "--fail-fast"), "bad-usage"),
])  # fmt: skip
def test_what_is_refused(cli, fake_llm, tmp_path, words, code):
    user = {"role": "user", "content": "Hi"}
    image = {"type": "image_url", "image_url": {"url": "x"}}
    texts = {
        "FILE": json.dumps([user]), "BAD": "{", "NUMBER": "5", "EMPTY": "[]",
        "SYSTEM": json.dumps([{"role": "system", "content": "S"}, user]),
        "TOOLS": json.dumps({"messages": [user], "tools": [{"type": "function"}]}),
        "IMAGE": json.dumps([{"role": "user", "content": [image]}]),
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    done = cli("run", *words, "--json")
    assert (done.status, json.loads(done.out)["error"]["code"]) == (2, code)
    assert "settings" not in fake_llm.asked or fake_llm.asked.get("flow") is None


def test_ctrl_c_during_a_chat(fake_script, environment):
    process = subprocess.Popen(
        [sys.executable, fake_script, "run", "Hi", "--thinking", "on", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        env=environment(FAKE_DELAY="0.5"), text=True,
    )  # fmt: skip
    time.sleep(4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert json.loads(out)["error"]["code"] == "interrupted"
    assert os.path.exists(fake_script)
