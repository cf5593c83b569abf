"""A bar with the time that is left.

Comes in: how much is done of how much. Goes out: a bar on stderr, on a terminal only. It must not
know what is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deepinfer.cli.output import Output

__all__ = ["progress"]


@contextmanager
def progress(output: Output, silent: bool) -> Iterator[Callable[[int, int, str], None]]:
    """A function of (done, count, what)."""
    if silent or output.mode not in ("human", "plain") or not output.err.isatty():
        yield lambda done, count, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        Remaining(), console=Console(file=output.err), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=None)

        def show(done: int, count: int, what: str) -> None:
            bar.update(task, completed=done, total=count, description=what)

        yield show
