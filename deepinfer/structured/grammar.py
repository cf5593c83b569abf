"""What a caller asked for as a grammar of the library, or an error that names what is wrong.

A `Structured` comes in; a matcher at the start of its grammar goes out, made for one vocabulary, or
UsageError. It must not know requests, threads or how masks are used.

The library (llguidance) reads lazily: building is short, and what a grammar costs shows at its
first masks. So a grammar counts as compiled once two steps of it were tried, within limits that
keep every later step in milliseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.core.request import Structured
from deepinfer.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from deepinfer.tokenizer.tokenizer import Tokenizer

LONGEST = 1 << 20  # characters of a source
_MOST = 1 << 31  # and what is not beyond counting: lengths, repetitions
# Between two tokens of JSON a blank, or a line break and some indentation: enough for any layout,
# and too little for an answer of blanks.
_GAP = r"\r?\n[ \t]{0,32}|[ ]?"
# Below the library's own limits, a million and 250,000: a step of the worst grammar that passes
# takes some ten milliseconds, and its states some ten MB.
_LIMITS = dict(initial_lexer_fuel=250_000, max_lexer_states=50_000)

_UNFORCED = '%llguidance {"no_forcing": true}'

NAMES = {
    "json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar",
    "gbnf": "GBNF grammar",
}  # fmt: skip
# A text, an expression or a comment of Lark, none of which holds a schema, or what begins one.
_LARK = re.compile(r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?P<json>%json\s*)')
_CODES = {"json_schema": "schema-unsupported", "regex": "regex-unsupported"}
SUPPORTED = (
    "type, enum, const, properties, required, additionalProperties, patternProperties, "
    "minProperties, maxProperties, items, prefixItems, minItems, maxItems, minLength, maxLength, "
    "pattern, format, minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf, anyOf, "
    "allOf, oneOf whose choices exclude each other, $ref within the schema, $defs"
)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_SCHEMAS = (
    "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


def vocabulary(tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The tokens of a model as the library knows them: their bytes are those of our detokeniser.

    size: ids of the model, those without a token included.
    """
    _needed()
    from llguidance import LLTokenizer, TokenizerWrapper

    # Not by the library's own reader of tokenizer.json: that one turns the text of a special token
    # within a forced string into the token, which the grammar then refuses.
    return LLTokenizer(
        TokenizerWrapper(_Vocabulary(tokenizer, size, eos_ids)), n_vocab=size,
        eos_token=list(eos_ids),
    )  # fmt: skip


class _Vocabulary:
    """What the library's wrapper asks for."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_ids[0], tokenizer.bos_id
        names = tokenizer.special_names
        self.special_token_ids = sorted(names)
        self.tokens = [
            names[token].encode() if token in names else tokenizer.token_bytes(token)
            for token in range(size)
        ]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode_plain(text.decode())


def _needed() -> None:
    """Raise EnvironmentProblem where the library is not installed."""
    try:
        import llguidance  # noqa: F401
    except ModuleNotFoundError:
        raise EnvironmentProblem(
            "llguidance-missing",
            "constrained output needs llguidance, which is not installed",
            hint="pip install 'llguidance>=1.9,<2'",
        ) from None


def check(structured: Structured, root: str = "#") -> None:
    """Raise UsageError for a source that no tokenizer makes usable; cheap, and needs no model.

    root: what an error calls the place of a whole schema. For one within a Lark grammar that is
    what a comment before it says: `// at PLACE`.
    """
    _needed()
    from llguidance import LLMatcher, LLParserLimits

    text = _text(structured, root)
    failed, lines = LLMatcher.validate_grammar_with_warnings(
        text, limits=LLParserLimits(verbose_errors=False, **_LIMITS)
    )
    if failed:
        raise _refused(structured, lines[0], root)


def compiled(structured: Structured, tokens: LLTokenizer) -> LLMatcher:
    """A matcher at the start; copies of it are cheap. Raises UsageError."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, **_LIMITS)
    text = _unforced(structured.kind, _text(structured))
    matcher = LLMatcher(tokens, text, log_level=0, limits=limits)
    if matcher.is_error():
        check(structured)  # in the caller's words, if it can be told from those
        raise _refused(structured, matcher.get_error())
    tried = matcher.deep_copy()
    for _ in range(2):
        first = _first(tried.compute_bitmask())
        if not tried.is_error() and first not in tokens.eos_tokens:
            tried.consume_token(first)
        if tried.is_error():
            raise _refused(structured, tried.get_error())
    return matcher


def _first(mask: bytes) -> int:
    """The lowest id that a mask allows."""
    at = next((at for at, byte in enumerate(mask) if byte), 0)
    return 8 * at + (mask[at] & -mask[at]).bit_length() - 1


def _text(structured: Structured, root: str = "#") -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    source = structured.source
    if len(source) > LONGEST:
        raise _refused(structured, f"{len(source):,} characters, at most {LONGEST:,} are read")
    if structured.kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if structured.kind == "lark":
        return LLMatcher.grammar_from_lark(_laid_out(structured))
    if structured.kind == "gbnf":
        try:
            return LLMatcher.grammar_from_lark(gbnf_to_lark(source))
        except Exception as problem:  # it raises such for a rule that is not there
            raise _refused(structured, str(problem)) from None
    schema = _schema(structured)
    _counted(structured, schema, root)
    if schema is True:
        source = "{}"
    elif not isinstance(schema, dict):
        raise _refused(structured, f"a schema is an object or true, got {source[:60]}", root)
    try:
        return LLMatcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": _GAP})
    except ValueError as problem:
        raise _refused(structured, str(problem), root) from None


def _unforced(kind: str, text: str) -> str:
    """The grammar with every tokenisation of what it forces: a mask then allows what can be
    consumed, no less, and takes no longer where much is forced."""
    if kind in ("regex", "json_schema"):
        [part] = json.loads(text)["grammars"]
        text = part["lark_grammar"] if kind == "regex" else None
        text = text or f"start: %json {json.dumps(part['json_schema'])}"
    elif text.lstrip().startswith("{"):  # not Lark, but what the library makes of it
        return text
    return f"{text}\n{_UNFORCED}\n"


def _schemas(source: str) -> Iterator[tuple[str, object, int, int]]:
    """Of every schema in a Lark grammar its place, itself, and where it starts and ends."""
    at, root = 0, "#"
    while found := _LARK.search(source, at):
        at = found.end()
        if found[0].startswith("// at "):
            root = found[0].removeprefix("// at ")
        if found["json"] is None:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(source, at)
        except (ValueError, RecursionError):
            continue  # the library says what is wrong
        yield root, schema, at, end
        at, root = end, "#"


def _laid_out(structured: Structured) -> str:
    """A Lark grammar whose schemas are laid out like a schema of its own, and count no further."""
    pieces, done = [], 0
    for root, schema, start, end in _schemas(structured.source):
        _counted(structured, schema, root)
        own = {} if schema is True else schema
        guidance = own.get("x-guidance", {}) if isinstance(own, dict) else None
        if isinstance(own, dict) and isinstance(guidance, dict):
            told = {**own, "x-guidance": {"whitespace_pattern": _GAP, **guidance}}
            pieces += [structured.source[done:start], json.dumps(told)]
            done = end
    return "".join([*pieces, structured.source[done:]])


def _counted(structured: Structured, schema: object, root: str) -> None:
    """Raise UsageError for a schema with a number beyond counting."""
    for place, part in _parts(schema, root):
        for count in _COUNTS:
            value = part.get(count)
            if isinstance(value, (int, float)) and value >= _MOST:
                line = f"{count} {value} at {place}, accepted: below {_MOST:,}"
                raise _refused(structured, line, root)


def _schema(structured: Structured) -> object:
    try:
        return json.loads(structured.source)
    except RecursionError:
        raise _refused(structured, "it is nested too deeply") from None
    except ValueError as problem:
        raise _refused(structured, f"it is not JSON: {problem}") from None


def _parts(schema: object, root: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within a schema, and where it is."""
    left = [(root, schema)]
    while left:
        place, part = left.pop()
        if not isinstance(part, dict):
            continue
        yield place, part
        for key, value in part.items():
            named: Iterator[tuple[object, object]] = iter(())
            if key in _MAPS and isinstance(value, dict):
                named = iter(value.items())
            elif key in _LISTS and isinstance(value, list):
                named = enumerate(value)
            elif key in _SCHEMAS:
                left.append((f"{place}/{key}", value))
            left += [(f"{place}/{key}/{name}", one) for name, one in named]


def _refused(structured: Structured, line: str, root: str = "#") -> UsageError:
    """The error for what the library said of a source, or of a schema within it."""
    if structured.kind == "lark":
        for place, schema, _, _ in _schemas(structured.source):
            try:
                check(Structured("json_schema", json.dumps(schema)), place)
            except UsageError as problem:
                return problem
    name, code = NAMES[structured.kind], _CODES.get(structured.kind, "grammar-unsupported")
    said = " ".join(line.replace("<non-verbose/>", "").split())
    said = re.sub(r" \d+ \| " + re.escape(_UNFORCED), "", said)
    if "NoExtension" in said:
        said = "no text matches it: a rule leads only to itself"
    if structured.kind != "json_schema":
        shown = " ".join(structured.source.split())
        facts = [said[:200], "in " + (shown if len(shown) <= 60 else shown[:59] + "…")]
        return UsageError(code, f"the {name} cannot be used", facts)
    try:
        parts = list(_parts(json.loads(structured.source), root))
    except (ValueError, RecursionError):
        parts = []
    found = re.search(r'Unimplemented keys: \["([^"]+)"|^(oneOf) constraints', said)
    if found:
        key = found[1] or found[2]
        places = [place for place, part in parts if key in part]
        where = f" at {places[0]}" if places else ""
        message = f'the JSON schema uses "{key}"{where}, which is not supported'
        return UsageError(code, message, [f"supported: {SUPPORTED}"])
    if "matches it" in said:
        said = "no text matches it: a $ref leads only to itself"
    facts = [said[:200]]
    asked = {
        "regex": "pattern",
        "matches it": "$ref",
        "Pointer": "$ref",
        "Unknown format": "format",
    }
    keys = [key for word, key in asked.items() if word in said]
    values = [(key, part[key], place) for key in keys for place, part in parts if key in part]
    exact = [one for one in values if str(one[1]) in said] or values
    facts += [f"{key} {json.dumps(value)[:80]} at {place}" for key, value, place in exact[:3]]
    if root != "#" and not any(root in fact for fact in facts):
        facts.append(f"at {root}")
    return UsageError(code, "the JSON schema cannot be used", facts)
