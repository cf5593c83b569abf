"""The text views of a trace: the answers with their drafts marked, one step after the other, sums.

Comes in: a `Trace`, and what was added up of it. Goes out: lines of text and rows of tables, with
colours or with the marks of wdiff. It must not know models, files or the terminal; what a model
wrote is shown, never interpreted: control characters appear as escapes.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepinfer.speculative.reschedule import Choice
from deepinfer.speculative.trace import Line, Trace

__all__ = ["FORMULA", "LEGEND", "aligned", "ascii_only", "columns", "inline", "positions", "shown",
           "step_blocks", "step_rows", "sums"]  # fmt: skip

LEGEND = "accepted draft   [-rejected draft-]   {+the target's own token+}"
FORMULA = "tokens committed / steps, bonus included"

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Column heads, rows."""

_MARKS = {"accepted": ("", ""), "rejected": ("[-", "-]"), "target": ("{+", "+}")}
# Green and underlined, red and struck through, cyan.
_SGR = {"accepted": "4;32", "rejected": "9;31", "target": "36"}
_ASCII = {"→": "->", " · ": " | ", "⟨": "<", "⟩": ">", "█": "#", "−": "-"}
_BAR = 24
_BEHIND_LINE_ENDS = re.compile(r"(?<=\n)(?!\n)")


def shown(text: str) -> str:
    """Text that cannot steer a terminal: what is not printable as an escape."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii")
        for c in text
    )


def columns(text: str) -> int:
    """How many columns of a terminal printable text takes."""
    return sum(_columns_of(character) for character in text)


def _columns_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def ascii_only(text: str) -> str:
    """The same for a stream that knows no other characters of ours."""
    for character, plain in _ASCII.items():
        text = text.replace(character, plain)
    return text


def inline(trace: Trace, coloured: bool) -> list[str]:
    """Every answer with its drafts marked; a line ends behind each line end of the answer.

    Of a trace that was cut an answer ends with its last step, and a line counts what is missing.
    """
    out: list[str] = []
    for seq, (lines, sequence) in enumerate(zip(trace.by_sequence(), trace.sequences, strict=True)):
        if len(trace.sequences) > 1:
            prompt = shown(sequence["prompt"])
            out.append(
                f"--- prompt {seq + 1}: {prompt if len(prompt) <= 60 else prompt[:59] + '…'}"
            )
        rows: list[list[tuple[str, str]]] = [[]]
        for text, style in _spans(lines, sequence, trace.cut):
            for part in [text] if style == "rejected" else _BEHIND_LINE_ENDS.split(text):
                rows[-1].append((part, style))
                if style != "rejected" and part.endswith("\n"):
                    rows.append([])
        out += filter(None, (_rendered(row, coloured) for row in rows))
        missing = len(sequence["token_ids"]) - _told(lines, sequence)
        if trace.cut and missing > 0:
            out.append(f"--- {missing:,} more tokens, whose steps are not in the trace")
    return out


def step_rows(trace: Trace, choices: Sequence[Choice] = ()) -> Table:
    """One row per step and request."""
    several, other = len(trace.sequences) > 1, {choice.step: choice for choice in choices}
    heads = ["step", "drafted", "confidence", "verified", "accepted", "target", "ms"]
    if several:
        heads.insert(1, "prompt")
    if choices:
        heads.append("replayed")
    rows = []
    for line in trace.lines:
        step = line.step
        cells = [
            str(step.step),
            " ".join(_quoted(*pair) for pair in zip(line.draft_text, step.draft_ids, strict=True)),
            _chances(step.confidence),
            str(step.verified),
            str(step.accepted),
            "" if step.target_id is None else _quoted(line.target_text or "", step.target_id),
            _ms(step.ms),
        ]
        if several:
            cells.insert(1, str(step.seq + 1))
        if choices:
            choice = other.get(step.step)
            cells.append(str(choice.splits.get(step.seq, 0)) if choice else "")
        rows.append(tuple(cells))
    return tuple(heads), rows


def step_blocks(trace: Trace, coloured: bool, choices: Sequence[Choice] = ()) -> list[str]:
    """The same for people: what was tried in the first line, why so many in the second."""
    other = {choice.step: choice for choice in choices}
    several = len(trace.sequences) > 1
    digits = len(str(max((step.step for step in trace.steps), default=0)))
    asked = len(str(len(trace.sequences)))
    out = []
    for line in trace.lines:
        step = line.step
        who = f"  prompt {step.seq + 1:>{asked}}" if several else ""
        head = (
            f"step {step.step:>{digits}}{who}  draft {len(step.draft_ids)}  "
            f"verify {step.verified}  accepted {step.accepted}   "
        )
        below = f"{'':{5 + digits}}  conf {_chances(step.confidence)}"
        room = max(columns(head), columns(below) + 2)
        out.append(head.ljust(room) + _rendered(_step_spans(line), coloured))
        why = [_reason(trace, line), f"{_ms(step.ms)} ms"]
        choice = other.get(step.step)
        if choice:
            why.append(f"other curve → {choice.splits.get(step.seq, 0)}")
        out.append(below.ljust(room) + " · ".join(why))
    return out


def sums(summary: Mapping[str, Any], name: str) -> list[str]:
    """The lines of the summary that are no table. name: of the model."""
    if not summary["steps"]:
        return [f"{name}: no step decoded with drafts"]
    lines = [
        f"{name} · {summary['steps']:,} steps",
        f"accepted length {summary['accepted_length']:.2f} = {FORMULA} "
        f"({summary['tokens']:,} / {summary['steps']:,})",
    ]
    if summary["drafted"]:
        lines.append(
            f"acceptance rate {_percent(summary['acceptance_rate'])} = accepted / drafted "
            f"({summary['accepted']:,} / {summary['drafted']:,}); "
            f"verified {summary['verified']:,}, behind the end {summary['discarded']:,}"
        )
    lines.append(
        f"saved target passes {summary['saved_passes']:,} of {summary['tokens']:,} "
        f"({_percent(summary['saved_passes'] / max(summary['tokens'], 1))})"
    )
    if summary["outcomes"]:
        auroc = summary["auroc"]
        lines.append(
            f"confidence ECE {_percent(summary['ece'])} · Brier {summary['brier']:.3f} · "
            f"AUROC {'-' if auroc is None else f'{auroc:.3f}'} ({summary['outcomes']:,} drafts)"
        )
    lossless = {
        None: "not checked (--check)",
        True: "yes, the same ids as without speculation",
        False: "NO, the ids differ from those without speculation",
    }
    lines.append(f"lossless {lossless[summary['lossless']]}")
    if summary.get("replay"):
        lines += _replayed(summary["replay"])
    return [*lines, "", *_histogram(summary)]


def positions(summary: Mapping[str, Any]) -> Table:
    """Acceptance and calibration by draft position."""
    heads = ("draft", "drafted", "verified", "accepted", "rate", "predicted", "observed", "ECE",
             "Brier", "AUROC")  # fmt: skip
    rows = [
        (
            str(row["position"]), f"{row['drafted']:,}", f"{row['verified']:,}",
            f"{row['accepted']:,}", _percent(row["acceptance"]), _percent(row["predicted"]),
            _percent(row["observed"]), _percent(row["ece"]), _decimals(row["brier"]),
            _decimals(row["auroc"]),
        )
        for row in summary["by_position"]
    ]  # fmt: skip
    return heads, rows


def aligned(table: Table) -> list[str]:
    """A table of numbers without lines around it, so that it fits a narrow terminal."""
    heads, rows = table
    wide = [max(map(columns, column)) for column in zip(heads, *rows, strict=True)]
    return [
        " ".join(cell.rjust(room) for cell, room in zip(row, wide, strict=True))
        for row in (heads, *rows)
    ]


def _histogram(summary: Mapping[str, Any]) -> list[str]:
    counts = summary["histogram"]
    most, digits = max(counts), len(f"{max(counts):,}")
    lines = ["tokens committed by a step"]
    for tokens, count in enumerate(counts):
        if tokens or count:
            bar = "█" * math.ceil(count / most * _BAR)
            share = _percent(count / summary["steps"])
            lines.append(f"{tokens:>4}  {count:>{digits},}  {share:>7}  {bar}".rstrip())
    return lines


def _replayed(replay: Mapping[str, Any]) -> list[str]:
    if not replay["steps"]:
        return []
    return [
        f"with {replay['curve']}: {replay['replayed_verified_per_step']:.2f} drafts a step, "
        f"expected {replay['replayed_tokens_per_s']:,.1f} tok/s; "
        f"as run it would be {replay['tokens_per_s']:,.1f} tok/s"
    ]


def _told(lines: Sequence[Line], sequence: Mapping[str, Any]) -> int:
    """Tokens of an answer up to its last step."""
    if not lines:
        return 0
    return lines[-1].step.pos + lines[-1].step.committed - sequence["prompt_tokens"]


def _spans(
    lines: Sequence[Line], sequence: Mapping[str, Any], cut: bool = False
) -> Iterable[tuple[str, str]]:
    """(text, style) of an answer: its tokens, those without a step as the target's own, and what
    was rejected where it was. Its last token is shown even without a text.

    cut: nothing behind the last step; who made it is not known.
    """
    texts, ids, at = list(sequence["token_text"]), sequence["token_ids"], 0
    for line in lines:
        start = line.step.pos - sequence["prompt_tokens"]
        yield from ((text, "target") for text in texts[at:start])
        *before, last = _step_spans(line)
        yield from before
        at = max(at, start + line.step.committed)
        yield (line.target_text or "", "target") if last[1] == "target" and at < len(ids) else last
    if not cut:
        yield from ((_named(texts[i], ids[i]), "target") for i in range(at, len(ids)))


def _step_spans(line: Line) -> list[tuple[str, str]]:
    """At least one: accepted drafts, rejected ones, the target's own token."""
    step, texts = line.step, line.draft_text
    spans = [(text, "accepted") for text in texts[: step.accepted]]
    if step.target_id is not None:
        if step.verified > step.accepted:
            fell = "".join(texts[step.accepted : step.verified])
            spans.append((_named(fell, step.draft_ids[step.accepted]), "rejected"))
        spans.append((_named(line.target_text or "", step.target_id), "target"))
    elif spans:
        spans[-1] = _named(spans[-1][0], step.draft_ids[step.accepted - 1]), "accepted"
    return spans or [("", "accepted")]


def _rendered(spans: Iterable[tuple[str, str]], coloured: bool) -> str:
    joined: list[tuple[str, str]] = []
    for text, style in spans:
        if joined and joined[-1][1] == style:
            joined[-1] = joined[-1][0] + text, style
        elif text:
            joined.append((text, style))
    if coloured:
        return "".join(f"\x1b[{_SGR[style]}m{shown(text)}\x1b[0m" for text, style in joined)
    return "".join(_MARKS[style][0] + shown(text) + _MARKS[style][1] for text, style in joined)


def _named(text: str, token: int) -> str:
    """A token that has no text of its own is shown by its id."""
    return text or f"⟨{token}⟩"


def _quoted(text: str, token: int) -> str:
    return '"' + shown(text).replace('"', '\\"') + '"' if text else _named("", token)


def _reason(trace: Trace, line: Line) -> str:
    """Why so many drafts were verified."""
    step, threshold = line.step, trace.header["speculation"].get("threshold")
    if not step.draft_ids:
        return "nothing drafted"
    if step.budget is not None:
        share = f", share {step.split}" if step.requests > 1 else ""
        reason = f"budget {step.budget}{share}"
    elif threshold is not None:
        reason = f"cut at {_chance(threshold)}"
    else:
        reason = f"all {step.split}"
    if step.useful < len(step.draft_ids):
        reason += f", no use behind {step.useful}"
    if step.verified < step.split:
        reason += ", no room for more"
    return f"{reason} → {step.verified} verified"


def _chances(values: Sequence[float]) -> str:
    return " ".join(_chance(value) for value in values)


def _chance(value: float) -> str:
    """`.98`, `1.0` or `nan`: three characters."""
    return "nan" if math.isnan(value) else f"{value:.2f}"[1:] if value < 0.995 else "1.0"


def _ms(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def _decimals(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
