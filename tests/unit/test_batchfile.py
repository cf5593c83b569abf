"""Files of requests and answers: every line checked, every line whole, nothing twice."""

import errno
import json
import os

import pytest

from deepinfer.core.request import Problem
from deepinfer.errors import CapacityError, InternalError, UsageError
from deepinfer.protocol import batchfile
from deepinfer.protocol.batchfile import Input, Line, Results

CHAT = "/v1/chat/completions"


def row(name, url=CHAT, **body):
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path, rows):
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows)
    path.write_text(text)
    return Input(path)


def scan(path, rows, check=lambda line: None):
    source = write(path, rows)
    return source, source.scan(check)


BAD = [
    ("{", "not JSON (column 2"), ("5", "not a JSON object"), ('{"a": NaN}', "not JSON"),
    ("[" * 100_000, "not JSON"), ({"url": CHAT, "body": {}}, "custom_id"),
    ({**row("a"), "custom_id": 5}, "custom_id"), ({**row("a"), "custom_id": ""}, "custom_id"),
    (row("a", url="/v1/embeddings"), 'url "/v1/embeddings" is not supported'),
    (row("a", url=5), "url 5"), ({**row("a"), "method": "GET"}, 'method "GET"'),
    ({"custom_id": "a", "body": {}}, "no url"), ({**row("a"), "body": 5}, "no JSON object"),
    ({**row("a"), "params": {}}, "body"), ({"custom_id": "a", "url": CHAT, "params": {}}, "body"),
    ({**row("a"), "extra": 1}, "'extra' is no field"), (row("a", stream=True), "stream"),
    ('{"custom_id": "\\ud800", "url": "/v1/messages", "body": {}}', "surrogate"),
]  # fmt: skip


@pytest.mark.parametrize("bad, why", BAD, ids=[why for _, why in BAD])
def test_a_bad_line_is_named_with_its_number(tmp_path, bad, why):
    _, found = scan(tmp_path / "in", [row("x"), "", bad, row("y")])
    assert (found.count, found.bad_count, len(found.numbers)) == (3, 1, 2)
    assert found.bad[0].startswith("line 3: ") and why in found.bad[0]


def test_what_is_no_utf8(tmp_path):
    (tmp_path / "in").write_bytes(b'{"custom_id": "\xff"}\n')
    assert "not UTF-8 (byte 15)" in Input(tmp_path / "in").scan(print).bad[0]


def test_kinds_of_lines(tmp_path):
    source, found = scan(tmp_path / "in", [
        row("a"), row("b", "/v1/completions"), row("c", "/v1/responses"),
        {"custom_id": "d", "params": {"m": 1}}, row("e", "/v1/messages"),
        {"custom_id": "f", "url": "/v1/messages", "params": {}},
    ])  # fmt: skip
    lines = list(source.wanted(found, Results("-").done))
    kinds = ["chat", "completions", "responses", "messages", "messages", "messages"]
    assert [line.kind for line in lines] == kinds and not found.bad
    assert lines[3] == Line(4, "d", "messages", {"m": 1})


def test_a_byte_order_mark_and_a_last_line_without_end(tmp_path):
    text = json.dumps(row("a")) + "\r\n" + json.dumps(row("b"))
    (tmp_path / "in").write_text("\ufeff" + text)
    assert len(Input(tmp_path / "in").scan(lambda line: None).numbers) == 2


def test_a_name_that_is_taken_names_the_line_that_has_it(tmp_path):
    source, found = scan(tmp_path / "in", [row("a"), row("b"), "{", row("a"), row("a")])
    assert found.bad_count == 3 and 'custom_id "a" already used on line 1' in found.bad[1]
    assert [line.number for line in source.wanted(found, Results("-").done)] == [1, 2]


def test_ten_bad_lines_are_shown_and_the_others_counted(tmp_path):
    _, found = scan(tmp_path / "in", [row("x"), *["{"] * 25])
    problem = found.refusal("in.jsonl")
    assert problem.code == "batch-invalid" and problem.exit_status == 2
    assert problem.message == "in.jsonl has 25 bad lines of 26"
    assert len(problem.facts) == 11 and problem.facts[-1] == "and 15 more"


def test_what_the_request_says_is_checked_too(tmp_path):
    def check(line):
        raise UsageError("x", "top_k is bad", ["accepted: 1"])

    _, found = scan(tmp_path / "in", [row("a")], check)
    assert found.bad == ["line 1: top_k is bad (accepted: 1)"]


def test_finished_names_are_left_out(tmp_path):
    source, found = scan(tmp_path / "in", [row(str(n)) for n in range(9)])
    results = Results(str(tmp_path / "out"))
    results.open()
    results.begin({})
    for name in ("3", "5", "unknown"):
        results.append({"custom_id": name})
    left = [line.custom_id for line in source.wanted(found, results.done)]
    assert left == ["0", "1", "2", "4", "6", "7", "8"]


@pytest.mark.parametrize("change", ["shorter", "other", "damaged"])
def test_a_file_that_changes_while_it_runs(tmp_path, change):
    place = tmp_path / "in"
    source, found = scan(place, [row("a"), row("b"), row("c")])
    lines = place.read_text().splitlines(keepends=True)
    new = {"shorter": lines[:1], "other": [*lines[:1], lines[2], lines[1]],
           "damaged": [*lines[:1], "{" * len(lines[1]), lines[2]]}  # fmt: skip
    place.write_text("".join(new[change]))
    with pytest.raises(UsageError, match="was changed"):
        list(source.wanted(found, Results("-").done))


@pytest.mark.parametrize("make", [lambda p: None, os.mkdir, os.mkfifo])
def test_what_cannot_be_read_twice(tmp_path, make):
    place = tmp_path / "in"
    make(place)
    if make is os.mkfifo:
        writer = os.open(place, os.O_RDWR)
    with pytest.raises(UsageError, match="cannot be read"):
        Input(place)
    if make is os.mkfifo:
        os.close(writer)


def test_seeds_and_ids_follow_from_the_name_alone():
    first, other = (Line(n, "a", "chat", {}) for n in (1, 99))
    assert batchfile.identity(first) == batchfile.identity(other)
    assert batchfile.seed("a") == batchfile.seed("a") != batchfile.seed("b")
    assert batchfile.seed("a", 7) != batchfile.seed("a") and batchfile.seed("a", 7) < 2**53
    prefixes = {batchfile.identity(Line(1, "a", kind, {})).split("_")[0].split("-")[0]
                for kind in ("chat", "responses", "messages", "completions")}  # fmt: skip
    assert prefixes == {"chatcmpl", "resp", "msg", "cmpl"}


# the shapes of the vendors' batches


def test_lines_parse_into_the_clients_types():
    from anthropic.types.messages import MessageBatchIndividualResponse

    line = Line(1, "a", "messages", {})
    for problem in (UsageError("c", "m", ["f"]), Problem.of(InternalError("c", "m"))):
        parsed = MessageBatchIndividualResponse.model_validate(batchfile.failed(line, problem))
        assert parsed.custom_id == "a" and parsed.result.type == "errored"
    made = {"id": "msg", "type": "message", "role": "assistant", "model": "m", "content": [],
            "stop_reason": "end_turn", "stop_sequence": None,
            "usage": {"input_tokens": 1, "output_tokens": 1}}  # fmt: skip
    parsed = MessageBatchIndividualResponse.model_validate(batchfile.succeeded(line, made))
    assert parsed.result.message.id == "msg"


def test_lines_of_openai():
    line = Line(1, "a", "chat", {})
    made = batchfile.succeeded(line, {"x": 1})
    assert set(made) == {"id", "custom_id", "response", "error"} and made["error"] is None
    assert made["response"]["status_code"] == 200 and made["response"]["body"] == {"x": 1}
    for problem, status in ((CapacityError("long", "m"), 400), (InternalError("bug", "m"), 500)):
        made = batchfile.failed(line, problem)
        assert made["error"] == {"code": problem.code, "message": "m"}
        assert made["response"]["status_code"] == status
        assert made["response"]["body"]["error"]["code"] == problem.code


# the file of answers


def results(place, **lines):
    made = Results(str(place))
    made.open()
    made.begin({"model": "m"})
    for name, error in lines.items():
        made.append({"custom_id": name, "error": error})
    return made


def test_one_write_a_line(tmp_path, monkeypatch):
    made, seen, real = results(tmp_path / "out"), [], os.write

    def write(fd, data):
        seen.append(bytes(data))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    made.append({"custom_id": "a", "text": "北京\n"})
    assert len(seen) == 1 and seen[0].endswith(b"}\n") and seen[0].count(b"\n") == 1


def test_what_was_there_is_read_again(tmp_path):
    place = tmp_path / "out"
    results(place, a=None, b={"code": "x"}).close()
    again = Results(str(place))
    assert again.open() == 2 and again.meta() == {"model": "m"}
    again.go_on(pytest.fail)
    assert (len(again.done), again.errors) == (2, 1)


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_half_line_is_dropped(tmp_path, cut):
    place = tmp_path / "out"
    results(place, a=None, b=None).close()
    whole = place.read_bytes()
    place.write_bytes(whole[:-cut])
    said, again = [], Results(str(place))
    assert again.open() == 1
    again.go_on(said.append)
    assert "half-written" in said[0] and len(again.done) == 1
    again.append({"custom_id": "b", "error": None})
    assert place.read_bytes() == whole


def test_damaged_lines_are_thrown_out(tmp_path):
    place = tmp_path / "out"
    results(place, a=None, b=None).close()
    good = place.read_text()
    place.write_text("{\n" + good + '{"custom_id": 5}\n\x00\x00\n')
    said, again = [], Results(str(place))
    again.open()
    again.go_on(said.append)
    assert "3 damaged lines" in said[0] and place.read_text() == good
    again.append({"custom_id": "c", "error": None})
    assert place.read_text().startswith(good) and len(place.read_text().splitlines()) == 3


def test_two_runs_cannot_write_one_file(tmp_path):
    first = results(tmp_path / "out", a=None)
    with pytest.raises(UsageError, match="another run is writing"):
        Results(str(tmp_path / "out")).open()
    first.close()
    assert Results(str(tmp_path / "out")).open() == 1


@pytest.mark.parametrize("most", [0, 1, 30])
def test_a_full_disk_takes_back_what_did_not_fit(tmp_path, monkeypatch, most):
    place = tmp_path / "out"
    made = results(place, a=None, b=None)
    whole, real = place.read_bytes(), os.write

    def full(fd, data):
        if most and not full.called:
            full.called = True
            return real(fd, data[:most])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    full.called = False
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(UsageError, match="cannot be written") as caught:
        made.append({"custom_id": "c", "error": None, "text": "x" * 100})
    assert "No space left" in caught.value.facts[0] and "2 results" in caught.value.facts[1]
    assert place.read_bytes() == whole


def test_places_that_cannot_be_written(tmp_path):
    for name in (tmp_path / "no" / "out", tmp_path):
        with pytest.raises(UsageError, match="cannot be written"):
            Results(str(name)).open()
    with pytest.raises(UsageError, match="cannot be written"):
        Results(str(tmp_path / "no" / "out")).check()
    Results(str(tmp_path / "out")).check()
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot be written"):
        Results(str(tmp_path / "out")).open()


def test_half_of_a_surrogate_pair_is_written_as_its_escape(tmp_path):
    place = tmp_path / "out"
    made = results(place)
    made.append({"custom_id": "a", "error": None, "model": "\ud800"})
    assert json.loads(place.read_bytes())["model"] == "\ud800"
