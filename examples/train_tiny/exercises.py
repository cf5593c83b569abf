"""Generators of exercises with checkable answers, for training rows and for evaluation.

Random numbers and a `Material` (docstring pairs, source code as ids) come in; weighted segments of
V4.1 chat text go out, or evaluation questions with their expected answers. Short exercises whose
key is `reserved` are asked in evaluation only. It knows nothing of batches, files or the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from examples.train_tiny import arithmetic
from examples.train_tiny.arithmetic import reserved
from examples.train_tiny.chat import (
    ANSWER,
    PROMPT,
    Assistant,
    Call,
    Content,
    Message,
    Result,
    Segment,
    User,
    render,
)
from examples.train_tiny.tokenizer import BOS, EOS, Vocabulary

ADJECTIVES = (
    "amber ancient bitter blank bold brave brief bright broad broken calm careful clean clever "
    "cold cool crimson curious damp dark deep distant dry dusty eager early easy empty even exact "
    "faint famous fast fierce final firm flat foggy free fresh frozen gentle giant golden grand "
    "gray green happy hard heavy hidden hollow honest humble hungry icy idle jolly keen kind large "
    "lazy light little lonely long loud lucky main mellow mighty misty modest narrow noble odd old "
    "orange pale plain polite proud purple quick quiet rapid rare red rough round royal rusty "
    "sharp silent silver"
).split()
NOUNS = (
    "anchor apple arrow badge barrel basket beacon bell bird blanket boat bottle branch bridge "
    "brush bucket button cabin camera candle canyon carpet castle cedar chain chair cherry circle "
    "clock cloud comet copper coral cotton crown desert diamond dragon drum eagle engine falcon "
    "feather field flame flower forest fountain garden gate glass hammer harbor hill "
    "horse island jacket kettle key ladder lake lamp lantern leaf lemon lion marble meadow mirror "
    "mountain needle ocean olive paper pencil piano pillow planet pocket river rocket saddle "
    "shadow shield ship spoon stone table tiger tower train tunnel valley violin wagon window"
).split()
# Adjectives that are one token behind a space, as all nouns are: a key is then two tokens almost
# everywhere, which a small model finds again more surely. The others keep keys varied.
PLAIN_ADJECTIVES = (
    "actual available bad binary blank broad broken clean close complete complex constant current "
    "custom deep default different direct easy empty equal even exact expected explicit extra fast "
    "final first flat free frozen full hard higher idle initial invalid large last left light "
    "little local long main missing named new next normal old only open optional original other "
    "plain possible present previous proper quiet random raw real red right round same second "
    "short single small special specific standard strict top valid zero"
).split()
WORDS = tuple(sorted(set(ADJECTIVES) | set(NOUNS)))

QUESTIONS = ("What is {}?", "What is the value of {}?", "Give me the value of {}.", "And {}?")
SYSTEMS = ("You are a helpful assistant.", "Be brief.", "Answer in one line.")
EFFORTS = (75, 75, 75, 50, 100)


class Material:
    """Docstring pairs and windows of source code, cut at line ends.

    `streams`: id arrays (bos file eos bos file eos ...); `docs`: (name, sentence) pairs.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        streams: Sequence[np.ndarray],
        docs: Sequence[tuple[str, str]],
    ) -> None:
        self.vocabulary = vocabulary
        self.streams = streams
        self.docs = docs
        text = vocabulary.token_bytes
        self._opens_line = np.array([t[:1] in (b"\n", b"\r") for t in text])
        self._ends_line = np.array([t[-1:] in (b"\n", b"\r") for t in text])

    def line_starts(self, ids: np.ndarray) -> np.ndarray:
        """Positions i > 0 where a newline piece starts: cutting before i keeps the tokenization."""
        opens = self._opens_line[ids]
        opens[1:] &= ~self._ends_line[ids[:-1]]
        opens[0] = False
        return np.flatnonzero(opens)

    def code(self, rng: random.Random, tokens: int) -> np.ndarray:
        """About `tokens` (never more) ids of code; starts with a newline piece and ends a line.

        File boundaries inside the window are joined without their bos and eos.
        """
        stream = rng.choice(self.streams)
        want = tokens + 64
        start = rng.randrange(max(1, len(stream) - want - 600))
        window = np.array(stream[start : start + want + 600])
        window = window[(window != BOS) & (window != EOS)]
        starts = self.line_starts(window)
        starts = starts[starts < 560]
        first = int(starts[0]) if len(starts) else 0
        window = window[first : first + tokens + 1]
        cuts = self.line_starts(window)
        cuts = cuts[cuts <= tokens]
        return window[: int(cuts[-1])] if len(cuts) else window[:tokens]


# --- keys and values ------------------------------------------------------------------------


def keys(rng: random.Random, n: int, plain: bool | None = None) -> list[str]:
    """`n` different keys, adjective + noun; from the plain adjectives, usually, if not stated."""
    if plain is None:
        plain = rng.random() < 0.85
    words = PLAIN_ADJECTIVES if plain else ADJECTIVES
    chosen = rng.sample(range(len(words) * len(NOUNS)), n)
    return [f"{words[i // len(NOUNS)]} {NOUNS[i % len(NOUNS)]}" for i in chosen]


def value(rng: random.Random) -> str:
    """Five random digits."""
    return f"{rng.randrange(100_000):05d}"


def question(rng: random.Random, key: str) -> str:
    """One of the phrasings of a question for `key`."""
    return rng.choice(QUESTIONS).format(key)


def table_text(rng: random.Random, pairs: Sequence[tuple[str, str]], layout: int) -> str:
    """Pairs as JSON-like text (0), lines (1) or sentences (2)."""
    if layout == 0:
        return "{\n" + ",\n".join(f'  "{k}": "{v}"' for k, v in pairs) + "\n}"
    if layout == 1:
        return "\n".join(f"{k} = {v}" for k, v in pairs)
    return " ".join(f"The value of {k} is {v}." for k, v in pairs)


_TABLE_TOKENS = (16, 11, 13)  # tokens a pair takes at most, by layout; only sizes depend on it


# --- long rows ------------------------------------------------------------------------------


class _Length:
    """Counts the tokens of segments while a row grows."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.tokens = 0

    def add(self, segments: Sequence[Segment]) -> None:
        for content, _ in segments:
            if isinstance(content, str):
                self.tokens += len(self._vocabulary.encode(content))
            else:
                self.tokens += len(content)


def _ask(rng: random.Random, key: str, answer: str) -> list[Message]:
    return [User([question(rng, key)]), Assistant(answer)]


def _remember(key: str, val: str) -> list[Message]:
    return [User([f"Remember: {key} = {val}"]), Assistant("OK.")]


def _read(rng: random.Random, material: Material, tokens: int) -> list[Message]:
    code = tuple(int(i) for i in material.code(rng, tokens))
    return [User(["Read this:", code]), Assistant("OK.")]


def _describe(rng: random.Random, material: Material) -> list[Message]:
    name, sentence = rng.choice(material.docs)
    return [User([f"Describe `{name}`."]), Assistant(sentence)]


def _turns(messages: list[Message]) -> list[Segment]:
    """Segments of further turns: like render, without the bos."""
    return render(messages)[1:]


def conversation_row(rng: random.Random, material: Material, length: int) -> list[Segment]:
    """Facts to remember, questions on earlier ones, code and docstrings in between."""
    names = keys(rng, max(8, length // 24))
    facts: list[tuple[str, str]] = []
    fresh: list[int] = []  # facts not asked yet: only these need a look far back
    out = list(render(_remember(names[0], val := value(rng))))
    facts.append((names[0], val))
    fresh.append(0)
    size = _Length(material.vocabulary)
    size.add(out)
    reading = rng.choice((0.04, 0.12, 0.2))
    while size.tokens < length:
        p = rng.random()
        if p < 0.33 and len(facts) < len(names):
            key, val = names[len(facts)], value(rng)
            fresh.append(len(facts))
            facts.append((key, val))
            messages = _remember(key, val)
        elif p < 0.75:
            if fresh and rng.random() < 0.75:
                # A third of these go to the oldest open fact.
                at = 0 if rng.random() < 0.33 else rng.randrange(len(fresh))
                which = fresh.pop(at)
            else:
                which = rng.randrange(len(facts))
            messages = _ask(rng, *facts[which])
        elif p < 0.75 + reading:
            messages = _read(rng, material, rng.randrange(60, max(64, min(400, length // 3))))
        else:
            messages = _describe(rng, material)
        turn = _turns(messages)
        size.add(turn)
        out += turn
    return out


def table_row(rng: random.Random, material: Material, length: int) -> list[Segment]:
    """A table of 30-70 % of the row, then questions on it until the row is full."""
    layout = rng.randrange(3)
    n = max(2, int(length * rng.uniform(0.3, 0.7)) // _TABLE_TOKENS[layout])
    pairs = [(k, value(rng)) for k in keys(rng, n)]
    text = rng.choice(("Here are some values:\n", "Use this table:\n", ""))
    text += table_text(rng, pairs, layout) + "\n\n"
    size = _Length(material.vocabulary)
    out: list[Segment] = []
    open_pairs: list[tuple[str, str]] = []
    while size.tokens < length:
        if not open_pairs:
            open_pairs = rng.sample(pairs, len(pairs))
        key, val = open_pairs.pop()
        if out:
            turn = _turns(_ask(rng, key, val))
        else:
            turn = render([User([text + question(rng, key)]), Assistant(val)])
        size.add(turn)
        out += turn
    return out


def _needles(
    rng: random.Random, material: Material, code: np.ndarray, facts: Sequence[tuple[str, str]]
) -> tuple[int, ...]:
    """Code with the facts as comment lines at random line starts."""
    starts = material.line_starts(code)
    spots = sorted((int(rng.choice(starts)) if len(starts) else 0, i) for i in range(len(facts)))
    out: list[int] = []
    last = 0
    for spot, i in spots:
        out += code[last:spot].tolist()
        key, val = facts[i]
        out += material.vocabulary.encode(f"\n# {key} = {val}")
        last = spot
    return tuple(out + code[last:].tolist())


def needle_row(rng: random.Random, material: Material, length: int) -> list[Segment]:
    """Facts hidden as comments in code that fills the row, then questions."""
    n = rng.randrange(2, 9) if length < 4096 else rng.randrange(6, 21)
    n = min(n, max(1, length // 100))
    facts = [(k, value(rng)) for k in keys(rng, n)]
    code = material.code(rng, max(32, length - 45 * n - 16))
    body = _needles(rng, material, code, facts)
    asked = rng.sample(facts, n)
    out = render(
        [
            User(["Read this code:", body, "\n\n" + question(rng, asked[0][0])]),
            Assistant(asked[0][1]),
        ]
    )
    for fact in asked[1:]:
        out += _turns(_ask(rng, *fact))
    size = _Length(material.vocabulary)
    size.add(out)
    while size.tokens < length:
        turn = _turns(_describe(rng, material))
        size.add(turn)
        out += turn
    return out


# --- short exercises ------------------------------------------------------------------------


@dataclass
class Short:
    """A short exercise before rendering: the last message is the assistant's."""

    messages: list[Message]
    effort: int | None = None
    tools: list[dict] = field(default_factory=list)
    system: str = ""

    def segments(self) -> list[Segment]:
        """The rendered exercise."""
        return render(self.messages, effort=self.effort, tools=self.tools, system=self.system)


def _with_thought(rng: random.Random, messages: list[Message], thought: str) -> Short:
    """Sometimes answers in thinking mode, after one short line."""
    if rng.random() >= 0.15:
        return Short(messages)
    done = [
        Assistant(m.answer, think="", calls=m.calls) if isinstance(m, Assistant) else m
        for m in messages[:-1]
    ]
    last = messages[-1]
    if not isinstance(last, Assistant):
        raise TypeError("an exercise ends with the assistant")
    return Short(
        [*done, Assistant(last.answer, think=thought + "\n", calls=last.calls)],
        effort=rng.choice(EFFORTS),
    )


_ASK_SUM = ("What is {}?", "Compute {}.", "{} = ?", "Calculate {}.")


def arithmetic_short(
    rng: random.Random, held: bool, op: str | None = None, digits: int | None = None
) -> Short:
    """One or two written sums; steps in the thinking block of the last."""
    count = 1 if held or rng.random() >= 0.2 else 2
    messages: list[Message] = []
    for _ in range(count):
        o = op or rng.choices(arithmetic.OPERATORS, (30, 40, 30))[0]
        a, b = arithmetic.problem(rng, o, held, digits)
        think, answer = arithmetic.steps(o, a, b)
        messages += [User([rng.choice(_ASK_SUM).format(f"{a} {o} {b}")])]
        messages += [Assistant(answer, think=think)]
    return Short(messages, effort=rng.choice(EFFORTS) if rng.random() < 0.7 else None)


def _fresh(make: Callable[[], tuple[str, str]], held: bool) -> tuple[str, str]:
    """Draws until the question is reserved (or not), as asked."""
    while True:
        asked, answer = make()
        if reserved(asked) == held:
            return asked, answer


def copying_short(rng: random.Random, held: bool) -> Short:
    """Copy words, a digit string or a list of assignments."""

    def make() -> tuple[str, str]:
        kind = rng.randrange(3)
        if kind == 0:
            text = " ".join(rng.choices(WORDS, k=rng.randrange(2, 13)))
        elif kind == 1:
            text = "".join(rng.choices("0123456789", k=rng.randrange(4, 25)))
        else:
            names = rng.sample(WORDS, rng.randrange(2, 7))
            text = "\n".join(f"{w} = {rng.randrange(1000)}" for w in names)
            return f"Copy this:\n{text}", text
        return rng.choice(("Copy this: {}", "Repeat: {}", "Say {}")).format(text), text

    asked, answer = _fresh(make, held)
    return _with_thought(rng, [User([asked]), Assistant(answer)], "Copy it.")


def sorting_short(rng: random.Random, held: bool) -> Short:
    """Sort numbers up or down, sort words, reverse words."""

    def make() -> tuple[str, str]:
        kind = rng.randrange(4)
        if kind < 2:
            high = rng.choice((10, 100, 1000))
            numbers = [rng.randrange(high) for _ in range(rng.randrange(3, 9))]
            order, down = ("in descending order", True) if kind else ("in ascending order", False)
            return (
                f"Sort {order}: {' '.join(map(str, numbers))}",
                " ".join(map(str, sorted(numbers, reverse=down))),
            )
        words = rng.sample(WORDS, rng.randrange(3, 8))
        if kind == 2:
            return f"Sort these words: {' '.join(words)}", " ".join(sorted(words))
        return f"Reverse these words: {' '.join(words)}", " ".join(reversed(words))

    asked, answer = _fresh(make, held)
    return _with_thought(rng, [User([asked]), Assistant(answer)], "Put them in order.")


_GREETINGS = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hi! What can I do for you?"),
    ("Good morning.", "Good morning! How can I help you?"),
    ("Good evening.", "Good evening! How can I help you?"),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("Thank you!", "You are welcome!"),
    ("Thanks", "You are welcome!"),
    ("Who are you?", "I am a small language model. I can read code and answer short questions."),
    ("What can you do?", "I can copy, sort, calculate, look things up and complete Python code."),
    ("Goodbye.", "Goodbye!"),
)


def _small_talk(rng: random.Random) -> list[Message]:
    kind = rng.randrange(3)
    if kind == 0:
        asked, answer = rng.choice(_GREETINGS)
    elif kind == 1:
        word = rng.choice(WORDS)
        asked, answer = f"Spell {word}.", " ".join(word)
    elif rng.random() < 0.5:
        low = rng.randrange(100)
        high = low + rng.randrange(2, 9)
        asked = f"Count from {low} to {high}."
        answer = " ".join(map(str, range(low, high + 1)))
    else:
        words = rng.choices(WORDS, k=rng.randrange(2, 9))
        asked, answer = f"How many words: {' '.join(words)}", str(len(words))
    return [User([asked]), Assistant(answer)]


def chat_short(rng: random.Random, material: Material) -> Short:
    """One to four turns of descriptions and small talk."""
    messages: list[Message] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        messages += _describe(rng, material) if rng.random() < 0.8 else _small_talk(rng)
    short = _with_thought(rng, messages, "Answer in one sentence.")
    if rng.random() < 0.1:
        short.system = rng.choice(SYSTEMS)
    return short


def short_table(rng: random.Random) -> Short:
    """A small table and one to three questions on it."""
    pairs = [(k, value(rng)) for k in keys(rng, rng.randrange(2, 11))]
    text = table_text(rng, pairs, rng.randrange(3)) + "\n\n"
    messages: list[Message] = []
    for key, val in rng.sample(pairs, min(len(pairs), rng.randrange(1, 4))):
        messages += [User([text + question(rng, key)]), Assistant(val)]
        text = ""
    return _with_thought(rng, messages, "Look it up.")


def _schema(name: str, description: str, required: Sequence[str] = (), **types: str) -> dict:
    properties = {k.rstrip("_"): {"type": t} for k, t in types.items()}
    return {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": list(required) or list(properties),
        },
    }


TOOLS = {
    s["name"]: s
    for s in (
        _schema("get_weather", "Weather forecast for a city.", city="string", days="integer"),
        _schema("search_files", "Search files for a text.", query="string", limit="integer"),
        _schema("send_message", "Send a message to a person.", to="string", text="string"),
        _schema("set_timer", "Start a timer.", minutes="integer", label="string"),
        _schema("convert", "Convert money.", amount="number", source="string", target="string"),
        _schema("read_file", "Read the first lines of a file.", path="string", lines="integer"),
        _schema("add_event", "Add an event to the calendar.", title="string", guests="array"),
        _schema("set_light", "Switch a light.", room="string", on="boolean", level="integer"),
    )
}
_CITIES = "Paris London Berlin Madrid Rome Oslo Tokyo Cairo Lima Delhi Boston Vienna".split()
_PEOPLE = "Anna Ben Clara David Emma Frank Grace Henry Iris Jack Laura Max".split()
_ROOMS = "kitchen bedroom office hall garage bathroom garden cellar".split()
_MONEY = "USD EUR GBP JPY CHF SEK".split()


def _tool_case(rng: random.Random, name: str) -> tuple[str, Call, str]:
    """(request, call, result text) for one tool."""
    n = rng.randrange(1, 31)
    pick = rng.choice
    word, other = rng.sample(WORDS, 2)
    if name == "get_weather":
        city = pick(_CITIES)
        asked = pick(("What is the weather in {c} for {n} days?", "Weather in {c}, {n} days."))
        result = f"{pick(('sunny', 'rain', 'snow', 'clouds', 'wind'))}, {rng.randrange(-9, 39)} C"
        return asked.format(c=city, n=n), Call(name, (("city", city), ("days", n))), result
    if name == "search_files":
        asked = pick(("Find {n} files with {w}.", "Search for {w}, at most {n} results."))
        found = f"{rng.randrange(n + 1)} files"
        return asked.format(n=n, w=word), Call(name, (("query", word), ("limit", n))), found
    if name == "send_message":
        who, text = pick(_PEOPLE), f"{word} {other}"
        asked = pick(("Tell {p}: {t}", "Send {p} the message: {t}"))
        call = Call(name, (("to", who), ("text", text)))
        return asked.format(p=who, t=text), call, pick(("sent", "queued"))
    if name == "set_timer":
        asked = pick(("Set a timer for {n} minutes named {w}.", "Timer {w}, {n} minutes."))
        call = Call(name, (("minutes", n), ("label", word)))
        return asked.format(n=n, w=word), call, f"timer {rng.randrange(100)} started"
    if name == "convert":
        source, target = rng.sample(_MONEY, 2)
        amount: int | float = n * 10 if rng.random() < 0.5 else n + 0.5
        asked = pick(("Convert {a} {s} to {t}.", "How much is {a} {s} in {t}?"))
        call = Call(name, (("amount", amount), ("source", source), ("target", target)))
        result = f"{rng.randrange(1, 1000)}.{rng.randrange(10)} {target}"
        return asked.format(a=amount, s=source, t=target), call, result
    if name == "read_file":
        path = f"/{word}/{other}.{pick(('py', 'txt', 'md'))}"
        asked = pick(("Show the first {n} lines of {p}.", "Read {n} lines of {p}."))
        call = Call(name, (("path", path), ("lines", n)))
        return asked.format(n=n, p=path), call, f"{pick(WORDS)} {pick(WORDS)}"
    if name == "add_event":
        guests = rng.sample(_PEOPLE, rng.randrange(1, 4))
        asked = f"Plan {word} {other} with {' and '.join(guests)}."
        call = Call(name, (("title", f"{word} {other}"), ("guests", guests)))
        return asked, call, pick(("added", "conflict"))
    room, on = pick(_ROOMS), rng.random() < 0.5
    asked = f"Turn {'on' if on else 'off'} the {room} light at level {n}."
    call = Call(name, (("room", room), ("on", on), ("level", n)))
    return asked, call, pick(("done", "failed"))


def tools_short(rng: random.Random, held: bool) -> Short:
    """One to three schemas, a request, the call, its result and the closing answer."""
    offered = rng.sample(sorted(TOOLS), rng.randrange(1, 4))
    while True:
        name = rng.choice(offered)
        asked, call, result = _tool_case(rng, name)
        if reserved(asked) == held:
            break
    thinking = rng.random() < 0.3
    think = f"I call {name}.\n" if thinking else None
    messages: list[Message] = [User([asked]), Assistant("", think, (call,))]
    messages += [Result(result), Assistant(f"Result: {result}", "" if thinking else None)]
    effort = rng.choice(EFFORTS) if thinking else None
    return Short(messages, effort, [TOOLS[n] for n in offered])


def short_exercise(rng: random.Random, material: Material) -> Short:
    """One exercise of the short mix."""
    kind = rng.choices(
        ("arithmetic", "copying", "sorting", "chat", "table", "tools"), (40, 9, 10, 18, 6, 17)
    )[0]
    if kind == "arithmetic":
        return arithmetic_short(rng, False)
    if kind == "copying":
        return copying_short(rng, False)
    if kind == "sorting":
        return sorting_short(rng, False)
    if kind == "chat":
        return chat_short(rng, material)
    if kind == "table":
        return short_table(rng)
    return tools_short(rng, False)


def short_row(rng: random.Random, material: Material, length: int) -> list[Segment]:
    """Short exercises one after the other until the row is full."""
    out: list[Segment] = []
    size = _Length(material.vocabulary)
    while size.tokens < length:
        segments = short_exercise(rng, material).segments()
        size.add(segments)
        out += segments
    return out


ROWS = (conversation_row, table_row, needle_row, short_row)
_SHARES = (4, 2, 3, 5)
_LONG_SHARES = (4, 3, 6, 1)  # rows beyond 4,096 tokens teach distance, little else


def exercise_row(rng: random.Random, material: Material, length: int) -> list[Segment]:
    """Segments of at least `length` tokens of one row kind."""
    kind = rng.choices(ROWS, _SHARES if length <= 4097 else _LONG_SHARES)[0]
    return kind(rng, material, length)


# --- evaluation -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """An evaluation question.

    `prompt` ends with the assistant header and `<think>` or `</think>`; `target` is the whole
    expected continuation and `answer` its part after `</think>`, both ending with eos.
    `distance` counts the tokens from the fact (behind its value) to the end of the prompt.
    """

    kind: str
    prompt: list[int]
    target: list[int]
    answer: list[int]
    distance: int = 0


def encode_segments(
    vocabulary: Vocabulary, segments: Sequence[Segment]
) -> tuple[list[int], list[int]]:
    """(ids, weight codes) of segments; neighbouring texts are encoded together."""
    ids: list[int] = []
    codes: list[int] = []
    text, text_code = "", PROMPT

    def flush() -> None:
        if text:
            new = vocabulary.encode(text)
            ids.extend(new)
            codes.extend([text_code] * len(new))

    for content, code in segments:
        if isinstance(content, str):
            if code != text_code:
                flush()
                text = ""
            text, text_code = text + content, code
        else:
            flush()
            text = ""
            ids.extend(content)
            codes.extend([code] * len(content))
    flush()
    return ids, codes


def as_question(vocabulary: Vocabulary, kind: str, short: Short) -> Question:
    """Splits a rendered exercise before its last assistant answer."""
    ids, codes = encode_segments(vocabulary, short.segments())
    start = len(ids)
    while start and codes[start - 1] == ANSWER:
        start -= 1
    last = short.messages[-1]
    if not isinstance(last, Assistant):
        raise TypeError("an exercise ends with the assistant")
    tail, _ = encode_segments(vocabulary, short.segments()[-_answer_segments(last) :])
    return Question(kind, ids[:start], ids[start:], tail)


def _answer_segments(message: Assistant) -> int:
    """Segments of a message behind `</think>`: answer, calls, eos."""
    whole = render([message])
    bare = render([Assistant("", message.think)])
    return 2 + len(whole) - len(bare)


def _eval_rng(kind: str, seed: int) -> random.Random:
    return random.Random(f"evaluation {kind} {seed}")


def arithmetic_eval(vocabulary: Vocabulary, op: str, n: int, seed: int = 0) -> list[Question]:
    """`n` different reserved questions `a op b` of 3-digit numbers (`*`: by one digit)."""
    rng = _eval_rng(f"arithmetic {op}", seed)
    out: dict[tuple[int, int], Question] = {}
    while len(out) < n:
        a, b = arithmetic.problem(rng, op, True, 3)
        if (a, b) not in out:
            think, answer = arithmetic.steps(op, a, b)
            asked = rng.choice(_ASK_SUM).format(f"{a} {op} {b}")
            short = Short([User([asked]), Assistant(answer, think)], effort=75)
            out[a, b] = as_question(vocabulary, f"arithmetic {op}", short)
    return list(out.values())


def copying_eval(vocabulary: Vocabulary, n: int, seed: int = 0) -> list[Question]:
    """`n` reserved copying questions."""
    rng = _eval_rng("copying", seed)
    return [as_question(vocabulary, "copying", copying_short(rng, True)) for _ in range(n)]


def sorting_eval(vocabulary: Vocabulary, n: int, seed: int = 0) -> list[Question]:
    """`n` reserved sorting and reversing questions."""
    rng = _eval_rng("sorting", seed)
    return [as_question(vocabulary, "sorting", sorting_short(rng, True)) for _ in range(n)]


def tools_eval(vocabulary: Vocabulary, n: int, seed: int = 0) -> list[Question]:
    """`n` reserved requests; the target is the tool call (thinking included where it is on)."""
    rng = _eval_rng("tools", seed)
    out = []
    for _ in range(n):
        short = tools_short(rng, True)
        short.messages = short.messages[:2]
        out.append(as_question(vocabulary, "tools", short))
    return out


def retrieval_eval(
    material: Material, distance: int, layout: str, n: int, seed: int = 0
) -> list[Question]:
    """`n` questions on a fact about `distance` tokens back (never more, some 20 fewer at most).

    `layout`: "needle", "table" or "conversation". `material` should hold held-out code. The
    prompt is at most `distance` + 160 tokens long.
    """
    rng = _eval_rng(f"retrieval {layout} {distance}", seed)
    make = {"needle": _needle_question, "table": _table_question}.get(layout, _talk_question)
    out = []
    while len(out) < n:
        q = make(rng, material, distance)
        if distance - 20 <= q.distance <= distance:
            out.append(q)
    return out


def _finish(
    material: Material, kind: str, messages: list[Message], head: list[int], val: str
) -> Question:
    """Question whose fact ends with the first len(head) tokens of the prompt."""
    ids, _ = encode_segments(material.vocabulary, render(messages))
    answer = [*material.vocabulary.encode(val), EOS]
    if ids[: len(head)] != head:
        raise RuntimeError("the fact is not where it should be")
    return Question(kind, ids, answer, answer, len(ids) - len(head))


def _needle_question(rng: random.Random, material: Material, distance: int) -> Question:
    encode = material.vocabulary.encode
    (key, other, third), val = keys(rng, 3, plain=True), value(rng)
    ask = "\n\n" + question(rng, key)
    before = material.code(rng, rng.randrange(20, 90)).tolist()
    fact = encode(f"\n# {key} = {val}")
    room = distance - len(encode(ask)) - 2 - 2 * 16
    code = material.code(rng, max(16, room))
    facts = [(other, value(rng)), (third, value(rng))]
    behind = list(_needles(rng, material, code, facts))
    head, _ = encode_segments(material.vocabulary, render([User(["Read this code:"])])[:-2])
    messages: list[Message] = [User(["Read this code:", tuple(before + fact + behind), ask])]
    return _finish(material, "needle", messages, head + before + fact, val)


def _table_question(rng: random.Random, material: Material, distance: int) -> Question:
    encode = material.vocabulary.encode
    layout = rng.randrange(3)
    names = keys(rng, distance // 8 + 40, plain=True)
    pairs = [(k, value(rng)) for k in names]
    at = rng.randrange(0, 7)
    key, val = pairs[at]
    ask = question(rng, key)
    room = distance - len(encode("\n\n" + ask)) - 4
    n, used = at + 1, 0
    while n < len(pairs):
        used += len(encode(table_text(rng, pairs[n : n + 1], layout)))
        used += (0, 1, 1)[layout] - (3 if layout == 0 else 0)
        if used > room - 2:
            break
        n += 1
    best: Question | None = None
    for m in range(max(at + 1, n - 2), n + 8):  # sizes of joined entries are only known exactly now
        text = table_text(rng, pairs[:m], layout)
        start = text.index(val, text.index(key))
        head, _ = encode_segments(
            material.vocabulary, render([User([text[: start + len(val)]])])[:-2]
        )
        messages: list[Message] = [User([text + "\n\n" + ask])]
        q = _finish(material, "table", messages, head, val)
        if q.distance > distance:
            break
        best = q
    return best or q


def _talk_question(rng: random.Random, material: Material, distance: int) -> Question:
    names = keys(rng, max(8, distance // 30 + 8), plain=True)
    messages: list[Message] = []
    for k in names[: rng.randrange(0, 4)]:
        messages += _remember(k, value(rng))
    key, val = names[4], value(rng)
    head_segments = render([*messages, User([f"Remember: {key} = {val}"])])[:-2]
    head, _ = encode_segments(material.vocabulary, head_segments)
    messages += _remember(key, val)
    ask = User([question(rng, key)])
    size = _Length(material.vocabulary)
    size.add(_turns([ask]))
    size.add([("OK.", PROMPT), ((EOS,), PROMPT)])
    size.tokens += 2
    known: list[tuple[str, str]] = []
    upcoming = iter(names[5:])
    while (room := distance - size.tokens) > 12:
        p = rng.random()
        if room < 40:
            k = next(upcoming)
            turn = _remember(k, value(rng))
        elif p < 0.35:
            k, v = next(upcoming), value(rng)
            known.append((k, v))
            turn = _remember(k, v)
        elif p < 0.6 and known:
            turn = _ask(rng, *rng.choice(known))
        elif p < 0.8:
            turn = _describe(rng, material)
        else:
            turn = _read(rng, material, rng.randrange(30, max(31, min(400, room - 10))))
        before = size.tokens
        size.add(_turns(turn))
        if size.tokens > distance:
            size.tokens = before
            if room < 22:
                break
            continue
        messages += turn
    return _finish(material, "conversation", [*messages, ask], head, val)


def tokenizer_texts(rng: random.Random, docs: Sequence[tuple[str, str]], n: int) -> list[str]:
    """Plain text of `n` exercises (no control tokens), to train the tokenizer on."""
    out = []
    for i in range(n):
        if i % 4 == 3:
            pairs = [(k, value(rng)) for k in keys(rng, 6)]
            key = pairs[0][0]
            out.append(table_text(rng, pairs, i // 4 % 3) + "\n\n" + question(rng, key))
            out.append(f"Remember: {key} = {value(rng)}\n# {key} = {value(rng)}")
            continue
        make = rng.choice((arithmetic_short, copying_short, sorting_short, tools_short, None))
        if make is None:
            name, sentence = rng.choice(docs)
            out.append(f"Describe `{name}`.\n{sentence}")
            continue
        parts: list[Content] = [c for c, _ in make(rng, False).segments()]
        out += [c for c in parts if isinstance(c, str)]
    return out
