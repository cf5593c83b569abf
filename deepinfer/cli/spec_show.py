"""What `spec-trace` prints for people and pipes: one view, the fit, the difference a check found.

Comes in: a `Trace` and what was added up of it. Goes out: lines through `Output`. It must not know
how a number is made, nor what a view looks like: `report/trace_views.py` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepinfer.cli.output import Output
from deepinfer.errors import DeepinferError
from deepinfer.report import trace_views
from deepinfer.speculative.reschedule import Choice
from deepinfer.speculative.trace import Trace

if TYPE_CHECKING:
    from deepinfer.speculative.acceptance import Calibration

__all__ = ["calibration", "difference", "view"]


def view(
    output: Output, trace: Trace, sums: dict[str, Any], choices: list[Choice], name: str | None,
    coloured: bool,
) -> None:  # fmt: skip
    """One view, by its name; -q: the accepted length."""
    if output.mode == "quiet":
        length = sums["accepted_length"]
        output.data("nan" if length is None else f"{length:.4f}")
        return
    plain = (getattr(output.out, "encoding", None) or "utf-8").lower() not in ("utf-8", "utf8")

    def lines(text: list[str]) -> None:
        for line in text:
            output.data(trace_views.ascii_only(line) if plain else line)

    if not sums["steps"] and not trace.cut and name != "summary":
        output.say("no step decoded with drafts: a first token comes with its prompt", "dim")
    name = name or ("inline" if len(trace.sequences) == 1 else "summary")
    if name == "inline":
        if not coloured:
            output.say(trace_views.LEGEND, "dim")
        lines(trace_views.inline(trace, coloured))
        if sums["steps"]:
            output.say(f"accepted length {sums['accepted_length']:.2f} = {trace_views.FORMULA} "
                       f"({sums['tokens']:,} / {sums['steps']:,})", "dim")  # fmt: skip
    elif name == "steps" and output.mode == "human":
        lines(trace_views.step_blocks(trace, coloured, choices))
    elif name == "steps":
        output.table(*trace_views.step_rows(trace, choices))
    else:
        lines(trace_views.sums(sums, trace_views.shown(trace.header["model"]["name"])))
        if sums["by_position"]:
            output.data("")
            if output.mode == "human":
                lines(trace_views.aligned(trace_views.positions(sums)))
            else:
                output.table(*trace_views.positions(sums))


def calibration(output: Output, fitted: Calibration) -> None:
    """What the temperatures change, by position."""
    if output.mode == "quiet":
        return
    rows = [
        (str(at + 1), f"{count:,}", f"{before * 100:.2f} %", f"{after * 100:.2f} %", f"{t:.3f}")
        for at, (count, before, after, t) in enumerate(
            zip(fitted.counts, fitted.before, fitted.after, fitted.temperatures, strict=True)
        )
    ]
    before, after = fitted.ece
    rows.append(("all", f"{sum(fitted.counts):,}", f"{before * 100:.2f} %", f"{after * 100:.2f} %",
                 ""))  # fmt: skip
    output.data("")
    if before == after:
        output.say("no temperatures were found truer: those of the trace stay", "dim")
    output.table(("position", "drafts", "ECE before", "ECE after", "temperature"), rows)


def difference(output: Output, trace: Trace) -> None:
    """Where the ids part from those without speculation, as an error."""
    found = trace.header.get("difference", {})
    facts = (
        [f"prompt {found['seq'] + 1}, token {found['token'] + 1} of the answer"] if found else []
    )
    for name, words in (("with_drafts", "with drafts"), ("without", "without")):
        token = found.get(name)
        what = f'id {token["token_id"]} "{token["text"]}"' if token else "the answer had ended"
        facts.append(f"{words}: {what}")
    output.error(
        DeepinferError("not-lossless", "the ids differ from those without speculation", facts,
                       "deepinfer doctor --bundle report.txt, and open an issue with it")
    )  # fmt: skip
