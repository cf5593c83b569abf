"""What `benchmarks/kill_resume.py` would see: planted faults, one at a time."""

import json

import pytest

from benchmarks.kill_resume import differs, ended
from deepinfer.bench.files import Folder
from deepinfer.report.bench import csv
from tests import benched


@pytest.fixture
def rows():
    def made(**more):
        found = benched.sweep()[:3]
        for at, row in enumerate(found):
            row |= {"prompt_digest": f"p{at}", "answers": [f"a{at}"], "output_tokens": 4}
        found[1] |= more
        return found

    return made


def test_alike_whatever_was_timed(rows):
    assert differs(rows(), rows(ttft_ms=None, samples={})[::-1]) == []


@pytest.mark.parametrize(
    "fault", [{"answers": ["other"]}, {"prompt_digest": "x"}, {"row_id": "0" * 16},
              {"output_tokens": 3}, {"status": "failed"}],
)  # fmt: skip
def test_other_rows_are_seen(rows, fault):
    assert f"{next(iter(fault))} differs" in differs(rows(), rows(**fault))


def test_repeats_that_answered_otherwise_are_seen(rows):
    two = rows(answers=["a1", "a2"])
    assert differs(two, two) == ["repeats differ"]


def test_a_run_that_ended_badly_is_seen(rows, tmp_path):
    folder = Folder(tmp_path, csv)
    for row in rows():
        folder.add_row(row)
    said = json.dumps({"rows": rows()}).encode()
    assert ended(0, said, tmp_path) == []
    assert ended(2, b"", tmp_path) == ["exit 2"]
    other = json.dumps({"rows": rows(output_tokens=9)}).encode()
    assert ended(0, other, tmp_path) == ["the document has other rows"]
    table = (tmp_path / "summary.csv").read_text()
    (tmp_path / "summary.csv").write_text(table.rsplit("\n", 2)[0] + "\n")
    (tmp_path / "samples.jsonl").touch()
    assert [word.split()[0] for word in ended(0, said, tmp_path)] == ["summary.csv", "single"]
    folder.add_row(rows()[0])
    assert ended(0, said, tmp_path)[0] == "a row is there twice"
