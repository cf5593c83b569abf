"""Tables, pictures, page and comparison of bench, on rows made up in `tests/benched.py`."""

import csv
import io
import json
import random

import pytest

from deepinfer.errors import UsageError
from deepinfer.report import bench, bench_bars, bench_compare, bench_plots, bench_rows
from tests import benched


def read_csv(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


# rows and files


def test_the_last_row_of_an_axis_counts_and_half_lines_are_dropped(tmp_path):
    rows = [benched.row(mtp=0), benched.row(mtp=5), benched.row(mtp=5, seed=1)]
    folder = benched.save(tmp_path / "a", rows)
    whole = (folder / "rows.jsonl").read_bytes()
    for cut in (1, 2, 300, 900):
        (folder / "rows.jsonl").write_bytes(whole[:-cut])
        found = bench_rows.read(folder)
        assert list(found.rows) == [rows[0], rows[2] if cut == 1 else rows[1]]
        assert len(found.warnings) == (cut > 1) and found.meta == benched.meta()
    (folder / "rows.jsonl").write_bytes(b'\x00\x01\n{"schema": NaN}\n[]\n' + whole)
    assert len(bench_rows.read(folder / "rows.jsonl").rows) == 2


def test_a_document_is_read_like_its_folder(tmp_path):
    rows = [benched.row(mtp=mtp) for mtp in (0, 5)]
    (tmp_path / "d.json").write_text(json.dumps({"meta": benched.meta(), "rows": rows}))
    found = bench_rows.read(tmp_path / "d.json")
    assert list(found.rows) == rows and found.meta == benched.meta() and not found.warnings
    # `bench --json` has what is known of the machine beside its `meta`.
    other = {"environment": {"torch": "9.9"}, "meta": {"model": "x"}, "rows": rows}
    (tmp_path / "o.json").write_text(json.dumps(other))
    differs = bench_compare.compare(tmp_path / "d.json", tmp_path / "o.json")["differs"]
    assert any(line.startswith("torch:") and line.endswith("9.9") for line in differs)


@pytest.mark.parametrize("text", [None, "", "{}\n", "not json", "[1, 2]", '{"rows": [{}]}'])
def test_what_has_no_rows_is_refused_by_name(tmp_path, text):
    folder = tmp_path / "a"
    folder.mkdir()
    if text is not None:
        (folder / "rows.jsonl").write_text(text)
    with pytest.raises(UsageError) as caught:
        bench_rows.read(folder)
    assert caught.value.code == ("bench-missing" if text is None else "bench-invalid")
    assert caught.value.hint


# tables


def test_one_row_stands_upright_and_says_all_that_was_measured():
    (heads, lines, title), *more = bench.tables([benched.row()])
    assert not more and heads == ("measure", "value") and "keep 140" in title and "mtp 5" in title
    assert [name for name, _ in lines] == [name for name, _ in bench.SPEED + bench.WORK]
    told = dict(lines)
    assert "±" in told["TTFT ms"] and told["saved layer-rows"] == "43.0 %"
    assert told["by position"] == "80% 56% 39% 27% 19%" and told["row"] == "ok"


def test_many_rows_have_columns_for_the_axes_that_differ():
    speed, work = bench.tables(benched.sweep())
    assert speed[0][:3] == work[0][:3] == ("batch", "keep", "mtp")
    assert len(speed[1]) == len(work[1]) == 24 and "prompt 1,024" in speed[2]
    assert all(len(line) == len(speed[0]) for line in speed[1])
    (ops,) = bench.tables(benched.ops())
    assert ops[0][:3] == ("op", "backend", "rows") and len(ops[1]) == 24


def test_axes_that_another_one_decides_are_no_columns():
    rows = [
        benched.row(swa_keep=keep, replay_mode="off" if keep == "full" else "compact", mtp=mtp,
                    verify="coupled" if mtp else None)
        for keep in (140, "full") for mtp in (0, 5)
    ]  # fmt: skip
    heads, _, title = bench.tables(rows)[0]
    assert heads[:3] == ("keep", "mtp", "TTFT ms")
    assert ", mode " not in title and "verify" not in title
    masked = [*rows, benched.row(replay_mode="mask")]
    assert bench_rows.varying(masked) == ["swa_keep", "replay_mode", "mtp"]


def test_what_is_missing_is_a_dash_and_never_a_zero():
    row = benched.row(mtp=0)
    row |= {"tpot_ms": None, "ceiling_fraction": None, "kv_bytes": None, "decode_tok_s": None}
    row["why"] = {"tpot_ms": "one", "decode_tok_s": "one"}
    for rows in ([row], [row, *benched.sweep()]):
        text = bench.table(rows)
        assert "None" not in text and "nan" not in text
    assert "TPOT ms" not in bench.table([row])
    assert [line for line in bench.tables([row, *benched.sweep()])[0][1]][0].count("-") == 4


def test_saving_tells_a_plan_that_was_not_what_happened():
    row = benched.row()
    row["prefill_saved_flops"] = {"planned": 0.43, "measured": 0.40}
    row["prefill_saved_rows"] = {"planned": 0.43}
    told = dict(bench.tables([row])[0][1])
    assert told["saved FLOPs"] == "40.0 % (planned 43.0 %)"
    assert told["saved layer-rows"] == "43.0 % planned"


ODD = 'a,"b"|\n中文 <x>'


def test_every_format_survives_odd_labels():
    rows = [benched.row(workload=ODD, mtp=mtp) for mtp in (0, 1, 3, 5)]
    back = list(csv.DictReader(io.StringIO(bench.table(rows, "csv"))))
    assert [line["axes.workload"] for line in back] == [ODD] * 4
    assert float(back[1]["ttft_ms.median"]) == rows[1]["ttft_ms"]["median"]
    assert not any(name.startswith("samples") for name in back[0])
    assert json.loads(bench.table(rows, "json")) == rows
    assert [json.loads(line) for line in bench.table(rows, "jsonl").splitlines()] == rows
    lines = [line for line in bench.table(rows, "md").splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines[:6]} == {lines[0].count("|")}
    text = bench.table(rows)
    assert "\n中文" not in text and "中文" in text and len(text.splitlines()) == 13


def test_no_number_that_is_none_is_written():
    row = benched.row() | {"self_ratio": float("nan")}
    for format in ("json", "jsonl"):
        with pytest.raises(ValueError):
            bench.table([row], format)


# remarks


def test_prefill_in_tpot_and_a_missing_window_are_told():
    rows = benched.sweep()
    rows[0] |= {"prefill_in_tpot": True}
    rows[1] |= {"decode_tok_s": None, "why": {"decode_tok_s": "no decode window: fewer than 4"}}
    found = bench.notes(benched.meta(), rows)
    assert "TPOT has prompts of others in it" in found[0]
    assert "no decode window: fewer than 4; longer answers" in found[1] and len(found) == 2
    told = [line[-1] for line in bench.tables(rows)[0][1]]
    assert told[:3] == ["prefill in TPOT", "no decode window", "ok"]


def test_remarks_name_what_spoils_a_row():
    rows = benched.sweep()
    assert bench.notes(benched.meta(), rows) == []
    assert any("moved" in line for line in bench.notes(benched.meta(moved=-0.05), rows))
    rows[0]["outliers"] = 2
    rows[1] |= {"self_ratio": 1.06, "steady": False}
    rows[2] |= {"status": "failed", "error": {"code": "kv-too-small", "message": "does not fit"}}
    rows[3] |= {"status": "empty"}
    found = bench.notes({}, rows)
    assert len(found) == 4 and "batch 1, keep 140, mtp 0: 2 samples are stat" in found[2]
    assert "does not fit" in found[0] and "empty" in found[1] and "1.060" in found[3]
    told = [line[-1] for line in bench.tables(rows)[0][1]]
    assert told[:5] == ["outliers 2", "not steady", "failed", "empty", "ok"]
    for row in rows[4:]:
        row |= {"self_ratio": 0.9, "steady": False}
    assert bench.notes({}, rows)[-1] == "not steady: 18 rows more"
    alone = bench.notes({}, [rows[1]])
    assert alone[0].startswith("not steady: its repeats")


def test_every_row_says_that_it_is_synthetic():
    rows = [benched.row(synthetic="flash-slice:1+1", mtp=n, accepted_length=3.51) for n in range(5)]
    assert {line[-1] for line in bench.tables(rows)[0][1]} == {"synthetic, simulated"}
    assert dict(bench.tables(rows[:1])[0][1])["row"] == "synthetic, simulated"
    said = "\n".join(bench.notes({}, rows))
    assert "flash-slice:1+1" in said and "mean length 3.51" in said


def test_the_page_holds_facts_ceilings_tables_pictures_and_terms():
    rows = benched.sweep()
    files = ["figures/decode pareto.png", "figures/decode.csv"]
    text = bench.markdown(benched.meta(), rows, files)
    assert text.startswith("# Benchmark of embedded\n")
    for part in (
        "deepinfer bench --mtp 0,5", "0123456789ab", "A processor, 2 cores", "| copy GB/s |",
        "![decode pareto](figures/decode%20pareto.png)", "medians of 5 repeats",
        "DEEPINFER_USE_NEXTN_DECODE=5", "24 measured", "tokens committed / target steps",
    ):  # fmt: skip
        assert part in text, part
    assert "DEEPINFER_LOG" not in text and "decode.csv" not in text and "Remarks" not in text
    assert "## Remarks" in bench.markdown(benched.meta(0.05), rows)
    assert bench.markdown({}, [rows[0] | {"status": "failed"}]).count("0 measured, 1 not") == 1


# pictures


def test_every_picture_has_its_table(tmp_path):
    files = bench_plots.write(benched.meta(), benched.sweep() + benched.ops(), tmp_path / "figures")
    names = {file.name for file in files}
    assert names == {
        f"{name}.{end}" for end in ("png", "csv")
        for name in ("prefill-pareto", "decode-pareto", "speedup-keep-mtp", "ops-roofline")
    }  # fmt: skip
    assert all(file.stat().st_size for file in files)
    decode = read_csv(tmp_path / "figures" / "decode-pareto.csv")
    assert len(decode) == 24 and len({line["curve"] for line in decode}) == 12
    row = next(r for r in benched.sweep() if r["axes"]["batch_size"] == 8)
    line = next(x for x in decode if x["curve"] == "keep 140, mtp 0" and x["batch_size"] == "8")
    assert float(line["user_tok_s_median"]) == row["decode_tok_s"]["median"] / 8
    assert float(line["user_tok_s_p5"]) < float(line["user_tok_s_median"])
    share = row["ceiling_fraction"]["decode"]["median"]
    best = row["decode_tok_s"]["median"] / share
    assert float(line["ceiling_y"]) == pytest.approx(best)
    matrix = read_csv(tmp_path / "figures" / "speedup-keep-mtp.csv")
    framed = [x for x in matrix if (x["swa_keep"], x["mtp"]) == ("full", "0")]
    assert [float(x["speedup"]) for x in framed] == [1.0, 1.0] and len(matrix) == 24


def own_texts():
    """Changes of a row about prompts of a user, which are as long as they are."""
    return {"axes": {**benched.row()["axes"], "prompt_len": None}}


def test_depth_is_drawn_where_lengths_differ(tmp_path):
    rows = [benched.row(prompt_len=n, mtp=m) for n in (1024, 4096, 16384) for m in (0, 5)]
    rows[0] |= {"decode_tok_s": None}
    bench_plots.write({}, [*rows, benched.row() | own_texts()], tmp_path)
    found = read_csv(tmp_path / "context-depth.csv")
    assert len(found) == 11 and {line["part"] for line in found} == {"prefill", "decode"}
    assert not (tmp_path / "decode-pareto.png").exists(), "one batch size makes a line, no picture"
    assert not (tmp_path / "speedup-keep-mtp.png").exists()


def test_nothing_is_drawn_of_nothing(tmp_path):
    failed = benched.row() | {"status": "failed"}
    assert bench_plots.write({}, [failed], tmp_path / "figures") == []
    assert not (tmp_path / "figures").exists()
    bare = benched.row() | {"decode_tok_s": None, "prompt_tok_s": None}
    assert bench_plots.write({}, [bare], tmp_path) == []


def test_synthetic_rows_are_watermarked(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        bench_plots, "save_figure", lambda figure, base, *_: drawn.append((base.name, figure)) or []
    )
    for synthetic in ("flash-slice:1+1", None):
        drawn.clear()
        rows = benched.sweep(synthetic=synthetic) + [benched.row(synthetic=synthetic, prompt_len=9)]
        bench_plots.write({}, rows, tmp_path)
        assert len(drawn) == 4
        for name, figure in drawn:
            said = [text.get_text() for text in figure.texts]
            assert ("SYNTHETIC WEIGHTS" in said) == bool(synthetic), name


def test_pictures_take_odd_names_and_a_single_sample(tmp_path):
    alone = {"median": 3.0, "n": 1}
    rows = [
        benched.row(workload=ODD + "$x_", batch_size=n)
        | {"ttft_ms": alone, "prompt_tok_s": alone, "decode_tok_s": alone}
        for n in (1, 2)
    ]
    assert len(bench_plots.write({}, rows, tmp_path)) == 4
    table = (tmp_path / "decode-pareto.csv").read_text(encoding="utf-8")
    assert len(list(csv.reader(io.StringIO(table)))) == 3


# two runs


def lost(rows, before, limit, meta=None):
    baseline = bench_rows.Saved("old", benched.meta(), tuple(before))
    return bench_compare.regressions(meta or benched.meta(), rows, baseline, limit)


def test_ratios_are_above_one_where_the_second_is_faster(tmp_path):
    a = benched.save(tmp_path / "a", benched.sweep())
    b = benched.save(tmp_path / "b", benched.sweep(seed=1, speed=1.2), deepinfer_version="0.2.0")
    found = bench_compare.compare(a, b)
    assert (found["a"], found["b"], found["failed"]) == ("a", "b", 0)
    assert found["differs"] == ["version: 0.1.0 and 0.2.0"]
    ratios = [ratio for row in found["rows"] for ratio in row["ratios"].values()]
    assert len(ratios) == 96
    for ratio in ratios:
        assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
        assert 1.05 < ratio["ratio"] < 1.4 and ratio["verdict"] in ("better", "same")
    inside = sum(ratio["low"] <= 1.2 <= ratio["high"] for ratio in ratios)
    assert inside >= 80
    back = bench_compare.compare(b, a)["rows"][0]["ratios"]["ttft_ms"]
    assert back["ratio"] == pytest.approx(1 / found["rows"][0]["ratios"]["ttft_ms"]["ratio"])
    assert back["verdict"] == "worse"
    heads, lines, title = bench_compare.table(found)
    assert len(lines) == 24 and "A a, B b" in title and len(heads) == len(lines[0]) == 6
    same = bench_compare.compare(a, a)["rows"][0]["ratios"]["output_tok_s"]
    assert same["ratio"] == 1.0 and same["verdict"] == "same"


def test_the_interval_holds_the_ratio_as_often_as_it_says():
    draw, held = random.Random(5), 0
    for _ in range(200):
        a = [draw.gauss(1.0, 0.05) for _ in range(15)]
        b = [draw.gauss(1.3, 0.05) for _ in range(15)]
        low, high = bench_compare.interval(a, b, draws=400)
        held += low <= 1.3 <= high
    assert held >= 180
    assert bench_compare.interval([1.0], [2.0]) == (2.0, 2.0)


def test_unlike_rows_are_refused_and_the_axis_is_named(tmp_path):
    a = benched.save(tmp_path / "a", [benched.row(mtp=5), benched.row(mtp=0)])
    other = benched.save(tmp_path / "b", [benched.row(mtp=5), benched.row(mtp=3)])
    fewer = benched.save(tmp_path / "c", [benched.row(mtp=5)])
    random_ = benched.save(tmp_path / "d", [benched.row(mtp=n, synthetic="tiny") for n in (5, 0)])
    for b, said in ((other, "mtp: 0 and 3"), (fewer, "1 rows have"), (random_, "synthetic: - and")):
        with pytest.raises(UsageError) as caught:
            bench_compare.compare(a, b)
        assert caught.value.code == "bench-unlike"
        assert any(fact.startswith(said) for fact in caught.value.facts), caught.value.facts


def test_other_prompts_are_unlike_rows(tmp_path):
    a = benched.save(tmp_path / "a", [benched.row() | {"prompt_digest": "aa"}])
    b = benched.save(tmp_path / "b", [benched.row() | {"prompt_digest": "bb"}])
    assert len(bench_compare.compare(a, a)["rows"]) == 1
    with pytest.raises(UsageError, match="asked other prompts"):
        bench_compare.compare(a, b)


def test_rows_that_failed_are_counted_and_not_compared(tmp_path):
    rows = [benched.row(mtp=mtp) for mtp in (0, 5)]
    a = benched.save(tmp_path / "a", [rows[0], rows[1] | {"status": "failed"}])
    b = benched.save(tmp_path / "b", rows)
    found = bench_compare.compare(a, b)
    assert found["failed"] == 1 and len(found["rows"]) == 1
    told = [row | {"prompt_digest": "aa"} for row in rows]
    d = benched.save(tmp_path / "d", told)
    e = benched.save(tmp_path / "e", [told[0], rows[1] | {"status": "failed"}])
    for pair in ((d, e), (e, d)):
        assert bench_compare.compare(*pair)["failed"] == 1
    none = benched.save(tmp_path / "c", [row | {"status": "failed"} for row in rows])
    with pytest.raises(UsageError, match="no row was measured on both"):
        bench_compare.compare(none, b)


def test_regressions_are_losses_beyond_the_limit():
    before, same = benched.sweep(), benched.sweep(seed=2)
    assert lost(same, before, 0.10)["regressions"] == []
    slow = benched.sweep(seed=2, speed=0.7)
    found = lost(slow, before, 0.10)
    assert found["judged"] == 24 and len(found["regressions"]) == 96 and not found["unmatched"]
    assert {loss["measure"] for loss in found["regressions"]} == {
        "ttft_ms", "tpot_ms", "output_tok_s", "decode_tok_s",
    }  # fmt: skip
    assert lost(slow, before, 0.5)["regressions"] == []
    assert lost(benched.sweep(speed=2), before, 0.0)["regressions"] == []


def test_a_row_that_broke_is_a_regression_and_new_rows_are_named():
    before = [benched.row(mtp=0), benched.row(mtp=5)]
    after = [before[0] | {"status": "failed"}, before[1], benched.row(mtp=3)]
    found = lost(after, before, 0.1)
    assert [(loss["row"], loss["measure"]) for loss in found["regressions"]] == [
        ("mtp 0", "status")
    ]
    assert found["unmatched"] == ["mtp 3"] and found["judged"] == 2
    with pytest.raises(UsageError) as caught:
        lost([benched.row(mtp=1)], before, 0.1)
    assert caught.value.code == "bench-unlike" and "mtp: 0 and 1" in caught.value.facts


def test_noise_is_not_taken_for_a_loss():
    """Means that differ by 12 % while the samples spread over 40 %."""
    before, after = benched.row(), benched.row()
    for row, values in ((before, [80, 90, 100, 110, 120]), (after, [70, 80, 88, 101, 115])):
        row["samples"]["output_tok_s"] = values
        row["output_tok_s"] = benched.stats(values)
    assert lost([after], [before], 0.1)["regressions"] == []


def test_a_row_that_vanished_or_was_asked_something_else_is_a_regression():
    before = [benched.row(mtp=n) | {"prompt_digest": "aa"} for n in (0, 3, 5)]
    before.append(benched.row(mtp=1) | {"status": "failed"})
    found = lost([before[0], before[1] | {"prompt_digest": "bb"}], before, 0.1)
    assert [(loss["row"], loss["measure"], loss["b"]) for loss in found["regressions"]] == [
        ("mtp 5", "status", "missing"), ("mtp 3", "prompt_digest", "bb"),
    ]  # fmt: skip


def test_what_spoils_a_baseline_is_named():
    before = [benched.row(mtp=0), benched.row(mtp=5) | {"steady": False}]
    after = [before[0] | {"steady": False}, before[1] | {"steady": True}]
    now = benched.meta()
    now["environment"] = {**now["environment"], "cpu": {"name": "Another"}}
    found = lost(after, before, 0.1, now)["remarks"]
    assert found[0] == "differs: cpu: A processor and Another"
    assert [line.split(",")[0] for line in found[1:]] == [
        "mtp 0: not steady now", "mtp 5: not steady then",
    ]  # fmt: skip


# bars


def judged(rows, meta=None, /, **bar):
    one = {"name": "B1", "figure": "decode_tok_s", "rows": {}, **bar}
    [record] = bench_bars.judge([one], meta or benched.meta(), rows)
    return record


def test_a_bar_is_about_the_worst_of_its_rows():
    rows = benched.sweep()
    speeds = [row["decode_tok_s"]["median"] for row in rows if row["axes"]["mtp"] == 0]
    found = judged(rows, rows={"mtp": (0,)}, at_least=1.0)
    assert found["value"] == min(speeds) and found["verdict"] == "met" and found["unit"]
    assert found["p5"] < found["value"] < found["p95"] and "mtp 0" in found["row"]
    assert found["git"] == "0123456789ab" and found["ceilings"]["after"]
    slowest = judged(rows, rows={"mtp": (0,)}, figure="decode_step_ms", at_most=1.0)
    assert slowest["verdict"] == "missed" and slowest["value"] > 20
    share = judged(rows, figure="ceiling_fraction.decode", at_least=0.25)
    assert share["value"] == pytest.approx(0.2125) and share["verdict"] == "missed"


def test_a_bar_may_be_a_ratio_to_the_best_of_other_rows():
    rows = benched.sweep()
    found = judged(
        rows, rows={"mtp": (5,)}, over={"mtp": (0, 1, 3)}, each="batch_size", at_least=1.0
    )

    def speed(batch, mtps):
        return [row["decode_tok_s"]["median"] for row in rows
                if row["axes"]["batch_size"] == batch and row["axes"]["mtp"] in mtps]  # fmt: skip

    worst = min(min(speed(batch, (5,))) / max(speed(batch, (0, 1, 3))) for batch in (1, 8))
    assert found["ratio"] == pytest.approx(worst)
    assert found["peer_value"] and "mtp 3" in found["peer"] and found["verdict"] == "met"
    [line] = bench_bars.table([found])[1]
    assert line[1].endswith(" times") and "beside" in line[4] and line[-1] == "met"


def test_a_bar_is_void_on_a_machine_that_was_not_still():
    rows = benched.sweep()
    assert judged(rows, benched.meta(0.05), at_least=1.0)["verdict"] == "void"
    rows[0] |= {"steady": False}
    found = judged(rows[:1], at_least=1.0)
    assert found["verdict"] == "void" and "not steady" in found["why"]


def test_a_bar_fails_where_its_rows_are_not_right():
    rows = [benched.row() | {"same_answers": False}]
    assert judged(rows, at_least=1.0)["verdict"] == "missed"
    rows = [benched.row() | {"prefill_saved_rows": {"planned": 0.43, "measured": 0.4}}]
    found = judged(rows, at_least=1.0)
    assert (found["verdict"], found["correct"]) == ("missed", False)


def test_a_bar_without_its_rows_is_not_judged():
    rows = [benched.row(mtp=0), benched.row(mtp=5) | {"status": "failed"}]
    for bar in (
        {"rows": {"mtp": (3,)}}, {"rows": {"mtp": (5,)}},
        {"rows": {"mtp": (0,)}, "over": {"mtp": (3,)}},
    ):  # fmt: skip
        found = judged(rows, at_least=1.0, **bar)
        assert found["verdict"] == "not judged" and found["why"]
    none = benched.row() | {"decode_tok_s": None, "why": {"decode_tok_s": "no decode window"}}
    assert judged([none], at_least=1.0)["why"] == "all rows: no decode window"
    text = bench.markdown(benched.meta(), rows, (), [bench_bars.table([found])])
    assert "**Bars**" in text and "not judged" in text
