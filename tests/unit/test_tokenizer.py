"""Text to ids and back (hard inputs DI-39, DI-41), and where the text of an answer ends."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest

tokenizers = pytest.importorskip("tokenizers")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from deepinfer.errors import CheckpointError, UsageError  # noqa: E402
from deepinfer.tokenizer.tokenizer import StopText, Tokenizer, _byte_alphabet  # noqa: E402

BOS, EOS, THINK = 300, 301, 302


def spec(**changes) -> dict:
    """Bytes 0-255 in order, one merge (256 = "th"), special tokens from 300 on."""
    vocab = {character: byte for character, byte in _byte_alphabet().items()} | {"th": 256}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [(BOS, "<｜begin｜>", True), (EOS, "<｜end｜>", True), (THINK, "<think>", False)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    document = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, "special": special, **flags} for i, text, special in added
        ],
        "truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0,
                       "direction": "Right"},
        "pre_tokenizer": {**level, "use_regex": True},
        "decoder": {**level, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["t", "h"]]},
    }  # fmt: skip
    return document | changes


@functools.cache
def made() -> Tokenizer:
    """One for the property tests, which cannot take fixtures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(json.dumps(spec()), encoding="utf-8")
        return Tokenizer(path, BOS)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(spec()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(path):
    return Tokenizer(path, BOS)


def test_text_gets_exactly_one_bos(tokenizer):
    """DI-41: raw text, with and without the literal; nothing is cut by the file's truncation."""
    assert tokenizer.encode("the abcdef") == [BOS, 256, *b"e abcdef"]
    assert tokenizer.encode("") == [BOS]
    for text in ("<｜begin｜>hi", "a<｜begin｜>b", "<think>x<｜end｜>"):
        ids = tokenizer.encode(text)
        assert ids.count(BOS) == 1 and ids[0] == BOS
        assert not {EOS, THINK} & set(ids), "literals stay ordinary text"
        assert tokenizer.decode(ids) == text


def test_no_bos_where_the_model_has_none(path):
    assert Tokenizer(path, None).encode("ab") == [*b"ab"]


def test_special_tokens_are_silent_and_added_ones_speak(tokenizer):
    assert tokenizer.decode([BOS, *b"a", THINK, *b"b", EOS, 9999]) == "a<think>b"


def pieces(tokenizer, ids):
    stream = tokenizer.stream()
    return [stream.push(token) for token in ids], stream.finish()


def test_characters_split_over_tokens(tokenizer):
    """DI-39."""
    parts, tail = pieces(tokenizer, "中🚀é".encode())
    assert "".join(parts) == "中🚀é" and tail == ""
    assert [part for part in parts if part] == ["中", "🚀", "é"]
    parts, tail = pieces(tokenizer, "中🚀".encode()[:5])
    assert "".join(parts) == "中" and tail == "\ufffd", "the cut tail shows once, at the end"
    parts, tail = pieces(tokenizer, [0xFF, *b"ok"])
    assert parts == ["\ufffd", "o", "k"] and tail == ""
    parts, tail = pieces(tokenizer, [0xC3, *b" a"])
    assert "".join(parts) == "\ufffd a" and tail == "", "the blank does not swallow the byte"


@given(st.lists(st.integers(0, 256), max_size=24))
def test_deltas_join_to_the_library_s_decode(ids):
    library = tokenizers.Tokenizer.from_str(json.dumps(spec(), ensure_ascii=False))
    ours = made()
    parts, tail = pieces(ours, ids)
    assert "".join(parts) + tail == ours.decode(ids) == library.decode(ids)


@given(st.text(max_size=30))
def test_text_survives(text):
    ours = made()
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert ours.decode(ours.encode(text)) == text


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(UsageError) as caught:
        tokenizer.encode("a\ud83d")
    assert caught.value.code == "prompt-not-text"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("not json", "tokenizer-unreadable"),
        ("{}", "tokenizer-unreadable"),
        (json.dumps(spec(model={"type": "Nonsense"})), "tokenizer-unreadable"),
        (json.dumps(spec(added_tokens=[{"id": 300}])), "tokenizer-unreadable"),
        (
            json.dumps(spec(model={"type": "Unigram", "vocab": [["a", 0.0]]})),
            "tokenizer-unreadable",
        ),
        (json.dumps(spec(decoder=None)), "tokenizer-unsupported"),
    ],  # fmt: skip
)
def test_bad_files_are_named(tmp_path, content, code):
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match="tokenizer.json") as caught:
        Tokenizer(path, BOS)
    assert caught.value.code == code


def test_ids_that_the_model_does_not_have_are_refused(path):
    assert Tokenizer(path, BOS, THINK + 1).encode("a") == [BOS, *b"a"]
    for vocab_size in (THINK, 256, 1):
        with pytest.raises(CheckpointError, match="does not fit the model") as caught:
            Tokenizer(path, BOS, vocab_size)
        assert caught.value.code == "tokenizer-unsupported"
        assert f"reach to {THINK}, the model's to {vocab_size - 1}" in caught.value.facts[0]


def answer(tokenizer, stop, text, cut=None):
    """Deltas of `text`, given byte by byte, until it stops."""
    out, source = [], StopText(tokenizer, stop)
    for token in text.encode()[:cut]:
        out.append(source.push(token))
        if source.stopped:
            break
    return out, source.finish(), source.stopped


def test_stop_strings_cut_the_text(tokenizer):
    out, tail, stopped = answer(tokenizer, ("##",), "ab##cd")
    assert ("".join(out), tail, stopped) == ("ab", "", True)
    out, tail, stopped = answer(tokenizer, ("##",), "a#b#")
    assert out == ["a", "", "#b", ""] and tail == "#" and not stopped, "held back, then released"
    out, tail, _ = answer(tokenizer, ("<a>", "<ab>"), "x<a")
    assert out == ["x", "", ""] and tail == "<a"
    out, tail, stopped = answer(tokenizer, ("é",), "aéb")
    assert "".join(out) + tail == "a" and stopped


def test_the_earliest_stop_string_wins(tokenizer):
    source = StopText(tokenizer, ("cd", "bcd"))
    assert source.push(256) == "th"
    assert [source.push(token) for token in b"abc"] == ["a", "", ""]
    assert source.push(b"d"[0]) == "" and source.stopped


def test_stop_strings_can_be_ignored_for_a_while(tokenizer):
    source = StopText(tokenizer, ("##",))
    text = "".join(source.push(token, may_stop=False) for token in b"a##")
    text += source.push(b"#"[0])
    assert source.stopped and text == "a#"


@given(st.text("ab#", max_size=20), st.lists(st.text("ab#", min_size=1, max_size=3), max_size=3))
def test_streamed_text_is_the_text_before_the_first_stop(text, stop):
    ours = made()
    out, tail, stopped = answer(ours, tuple(stop), text)
    ends = [text.find(s) + len(s) for s in stop if s in text]
    assert stopped == bool(ends)
    if ends:  # one byte per token: the stop completed first, and of these the longest
        first = min(ends)
        start = min(first - len(s) for s in stop if text[:first].endswith(s))
        assert "".join(out) + tail == text[:start]
    else:
        assert "".join(out) + tail == text


def test_without_a_tokenizer_there_is_no_text():
    source = StopText(None, ())
    assert source.push(5) == "" and source.finish() == ""
