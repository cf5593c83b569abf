"""Traces: the file, the sums, other time curves, calibration, views and pictures."""

import csv
import json
import math
import random
from dataclasses import replace

import pytest

from deepinfer.errors import UsageError
from deepinfer.report import trace_views
from deepinfer.speculative import acceptance, reschedule, timing, tracefile
from deepinfer.speculative.schedule import Schedule, split
from deepinfer.speculative.trace import TokenTexts, TraceStep, lines
from tests import traces

SILENT = pytest.fail


def step(**given):
    """A step with five drafts, four verified, three accepted."""
    plain = {
        "step": 12, "seq": 0, "pos": 10, "draft_ids": (11, 12, 13, 14, 15),
        "confidence": (0.98, 0.95, 0.91, 0.62, 0.31), "logits": (3.9, 2.9, 2.3, 0.5, -0.8),
        "survival": (0.98, 0.931, 0.847, 0.525, 0.163), "useful": 5, "budget": None, "limit": 5,
        "split": 4, "verified": 4, "accepted": 3, "discarded": 0, "committed": 4, "target_id": 16,
        "rows": 5, "requests": 1, "ms": 41.25,
    }  # fmt: skip
    return TraceStep(**{**plain, **given})


WORDS = {11: "def", 12: " quicksort", 13: "(arr", 14: " ->", 15: " x", 16: ":"}


def one_step(words=WORDS, given=None, **speculation):
    """A trace of that step: seven tokens before it, of which the prompt has three."""
    spelled = {10: "x", **words}
    ids = [10] * 7 + [11, 12, 13, 16]
    made = [step(**(given or {}))]
    return traces.trace(made, [ids], spelled=lambda token: spelled[token].encode(), **speculation)


# the file


def test_a_trace_survives_its_file(tmp_path):
    for seed, varlen in ((1, True), (2, False)):
        steps, answers, _ = traces.simulate(seed, requests=3, varlen=varlen)
        steps[4] = replace(
            steps[4], draft_ids=(-1, *steps[4].draft_ids[1:]), ms=math.inf,
            confidence=(math.nan, *steps[4].confidence[1:]),
        )  # fmt: skip
        before = traces.trace(steps, answers, varlen=varlen)
        tracefile.write(before, tmp_path / "t.jsonl")
        after = tracefile.read(tmp_path / "t.jsonl", SILENT)
        assert after.header == before.header
        assert [line.draft_text for line in after.lines] == [x.draft_text for x in before.lines]
        assert [line.target_text for line in after.lines] == [x.target_text for x in before.lines]
        for one, other in zip(after.steps, before.steps, strict=True):
            assert repr(one).replace("ms=nan", "ms=inf") == repr(other)
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_the_keys_of_a_line(tmp_path):
    made = one_step(given={"budget": 4, "time_ms": (20.0, 21.5), "confidence": (math.nan,) * 5})
    tracefile.write(made, tmp_path / "t.jsonl")
    head, line = map(json.loads, (tmp_path / "t.jsonl").read_text().splitlines())
    assert head["schema"] == "deepinfer.trace/1"
    assert {
        "step", "seq", "pos", "draft_ids", "draft_text", "confidence", "survival", "budget",
        "split", "verified", "accepted", "target_id", "target_text", "time_model", "ms",
    } <= set(line)  # fmt: skip
    assert line["confidence"] == [None] * 5 and line["time_model"] == [20.0, 21.5]
    assert line["draft_text"] == ["def", " quicksort", "(arr", " ->", " x"]
    ended = one_step(given={"target_id": None, "draft_ids": (11, 12, 13, -1, 15)})
    tracefile.write(ended, tmp_path / "t.jsonl")
    line = json.loads((tmp_path / "t.jsonl").read_text().splitlines()[1])
    assert not {"budget", "target_id", "target_text", "time_model"} & set(line)
    assert line["draft_ids"][3] is None


def test_a_half_written_last_line_is_dropped(tmp_path):
    steps, answers, _ = traces.simulate(3)
    file = tmp_path / "t.jsonl"
    tracefile.write(traces.trace(steps, answers), file)
    whole = file.read_bytes()
    said = []
    for cut in range(2, 200, 7):
        file.write_bytes(whole[:-cut])
        after = tracefile.read(file, said.append)
        assert after.steps == steps[: len(after.steps)] and len(steps) - len(after.steps) <= 2
    half = "t.jsonl: the last line is half-written and was dropped"
    assert half in said and all(line == half or line.startswith("t.jsonl has ") for line in said)
    file.write_bytes(whole[:-1])
    assert tracefile.read(file, SILENT).steps == steps
    file.write_bytes(whole + b"{}\n")
    with pytest.raises(UsageError, match=r"t\.jsonl is damaged"):
        tracefile.read(file, SILENT)


def spoiled(key, value):
    def change(row):
        row[key] = value

    return change


DAMAGE = {
    "a count below zero": spoiled("verified", -1),
    "a switch for a count": spoiled("step", True),
    "a text for a count": spoiled("rows", "5"),
    "a number for drafts": spoiled("draft_ids", 7),
    "too few confidences": spoiled("confidence", [0.5]),
    "a text for a chance": spoiled("survival", ["x"] * 5),
    "a number too large": spoiled("logits", [10**400] * 5),
    "more stood than were verified": spoiled("accepted", 5),
    "more verified than drafted": spoiled("verified", 6),
    "another prompt": spoiled("seq", 1),
    "a survival above one": spoiled("survival", [2.0] * 5),
    "no survival": spoiled("survival", [None] * 5),
    "more committed than stood": spoiled("committed", 9),
    "inside the prompt": spoiled("pos", 2),
    "behind the answer": spoiled("pos", 10**9),
    "a chance above one": spoiled("confidence", [5.0] * 5),
    "a chance below zero": spoiled("confidence", [-0.5] * 5),
    "more useful than drafted": spoiled("useful", 99),
    "more given than useful": spoiled("split", 6),
    "more verified than given": spoiled("split", 3),
    "a step of no request": spoiled("requests", 0),
    "no time": lambda row: row.pop("ms"),
    "no text of the target": lambda row: row.pop("target_text"),
    "a number for a text": spoiled("draft_text", [1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(tmp_path, change):
    file = tmp_path / "t.jsonl"
    tracefile.write(one_step(), file)
    head, line = file.read_text().splitlines()
    row = json.loads(line)
    change(row)
    file.write_text(f"{head}\n{json.dumps(row)}\n")
    with pytest.raises(UsageError) as caught:
        tracefile.read(file, SILENT)
    assert caught.value.code == "trace-damaged" and "line 2: " in caught.value.facts[0]


def test_a_header_without_a_count_of_lines(tmp_path):
    """Traces of the first days have none: they are read, only a cut is not noticed."""
    file = tmp_path / "t.jsonl"
    tracefile.write(one_step(), file)
    head, line = file.read_text().splitlines()
    head = json.loads(head)
    del head["lines"]
    file.write_text(f"{json.dumps(head)}\n{line}\n")
    assert len(tracefile.read(file, SILENT).lines) == 1
    del head["speculation"]
    file.write_text(f"{json.dumps(head)}\n{line}\n")
    with pytest.raises(UsageError) as caught:
        tracefile.read(file, SILENT)
    assert list(caught.value.facts) == ["line 1: header: no 'speculation'"]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "trace-invalid"),
        (b"hello\n", "trace-invalid"),
        (b"[]\n", "trace-invalid"),
        (b'{"schema": 5}\n', "trace-invalid"),
        (b'{"schema": "deepinfer.run/1"}\n', "trace-invalid"),
        (b'{"schema": "deepinfer.trace/2"}\n', "trace-unsupported"),
        (b'{"schema": "deepinfer.trace/1"}\n', "trace-damaged"),
        (b'{"schema": "deepinfer.trace/1", "speculation": 1, "sequences": []}\n', "trace-damaged"),
        (b"\xff\xfe\n", "trace-damaged"),
        (b"[" * 100_000, "trace-invalid"),
    ],
)
def test_what_is_no_trace(tmp_path, content, code):
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        tracefile.read(tmp_path / "t.jsonl", SILENT)
    assert caught.value.code == code and caught.value.hint


def test_random_bytes_never_end_otherwise(tmp_path):
    draw, file = random.Random(0), tmp_path / "t.jsonl"
    steps, answers, _ = traces.simulate(4, tokens=12)
    tracefile.write(traces.trace(steps, answers), file)
    whole = bytearray(file.read_bytes())
    for _ in range(300):
        broken = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            broken[draw.randrange(len(broken))] = draw.choice(b'0{}[],:"-eN\n x')
        file.write_bytes(broken)
        try:
            after = tracefile.read(file, lambda line: None)
        except UsageError:
            continue
        acceptance.summary(after)
        trace_views.inline(after, True)
        trace_views.step_blocks(after, False)


# texts of tokens


def test_a_character_belongs_to_the_last_of_its_tokens():
    spelled = {1: b"a\xe6", 2: b"\x97", 3: b"\xa5b", 4: b"", 5: b"\xff", 6: b"c"}.__getitem__
    texts = TokenTexts(spelled, [1, 2, 3, 6])
    assert texts.token_text == ["a", "", "日b", "c"]
    assert texts.branch(1, [2, 3]) == ("", "日b")
    assert texts.branch(2, [3]) == ("日b",) and texts.branch(2, [6, 6]) == ("�c", "c")
    assert texts.branch(2, [4]) == ("�",) and texts.branch(4, [-1, 6]) == ("", "c")
    assert TokenTexts(spelled, [1]).token_text == ["a�"]


def test_joined_texts_are_the_text():
    draw = random.Random(5)
    whole = "grün 日本 🙂 x".encode()
    pieces = [bytes([byte]) for byte in whole]
    for _ in range(50):
        ids = [draw.randrange(len(pieces)) for _ in range(30)]
        texts = TokenTexts(pieces.__getitem__, ids).token_text
        assert "".join(texts) == b"".join(pieces[i] for i in ids).decode("utf-8", "replace")


def test_what_stands_has_the_texts_of_the_answer():
    steps, answers, _ = traces.simulate(6, tokens=80)
    found, texts = lines(steps, [(3, answers[0])], traces.spell)
    for line in found:
        at = line.step.pos - 3
        stands = [*line.draft_text[: line.step.accepted], line.target_text]
        assert stands == texts[0][at : at + line.step.committed]


# sums


def test_the_sums_by_hand():
    made = [
        step(step=1, accepted=3, verified=4, committed=4),
        step(step=2, accepted=0, verified=1, committed=1),
        step(step=3, draft_ids=(), confidence=(), logits=(), survival=(), useful=0, verified=0,
             split=0, accepted=0, committed=1),
        step(step=4, accepted=1, discarded=2, verified=4, committed=1, target_id=None),
    ]  # fmt: skip
    found = acceptance.summary(traces.trace(made, [[11] * 40]))
    assert (found["steps"], found["tokens"], found["accepted_length"]) == (4, 7, 7 / 4)
    assert (found["drafted"], found["verified"], found["accepted"]) == (15, 9, 4)
    assert found["acceptance_rate"] == 4 / 15 and found["discarded"] == 2
    assert found["histogram"] == [0, 3, 0, 0, 1] and found["saved_passes"] == 3
    rows = found["by_position"]
    assert [row["drafted"] for row in rows] == [3] * 5
    assert [row["verified"] for row in rows] == [3, 1, 1, 1, 0], "none behind the end"
    assert [row["accepted"] for row in rows] == [2, 1, 1, 0, 0]
    assert rows[0]["acceptance"] == 2 / 3 and rows[0]["observed"] == 2 / 3
    assert rows[1]["observed"] == 1.0, "what lies behind the end has no fate"
    assert rows[4]["observed"] is rows[4]["ece"] is rows[4]["auroc"] is None
    # One bin: 15 x 0.98 = 14.7, so all three lie in the last; 2 of 3 stood.
    assert rows[0]["ece"] == pytest.approx(abs(0.98 - 2 / 3))
    assert rows[0]["brier"] == pytest.approx((2 * 0.02**2 + 0.98**2) / 3)
    assert rows[0]["auroc"] == pytest.approx(0.5)
    assert found["outcomes"] == 6 and found["lossless"] is None


def test_nothing_to_sum():
    found = acceptance.summary(traces.trace([], [[11]]))
    assert found["steps"] == 0 and found["accepted_length"] is None and found["ece"] is None
    assert trace_views.sums(found, "m") == ["m: no step decoded with drafts"]


def test_bins_are_those_of_the_error():
    draw = random.Random(7)
    pairs = [(survival, draw.random() < survival**2) for survival in
             (draw.random() for _ in range(500))] + [(1.0, True), (0.0, False)]  # fmt: skip
    bins = acceptance.reliability(pairs)
    assert sum(row["count"] for row in bins) == 502
    gap = sum(abs(row["predicted"] - row["observed"]) * row["count"] for row in bins) / 502
    assert gap == pytest.approx(acceptance._quality(pairs)["ece"])


def test_calibration_makes_confidences_truer():
    steps, answers, _ = traces.simulate(8, requests=8, tokens=1000)
    found = acceptance.calibrate(traces.trace(steps, answers))
    assert len(found.temperatures) == 5 and min(found.counts) >= 1000
    # The simulated truth is the confidence at temperature 2.
    assert found.temperatures[0] == pytest.approx(2.0, rel=0.25)
    assert found.ece[1] < found.ece[0] / 2 and found.after[0] < found.before[0] / 2
    warmer, answers, _ = traces.simulate(8, 8, tokens=1000, temperatures=found.temperatures)
    sums = acceptance.summary(traces.trace(warmer, answers))
    assert sums["ece"] < found.ece[1] + 0.005, "what the next run will see"


def test_calibration_of_true_confidences_changes_nothing():
    """What a fit makes of chance does not hold on outcomes that it did not see."""
    for seed in range(4):
        steps, answers, _ = traces.simulate(seed, 8, tokens=1000, temperatures=(2.0,))
        found = acceptance.calibrate(traces.trace(steps, answers, temperatures=[2.0]))
        assert found.temperatures == (2.0,) * 5, "those of the trace"
        assert found.after == found.before and found.ece[1] == found.ece[0] < 0.03


def test_calibration_refuses_few_outcomes():
    steps, answers, _ = traces.simulate(9, requests=2, tokens=800)
    with pytest.raises(UsageError) as caught:
        acceptance.calibrate(traces.trace(steps, answers))
    assert caught.value.code == "calibration-too-few" and "draft 1" in caught.value.facts[0]
    steps, answers, _ = traces.simulate(9, requests=8, tokens=500, mtp=3)
    with pytest.raises(UsageError, match="too few"):
        acceptance.calibrate(traces.trace(steps, answers))  # five drafts asked for, three made


# other time curves


def steep(rows, requests):
    return 0.02 + 0.004 * rows


def cliff(rows, requests):
    return 0.02 if rows <= 8 else 0.05 + 0.0001 * rows


@pytest.mark.parametrize("requests", [1, 2, 5, 30])
@pytest.mark.parametrize("time", [steep, cliff])
def test_the_same_curve_gives_the_live_choices(requests, time):
    for seed in range(3):
        steps, _, budgets = traces.simulate(
            seed, requests, tokens=40, varlen=True, time=time, noise=0.02
        )
        found = reschedule.reschedule(steps, reschedule.Curve("live", time, 0.02))
        assert {choice.step: choice.budget for choice in found} == budgets
        verified = {(s.step, s.seq): s.verified for s in steps if s.draft_ids}
        shares = {(c.step, seq): n for c in found for seq, n in c.splits.items()}
        assert shares == verified
        assert all(c.tokens[0] == c.tokens[1] and c.ms[0] == c.ms[1] for c in found)


def test_another_curve_gives_what_a_schedule_would():
    steps, _, _ = traces.simulate(11, requests=4, tokens=60)
    found = reschedule.reschedule(steps, reschedule.Curve("other", steep, 0.0))
    live = Schedule(steep)
    for choice in found:
        together = [s for s in steps if s.step == choice.step and s.draft_ids]
        everybody = [s for s in steps if s.step == choice.step]
        live.learn(choice.step - 1, {s.seq: (*s.survival, *(0.0,) * 5)[:5] for s in everybody})
        counts = {s.seq: 5 for s in everybody}
        budget = live.budget(choice.step, counts, 0.0, together[0].limit)
        assert budget == choice.budget
        assert list(choice.splits.values()) == split([s.survival for s in together], budget)
    free = reschedule.reschedule(steps, reschedule.Curve("free", lambda r, q: 0.02, 0.0))
    assert sum(c.budget for c in free) > sum(c.budget for c in found)
    sums = reschedule.totals(found, reschedule.Curve("other", steep, 0.0))
    assert sums["replayed_tokens_per_s"] > sums["tokens_per_s"] > 0
    assert reschedule.totals([], reschedule.Curve("none", steep, 0.0))["tokens_per_s"] is None


def test_curves_from_files(tmp_path):
    file = tmp_path / "curve.json"
    file.write_text(json.dumps({"1": 20, "6": 25, "64": 60.5}))
    curve = reschedule.load(file)
    assert curve.time(1, 1) == 0.020 and curve.time(6, 3) == 0.025 and curve.noise == 0
    assert curve.time(3, 1) == pytest.approx(0.022) and curve.time(63, 1) < 0.060
    assert curve.time(127, 1) == pytest.approx(0.101)
    times = timing.StepTimes()
    for rows in (1, 2, 6, 12):
        for again in range(6):
            times.observe(rows, 1, 0.02 + rows / 1000 + again / 1e5, 0.001)
    times.save(tmp_path / "saved", "this machine", SILENT)
    [saved] = (tmp_path / "saved").iterdir()
    curve = reschedule.load(saved)
    assert curve.noise == times.noise > 0
    for rows in range(1, 40):
        assert curve.time(rows, 1) == times(rows, 1) and curve.knows(rows) == times.knows(rows)


def test_what_was_not_measured_calls_no_row_free():
    steps, _, _ = traces.simulate(2, 2, tokens=40, varlen=True)
    noisy = reschedule.Curve("noisy", steep, 9.0)
    guessed = replace(noisy, knows=lambda rows: False)
    known, unknown = (reschedule.reschedule(steps, some) for some in (noisy, guessed))
    assert sum(c.budget for c in unknown) < sum(c.budget for c in known)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "5", '{"a": 1}', '{"0": 1}', '{"1": -1}', '{"1": "x"}', '{"1": NaN}',
     '{"1": 0}', '{"1": true}', '{"1": [3]}',
     '{"schema": "deepinfer.step-times/1"}', '{"schema": "x"}',
     '{"schema": "deepinfer.step-times/1", "target": {"1": 3}, "rest": {}}'],
)  # fmt: skip
def test_no_curve(tmp_path, content):
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(UsageError) as caught:
        reschedule.load(tmp_path / "c.json")
    assert caught.value.code == "curve-invalid" and "from --replay-curve" in caught.value.facts
    said = " ".join(caught.value.facts)
    assert not any(word in said for word in ("object", "instance", "NoneType", "literal"))
    with pytest.raises(UsageError, match="cannot be read"):
        reschedule.load(tmp_path / "gone")


# views


def test_the_marks_of_the_example():
    assert trace_views.inline(one_step(), False)[0].endswith("def quicksort(arr[- ->-]{+:+}")
    blocks = trace_views.step_blocks(one_step(threshold=0.5), False)
    assert blocks == [
        "step 12  draft 5  verify 4  accepted 3   def quicksort(arr[- ->-]{+:+}",
        "         conf .98 .95 .91 .62 .31        cut at .50 → 4 verified · 41.2 ms",
    ]
    heads, [row] = trace_views.step_rows(one_step())
    assert heads == ("step", "drafted", "confidence", "verified", "accepted", "target", "ms")
    assert row == ("12", '"def" " quicksort" "(arr" " ->" " x"', ".98 .95 .91 .62 .31", "4", "3",
                   '":"', "41.2")  # fmt: skip


def test_the_colours():
    [block, _] = trace_views.step_blocks(one_step(), True)
    assert block.endswith("\x1b[4;32mdef quicksort(arr\x1b[0m\x1b[9;31m ->\x1b[0m\x1b[36m:\x1b[0m")


@pytest.mark.parametrize("coloured", [False, True])
def test_hostile_text_is_shown_not_obeyed(coloured):
    texts = "[/INST]", "\x1b[2J\x07", "a\r\n", "\u202e\x9b1m\u2028", "list[str]", "[bold]\t"
    words = dict(enumerate(texts, start=11))
    made = one_step(words)
    out = "\n".join(
        [*trace_views.inline(made, coloured), *trace_views.step_blocks(made, coloured),
         *trace_views.step_rows(made)[1][0]]
    )  # fmt: skip
    for shown in ("[/INST]", r"\x1b[2J\x07", r"a\r\n", r"\u202e\x9b1m\u2028", r"[bold]\t"):
        assert shown in out
    bare = out.replace("\n", "")
    for style in ("4;32", "9;31", "36", "0"):
        bare = bare.replace(f"\x1b[{style}m", "")
    assert bare.isprintable()


def test_lines_end_where_the_answer_has_them():
    words = {11: "a\n", 12: "b", 13: "\n\n  c", 14: "x\ny", 15: "y", 16: "\n"}
    assert trace_views.inline(one_step(words), False) == [
        r"{+xxxxxxx+}a\n", r"b\n\n", r"  c[-x\ny-]{+\n+}",
    ]  # fmt: skip


def test_tokens_without_a_text_are_named():
    words = {**WORDS, 14: "", 16: ""}
    [text] = trace_views.inline(one_step(words), False)
    assert text.endswith("(arr[-⟨14⟩-]{+⟨16⟩+}")
    accepted_end = one_step({**WORDS, 13: ""}, {"target_id": None, "committed": 3})
    assert trace_views.step_blocks(accepted_end, False)[0].endswith("def quicksort⟨13⟩")
    assert trace_views.ascii_only("⟨13⟩ → · █") == "<13> -> | #"


def test_marked_text_without_marks_is_the_answer():
    for seed in range(5):
        steps, answers, _ = traces.simulate(seed, requests=2, varlen=True)
        made = traces.trace(steps, answers, varlen=True)
        for seq, sequence in enumerate(made.sequences):
            spans = trace_views._spans(made.by_sequence()[seq], sequence)
            kept = "".join(text for text, style in spans if style != "rejected")
            assert kept == sequence["text"]


def test_steps_that_left_no_record_are_the_targets_own():
    steps, answers, _ = traces.simulate(12, tokens=50)
    made = traces.trace(steps[:3] + steps[5:-2], answers)
    spans = trace_views._spans(made.by_sequence()[0], made.sequences[0])
    assert "".join(t for t, style in spans if style != "rejected") == made.sequences[0]["text"]


def test_widths_are_those_of_a_terminal():
    assert trace_views.columns("日本a") == 5 and trace_views.columns("e\u0301") == 1
    assert trace_views.columns("🙂") == 2 and trace_views.columns("a\u200db") == 2


def test_reasons():
    def why(given, **rule):
        return trace_views.step_blocks(one_step(given=given, **rule), False)[1].split("  ")[-1]

    assert why({"budget": 4}) == "budget 4 → 4 verified · 41.2 ms"
    assert why({"budget": 9, "requests": 3}).startswith("budget 9, share 4 → 4 verified")
    assert why({"split": 5}) == "all 5, no room for more → 4 verified · 41.2 ms"
    assert why({"useful": 4}).startswith("all 4, no use behind 4 → 4 verified")
    empty = {"draft_ids": (), "confidence": (), "logits": (), "survival": (), "useful": 0,
             "split": 0, "verified": 0, "accepted": 0, "committed": 1, "target_id": 11,
             "ms": math.nan}  # fmt: skip
    assert why(empty) == "nothing drafted · - ms"


def test_the_summary_says_its_formula():
    sums = acceptance.summary(one_step())
    text = trace_views.sums(sums, "m")
    assert "accepted length 4.00 = tokens committed / steps, bonus included (4 / 1)" in text
    assert "saved target passes 3 of 4 (75.0 %)" in text
    assert "   4  1  100.0 %  ████████████████████████" in text
    assert any(line.startswith("lossless not checked") for line in text)
    proven = trace_views.sums({**sums, "lossless": True}, "m")
    assert any(line.startswith("lossless yes") for line in proven)
    _, rows = trace_views.positions(sums)
    assert rows[4][2:] == ("0", "0", "0.0 %", "-", "-", "-", "-", "-")
    table = trace_views.aligned(trace_views.positions(sums))
    assert len({len(line) for line in table}) == 1 and len(table[0]) <= 80


def test_pictures_and_the_tables_behind_them(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    from deepinfer.report import trace_plots

    steps, answers, _ = traces.simulate(13, requests=2, varlen=True, time=steep)
    made = traces.trace(steps, answers, prompts=["$a$", "日本"], varlen=True)
    sums = acceptance.summary(made)
    names = [path.name for path in trace_plots.write(made, sums, tmp_path)]
    stems = ("accepted-length", "acceptance-by-position", "calibration", "timeline")
    assert names == [f"{stem}.{kind}" for stem in stems for kind in ("png", "csv")]
    for stem in stems:
        assert image.imread(tmp_path / f"{stem}.png").shape[1] >= 1000

    def table(stem):
        with (tmp_path / f"{stem}.csv").open() as file:
            return list(csv.DictReader(file))

    assert sum(int(row["steps"]) for row in table("accepted-length")) == len(steps)
    rows = table("acceptance-by-position")
    assert [int(row["accepted"]) for row in rows] == [r["accepted"] for r in sums["by_position"]]
    rows = table("calibration")
    inside = [int(row["count"]) for row in rows if row["drafts"] == "all drafts"]
    assert sum(inside) == sums["outcomes"]
    assert {row["drafts"] for row in rows} > {"all drafts", "draft 1", "draft 2"}
    assert len(table("timeline")) == len(steps)
    assert trace_plots.write(traces.trace([], [[11]]), acceptance.summary(
        traces.trace([], [[11]])), tmp_path) == []  # fmt: skip
