"""Axes, grids and the names of rows."""

import pytest

from deepinfer.bench.axes import AXES, combinations, parse, read_sweep, row_id, tokens_cached
from deepinfer.errors import UsageError


@pytest.mark.parametrize(
    ("name", "words", "values"),
    [
        ("swa_keep", "140,256,full", (140, 256, "full")),
        ("swa_keep", "140-148+4,full", (140, 144, 148, "full")),
        ("prompt_len", "1k-64k*2", (1024, 2048, 4096, 8192, 16384, 32768, 65536)),
        ("prompt_len", "1k-8191*2", (1024, 2048, 4096)),
        ("gen_len", "1-9+2", (1, 3, 5, 7, 9)),
        ("mtp", "0-5", (0, 1, 2, 3, 4, 5)),
        ("mtp", "0, 5,0", (0, 5)),
        ("batch_size", [1, "8"], (1, 8)),
        ("cached", "0,512,75%,100%", (0, 512, "75%", "100%")),
        ("mtp_varlen", "on,off", (True, False)),
        ("mtp_varlen", [True, False], (True, False)),
        ("replay_mode", "COMPACT,off", ("compact", "off")),
        ("backend", "auto,torch,moe=torch+linear=cpu",
         ("auto", "torch", "linear=cpu+moe=torch")),
        ("accelerator", "cpu", ("cpu",)),
        ("workload", "code,agent", ("code", "agent")),
    ],
)  # fmt: skip
def test_lists_and_ranges(name, words, values):
    assert parse(name, words) == values


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("prompt_len", "0"), ("prompt_len", "many"), ("prompt_len", "8k-1k"), ("gen_len", ""),
        ("gen_len", "1-9+0"), ("gen_len", "1-9*1"), ("mtp", "-1"), ("gen_len", "1-1m"),
        ("cached", "101%"), ("cached", "-1"), ("workload", "poems"), ("mtp_varlen", "maybe"),
        ("swa_keep", "140,,full"), ("verify", "both"), ("backend", "=torch"),
    ],
)  # fmt: skip
def test_a_bad_word_names_its_axis(name, words):
    with pytest.raises(UsageError) as caught:
        parse(name, words)
    assert caught.value.code == "bad-axis"
    assert AXES[name].flag in caught.value.message
    assert caught.value.facts and caught.value.hint


def test_every_combination_once_the_last_axis_fastest():
    grid = list(combinations({"mtp": (0, 5), "swa_keep": (140, "full"), "prompt_len": (8,)}))
    assert grid == [
        {"prompt_len": 8, "swa_keep": 140, "mtp": 0},
        {"prompt_len": 8, "swa_keep": 140, "mtp": 5},
        {"prompt_len": 8, "swa_keep": "full", "mtp": 0},
        {"prompt_len": 8, "swa_keep": "full", "mtp": 5},
    ]
    assert list(combinations({})) == [{}]


def test_a_row_is_named_by_its_axes_alone():
    one = row_id({"mtp": 5, "swa_keep": 140})
    assert one == row_id({"swa_keep": 140, "mtp": 5})
    assert len(one) == 16 and int(one, 16) >= 0
    assert one != row_id({"swa_keep": 140, "mtp": 4})
    assert one != row_id({"swa_keep": "140", "mtp": 5})


def test_a_share_of_the_prompt():
    assert tokens_cached("75%", 1000) == 750
    assert tokens_cached(2000, 1000) == 1000
    assert tokens_cached(0, 1000) == 0


def test_a_sweep_file(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text(
        'repeats = 3\n[[axes]]\nswa-keep = [140, 256, "full"]\nmtp = "0-1"\n'
        "[[axes]]\nmtp_varlen = [true, false]\n"
    )
    grids, rest = read_sweep(path)
    assert grids == [
        {"swa_keep": (140, 256, "full"), "mtp": (0, 1)},
        {"mtp_varlen": (True, False)},
    ]
    assert rest == {"repeats": 3}
    for text in ("mtp = ", "[axes]\nmpt = 5", ""):
        path.write_text(text)
        if text:
            with pytest.raises(UsageError, match="sweep|axis"):
                read_sweep(path)
    with pytest.raises(UsageError):
        read_sweep(tmp_path / "missing.toml")
