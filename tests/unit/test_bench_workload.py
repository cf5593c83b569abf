"""Prompts of every kind have the length that was asked for and are always the same."""

import json

import pytest

from deepinfer.bench.axes import KINDS
from deepinfer.bench.workload import ANSWER, TURNS, Prompts, digest
from deepinfer.engine.assembly import embedded_model
from deepinfer.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def prompts():
    folder = embedded_model()
    config = json.loads((folder / "config.json").read_text())["text_config"]
    return Prompts(Tokenizer(folder / "tokenizer.json", 0), 0, config["vocab_size"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 7, 256, 3000])
def test_every_kind_has_its_length(prompts, kind, length):
    made = prompts.make(kind, length, 3)
    assert [len(ids) for ids in made] == [length] * 3
    assert all(ids[0] == 0 and 0 not in ids[1:] for ids in made)
    assert made == prompts.make(kind, length, 3)
    if length > 100:
        assert len(set(made)) == 3
        assert digest(made) != digest(prompts.make(kind, length, 2))


def test_a_question_stands_at_the_end(prompts):
    for kind in ("arithmetic", "retrieval", "chat", "agent"):
        [ids] = prompts.make(kind, 512, 1)
        assert ids[-2] == 4 and ids[-1] in (6, 7), kind  # the assistant's header


def test_sessions_grow_to_the_prompt(prompts):
    for cached in (0, 5, 64, 384, 512):
        [session] = prompts.sessions(512, cached, 1)
        known = sum(len(said) + ANSWER for said in session.said)
        assert known == (cached if cached >= 16 else 0)
        assert known + len(session.last) == 512
        [whole] = prompts.make("agent", 512, 1)
        assert session.last == whole[known:]
        assert len(session.said) <= TURNS


def test_noise_where_there_is_no_tokenizer():
    [ids] = Prompts(None, 3, 50).make("code", 40, 1)
    assert len(ids) == 40 and ids[0] == 3
    assert all(11 <= token < 50 for token in ids[1:])


def test_given_texts_are_cut_in_front(prompts):
    whole = prompts.given(["def f(x):\n    return x"], None, 2)
    assert whole[0] == whole[1]
    [cut] = prompts.given(["def f(x):\n    return x"], 4, 1)
    assert cut == (0, *whole[0][-3:])
