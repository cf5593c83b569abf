"""Grammars of forced and strict calls: what they let through, and what they do not."""

import json

import llguidance as lg
import pytest

from deepinfer.core.request import Structured
from deepinfer.errors import UsageError
from deepinfer.protocol.calls import Markup
from deepinfer.protocol.grammar import Choice, Tool, constraint
from deepinfer.structured import grammar
from tests.unit.exchanges import FILE, MARK, ids, tokenizer
from tests.unit.test_protocol_answers import block, call

EOS = 1
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "n": {"type": "integer"},
        "kind": {"enum": ["a b", 'c"d', "é", 7]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"$ref": "#/$defs/L"},
        "short": {"type": "string", "maxLength": 3},
        "any": {},
        "low": {"type": "string", "pattern": "^[a-z]+$"},
        "null": {"type": ["string", "null"]},
    },
    "required": ["city"],
    "$defs": {"L": {"type": "array", "items": {"type": "integer"}}},
}
TOOLS = [Tool("get_weather", SCHEMA), Tool("other", {"type": "object", "properties": {}}),
         Tool("free", None)]  # fmt: skip
CITY = ("city", "true", "北京 </b> x\n")


@pytest.fixture(scope="module")
def vocabulary():
    return lg.LLTokenizer(FILE.read_text())


@pytest.fixture
def takes(vocabulary):
    def check(held: Structured, text: str) -> bool:
        grammar = lg.LLMatcher.grammar_from_lark(held.source)
        matcher = lg.LLMatcher(vocabulary, grammar)
        assert not matcher.is_error(), matcher.get_error()
        tokens = [*ids(text), EOS]
        return matcher.validate_tokens(tokens) == len(tokens)

    return check


def held(*, answer=None, tools=TOOLS, after=(), **choice):
    return constraint(answer, tools, Choice(**choice), tokenizer().special(MARK), after)


GOOD = [
    block(call("get_weather", CITY)),
    block(call("get_weather", CITY, ("n", "false", "4"), ("kind", "true", 'c"d'))),
    block(call("get_weather", CITY, ("kind", "true", "é"), ("maybe", "false", "null"))),
    block(call("get_weather", CITY, ("kind", "false", "7"), ("list", "false", "[1, 2]"))),
    block(call("get_weather", CITY, ("maybe", "false", '"x"'), ("short", "true", "北京市"))),
    block(call("get_weather", CITY, ("any", "true", "x"), ("low", "false", '"abc"'))),
    block(call("get_weather", CITY, ("any", "false", "{}"), ("null", "true", "q"))),
    block(call("other"), call("get_weather", CITY)),
    block(call("free", ("q", "true", "x <"), ("z", "false", "[1]"))),
    block(call("free")),
]
BAD = [
    "text", "text" + block(call("other")), block(), block(call("nope")), "",
    block(call("get_weather")), block(call("get_weather", ("n", "false", "4"))),
    block(call("get_weather", CITY, ("n", "false", "x"))),
    block(call("get_weather", CITY, ("n", "true", "4"))),
    block(call("get_weather", CITY, ("kind", "true", "x"))),
    block(call("get_weather", CITY, ("short", "true", "abcd"))),
    block(call("get_weather", CITY, ("low", "false", '"A"'))),
    block(call("get_weather", CITY, ("more", "true", "x"))),
    block(call("other", ("a", "true", "x"))).replace("other", "get_weather"),
    block(call("other")) + "tail", block(call("other"))[:-3],
]  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_a_forced_call_may_be(takes, text):
    assert takes(held(must=True), text)


@pytest.mark.parametrize("text", BAD)
def test_a_forced_call_may_not_be(takes, text):
    assert not takes(held(must=True), text)


def test_a_block_that_the_prompt_has_begun(takes):
    begun = f"\n\n<{MARK} calls>\n"
    opened = held(must=True, opened=True)
    for text in GOOD:
        assert takes(opened, text.removeprefix(begun))
    assert not takes(opened, GOOD[0])


def test_one_tool_and_one_call(takes):
    named = held(must=True, only="other", single=True)
    assert takes(named, block(call("other")))
    assert not takes(named, block(call("other"), call("other")))
    assert not takes(named, block(call("free")))


def test_a_free_choice_lets_any_text_through(takes):
    free = held(tools=[Tool("other", {"type": "object", "properties": {}}, strict=True)])
    for text in ("", "text", "a < b </ c\n\n<", "text" + block(call("other")), "<b>\n" * 9):
        assert takes(free, text), text
    for text in ("text" + block(call("nope")), "text" + block(), block(call("other")) + "x"):
        assert not takes(free, text), text


def test_an_answer_in_a_format_or_a_call(takes):
    number = held(answer=Structured("json_schema", '{"type": "integer"}'))
    assert takes(number, "12") and takes(number, block(call("other")))
    assert not takes(number, "x") and not takes(number, "12" + block(call("other")))
    words = held(answer=Structured("regex", "a/b+"))
    assert takes(words, "a/bb") and not takes(words, "ab")


def test_strict_takes_no_more_than_it_says(takes):
    closed = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    strict = held(tools=[Tool("t", closed, strict=True)], must=True)
    assert takes(strict, block(call("t", ("a", "false", "1"))))
    assert not takes(strict, block(call("t")))
    empty = held(tools=[Tool("t", {"type": "object"}, strict=True)], must=True)
    assert takes(empty, block(call("t"))) and not takes(empty, block(call("t", CITY)))


def test_what_cannot_be_expressed_is_left_out_of_tools_that_promise_nothing(takes):
    odd = {"type": "object", "properties": {"a": {"type": "object", "not": {"type": "string"}}},
           "required": ["a"]}  # fmt: skip
    assert takes(held(tools=[Tool("t", odd)], must=True), block(call("t", ("a", "false", "{}"))))


def one(value, key="a", name="f", strict=False):
    """A forced call of a tool with one argument."""
    schema = {"type": "object", "properties": {key: value}, "required": [key]}
    return held(tools=[Tool(name, schema, strict)], must=True)


@pytest.mark.parametrize("value", [{}, {"type": "object"}, {"type": "array"}])
@pytest.mark.parametrize("strict", [False, True])
def test_an_argument_has_no_more_layout_than_an_answer(vocabulary, value, strict):
    matcher = grammar.compiled(one(value, strict=strict), vocabulary)
    bracket = "[" if value.get("type") == "array" else "{"
    head = (
        f'\n\n<{MARK} calls>\n<{MARK} invoke name="f">\n<{MARK} parameter name="a" string="false">'
    )
    for gap, fine in (("\n  ", True), ("\n" * 300, False), (" " * 300, False)):
        tokens = ids(head + bracket + gap)
        assert (matcher.validate_tokens(tokens) == len(tokens)) is fine


BAD_NAMES = ['a"b', "a\nb", "\x00", "\x1b[0m", "\t", "\x7f"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_no_call_can_carry_are_refused(name):
    with pytest.raises(UsageError, match="property of the tool f") as caught:
        one({}, key=name)
    assert json.dumps(name) in str(caught.value)
    with pytest.raises(UsageError, match="with the tool "):
        one({}, name=name)


@pytest.mark.parametrize("key", ["a b", "北京🚀", "<>", "a.b", "\\", "//", "é'"])
def test_other_names_are_written_and_read_back(takes, key):
    text = block(call("f", (key, "true", "x")))
    assert takes(one({"type": "string"}, key=key), text)
    [made], rest = Markup(MARK).read(text.split(Markup(MARK).open)[1], cut=False)
    assert made.values == {key: "x"} and rest == ""


@pytest.mark.parametrize("value, said", [
    ({"type": "array", "items": {"pattern": "["}}, 'pattern "[" at tools[f].a/items'),
    ({"$ref": "#/$defs/x"}, '$ref "#/$defs/x" at tools[f].a'),
    ({"type": "array", "uniqueItems": True}, 'uses "uniqueItems" at tools[f].a, which'),
    ({"type": "array", "items": {}, "maxItems": 1 << 64}, f"maxItems {1 << 64} at tools[f].a"),
    ({"type": "string", "maxLength": 1 << 64}, f"maxLength {1 << 64} at tools[f].a"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "at tools[f].a"),
    (False, "at tools[f].a"),
])  # fmt: skip
def test_what_a_tool_cannot_ask_for_is_named(value, said):
    with pytest.raises(UsageError) as caught:
        grammar.check(one(value, strict=True))
    assert said in str(caught.value) and "Lark" not in str(caught.value), str(caught.value)


def test_nothing_is_held_where_nothing_is_asked():
    assert held() is None
    plain = Structured("regex", "a")
    assert held(answer=plain, tools=[], after=(7,)) == Structured("regex", "a", (7,))


def test_what_the_grammar_lets_through_is_read_back():
    markup = Markup(MARK)
    for text in GOOD:
        inner = text.split(markup.open)[1]
        calls, rest = markup.read(inner, cut=False)
        assert rest == "" and calls and all(made.whole for made in calls)
        assert markup.write(calls) == text
