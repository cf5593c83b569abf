"""The replay plan against a second definition: what becomes of each token in each layer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import InternalError
from deepinfer.replay import ReplayRule
from deepinfer.replay.plan import MODES


@st.composite
def rules(draw, modes=MODES, window=12):
    layers = draw(st.integers(1, 7))
    mode = draw(st.sampled_from(modes))
    known = st.integers(0, layers - 1)
    boundary = draw(known if mode != "off" else known | st.none())
    width = draw(st.integers(1, window))
    keep = 0 if mode == "off" else draw(st.integers(width, width + 40))
    return ReplayRule(layers=layers, boundary=boundary, window=width, mode=mode, keep=keep)


@st.composite
def plans(draw):
    rule, tokens, full = draw(rules()), draw(st.integers(1, 80)), draw(st.booleans())
    latest = tokens - 1 if full or rule.mode == "off" else max(tokens - rule.keep, 0)
    cached = draw(st.integers(0, latest))
    refill = draw(st.just(0) | st.integers(0, cached))
    return rule, rule.plan(tokens, cached=cached, refill=refill, full=full), full


def fate(rule, plan, full, layer, token):
    """One token in one layer, as serving semantics §2 puts it."""
    boundary = rule.layers if rule.boundary is None else rule.boundary
    cut = not full and rule.mode != "off" and plan.tokens > rule.keep
    first = plan.cached - plan.refill
    drops = cut and rule.mode == "compact" and layer >= boundary
    if token >= first and not (drops and token < plan.tokens - rule.keep):
        return "computed"
    if layer == boundary and drops and token >= plan.cached:
        return "keys_only"
    if layer == boundary and drops:
        return "read"
    return "skipped" if cut and layer > boundary else "read"


@settings(max_examples=120, deadline=None)
@given(plans())
def test_ranges_are_a_partition_that_says_what_happens(case):
    rule, plan, full = case
    ranges = plan.all_ranges()
    assert [layer.index for layer in ranges] == list(range(rule.layers))
    for layer in ranges:
        fates = {}
        for what in ("computed", "keys_only", "read", "skipped"):
            for start, stop in getattr(layer, what):
                assert 0 <= start < stop <= plan.tokens, "no empty range"
                for token in range(start, stop):
                    assert fates.setdefault(token, what) == what, "in two ranges"
        wanted = {t: fate(rule, plan, full, layer.index, t) for t in range(plan.tokens)}
        assert fates == wanted
        if rule.boundary is not None:
            assert layer.role == ("encoder", "boundary", "decoder")[
                (layer.index >= rule.boundary) + (layer.index > rule.boundary)
            ]  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(plans())
def test_every_entry_is_read_or_computed_once_and_the_last_row_runs(case):
    """The owner of the decoder half has keys for every token, and a logits row is never cut."""
    rule, plan, _ = case
    for layer in plan.all_ranges():
        assert layer.computed and layer.computed[-1][1] == plan.tokens
        if layer.index <= plan.boundary:
            assert not layer.skipped, "compressed KV without a gap"
    assert 0 <= plan.first <= plan.cached < plan.tokens or plan.tokens == 0
    if plan.kept:
        assert plan.tokens - plan.kept == rule.keep and plan.cached <= plan.kept


@settings(max_examples=80, deadline=None)
@given(plans())
def test_mask_runs_every_row_and_compact_sees_the_same(case):
    rule, plan, full = case
    if rule.mode == "off":
        return
    twin = {"mask": "compact", "compact": "mask"}[rule.mode]
    other = ReplayRule(rule.layers, rule.boundary, rule.window, twin, rule.keep).plan(
        plan.tokens, cached=plan.cached, refill=plan.refill, full=full
    )
    for layer in range(rule.layers):
        assert other.sees_from(layer) == plan.sees_from(layer)
        mask, compact = (plan, other) if rule.mode == "mask" else (other, plan)
        assert mask.rows_from(layer) == mask.first <= compact.rows_from(layer)
        assert full or compact.rows_from(layer) <= max(plan.tokens - rule.keep, compact.first)


def last_row_is_exact(rule, tokens):
    """Follow which rows of each decoder layer differ from an uncut prefill, to the last row."""
    plan = rule.plan(tokens)
    same = [True] * tokens  # the output of the layer before, as far as rows run
    for layer in range(plan.boundary, rule.layers):
        sees = plan.sees_from(layer)
        same = [
            row >= plan.rows_from(layer)
            and all(q >= sees and same[q] for q in range(max(row - rule.window + 1, 0), row + 1))
            for row in range(tokens)
        ]
    return same[-1]


@settings(max_examples=120, deadline=None)
@given(rules(modes=("mask", "compact"), window=6), st.integers(-3, 3), st.integers(1, 9))
def test_the_threshold_of_exactness_is_sharp(rule, around, more):
    keep = rule.exact + around
    if keep < 1:
        return
    rule = ReplayRule(rule.layers, rule.boundary, rule.window, rule.mode, keep)
    assert last_row_is_exact(rule, keep), "K >= L"
    assert last_row_is_exact(rule, keep + more) == (around >= 0)


def test_thresholds_of_the_released_model():
    """Window 128, rollback 6, 20 decoder layers: 134 and 2,541 (serving semantics §2)."""
    rule = ReplayRule(layers=40, boundary=20, window=128, mode="compact", keep=140)
    assert (rule.minimum(6), rule.exact, rule.stateful) == (134, 2541, 20)
    assert rule.window_pages(128) * 128 == 384
    assert ReplayRule(layers=40, boundary=None, window=128).stateful == 40


@settings(max_examples=80, deadline=None)
@given(rules(), st.integers(0, 120), st.booleans())
def test_the_latest_resume_is_the_last_that_a_plan_takes(rule, tokens, full):
    latest = rule.latest_resume(tokens)
    assert rule.plan(tokens, cached=latest).cached == latest
    assert latest == (0 if tokens <= 1 else latest) and latest <= max(tokens - 1, 0)
    for cached, refill in ((latest + 1, 0), (-1, 0), (latest, latest + 1), (latest, -1)):
        with pytest.raises(InternalError) as refused:
            rule.plan(tokens, cached=cached, refill=refill)
        assert refused.value.code == "replay-plan"
    if rule.mode != "off":
        assert latest == max(tokens - rule.keep, 0)


@settings(max_examples=80, deadline=None)
@given(rules(), st.integers(1, 9), st.integers(1, 100))
def test_kept_window_pages_reach_back_to_the_latest_resume(rule, size, tokens):
    """W + P * ceil(K / P) rows before the last page edge hold a window before every point from the
    latest resume on."""
    pages = rule.window_pages(size)
    resume = rule.latest_resume(tokens) // size * size
    first = (tokens // size - pages) * size
    assert first <= max(resume - rule.window, 0) or resume == 0
    keep = rule.keep if rule.cuts else 1
    assert pages * size < rule.window + size + size * -(-keep // size)


@pytest.mark.parametrize("mode,boundary", [("masked", 2), ("", 2), ("mask", None)])
def test_a_rule_that_cannot_be_is_refused(mode, boundary):
    with pytest.raises(InternalError):
        ReplayRule(layers=4, boundary=boundary, window=4, mode=mode, keep=8)
