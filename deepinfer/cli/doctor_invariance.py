"""`deepinfer doctor --check-invariance`: the matrix of batch invariance on this machine.

Comes in: what the user chose. Goes out: a verdict in words, the first differing op and row if the
promise is broken, or the fields for JSON. What is compared, and how, is the engine's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepinfer.cli.output import Output
from deepinfer.settings import resolve

if TYPE_CHECKING:
    from deepinfer.engine.invariance import Cell, Report

__all__ = ["check", "show"]

# About a minute with the embedded model on two cores.
BATCHES, BUDGETS, CHUNKS = (1, 2, 3, 5, 8, 16, 64), (64, None), (29, None)
CELLS, PROMPTS, TOKENS = 12, 8, 5


def check(output: Output, chosen: Mapping[str, object], environ: Mapping[str, str]) -> Report:
    """Run a sample of the matrix; raises what an engine with these settings raises."""
    from deepinfer.engine import invariance
    from deepinfer.engine.engine import LLM

    settings = resolve({**invariance.SETTINGS, **chosen, "batch_invariant": True}, environ,
                       source="flag")  # fmt: skip

    def progress(cell: Cell, number: int, count: int) -> None:
        if not settings.no_progress:
            output.say(f"{number} of {count}: {cell}", "dim")

    with LLM.from_settings(settings, on_warning=output.warn) as llm:
        proof = invariance.Check(llm, invariance.subjects(llm, PROMPTS, TOKENS))
        matrix = proof.possible(invariance.Matrix(BATCHES, budgets=BUDGETS, chunks=CHUNKS))
        cells = matrix.sample(CELLS)
        return proof.run(cells, len(matrix.cells()), progress)


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
