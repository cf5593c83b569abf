"""`bench compare A B` behind the command's options, on rows made up in `tests/benched.py`."""

import json

import pytest

from deepinfer.cli.bench_compare import run
from deepinfer.cli.output import Output
from deepinfer.errors import UsageError
from deepinfer.settings.resolve import resolve
from tests import benched


@pytest.fixture
def two(tmp_path):
    """Folders of which the second is faster by a fifth, its last line half-written."""
    a = benched.save(tmp_path / "a", benched.sweep())
    b = benched.save(tmp_path / "b", benched.sweep(seed=1, speed=1.2))
    with (b / "rows.jsonl").open("a") as file:
        file.write('{"schema": "deepinfer.ben')
    return str(a), str(b)


def compare(*names, **modes):
    return run(Output(**modes), names, resolve({}, {}).as_json())


def test_a_table_and_what_differs(two, capsys):
    assert compare(*two) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == 25 and lines[0].startswith("row\toutput tok/s B/A")
    assert all(line.count("\t") == 5 for line in lines) and "[1." in lines[1]
    assert "rows.jsonl: 1 damaged lines" in err


def test_the_document(two, capsys, valid):
    assert compare(*two, json_mode=True) == 0
    out = capsys.readouterr().out
    found = valid("bench-compare", json.loads(out))
    assert len(found["rows"]) == 24 and str(two[0]) not in out


def test_quiet_gives_ratios_alone(two, capsys):
    assert compare(*two, quiet=True) == 0
    out, err = capsys.readouterr()
    assert err == "" and len(out.splitlines()) == 24
    assert all(0.9 < float(cell) < 1.6 for line in out.splitlines() for cell in line.split("\t"))


@pytest.mark.parametrize(
    "args",
    [("--format", "md"), ("--out", "o"), ("--report",), ("--mtp", "5"), ("-r", "3"), ("-m", "x"),
     ("--dry-run",), ("--no-plot",), ("--resume",), ("--max-num-batched-tokens", "9")],
)  # fmt: skip
def test_options_that_say_how_to_measure_are_refused(cli, two, args):
    done = cli("bench", "compare", *two, *args, "--json")
    assert done.status == 2
    error = json.loads(done.out)["error"]
    assert error["code"] == "bad-usage" and len(error["hint"]) > 3
    assert error["message"].split()[-1].startswith("--"), error["message"]


def test_options_that_say_how_to_show_are_not(cli, two):
    done = cli("bench", "compare", *two, "--color", "never", "-v")
    assert done.status == 0 and "output tok/s B/A" in done.out


@pytest.mark.parametrize("names", [(), ("a",), ("a", "b", "c")])
def test_two_folders_are_needed(names):
    with pytest.raises(UsageError, match="takes two"):
        compare(*names)


def test_a_folder_that_is_missing_is_named(two):
    with pytest.raises(UsageError) as caught:
        compare(two[0], two[1] + "x")
    assert caught.value.code == "bench-missing"
