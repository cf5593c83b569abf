"""`deepinfer doctor --check-invariance`: the matrix of batch invariance on this machine.

Comes in: what the user chose. Goes out: a verdict in words, the first differing op and row if the
promise is broken, or the fields for JSON. What is compared, and how, is the engine's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepinfer.cli.output import Output
from deepinfer.errors import UsageError
from deepinfer.settings import resolve

if TYPE_CHECKING:
    from deepinfer.engine.invariance import Cell, Report

__all__ = ["check", "show"]

# A minute or two with the embedded model on two cores.
BATCHES, BUDGETS, CHUNKS = (1, 2, 3, 5, 8, 16, 64), (64, None), (29, None)
CELLS, PROMPTS, TOKENS = 12, 8, 5


def check(
    output: Output, chosen: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[Report, dict[str, object]]:
    """Run a sample of the matrix; the settings that it ran with are returned too.

    Raises what an engine with these settings raises, and `UsageError` where the mode was switched
    off.
    """
    from deepinfer.engine import invariance
    from deepinfer.engine.engine import LLM

    asked = resolve(chosen, environ, source="flag")
    if asked.source("batch_invariant") == "flag" and not asked.batch_invariant:
        raise UsageError(
            "invariance-not-asked-for",
            "--check-invariance checks the batch-invariant mode, which was switched off",
            hint="leave batch_invariant out",
        )
    settings = resolve({**invariance.SETTINGS, **chosen, "batch_invariant": True}, environ,
                       source="flag")  # fmt: skip
    shown, done = not settings.no_progress, 0

    def progress(cell: Cell, number: int, count: int) -> None:
        nonlocal done
        done = number - 1
        if shown:
            output.say(f"{number} of {count}: {cell}", "dim")

    try:
        with LLM.from_settings(settings, on_warning=output.warn) as llm:
            proof = invariance.Check(llm, invariance.subjects(llm, PROMPTS, TOKENS))
            matrix = proof.possible(invariance.Matrix(BATCHES, budgets=BUDGETS, chunks=CHUNKS))
            cells = matrix.sample(CELLS)
            if shown:
                output.say(f"{PROMPTS} prompts alone, then {len(cells)} compositions", "dim")
            report = proof.run(cells, len(matrix.cells()), progress)
            return report, dict(llm.parts.settings)
    except KeyboardInterrupt:
        output.note(f"stopped after {done} of {CELLS} compositions")
        raise


def show(output: Output, report: Report) -> None:
    """The verdict on stdout, and each failure below it."""
    tried = (
        f"{report.cells} of {report.of} compositions, {report.requests} requests, "
        f"{report.resumed} resumed from kept state, {report.accepted} drafts accepted"
    )
    if report.invariant:
        output.data(f"batch invariance kept: {tried}")
        return
    output.data(f"batch invariance broken in {len(report.failures)} of {tried}")
    for failure in report.failures:
        output.data(str(failure))
