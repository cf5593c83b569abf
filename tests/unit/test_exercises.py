"""The training exercises: right answers, official chat format, evaluation apart from training.

A small tokenizer and this folder's own sources stand in for the prepared corpus, so the tests
need no download. They know the data side of the recipe only, never the model.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from deepinfer.tokenizer.token_map import compute_token_map
from examples.train_tiny import arithmetic, corpus, exercises, streams, tokenizer
from examples.train_tiny.chat import ANSWER, Assistant, Result, User, render
from examples.train_tiny.tokenizer import ASSISTANT, BOS, EOS, SPECIALS, THINK, THINK_END

DOCS = [
    ("json.dumps", "Serialize obj to a JSON string."),
    ("os.path.join", "Join two or more pathname components, inserting '/' as needed."),
    ("heapq.merge", "Merge multiple sorted inputs into a single sorted output — lazily."),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A work folder with a 900-entry tokenizer and three small streams."""
    folder = tmp_path_factory.mktemp("work")
    sources = [p.read_text() for p in sorted(Path(exercises.__file__).parent.glob("*.py"))]
    texts = exercises.tokenizer_texts(random.Random(0), DOCS, 300)
    tokenizer.save(tokenizer.train_bpe(sources + texts, 900), folder / "tokenizer.json")
    (folder / "docs.json").write_text(json.dumps(DOCS))
    vocabulary = tokenizer.Vocabulary(folder / "tokenizer.json")
    for name, repeat in (("library", 6), ("packages", 6), ("heldout", 3)):
        streams.write_stream(folder / f"{name}.bin", vocabulary, sources * repeat)
    return folder


@pytest.fixture(scope="module")
def material(work):
    return streams.training_material(work)


def shorts(n=40, held=False):
    rng = random.Random(7)
    for _ in range(n):
        yield exercises.arithmetic_short(rng, held)
        yield exercises.copying_short(rng, held)
        yield exercises.sorting_short(rng, held)
        yield exercises.tools_short(rng, held)
        yield exercises.short_table(rng)


def text_of(vocabulary, segments):
    return vocabulary.decode(exercises.encode_segments(vocabulary, segments)[0])


def test_arithmetic_steps_end_in_the_right_answer():
    rng = random.Random(0)
    for _ in range(3000):
        op = rng.choice(arithmetic.OPERATORS)
        a, b = arithmetic.draw(rng, op)
        text, answer = arithmetic.steps(op, a, b)
        assert int(answer) == {"+": a + b, "-": a - b, "*": a * b}[op]
        assert text.endswith(f": {answer}\n")


def test_subtraction_steps_compare_from_the_top_and_drop_zeros():
    text, answer = arithmetic.steps("-", 523, 527)
    assert answer == "-4"
    assert text.split("\n")[1] == "top 5=5 2=2 3<7 swap"
    assert text.split("\n")[-4:-1] == ["drop 0: 04", "drop 0: 4", "swap: -4"]


def test_piece_cache_encodes_as_the_tokenizer_does(material):
    vocabulary = material.vocabulary
    rng = random.Random(3)
    texts = exercises.tokenizer_texts(rng, DOCS, 200)
    alphabet = "ab Z09_.,:()[]#'\"\n\n\t\r  =+-"
    texts += ["".join(rng.choices(alphabet, k=60)) for _ in range(300)]
    for text in texts:
        want = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        assert vocabulary.encode(text) == want
        assert vocabulary.decode(want) == text


def test_special_strings_in_text_are_not_control_tokens(material):
    ids = material.vocabulary.encode("a <think> b</think>" + SPECIALS[1])
    assert min(ids) >= len(SPECIALS)
    assert material.vocabulary.decode(ids) == "a <think> b</think>" + SPECIALS[1]


def test_code_windows_and_needles_keep_the_tokenization(material):
    rng = random.Random(5)
    for _ in range(50):
        code = material.code(rng, 200)
        facts = [("red apple", "12345")]
        ids = list(exercises._needles(rng, material, code, facts))
        assert len(code) <= 200 and BOS not in ids and EOS not in ids
        assert "\n# red apple = 12345" in (text := material.vocabulary.decode(ids))
        if "\ufffd" not in text:
            assert material.vocabulary.encode(text) == ids


@pytest.mark.parametrize("make", exercises.ROWS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("length", [257, 1025])
def test_rows_fill_their_length_and_weigh_answers(material, make, length):
    rng = random.Random(11)
    for _ in range(3):
        ids, codes = exercises.encode_segments(material.vocabulary, make(rng, material, length))
        assert len(ids) == len(codes) >= length
        assert ids[0] == BOS and 0.005 < codes.count(ANSWER) / len(codes) < 0.95
        for i, token in enumerate(ids):
            if token == EOS:  # every turn end is the assistant's, and learned where derivable
                assert ASSISTANT in ids[:i]


def test_answers_in_conversation_rows_are_the_remembered_values(material):
    text = text_of(
        material.vocabulary, exercises.conversation_row(random.Random(2), material, 2048)
    )
    known, asked = {}, 0
    for turn in text.split(SPECIALS[3])[1:]:
        user, reply = turn.split(SPECIALS[4] + "</think>")
        reply = reply.removesuffix(SPECIALS[1])
        if user.startswith("Remember: "):
            key, val = user.removeprefix("Remember: ").split(" = ")
            known[key] = val
        elif reply.isdigit():
            asked += 1
            assert [v for k, v in known.items() if k in user] == [reply]
    assert asked > 10


@pytest.mark.parametrize("layout", ["needle", "table", "conversation"])
@pytest.mark.parametrize("distance", [256, 700])
def test_retrieval_questions_have_one_fact_at_the_distance(work, layout, distance):
    material = streams.heldout_material(work)
    vocabulary = material.vocabulary
    questions = exercises.retrieval_eval(material, distance, layout, 8)
    assert questions == exercises.retrieval_eval(material, distance, layout, 8)
    for q in questions:
        assert distance - 20 <= q.distance <= distance and len(q.prompt) <= distance + 160
        val = vocabulary.decode(q.answer[:-1])
        fact_end = len(q.prompt) - q.distance
        assert vocabulary.decode(q.prompt[:fact_end]).endswith(val)
        assert vocabulary.decode(q.prompt).count(val) == 1
        assert q.prompt[-2:] == [ASSISTANT, THINK_END] and q.answer[-1] == EOS


def test_evaluation_questions_are_reserved_and_reproducible(work):
    vocabulary = streams.load_vocabulary(work)
    for op in arithmetic.OPERATORS:
        questions = exercises.arithmetic_eval(vocabulary, op, 50)
        assert questions == exercises.arithmetic_eval(vocabulary, op, 50)
        assert len({tuple(q.prompt) for q in questions}) == 50
        for q in questions:
            assert q.prompt[-2:] == [ASSISTANT, THINK]
            assert q.target[-len(q.answer) - 1 :] == [THINK_END, *q.answer]
    rng = random.Random(0)
    for op in arithmetic.OPERATORS:
        for _ in range(500):
            a, b = arithmetic.problem(rng, op, held=False)
            assert not arithmetic.reserved(f"{a}{op}{b}")
    for make in (exercises.copying_eval, exercises.sorting_eval, exercises.tools_eval):
        for q in make(vocabulary, 10):
            assert q.target[-len(q.answer) :] == q.answer and q.answer[-1] == EOS


def test_batches_depend_on_the_step_only(work):
    expected = None
    for workers in (1, 3):
        with streams.Batches(256, 2, seed=4, workers=workers, work=work) as batches:
            got = [next(batches) for _ in range(4)]
        for tokens, weights in got:
            assert tokens.shape == weights.shape == (2, 257)
            assert tokens.dtype == np.int32 and weights.dtype == np.float32
            assert set(np.unique(weights)) <= {np.float32(0.1), np.float32(1.0)}
        if expected is not None:
            for one, other in zip(expected, got, strict=True):
                np.testing.assert_array_equal(one[0], other[0])
                np.testing.assert_array_equal(one[1], other[1])
        expected = got
    with streams.Batches(256, 2, seed=4, workers=2, work=work, first_step=3) as batches:
        np.testing.assert_array_equal(next(batches)[0], expected[3][0])


def test_packed_streams_come_back_and_windows_count_their_bytes(work):
    before = streams.load_streams(work)
    copies = {n: np.array(getattr(before, n)) for n in streams.STREAMS}
    streams.pack(work, part_tokens=len(copies["library"]) // 2 + 1)
    for name in streams.STREAMS:
        (work / f"{name}.bin").unlink()
    after = streams.load_streams(work)
    for name in streams.STREAMS:
        np.testing.assert_array_equal(getattr(after, name), copies[name])
    ids, size = streams.heldout_windows(128, 5, work)
    assert ids.shape == (5, 129)
    vocabulary = streams.load_vocabulary(work)
    for row, n in zip(ids, size, strict=True):
        assert sum(len(vocabulary.token_bytes[i]) for i in row[1:]) == n


def test_token_map_folds_case_accents_and_space(work):
    text = (work / "tokenizer.json").read_text()
    classes, n = compute_token_map(text)
    vocabulary = streams.load_vocabulary(work)
    assert len(classes) == 900 and max(classes) + 1 == n < 900
    assert classes[: len(SPECIALS)] == list(range(len(SPECIALS)))
    first = {}
    for token, number in zip(vocabulary.token_bytes, classes, strict=True):
        first.setdefault(token, number)
    assert first[b"a"] == first[b"A"] and first[b" "] == first[b"\t"] != first[b"a"]
    assert first[b"\xc3"] != first[b"\xc2"]  # half characters stay apart
    with pytest.raises(ValueError):
        compute_token_map("{}")


def test_corpus_filters_drop_tables_and_copies_of_held_out_files():
    line = "    value = compute_something_interesting(argument, other)\n"
    held = [corpus.SourceFile("argparse.py", line * 3 + "def held_out_function(with_argument):\n")]
    other = corpus.SourceFile("a.py", "".join(f"{line.strip()}  # number {i}\n" for i in range(9)))
    copy = corpus.SourceFile("b.py", line * 10)
    kept = list(corpus.remove_leaks([other, copy, other], held, set()))
    assert kept == [other]
    assert corpus.acceptable("a.py", line * 10)
    assert not corpus.acceptable("a.py", "x" * 900 + "\n" + line * 50)
    assert not corpus.acceptable("a.py", "1234567890, 0\n" * 50)
    assert not corpus.acceptable("cp1252.py", line * 10)


# --- against the official library -----------------------------------------------------------


def _official(messages, effort, tools, system):
    """The library's prompt for our messages (all but a final answer), or skip."""
    recipe = pytest.importorskip("deepseek_recipe")
    out = [{"role": "system", "content": system}] if system else []
    for i, m in enumerate(messages):
        if isinstance(m, User):
            out.append({"role": "user", "content": "".join(m.content)})
        elif isinstance(m, Result):
            out.append({"role": "tool", "tool_call_id": f"c{i - 1}", "content": m.content})
        else:
            entry = {"role": "assistant", "content": m.answer}
            if m.think:
                entry["reasoning_content"] = m.think
            if m.calls:
                entry["tool_calls"] = [
                    {
                        "id": f"c{i}",
                        "type": "function",
                        "function": {"name": c.name, "arguments": json.dumps(dict(c.arguments))},
                    }
                    for c in m.calls
                ]
            out.append(entry)
    body = {"model": "local", "messages": out}
    if tools:
        body["tools"] = [{"type": "function", "function": t} for t in tools]
    if effort is None:
        body["thinking"] = {"type": "disabled"}
    else:
        body["reasoning_effort"] = {50: "low", 75: "high", 100: "max"}[effort]
    options = recipe.ConversionOptions().with_model_alias(
        "local", recipe.ModelVersion.DeepseekV41Flash
    )
    conversation = recipe.ChatCompletionRequest(body).convert(options).conversation
    return recipe.DeepseekV41Encoding().render_conversation(conversation).prompt


def test_rendering_matches_the_official_library(material):
    vocabulary = material.vocabulary
    rng = random.Random(9)
    cases = [*shorts(), *(exercises.chat_short(rng, material) for _ in range(40))]
    checked = 0
    for short in cases:
        thinks = any(isinstance(m, Assistant) and m.think is not None for m in short.messages)
        if thinks and short.effort is None:
            continue  # a thinking block without the effort line: ours alone, on purpose
        for end, message in enumerate(short.messages):
            if not isinstance(message, Assistant):
                continue
            prefix = short.messages[:end]
            ours = render(prefix, effort=short.effort, tools=short.tools, system=short.system)
            want = _official(prefix, short.effort, short.tools, short.system)
            assert text_of(vocabulary, ours) == want
            checked += 1
        whole = text_of(vocabulary, short.segments())
        assert whole.startswith(want) and whole.endswith(SPECIALS[1])
    assert checked > 150


def test_special_tokens_are_the_official_ones():
    recipe = pytest.importorskip("deepseek_recipe")
    kind = recipe.SpecialToken
    names = "Bos Eos User Assistant System ThinkingStart ThinkingEnd Dsml LatestReminder Image"
    names += " Ref RefEnd Box BoxEnd Point PointEnd Polygon PolygonEnd"
    official = [getattr(kind, n).default_str() for n in names.split()]
    assert [s for i, s in enumerate(SPECIALS) if i != 2] == official


def test_readme_lists_the_packages():
    readme = Path(exercises.__file__).with_name("README.md").read_text(encoding="utf-8")
    assert corpus.packages_table() in readme
