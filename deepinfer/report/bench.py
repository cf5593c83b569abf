"""What `bench` says of its rows: tables for people and programs, remarks, the Markdown report.

Saved rows and the run's `meta` come in; tables, text and lines go out. It must not know how rows
are measured, nor the terminal; pandas is imported when CSV is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from deepinfer.report.bench_rows import (
    WORDS,
    Row,
    good,
    label,
    median,
    spread,
    values,
    varying,
    word,
)
from deepinfer.report.tables import Table, amount, percent

__all__ = ["FORMATS", "STEADY", "csv", "markdown", "moved", "notes", "table", "tables"]

FORMATS = ("table", "md", "csv", "json", "jsonl")
STEADY = (0.98, 1.02)
MOVED = 0.03
_NAMED = 3  # rows with one kind of remark; of others there is the number
_UPRIGHT = 3  # so many rows stand side by side, more lie below each other

Cell = Callable[[Row], str]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Speed and work of the runs, and the single ops; axes that all rows share are in a title."""
    runs = [row for row in rows if row.get("kind", "e2e") == "e2e"]
    ops = [row for row in rows if row.get("kind") == "ops"]
    found = []
    if 0 < len(runs) <= _UPRIGHT:
        found.append(_upright(runs, SPEED + WORK))
    elif runs:
        found += [_table(runs, "Speed", SPEED), _table(runs, "Work of the same rows", WORK)]
    return found + ([_table(ops, "Ops", OPS)] if ops else [])


def table(rows: Sequence[Row], format: str = "table") -> str:
    """The rows as text of a format of FORMATS, with a line end."""
    if format == "csv":
        return csv(rows)
    if format == "json":
        return json.dumps(list(rows), ensure_ascii=False, allow_nan=False) + "\n"
    if format == "jsonl":
        lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
        return "".join(line + "\n" for line in lines)
    write = {"table": _aligned, "md": _marked}[format]
    return "\n".join(write(*one) for one in tables(rows))


def csv(rows: Sequence[Row]) -> str:
    """One line a row, one column a number (`ttft_ms.median`), samples left out."""
    import pandas

    kept = [{name: value for name, value in row.items() if name != "samples"} for row in rows]
    frame = pandas.json_normalize(kept)
    lists = frame.map(lambda value: json.dumps(value) if isinstance(value, list) else value)
    return lists.to_csv(index=False, lineterminator="\n")


def notes(meta: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """What a reader has to know before believing a number, a line each."""
    names, found = varying(rows), []
    if moved(meta):
        found.append(
            f"the ceilings moved by more than {percent(MOVED)} during the run "
            f"({', '.join(moved(meta))}): its numbers are void, run it again on a quiet machine"
        )
    for what, remark in REMARKS.items():
        said = [(row, remark(row)) for row in rows if remark(row)]
        for row, text in said[:_NAMED]:
            found.append(f"{label(row, names)}: {text}" if names else str(text))
        if said[_NAMED:]:
            found.append(f"{what}: {len(said) - _NAMED} rows more")
    sizes = sorted({row["axes"]["synthetic"] for row in rows if row["axes"].get("synthetic")})
    if sizes:
        found.append(f"synthetic: random weights ({', '.join(sizes)}), no answer means anything")
    lengths = sorted({str(_simulated(row)) for row in rows if _simulated(row)})
    if lengths:
        found.append(
            f"drafts were accepted by a seeded draw of mean length {', '.join(lengths)}, not by "
            "what they say"
        )
    return found


def moved(meta: Mapping[str, Any]) -> list[str]:
    """The ceilings that moved too far during the run, in words."""
    return [
        f"{_unit(name)} {percent(abs(after / before - 1))}"
        for name, before, after in ceilings(meta)
        if before and after and abs(after / before - 1) > MOVED
    ]


def ceilings(meta: Mapping[str, Any]) -> list[tuple[str, float | None, float | None]]:
    """Name, value before and value after the run of each measured ceiling."""
    known = meta.get("ceilings") or {}
    before, after = (known.get(when) or {} for when in ("before", "after"))
    return [
        (name, median(before.get(name)), median(after.get(name)))
        for name in dict.fromkeys([*before, *after])
        if median(before.get(name)) is not None or median(after.get(name)) is not None
    ]


# Cells -------------------------------------------------------------------------------------------


def _measured(name: str, size: float = 1.0) -> Cell:
    """Median and half of what lies between p5 and p95."""

    def cell(row: Row) -> str:
        middle = median(row.get(name))
        if middle is None:
            return "-"
        wide, text = sum(spread(row[name])) / 2, amount(middle / size)
        decimals = len(text.partition(".")[2])
        return text + (f" ±{wide / size:,.{decimals}f}" if wide else "")

    return cell


def _pair(name: str) -> Cell:
    """Planned and measured, one number where they agree."""

    def cell(row: Row) -> str:
        both = row.get(name) or {}
        planned, found = both.get("planned"), both.get("measured")
        if planned is None:
            return "-"
        if found is None:
            return f"{percent(planned)} planned"
        if abs(planned - found) < 5e-4:
            return percent(found)
        return f"{percent(found)} (planned {percent(planned)})"

    return cell


def _fraction(part: str = "") -> Cell:
    def cell(row: Row) -> str:
        share = row.get("ceiling_fraction")
        share = share.get(part) if part and isinstance(share, Mapping) else share
        if median(share) is None:
            return "-"
        wide = f"{sum(spread(share)) * 50:.1f}"
        return percent(median(share) or 0.0) + (f" ±{wide}" if float(wide) else "")

    return cell


def _number(name: str, text: Callable[[float], str]) -> Cell:
    def cell(row: Row) -> str:
        value = median(row.get(name))
        return "-" if value is None else text(value)

    return cell


def _positions(row: Row) -> str:
    shares = map(median, row.get("acceptance_by_position") or [])
    return " ".join("-" if share is None else f"{share:.0%}" for share in shares) or "-"


def _tokens(row: Row) -> str:
    counts = row.get("prompt_tokens") or {}
    names = ("cached", "computed", "replayed")
    return " / ".join(word(counts.get(name)) for name in names) if counts else "-"


def _state(row: Row) -> str:
    """One word or a few for what must not be overlooked."""
    found = [] if good(row) else [str(row.get("status"))]
    if row["axes"].get("synthetic"):
        found.append("synthetic")
    if _simulated(row):
        found.append("simulated")
    if good(row) and row.get("steady") is False:
        found.append("not steady")
    if row.get("outliers"):
        found.append(f"outliers {row['outliers']}")
    if _mixed(row):
        found.append("prefill in TPOT")
    if _windowless(row):
        found.append("no decode window")
    return ", ".join(found) or "ok"


SPEED: tuple[tuple[str, Cell], ...] = (
    ("TTFT ms", _measured("ttft_ms")),
    ("TPOT ms", _measured("tpot_ms")),
    ("decode tok/s", _measured("decode_tok_s")),
    ("output tok/s", _measured("output_tok_s")),
    ("output tok/s/card", _measured("output_tok_s_per_card")),
    ("prompt tok/s", _measured("prompt_tok_s")),
    ("prefill of ceiling", _fraction("prefill")),
    ("decode of ceiling", _fraction("decode")),
    ("row", _state),
)
WORK: tuple[tuple[str, Cell], ...] = (
    ("saved layer-rows", _pair("prefill_saved_rows")),
    ("saved FLOPs", _pair("prefill_saved_flops")),
    ("accepted length", _measured("accepted_length")),
    ("of uncut steps", _measured("accepted_length_uncut")),
    ("accepted", _number("acceptance_rate", percent)),
    ("by position", _positions),
    ("verified", _measured("verified_length")),
    ("prompt cached / computed / replayed", _tokens),
    ("KV MiB, ledger", _measured("kv_bytes", 2**20)),
    ("decode step ms", _measured("decode_step_ms")),
    ("host ms/step", _measured("host_ms_per_step")),
)
OPS: tuple[tuple[str, Cell], ...] = (
    ("time us", _measured("time_us")),
    ("GB/s", _measured("gb_per_s")),
    ("GFLOP/s", _measured("flop_per_s", 1e9)),
    ("of ceiling", _fraction()),
    ("row", _state),
)


def _table(rows: Sequence[Row], title: str, columns: Sequence[tuple[str, Cell]]) -> Table:
    """A line each row; columns without a single value are left out."""
    names = varying(rows)
    cells = [[cell(row) for _, cell in columns] for row in rows]
    used = [at for at in range(len(columns)) if any(line[at] != "-" for line in cells)]
    heads = [WORDS.get(name, name) for name in names] + [columns[at][0] for at in used]
    lines = [
        (*(word(row["axes"].get(name)) for name in names), *(line[at] for at in used))
        for row, line in zip(rows, cells, strict=True)
    ]
    shared = _shared(rows) if columns is not WORK else ""
    return tuple(heads), lines, f"{title}: {shared}" if shared else title


def _upright(rows: Sequence[Row], columns: Sequence[tuple[str, Cell]]) -> Table:
    """A line each measure, which is easier to read of one row, or of a few."""
    names = varying(rows)
    heads = ("measure", *((label(row, names) for row in rows) if names else ("value",)))
    lines = [(name, *(cell(row) for row in rows)) for name, cell in columns]
    lines = [line for line in lines if any(cell != "-" for cell in line[1:])]
    return heads, lines, _shared(rows)


def _shared(rows: Sequence[Row]) -> str:
    """The axes that say something and are alike in all rows."""
    axes = rows[0]["axes"]
    return label(rows[0], [n for n in axes if axes[n] is not None and values(rows, n) == 1])


def _unmeasured(row: Row) -> str | None:
    if good(row):
        return None
    error = row.get("error") or {}
    why = error.get("message") or error.get("code") or "nothing was measured"
    return f"{row.get('status')}: {why}"


def _outliers(row: Row) -> str | None:
    count = row.get("outliers")
    return count and (
        f"{count} samples are statistical outliers: something else may have used the machine, run "
        "again when it is quiet"
    )


def _unsteady(row: Row) -> str | None:
    ratio = row.get("self_ratio")
    if ratio is None or STEADY[0] <= ratio <= STEADY[1]:
        return None
    return (
        f"not steady: its repeats against themselves give {ratio:.3f} (0.98 to 1.02), compare it "
        "with nothing"
    )


def _differing(row: Row) -> str | None:
    if row.get("same_answers") is not False:
        return None
    return "its repeats gave different answers: they did not do the same work"


def _mixed(row: Row) -> str | None:
    if not row.get("prefill_in_tpot"):
        return None
    return (
        "TPOT has prompts of others in it, as not all fitted into one step; decode tok/s has none"
    )


def _windowless(row: Row) -> str | None:
    if not good(row) or median(row.get("tpot_ms")) is None or row.get("decode_tok_s", 1):
        return None
    why = (row.get("why") or {}).get("decode_tok_s", "no decode window")
    return f"{why}; longer answers make one, or --cached 100%"


REMARKS: dict[str, Callable[[Row], str | None]] = {
    "not measured": _unmeasured, "with outliers": _outliers, "not steady": _unsteady,
    "differing": _differing, "with prefill in TPOT": _mixed,
    "without a decode window": _windowless,
}  # fmt: skip


def _simulated(row: Row) -> float | None:
    return row["axes"].get("accepted_length")


# The report --------------------------------------------------------------------------------------

TERMS = """\
Numbers are medians of {repeats}; ± is half of what lies between the 5th and the 95th percentile.
TTFT: from submission to the first delivered token, queue included. TPOT: milliseconds a token \
between the first delivery and the last, prompts of others in its steps included.
Decode tok/s, decode step, decode of ceiling: from the last first token to the first finish, when \
all requests decode and no prompt runs.
Output tok/s counts generated tokens, prompt tok/s the prompt tokens that were computed and not \
those reused.
Saved: of all layers of the model, against every layer on every prompt token; FLOPs are \
FP8-equivalent.
Accepted length: tokens committed / target steps, bonus or corrected token included; of uncut \
steps: of those that had room for every draft, as the end of an answer cuts its last ones. By \
position: of these too. Accepted: accepted drafts / drafted.
KV: bytes that the cost model gives the requests at their full length; nothing was measured.
Of ceiling: the time that the measured copy bandwidth and matmul rate allow at best, over the \
time it took."""


def markdown(
    meta: Mapping[str, Any],
    rows: Sequence[Row],
    figures: Sequence[PurePath | str] = (),
    more: Sequence[Table] = (),
) -> str:
    """The run as a page: facts, ceilings, tables, pictures, remarks, terms.

    figures: pictures as paths relative to the page; other files are left out. more: tables behind
    the rows, such as of bars.
    """
    shown = list(dict.fromkeys(str(row["axes"].get("model", "?")) for row in rows))
    parts = [f"# Benchmark of {_escaped(', '.join(shown) or 'nothing')}\n", _facts(meta, rows)]
    known = ceilings(meta)
    if known:
        lines = [
            (_unit(name), *map(_maybe, (before, after)),
             percent(abs(after / before - 1)) if before and after else "-")
            for name, before, after in known
        ]  # fmt: skip
        heads = ("measured on this machine", "before", "after", "moved")
        parts += ["## Ceilings\n", _marked(heads, lines, "")]
    parts += ["## Results\n", *(_marked(*one) for one in (*tables(rows), *more))]
    remarks = notes(meta, rows)
    if remarks:
        parts.append("## Remarks\n")
        parts.append("".join(f"* {_escaped(line)}\n" for line in remarks))
    pictures = [PurePath(path).as_posix() for path in figures if str(path).endswith(".png")]
    if pictures:
        parts.append("## Pictures\n")
        parts += [f"![{PurePath(path).stem}]({path.replace(' ', '%20')})\n" for path in pictures]
    repeats = sorted({f"{row['repeats']} repeats" for row in rows if row.get("repeats")})
    terms = TERMS.format(repeats=" or ".join(repeats) or "the repeats").splitlines()
    parts += ["## Terms\n", "".join(f"* {line}\n" for line in terms)]
    return "\n".join(parts)


def _facts(meta: Mapping[str, Any], rows: Sequence[Row]) -> str:
    here = meta.get("environment") or {}
    cpu = here.get("cpu") or {}
    devices = [device.get("name", "?") for device in here.get("devices") or ()]
    commit = here.get("commit", "")[:12] + (" with local changes" if here.get("dirty") else "")
    chosen = [
        f"{name}={json.dumps(entry['value'], ensure_ascii=False)}"
        for name, entry in (meta.get("settings") or {}).items()
        if entry.get("source") not in ("default", "model", "device")
    ]
    measured = sum(map(good, rows))
    counts = f"{measured} measured" + (f", {len(rows) - measured} not" * (measured < len(rows)))
    facts = (
        ("when", meta.get("created")),
        ("command", " ".join(meta.get("command") or ())),
        ("deepinfer", " ".join(filter(None, (meta.get("deepinfer_version"), commit)))),
        ("device", ", ".join(devices)),
        ("cpu", f"{cpu['name']}, {cpu['cores']} cores" if cpu.get("name") else ""),
        ("torch", here.get("torch")),
        ("settings chosen", ", ".join(chosen)),
        ("rows", counts),
    )
    return "".join(f"* {name}: {_escaped(str(value))}\n" for name, value in facts if value)


def _unit(ceiling: str) -> str:
    """`copy_gb_per_s` as a reader writes it: `copy GB/s`."""
    name, _, rate = ceiling.removesuffix("_per_s").rpartition("_")
    return f"{name} {rate[0].upper() + rate[1:].replace('b', 'B').replace('flop', 'FLOP')}/s"


def _maybe(value: float | None) -> str:
    return "-" if value is None else amount(value)


# Text --------------------------------------------------------------------------------------------


def _aligned(heads: Sequence[str], lines: Sequence[Sequence[str]], title: str) -> str:
    """Columns padded with blanks, numbers to the right; never cut, whatever the width."""
    shown = [[_flat(cell) for cell in line] for line in (heads, *lines)]
    wide = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return _flat(title) + "\n" + "".join(
        "  ".join(cell.ljust(w) if not at else cell.rjust(w)
                  for at, (cell, w) in enumerate(zip(line, wide, strict=True))).rstrip() + "\n"
        for line in shown
    )  # fmt: skip


def _marked(heads: Sequence[str], lines: Sequence[Sequence[str]], title: str) -> str:
    rule = ["---", *("---:" for _ in heads[1:])]
    body = [[_escaped(cell) for cell in line] for line in (heads, *lines)]
    body.insert(1, rule)
    table = "".join(f"| {' | '.join(line)} |\n" for line in body)
    return (f"**{_escaped(title)}**\n\n" if title else "") + table


def _flat(text: str) -> str:
    return " ".join(text.split())


def _escaped(text: str) -> str:
    """As a cell of a Markdown table."""
    return _flat(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
