"""`deepinfer bench compare A B`: the second run against the first, row by row.

Two result folders come in; a table or a document goes out. It must not know how a ratio is made:
`report/bench_compare.py` does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer.cli.output import Output
from deepinfer.errors import UsageError

__all__ = ["run"]


def run(output: Output, names: Sequence[str], settings: Mapping[str, Any]) -> int:
    """Print the comparison of two folders (or files of rows); exit 0, whatever it says.

    settings: those of this command, as a document holds them.
    Raises UsageError where there are not two, one has no rows, or the rows are unlike.
    """
    if len(names) != 2:
        raise UsageError(
            "bad-usage", f"compare takes two result folders, got {len(names)}",
            hint="deepinfer bench compare A B",
        )  # fmt: skip
    from deepinfer.report import bench_compare

    found = bench_compare.compare(Path(names[0]), Path(names[1]))
    for line in found["warnings"]:
        output.warn(line)
    if output.mode == "json":
        from deepinfer.device.detect import find
        from deepinfer.report import records

        here = find(query=False)
        head = records.document("deepinfer.bench.compare/1", sys.argv[1:], settings, here)
        output.document({**head, **found})
        return 0
    if output.mode == "quiet":
        for row in found["rows"]:
            output.data("\t".join(f"{ratio['ratio']:.4f}" for ratio in row["ratios"].values()))
        return 0
    output.table(*bench_compare.table(found))
    for line in found["differs"]:
        output.note(f"differs: {line}", "dim")
    if found["failed"]:
        output.warn(f"{found['failed']} rows were not measured on both sides")
    return 0
