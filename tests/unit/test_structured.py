"""Grammars and the constraint of one answer: the library's reading of tokens, limits, rollback."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from deepinfer.core.request import Structured
from deepinfer.engine.assembly import embedded_model
from deepinfer.errors import EnvironmentProblem, UsageError
from deepinfer.structured import grammar
from deepinfer.structured.compiler import Compiler
from deepinfer.structured.constraint import Constraint, leaves
from deepinfer.tokenizer.tokenizer import Tokenizer
from tests.compiling import held

EOS, VOCAB = 1, 4096
HUGE = 2**64 - 1


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(embedded_model() / "tokenizer.json", 0, VOCAB)


@pytest.fixture(scope="module")
def tokens(tokenizer):
    return grammar.vocabulary(tokenizer, VOCAB, (EOS,))


def schema(value: object) -> Structured:
    return Structured("json_schema", json.dumps(value))


def within(value: object) -> Structured:
    """A schema in a Lark grammar that says what its place is."""
    rules = ['start: "<%json {}" p "/"', "// at f.a", f"p: %json {json.dumps(value)}"]
    return Structured("lark", "\n".join(rules))


def constraint(asked: Structured, tokens) -> Constraint:
    return Constraint(grammar.compiled(asked, tokens), (EOS,), asked.after)


def ids_of(mask) -> list[int]:
    return np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()


def matches(asked: Structured, text: str, tokens, tokenizer) -> bool:
    """Is a text one that may be the whole answer?"""
    follows = constraint(asked, tokens)
    for token in tokenizer.encode_plain(text):
        if token not in ids_of(follows.allowed()):
            return False
        follows.push(token)
    return EOS in ids_of(follows.allowed()) and follows.complete


def test_the_library_reads_the_vocabulary_as_we_do(tokens, tokenizer):
    assert tokens.vocab_size == VOCAB and tokens.eos_tokens == [EOS]
    for token in range(VOCAB):
        special = token in tokenizer.special_names
        ours = tokenizer.special_names[token].encode() if special else tokenizer.token_bytes(token)
        if ours == b"\xff":
            continue  # begins the library's names of special tokens; no text has it
        assert tokens.is_special_token(token) == special
        assert tokens.decode_bytes([token]) == ours
    text = 'größe 🚀 {"a": [1, 2]}</think>'
    assert tokens.tokenize_str(text) == tokenizer.encode_plain(text)
    wider = grammar.vocabulary(tokenizer, VOCAB + 100, (EOS,))
    assert len(constraint(schema({}), wider).allowed()) * 8 >= VOCAB + 100


def test_the_text_of_a_special_token_stays_text(tokens, tokenizer):
    """Forced strings are where a library may turn it into the token."""
    for asked in (schema({"const": "a</think>b"}), Structured("regex", "x</think><｜User｜>y")):
        follows, made = constraint(asked, tokens), []
        while ids_of(follows.allowed()) != [EOS]:
            made.append(ids_of(follows.allowed())[0])
            follows.push(made[-1])
        assert "</think>" in tokenizer.decode(made) and follows.complete
        assert not set(made) & set(tokenizer.special_names)


def test_di_29_what_is_wrong_is_named(tokens):
    def one_of(depth):
        part = {"type": "integer"}
        for at in range(depth):
            part = {"oneOf": [part, {"type": "string", "maxLength": at + 1}]}
        return schema(part)

    cases = [
        (Structured("gbnf", "root ::= root"), "grammar-unsupported", "leads only to itself"),
        (Structured("lark", "start: start"), "grammar-unsupported", "leads only to itself"),
        (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
         "schema-unsupported", '$ref "#/$defs/a" at #'),
        (schema({"properties": {"v": {"type": "array", "minItems": HUGE, "maxItems": HUGE}}}),
         "schema-unsupported", f"minItems {HUGE} at #/properties/v"),
        (schema({"maxLength": HUGE}), "schema-unsupported", f"maxLength {HUGE} at #"),
        (Structured("regex", "["), "regex-unsupported", "unclosed character class"),
        (schema({"items": {"pattern": "["}}), "schema-unsupported", 'pattern "[" at #/items'),
        (one_of(12), "schema-unsupported", '"oneOf" at #, which is not supported'),
        (schema({"type": "object", "properties": {"age": {"not": {}}}}), "schema-unsupported",
         'the JSON schema uses "not" at #/properties/age, which is not supported'),
        (schema({"$ref": "#/$defs/b"}), "schema-unsupported", '$ref "#/$defs/b" at #'),
        (schema({"properties": {"d": {"format": "datum"}}}), "schema-unsupported",
         'format "datum" at #/properties/d'),
        (schema([1]), "schema-unsupported", "an object or true, got [1]"),
        (Structured("json_schema", "{"), "schema-unsupported", "it is not JSON"),
        (Structured("json_schema", '{"items":' * 100_000), "schema-unsupported", "nested"),
        (Structured("gbnf", "root ::= " + "(" * 100_000), "grammar-unsupported", "recursion"),
        (Structured("lark", "start: ["), "grammar-unsupported", "Expected token"),
        (Structured("lark", "{foo"), "grammar-unsupported", "in {foo"),
        (Structured("lark", "{}"), "grammar-unsupported", "in {}"),
        (Structured("gbnf", 'root ::= "a" | b'), "grammar-unsupported", "'b' not found"),
        (Structured("gbnf", ""), "grammar-unsupported", "root"),
        (Structured("regex", "a" * (grammar.LONGEST + 1)), "regex-unsupported", "1,048,577"),
        (within({"properties": {"b": {"not": {}}}}), "schema-unsupported",
         'the JSON schema uses "not" at f.a/properties/b, which is not supported'),
        (within({"type": "array", "items": {}, "maxItems": HUGE}), "schema-unsupported",
         f"maxItems {HUGE} at f.a, accepted"),
        (within({"type": "string", "minLength": 5, "maxLength": 2}), "schema-unsupported",
         "at f.a"),
        (Structured("lark", 'start: p\np: %json {"not": {}}'), "schema-unsupported", '"not" at #'),
    ]  # fmt: skip
    for asked, code, said in cases:
        began = time.process_time()
        with pytest.raises(UsageError) as caught:
            grammar.compiled(asked, tokens)
        assert caught.value.code == code and said in str(caught.value), str(caught.value)
        assert "no_forcing" not in str(caught.value)
        assert len(str(caught.value)) < 1000 and time.process_time() - began < 10


def test_what_needs_no_model_is_known_before_there_is_one(tokens):
    for asked in (Structured("regex", "["), schema({"not": {}}), Structured("lark", "start: [")):
        with pytest.raises(UsageError) as early:
            grammar.check(asked)
        with pytest.raises(UsageError) as late:
            grammar.compiled(asked, tokens)
        assert str(early.value) == str(late.value)
    for asked in (Structured("regex", "[a-z]+"), schema({}), Structured("gbnf", 'root ::= "a"+')):
        grammar.check(asked)


def test_without_the_library_the_error_says_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for use in (
        lambda: grammar.check(Structured("regex", "a")),
        lambda: grammar.vocabulary(tokenizer, VOCAB, (EOS,)),
    ):
        with pytest.raises(EnvironmentProblem, match="llguidance"):
            use()


def test_all_that_is_called_supported_is(tokens):
    values = dict(
        type="string", enum=[1], const=1, properties={"a": {}}, required=["a"], pattern="a",
        additionalProperties=False, patternProperties={"^a": {}}, minProperties=1, maxProperties=2,
        items={}, prefixItems=[{}], minItems=1, maxItems=2, minLength=1, maxLength=2, minimum=1,
        format="date", maximum=2, exclusiveMinimum=1, exclusiveMaximum=2, multipleOf=2,
        anyOf=[{"const": 1}, {}], allOf=[{}], oneOf=[{"type": "string"}, {"type": "null"}],
    )  # fmt: skip
    values |= {"$ref": "#/$defs/a", "$defs": {"a": {}}}
    named = [part.split()[0] for part in grammar.SUPPORTED.split(", ")]
    assert named == [*values] or sorted(named) == sorted(values)
    for key, value in values.items():
        grammar.compiled(schema({key: value, "$defs": {"a": {}}}), tokens)


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (Structured("regex", r"^[^\n]{1,129}$"), ["a", "é" * 129], ["", "a" * 130, "a\n"]),
        (schema({"type": "string", "pattern": r"^[^\n]{1,129}$"}), ['"a"'], ['"' + "a" * 130]),
        (schema({"maxLength": 2, "type": "string"}), ['"🚀🚀"', '""'], ['"🚀🚀🚀"', '"abc"']),
        (schema(True), ["1", "{}"], ["", "tru"]),
        (schema({}), ["1", "null", '{"a": [1, {}]}', '"x"', "-1.5e3"], ["", "{", "nul", "01"]),
        (schema({"type": "object"}), ["{}", '{\n  "a": 1\n}'],
         ["[]", "{\n\n}", "{  }", "{}\n", ' {"a": 1}']),
        (within({"type": "object"}), ['<%json {}{\n  "a": 1\n}/', '<%json {}{"a":1}/'],
         ["<%json {}{\n\n}/", "<%json {}{  }/", "<{}/"]),
        (within(True), ["<%json {}[1]/"], ["<%json {}[\n\n1]/"]),
        (Structured("gbnf", 'root ::= "a" ("b" | root)'), ["ab", "aab"], ["a", "abb"]),
        (Structured("lark", 'start: "a"+ NUM\nNUM: /[0-9]+/'), ["aa1"], ["1", "aa"]),
        (Structured("regex", "(a+)+"), ["a", "aaaa"], ["", "ab"]),
        (Structured("regex", "(a+)+$"), ["a", "aaaa"], ["", "ab"]),
    ],
)  # fmt: skip
def test_what_a_grammar_accepts(asked, good, bad, tokens, tokenizer):
    for text in good:
        assert matches(asked, text, tokens, tokenizer), text
    for text in bad:
        assert not matches(asked, text, tokens, tokenizer), text


NESTED = {
    "type": "object", "required": ["name", "sizes"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zé]{2,8}$"},
        "sizes": {"type": "array", "items": {"type": "number"}, "maxItems": 5},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [
        schema({"const": "a text that is forced, to its end"}), schema(NESTED), schema({}),
        Structured("regex", "(yes|no, thank you)"),
        Structured("lark", 'start: "hello world" /[a-z]+/ "the end"'),
    ],
    ids=lambda asked: asked.kind,
)  # fmt: skip
def test_a_mask_allows_every_token_that_fits(asked, tokens):
    """However a text is cut into tokens: what is drawn under a mask is the model's own, given that
    the grammar holds."""
    rng, matcher = random.Random(3), grammar.compiled(asked, tokens)
    for _ in range(12):
        allowed = set(ids_of(np.frombuffer(matcher.compute_bitmask(), np.uint8)))
        for token in (token for token in range(VOCAB) if token != EOS):
            fits = matcher.try_consume_tokens([token]) == 1
            assert fits == (token in allowed)
            if fits:
                matcher.rollback(1)
        assert matcher.is_accepting() == (EOS in allowed)
        if not allowed - {EOS}:
            break
        assert matcher.consume_token(rng.choice(sorted(allowed - {EOS})))


def test_an_error_quotes_what_was_asked_alone(tokens):
    """One that shows only with a vocabulary, which our own line is part of."""
    asked = Structured("lark", 'start: <thinks> "x"')
    with pytest.raises(UsageError, match="thinks") as caught:
        grammar.compiled(asked, tokens)
    assert "llguidance" not in str(caught.value)


@pytest.mark.parametrize("rule", ["[max_tokens=6]: /[a-z ]+/", '[stop="st"]: /[a-z ]*/'])
def test_what_the_library_cannot_take_back_is_read_again(rule, tokens, tokenizer):
    asked = Structured("lark", f'start: a "!"\na{rule}')
    walker, answer = constraint(asked, tokens), []
    rng = random.Random(4)
    for _ in range(4):
        legal = ids_of(walker.allowed())
        for other in rng.sample(legal, min(3, len(legal))):
            walker.allowed([other])
        fresh = constraint(asked, tokens)
        for token in answer:
            fresh.push(token)
        assert ids_of(walker.allowed()) == ids_of(fresh.allowed()) == legal
        answer.append(rng.choice([token for token in legal if token != EOS]))
        walker.push(answer[-1])
    assert walker.problem is None


@pytest.mark.parametrize("source", ["a{1000000}", "((a{1000}){1000}){1000}", "(ab){30000}"])
def test_di_29_a_long_repetition_takes_no_time(source, tokens):
    follows = constraint(Structured("regex", source), tokens)
    began = time.process_time()
    for _ in range(200):
        follows.push(ids_of(follows.allowed())[-1])
    assert time.process_time() - began < 2  # 0.02; where its end is looked for each time, 6


@pytest.mark.parametrize("after", [(), (7,), (60, 61, 60)], ids=len)
def test_masks_depend_on_the_tokens_alone(after, tokens):
    """Any walk of tokens and drafts, legal and not, gives the masks of a fresh reading."""
    asked = replace(schema(NESTED), after=after)
    start = grammar.compiled(asked, tokens)
    rng = random.Random(5)

    def fresh(answer):
        reader = Constraint(start, (EOS,), after)
        for token in answer:
            reader.push(token)
        return reader.allowed()

    reached = 0
    for _ in range(5):
        walker, answer = Constraint(start, (EOS,), after), []
        while len(answer) < 30:
            drafts = []
            for _ in range(rng.randrange(7)):
                mask = walker.allowed(drafts)
                if rng.random() < 0.1:
                    drafts = drafts[: rng.randrange(len(drafts) + 1)]  # another path
                    mask = walker.allowed(drafts)
                legal = [60, 61, 7, *after] if mask is None else ids_of(mask)
                drafts.append(rng.choice(legal or [-1, 3, EOS]))
                if rng.random() < 0.1:
                    drafts[-1] = rng.choice([-1, EOS, 3, 5, 2000])
            for count in range(len(drafts) + 1):
                mask = walker.allowed(drafts[:count])
                if any(token < 0 or token == EOS for token in drafts[:count]) and mask is not None:
                    continue
                if all(
                    (m := fresh([*answer, *drafts[:at]])) is None or drafts[at] in ids_of(m)
                    for at in range(count)
                ):
                    wanted = fresh([*answer, *drafts[:count]])
                    assert (mask is None) == (wanted is None)
                    assert mask is None or (mask == wanted).all()
                    reached += mask is not None
                elif mask is not None:
                    assert not mask.any(), "behind what may not stand, nothing may"
            stand = 0
            while stand < len(drafts) and rng.random() < 0.8:
                mask = fresh([*answer, *drafts[:stand]])
                if drafts[stand] in (-1, EOS):
                    break
                if mask is not None and drafts[stand] not in ids_of(mask):
                    break
                stand += 1
            own = fresh([*answer, *drafts[:stand]])
            own = rng.choice([60, 61, 7] if own is None else ids_of(own))
            if own == EOS:
                break
            for token in (*drafts[:stand], own):
                walker.push(token)
                answer.append(token)
    assert reached > 50


def test_it_holds_from_the_token_behind_the_last_of_after_on(tokens):
    asked = Structured("regex", "ab", after=(6, 7))
    follows = constraint(asked, tokens)
    assert follows.allowed() is None and follows.allowed([6]) is None
    assert follows.allowed([7, 6]) is None and follows.allowed([6, 7]) is not None
    assert follows.allowed([6, 5, 7]) is None and not follows.complete
    for token in (7, 6, 6):
        follows.push(token)
        assert follows.allowed() is None
    held = follows.allowed([7])
    follows.push(7)
    assert (follows.allowed() == held).all() and not follows.complete
    while ids_of(follows.allowed()) != [EOS]:
        follows.push(ids_of(follows.allowed())[0])
    assert follows.complete


def test_a_limit_met_by_a_draft_that_falls_harms_nobody(tokens, monkeypatch):
    """The library gives a matcher up for good; the answer goes on with another one."""
    start = grammar.compiled(Structured("regex", "[ab]{3,9}"), tokens)

    class Fragile:
        """Breaks at the first mask behind "bb"."""

        def __init__(self, matcher, taken=()):
            self.matcher, self.taken, self.broken = matcher, list(taken), False

        def deep_copy(self):
            return Fragile(self.matcher.deep_copy(), self.taken)

        def try_consume_tokens(self, some):
            self.taken += some
            return self.matcher.try_consume_tokens(some)

        consume_tokens = try_consume_tokens

        def rollback(self, count):
            assert not self.broken
            del self.taken[-count:]
            return self.matcher.rollback(count)

        def compute_bitmask(self):
            self.broken |= self.taken[-2:] == [b, b]
            return self.matcher.compute_bitmask()

        def is_error(self):
            return self.broken

        def get_error(self):
            return "too many expressions\n<state>"

        def is_accepting(self):
            return self.matcher.is_accepting()

    a, b = (tokens.tokenize_str(letter)[0] for letter in "ab")
    follows = Constraint(Fragile(start), (EOS,), ())
    follows.push(a)
    assert not follows.allowed([b, b]).any() and not follows.allowed([b, b, a]).any()
    assert follows.problem is None
    whole = Constraint(start, (EOS,), ())
    for token in (a, b, a):
        whole.push(token)
    assert (follows.allowed([b, a]) == whole.allowed()).all()
    for token in (b, b):
        follows.push(token)
    assert not follows.allowed().any() and not follows.complete
    assert follows.problem.code == "grammar-too-complex"
    assert "too many expressions" in str(follows.problem)


def test_what_a_mask_leaves():
    mask = np.array([0b00000110, 0, 0b10000000], dtype=np.uint8)
    assert leaves(mask, [1, 2]) and not leaves(mask, [1, 2, 23, 9]) and mask.any()


def test_a_late_grammar_is_given_up_and_others_go_on(tokenizer):
    hold, made = threading.Event(), []

    def make(asked, tokens):
        made.append(asked.source)
        if asked.source.startswith("slow"):
            hold.wait(30)
        return grammar.compiled(asked, tokens)

    compiler = Compiler(tokenizer, VOCAB, (EOS,), timeout=1.0, make=make)
    slow = [compiler.ask(Structured("regex", f"slow{at}")) for at in range(3)]
    quick = compiler.ask(Structured("regex", "quick"))
    while not (quick.ended and all(one.ended for one in slow)):
        compiler.wait([one for one in (quick, *slow) if not one.ended], 30)
    assert {one.problem.code for one in slow} == {"grammar-timeout"} and quick.problem is None
    assert "1 s" in slow[0].problem.message
    hold.set()
    # Equal sources are compiled once; another kind, or another source, is another grammar.
    again = compiler.ask(Structured("regex", "quick", after=(5,)))
    assert again is quick and again.begin((5,)).allowed() is None
    other = compiler.ask(Structured("lark", "quick"))
    compiler.wait([other], 30)
    assert other is not quick and other.problem.code == "grammar-unsupported"
    assert made.count("quick") == 2


def test_what_nobody_waits_for_is_dropped(tokenizer):
    hold, made = threading.Event(), []
    compiler = Compiler(tokenizer, VOCAB, (EOS,), timeout=30, make=held(hold, made))
    busy = [compiler.ask(Structured("regex", name)) for name in "ab"]
    twice, once = (compiler.ask(Structured("regex", name)) for name in "cd")
    assert compiler.ask(Structured("regex", "c")) is twice
    for one in (*busy, twice, once):
        compiler.leave(one)
    anew = compiler.ask(Structured("regex", "d"))
    assert anew is not once
    compiler.leave(anew)
    hold.set()
    while not twice.ended:
        compiler.wait([twice], 30)
    assert sorted(made) == ["a", "b", "c"] and not once.ended
    # What a worker had taken up is there for the next one.
    assert all(compiler.ask(one.structured) is one for one in busy)


def test_close_drops_what_waits_and_lets_workers_come_back(tokenizer):
    hold, made = threading.Event(), []
    compiler = Compiler(tokenizer, VOCAB, (EOS,), timeout=0.1, make=held(hold, made))
    asked = [compiler.ask(Structured("regex", name)) for name in "abc"]
    while not asked[0].ended:  # given up, and its worker is there still
        compiler.wait(asked[:1], 30)
    waits = [compiler.ask(Structured("regex", f"{at}")) for at in range(5)]
    began = time.monotonic()
    compiler.close(0.2)
    assert 0.2 <= time.monotonic() - began < 2
    threading.Timer(0.2, hold.set).start()
    compiler.close(30)
    assert not any(worker.is_alive() for worker in compiler._workers)
    count = len(made)
    assert count < 8 and not waits[-1].ended and "4" not in made


LEAVING = """
import sys, time
import torch
from deepinfer.cli import main as cli
from deepinfer.core.request import Structured
from deepinfer.engine.assembly import embedded_model
from deepinfer.structured import grammar
from deepinfer.structured.compiler import Compiler
from deepinfer.tokenizer.tokenizer import Tokenizer

def make(asked, tokens):
    while True:
        matcher = grammar.compiled(asked, tokens)
        if not forever:
            return matcher

def start(args):
    for at in range(100):
        source = f"(a{{1000}}){{{20 + at}}}[a-f]{{{at + 1}}}"
        compiler.ask(Structured("regex", source))
    while not compiler._tokens:
        time.sleep(0.05)
    time.sleep(0.3)
    print("said", end="")
    return 3

forever = sys.argv[1] == "cli"
tokenizer = Tokenizer(embedded_model() / "tokenizer.json", 0, 4096)
compiler = Compiler(tokenizer, 4096, (1,), 60, make)
cli._status = start
sys.exit(cli.main() if forever else start([]))
"""


@pytest.mark.parametrize("way", ["python", "cli"])
def test_a_process_can_leave_while_workers_compile(way):
    """From Python it waits for them; the command line leaves those that do not come back."""
    words = [sys.executable, "-c", LEAVING, way]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "said"), done.stderr
