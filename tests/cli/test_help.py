"""Help pages at 80 and 120 columns: nothing cut, nothing eaten, every option explained."""

import re

import pytest

from deepinfer.settings.registry import SETTINGS

COMMANDS = ("run", "bench", "replay-inspect", "spec-trace", "build", "doctor")
PAGES = [(), *((c, "--help") for c in COMMANDS), *((c, "--help-all") for c in COMMANDS)]


def words(page):
    """The text of a page without boxes, wrapped lines joined."""
    return " ".join(re.sub(r"[^\x20-\x7e\u2022]", " ", page).split())


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("args", PAGES, ids=" ".join)
def test_no_page_is_cut(child, args, columns):
    done = child(*args, env={"COLUMNS": str(columns)})
    assert done.status == 0 and done.err == ""
    assert max(len(line) for line in done.out.splitlines()) <= columns
    assert "\u2026" not in done.out, "a cell was cut"


@pytest.mark.parametrize("columns", [80, 120])
def test_every_setting_is_on_the_full_page_of_run(child, columns):
    page = child("run", "--help-all", env={"COLUMNS": str(columns)}).out
    for setting in SETTINGS:
        if setting.used and setting.flag:
            shown = setting.flag
            if setting.kind.name == "switch" and setting.attribute != "no_progress":
                shown = f"--[no-]{setting.flag[2:]}"
            assert shown in page, setting.flag
            assert setting.variable is None or setting.variable in page
            assert setting.doc.split(";")[0].split(":")[0] in words(page), setting.flag


def test_short_page_fits_two_screens_and_names_the_essentials(child):
    page = child("run", "--help", env={"COLUMNS": "80"}).out
    assert len(page.splitlines()) <= 60
    assert len(re.findall(r"^\u2502 --", page, re.MULTILINE)) <= 18
    for option in ("--model-dir", "--max-tokens", "--temperature", "--seed", "--json"):
        assert option in page
    assert page.index("Input") < page.index("Model") < page.index("Sampling")
    assert page.index("Sampling") < page.index("Device") < page.index("Output")


def test_brackets_survive(child):
    assert "such as [/INST]; repeatable" in words(child("run", "--help").out)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ends_with_three_examples(child, command):
    page = child(command, "--help").out
    assert page.count(f"\u2022 deepinfer {command}") + page.count(f"| deepinfer {command}") >= 3


def test_version(child):
    import deepinfer

    done = child("--version")
    assert (done.status, done.out) == (0, f"deepinfer {deepinfer.__version__}\n")


def test_ascii_terminals_get_ascii_boxes(child):
    env = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = child("run", "--help", env=env)
    assert done.status == 0 and done.out.isascii()
    assert "--max-tokens" in done.out


def test_absent_commands_are_absent(child):
    for name in ("eval", "serve"):
        done = child(name)
        assert done.status == 2 and f"No such command '{name}'" in done.err
