"""DI-49: the files of a sweep, cut and damaged in every place."""

import json
import os
import subprocess
import sys

import pandas
import pytest

from deepinfer.bench import files
from deepinfer.bench.axes import row_id
from deepinfer.errors import UsageError
from deepinfer.report.bench import csv


def row(status="ok", **axes):
    axes = {"mtp": 5, "workload": "code", **axes}
    return {
        "schema": files.ROW, "row_id": row_id(axes), "kind": "e2e", "axes": axes,
        "ttft_ms": {"median": 1.5, "p5": 1.0, "p95": 2.0, "n": 5}, "tpot_ms": None,
        "why": {"tpot_ms": "one delivery"}, "samples": {"ttft_ms": [1.0, 2.0]}, "status": status,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    made = files.Folder(tmp_path / "a" / "b", csv)
    with made.held(False):
        yield made


def again(folder):
    said = []
    fresh = files.Folder(folder.path, csv)
    fresh.load(said.append)
    return fresh, said


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.path.iterdir()}


def test_what_is_written_is_read(folder):
    folder.write_meta({"fingerprint": {"code": "f"}, "grid": {}})
    rows = [row(swa_keep=140), row(swa_keep="full")]
    for one in rows:
        folder.add_row(one)
    folder.add_sample("x", 0, {"ttft_ms": 1.0})
    fresh, said = again(folder)
    assert (list(fresh.rows.values()), said) == (rows, [])
    assert fresh.meta()["fingerprint"] == {"code": "f"}
    assert fresh.samples == {"x": {0: {"ttft_ms": 1.0}}}


def test_a_file_cut_at_any_byte_loses_the_running_row_only(folder):
    rows = [row(swa_keep=140), row(swa_keep=256), row(swa_keep="full")]
    for one in rows:
        folder.add_row(one)
    path = folder.path / "rows.jsonl"
    whole = path.read_bytes()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        fresh, said = again(folder)
        count = whole[:cut].count(b"\n")
        assert list(fresh.rows.values()) == rows[:count]
        half = cut > 0 and not whole[:cut].endswith(b"\n")
        assert bool(said) == half
        for one in rows[count:]:
            fresh.add_row(one)
        assert path.read_bytes() == whole


def test_damaged_failed_repeated_and_foreign_rows_are_run_again(folder):
    good, failed, other = row(swa_keep=140), row("failed", swa_keep=256), row(swa_keep="full")
    wrong = {**other, "row_id": good["row_id"][::-1]}
    nan = json.dumps(other).replace("1.5", "NaN")
    lines = [json.dumps(good), "{", json.dumps(failed), json.dumps(good), json.dumps(wrong), nan,
             '{"schema": "other/1"}', "[]", '"\udc80"', "\x00\xff"]  # fmt: skip
    text = "\n".join(lines) + "\n"
    (folder.path / "rows.jsonl").write_text(text, errors="surrogateescape", encoding="latin-1")
    fresh, said = again(folder)
    assert list(fresh.rows.values()) == [good]
    assert len(said) >= 6
    assert (folder.path / "rows.jsonl").read_text() == json.dumps(good) + "\n"


def test_a_folder_in_which_no_run_began_has_nothing_to_go_on_with(folder):
    assert folder.meta() is None


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"fingerprint": 1}', "\udcff"])
def test_rows_that_nothing_explains_are_refused_and_kept(folder, text):
    folder.add_row(row())
    folder.add_sample("x", 0, {})
    (folder.path / "rows.jsonl").open("a").write("half")
    if text is not None:
        (folder.path / "meta.json").write_text(text, errors="surrogateescape")
    before = contents(folder)
    with pytest.raises(UsageError) as caught:
        folder.meta()
    assert caught.value.code == "resume-mismatch" and "meta.json" in caught.value.message
    assert "rows.jsonl and samples.jsonl" in caught.value.facts[0] and "--out" in caught.value.hint
    assert contents(folder) == before


HOLD = """
import sys, pathlib
from deepinfer.bench.files import Folder
with Folder(pathlib.Path(sys.argv[1]), str).held(True):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("resume", [False, True])
def test_one_run_at_a_time_until_it_is_killed(tmp_path, resume):
    folder = files.Folder(tmp_path / "out", csv)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UsageError) as caught, folder.held(resume):
            pass
        assert caught.value.code == "output-in-use" and str(folder.path) in caught.value.message
    finally:
        other.kill()
        other.communicate()
    with folder.held(resume):
        folder.add_row(row())
    assert sorted(contents(folder)) == ["rows.jsonl", "summary.csv"], "nothing of the lock is left"


def test_results_are_not_written_over(folder):
    folder.refuse(False)
    folder.add_row(row())
    folder.refuse(True)
    with pytest.raises(UsageError) as caught:
        folder.refuse(False)
    assert caught.value.code == "output-exists"


def test_csv_reads_back_with_commas_quotes_and_other_alphabets(folder):
    folder.add_row(row(workload='a, "b"\n中文'))
    folder.add_row(row(swa_keep="full"))
    table = pandas.read_csv(folder.path / "summary.csv")
    assert table["axes.workload"].tolist() == ['a, "b"\n中文', "code"]
    assert table["ttft_ms.median"].tolist() == [1.5, 1.5]
    assert not any(name.startswith("samples") for name in table.columns)


def test_a_kill_while_replacing_leaves_the_old_file(folder, monkeypatch):
    folder.write_meta({"fingerprint": "old"})
    folder.add_row(row(swa_keep=140))
    before = contents(folder)
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        folder.write_meta({"fingerprint": "new"})
    with pytest.raises(KeyboardInterrupt):
        folder.add_row(row(swa_keep="full"))
    for name in ("meta.json", "summary.csv"):
        assert (folder.path / name).read_bytes() == before[name]


def test_no_number_that_json_does_not_have(folder):
    with pytest.raises(ValueError):
        folder.add_row(row() | {"ttft_ms": {"median": float("nan")}})


def test_a_folder_that_cannot_be_written_is_an_error_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as caught, files.Folder(tmp_path / "file" / "x", csv).held(True):
        pass
    assert caught.value.code == "out-not-written"


def test_a_name_that_is_taken_gets_a_number(tmp_path, monkeypatch):
    from datetime import date

    monkeypatch.chdir(tmp_path)
    day = date(2026, 3, 1)
    names = []
    for _ in range(3):
        made = files.Folder.named("embedded", csv, day)
        made.path.mkdir()
        names.append(made.path.name)
    assert names == [f"bench-2026-03-01-embedded{end}" for end in ("", "-2", "-3")]
