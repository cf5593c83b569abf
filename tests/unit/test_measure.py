"""The arithmetic of the measuring scripts, and what they say when the peer is missing."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import measure


def test_interleaved_runs_alternate_after_one_warm_up_each():
    order = []

    def side(name):
        order.append(name)
        return float(len(order))

    got = measure.interleave({"a": lambda: side("a"), "b": lambda: side("b")}, 3)
    assert "".join(order) == "abababab"
    assert got == {"a": [3.0, 5.0, 7.0], "b": [4.0, 6.0, 8.0]}


def test_quantiles_and_ratios():
    assert measure.quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert measure.quantile([7.0], 0.95) == 7.0
    entry = measure.record("b", [10.0, 10.1, 9.9], "t/s", peer="p", peer_samples=[4.0, 5.0, 6.0])
    assert (entry["value"], entry["peer_value"], entry["ratio"]) == (10.0, 5.0, 2.0)
    assert entry["steady"] is False or 0.98 <= entry["self_ratio"] <= 1.02
    assert measure.record("b", [1.0, 2.0, 1.0, 2.0], "s")["steady"] is False
    assert json.loads(json.dumps(entry)) == entry


def test_tables_put_numbers_to_the_right(capsys):
    measure.table(("what", "ms"), [("a", 1.5), ("long", 1234.5), ("none", None)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| a    |    1.50 |" and lines[3] == "| long | 1,234.5 |"
    assert lines[1].endswith(":|") and len({len(line) for line in lines[:5]}) == 1


@pytest.mark.skipif(importlib.util.find_spec("transformers") is not None, reason="peer is here")
def test_without_the_peer():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.decode_vs_transformers"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 3 and "pip install transformers" in done.stderr
