"""The record of replay-inspect, its map, its tables and its pictures."""

import csv
import itertools
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from deepinfer.errors import InternalError
from deepinfer.model import cost
from deepinfer.model.config import ModelConfig
from deepinfer.replay.plan import ReplayRule
from deepinfer.report import heatmap, replay, tables
from tests import t6

EMBEDDED = Path(heatmap.__file__).parents[1] / "embedded"
FLASH = ModelConfig.from_dict(json.loads((EMBEDDED / "v41-flash.json").read_text()))
SMALL = ModelConfig.from_dict(json.loads((EMBEDDED / "config.json").read_text()))


def record(config, tokens, keep=140, cached=0, mode="compact", shown=None, others=(), refill=False):
    """A document without its head, as the command makes it."""
    views = []
    for one in (keep, *others):
        rule = ReplayRule.of(config, mode, one)
        plan = rule.plan_with_hit(tokens, cached, 128, refill)
        view = replay.inspection(config, rule, plan)
        views.append(replay.restricted(view, (0, config.num_hidden_layers), shown or (0, tokens)))
    document = {
        "source": "plan",
        "model": replay.shape(config, "a model", 6),
        "prompt_tokens": tokens,
        "state_bytes": cost.held_bytes(config, tokens, 6, True),
        "thresholds": replay.thresholds(config, rule, 6),
        "shown": {"layers": [0, config.num_hidden_layers], "tokens": list(shown or (0, tokens))},
        **views[0],
    }
    return {**document, "others": views[1:]} if others else document


@pytest.mark.parametrize("mode", ["compact", "mask", "off"])
@pytest.mark.parametrize("config", [FLASH, SMALL], ids=["flash", "small"])
def test_the_four_states_cover_every_layer_exactly_once(config, mode):
    lengths = [1, 2, 127, 128, 129, 139, 140, 141, 255, 256, 267, 268, 269, 300, 1000]
    for tokens, cached in itertools.product(lengths, [0, 127, 128, 160, 1000]):
        for refill in (False, True):
            view = record(config, tokens, cached=min(cached, tokens), mode=mode, refill=refill)
            for layer in view["layers"]:
                ranges = sorted(r for s in replay.STATES for r in layer[s])
                ends = [0, *(stop for _, stop in ranges)]
                assert [start for start, _ in ranges] == ends[:-1], layer
                assert ends[-1] == tokens and all(a < b for a, b in ranges), layer


def test_thresholds_and_savings_of_the_published_model():
    rule = ReplayRule.of(FLASH, "compact", 140)
    assert replay.thresholds(FLASH, rule, 6) == {"minimum": 134, "exact": 2541}
    # Performance ledger §1.3, and the rows of serving semantics §8.
    for tokens, saved in ((256, 0.222), (1024, 0.432), (8192, 0.488), (2**17, 0.496)):
        totals = record(FLASH, tokens)["totals"]
        assert totals["flops_saved"] == pytest.approx(saved, abs=0.003)
    assert record(FLASH, 10_000)["totals"]["rows_saved"] == pytest.approx(0.493, abs=5e-5)


def test_state_is_what_the_ledger_says():
    grown = cost.held_bytes(FLASH, 2000, 0, False) - cost.held_bytes(FLASH, 1000, 0, False)
    assert grown == 890_000
    fixed = cost.held_bytes(FLASH, 0, 0, False)
    assert fixed == pytest.approx(2.70e6, rel=0.01)
    assert cost.held_bytes(FLASH, 0, 6, True) - fixed == (134 * 43 - 128 * 40) * 528


def test_totals_are_sums():
    view = record(FLASH, 65_536, cached=57_344)
    totals, parts = view["totals"], view["totals"]["components"]
    layers = sum(sum(layer["flops"].values()) for layer in view["layers"])
    assert totals["flops"] == layers + parts["head"]["flops"]
    assert totals["flops"] == sum(part["flops"] for part in parts.values())
    assert totals["flops_full"] == sum(part["flops_full"] for part in parts.values())
    assert totals["rows"] == 20 * 8192 + 20 * 140 and totals["rows_full"] == 40 * 8192
    assert totals["rows_uncached"] == 40 * 65_536
    assert totals["rows_saved"] == pytest.approx(0.4915, abs=5e-5)


def test_a_hit_ends_at_a_page_that_leaves_the_tail_to_compute():
    rule = ReplayRule.of(FLASH, "compact", 140)
    hits = {cached: rule.plan_with_hit(1000, cached, 128).cached for cached in
            (0, 127, 128, 700, 860, 896, 1000)}  # fmt: skip
    assert hits == {0: 0, 127: 0, 128: 128, 700: 640, 860: 768, 896: 768, 1000: 768}
    whole = ReplayRule.of(FLASH, "off", 0)
    assert whole.plan_with_hit(1024, 1024, 128).cached == 896
    assert rule.plan_with_hit(1000, 1000, 128, encoder_replay=True).refill == 128


def test_a_layout_that_cannot_be_cut_runs_everything():
    config = t6.model_config(engram_layer_ids=[1, 4])
    rule = ReplayRule.of(config, "compact", 28)
    assert rule.mode == "off"
    limits = replay.thresholds(config, rule, 6)
    assert limits["exact"] is None and "layer 4" in limits["why"]
    view = replay.inspection(config, rule, rule.plan(50))
    assert view["keep"] == "full" and view["totals"]["flops_saved"] == 0
    assert all(layer["computed"] == [[0, 50]] for layer in view["layers"])


@dataclass
class Run:
    layers: tuple
    flops: dict


def test_a_run_that_differs_from_the_plan_is_our_bug():
    rule = ReplayRule.of(FLASH, "compact", 140)
    plan = rule.plan(1000, cached=512)
    layers, flops = plan.all_ranges(), replay.components(FLASH, plan)
    replay.check(FLASH, plan, Run(layers, flops))
    wrong = list(layers)
    wrong[20] = replace(layers[20], keys_only=((512, 861),))
    with pytest.raises(InternalError) as caught:
        replay.check(FLASH, plan, Run(tuple(wrong), flops))
    assert caught.value.code == "replay-plan-differs" and caught.value.exit_status == 70
    assert "layer 20, keys only" in caught.value.message
    assert caught.value.facts[:2] == ("planned [512, 860)", "measured [512, 861)")
    with pytest.raises(InternalError, match="FLOPs of moe"):
        replay.check(FLASH, plan, Run(layers, {**flops, "moe": flops["moe"] + 1}))
    with pytest.raises(InternalError, match="layers"):
        replay.check(FLASH, plan, Run(layers[:-1], flops))


def test_bins_grow_and_have_one_state_each():
    for _ in range(60):
        config = random.choice([FLASH, SMALL])
        tokens = random.choice([random.randint(1, 400), random.randint(400, 16_000)])
        view = record(config, tokens, cached=random.randint(0, tokens))
        columns = random.choice([20, 36, 48])
        found = heatmap.edges(view, view, columns)
        assert found[0] == 0 and found[-1] == tokens and found == sorted(set(found))
        assert len(found) <= columns + 1
        assert len(found) == min(columns, tokens) + 1
        assert found[1] <= max(1, tokens // columns), "the last tokens have the finest bins"
        for far, near in zip(found[1:], found, strict=False):
            for layer in view["layers"]:
                first, last = tokens - far, tokens - near - 1
                assert heatmap.state_of(layer, first) == heatmap.state_of(layer, last)


def test_the_strip_of_the_published_model():
    view = record(FLASH, 65_536, cached=57_344)
    assert heatmap.strip(view, view, 80, plain=False).splitlines() == [
        "layers          tokens before the end of the prompt   rows full → compact",
        "                64k  8k    1k    140  64  16    4  0",
        "21-39 consumer  ··················│█████████████████  ████████ → ▏",
        "   20 boundary  ▒▒▒▒▒▒░░░░░░░░░░░░│█████████████████  ████████ → ▏        + keys",
        " 0-19 producer  ▒▒▒▒▒▒██████████████████████████████  ████████ → ████████",
        "█ computed   ░ keys only   ▒ cached   · skipped",
    ]
    plain = heatmap.strip(view, view, 80, plain=True)
    assert plain.isascii() and "21-39 consumer  ..................|####" in plain
    assert "# computed   : keys only   + cached   . skipped" in plain


def test_no_strip_is_wider_than_its_terminal_or_higher_than_24_rows():
    for _ in range(80):
        config = random.choice([FLASH, SMALL])
        tokens = random.choice([1, 2, 5, 140, 141, random.randint(1, 9_000), 2**14])
        cut = sorted(random.sample(range(tokens + 1), 2))
        view = record(
            config, tokens, random.choice([140, 256, "full"]), random.randint(0, tokens),
            random.choice(["compact", "mask"]), random.choice([None, tuple(cut)]),
        )  # fmt: skip
        for width in (80, 100, 120, 200):
            lines = heatmap.strip(view, view, width, plain=False).splitlines()
            assert max(map(len, lines)) <= width and len(lines) <= 24


def test_what_is_left_out_is_left_out_of_the_map_and_not_of_the_totals():
    rule = ReplayRule.of(FLASH, "compact", 140)
    whole = replay.inspection(FLASH, rule, rule.plan(1000))
    part = replay.restricted(whole, (19, 22), (800, 900))
    assert [layer["index"] for layer in part["layers"]] == [19, 20, 21]
    assert [layer["computed"] for layer in part["layers"]] == [[[800, 900]], [[860, 900]]] + [
        [[860, 900]]
    ]
    assert part["layers"][1]["keys_only"] == part["layers"][2]["skipped"] == [[800, 860]]
    assert part["totals"] == whole["totals"]


def test_facts_and_tables():
    view = record(FLASH, 65_536, cached=57_344, others=(256, "full"))
    lines = tables.facts(view, view)
    assert lines == [
        "minimum 134 (window 128 + rollback 6) · exact from 2,541 · here approximate",
        "cached 57,344 · new 8,192 · state 58.5 MiB · layer-rows −49.1 % · FLOPs −48.8 %",
        "against the whole prompt uncut: layer-rows −93.6 % · FLOPs −93.5 %",
    ]
    heads, rows, _ = tables.flops(view)
    assert heads == (
        "component", "full TFLOP", "keep 140 TFLOP", "saved", "keep 256 TFLOP", "saved"
    )  # fmt: skip
    assert rows[-1] == ("total", "317.1", "162.3", "48.8 %", "164.5", "48.1 %")
    exact = record(FLASH, 65_536, keep=2541)
    assert exact["exact"] and tables.facts(exact, exact)[0].endswith("here exact")
    assert record(FLASH, 140)["exact"] and not record(FLASH, 141)["exact"]
    assert not record(FLASH, 65_536, keep=2540)["exact"]
    assert tables.ascii_only("\n".join(lines)).isascii()


def test_keeps_that_resume_elsewhere_are_compared_with_their_own_uncut_prompt():
    view = record(FLASH, 1000, cached=1000, others=(512, "full"))
    shown = tables.bars(view)
    assert [name for name, _, _ in shown] == [
        "full, 232 new", "keep 140", "full, 616 new", "keep 512", "full, 104 new",
    ]  # fmt: skip
    for name, parts, saved in shown:
        if saved is None:
            full = sum(parts.values())
        else:
            assert saved == pytest.approx(1 - sum(parts.values()) / full) and 0 < saved < 1, name
    heads, rows, _ = tables.flops(view)
    assert len(heads) == len(rows[0]) == 8 and all(float(r[3][:-2]) >= 0 for r in rows)


def test_pictures_and_the_tables_behind_them(tmp_path):
    pytest.importorskip("matplotlib")
    from deepinfer.report import plots

    document = json.loads(json.dumps(record(SMALL, 1000, cached=512, others=("full",))))
    document["drift"] = [
        {"keep": 140, "max_abs_dlogit": 0.4, "kl": 0.003, "top1_agreement": 0.98},
        {"keep": "full", "max_abs_dlogit": 0.0, "kl": 0.0, "top1_agreement": 1.0},
    ]
    files = plots.write(document, tmp_path)
    names = ["drift", "flops", "heatmap-140", "heatmap-full"]
    assert sorted(f.name for f in files) == sorted(
        f"{n}.{e}" for n in names for e in ("csv", "png")
    )
    for name in names:
        data = (tmp_path / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG") and b"pHYs" + (5906).to_bytes(4) * 2 in data  # 150 dpi
    cells = list(csv.DictReader((tmp_path / "heatmap-140.csv").open()))
    for index in range(10):
        mine = [c for c in cells if c["layer"] == str(index)]
        ends = [0, *(int(c["token_to"]) for c in mine)]
        assert [int(c["token_from"]) for c in mine] == ends[:-1] and ends[-1] == 1000
    bars = list(csv.DictReader((tmp_path / "flops.csv").open()))
    spent = sum(int(row["flops"]) for row in bars if row["bar"] == "keep 140")
    assert spent == document["totals"]["flops"]
    assert [row["kl"] for row in csv.DictReader((tmp_path / "drift.csv").open())] == [
        "0.003",
        "0.0",
    ]
