"""The meter against the plan and the cost model: what really ran is what was planned, row for row
and FLOP for FLOP."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.checkpoint.load import load_weights
from deepinfer.core.step import Chunk, StepPlan
from deepinfer.engine.runner import Runner
from deepinfer.errors import InternalError
from deepinfer.model import cost
from deepinfer.ops import registry
from deepinfer.replay.meter import Meter
from deepinfer.replay.plan import ReplayPlan, ReplayRule
from tests import t6

PAGE = t6.PAGE_TOKENS
PAGES = 32
# A limit of 4 blocks of 4 entries is reached after 16 tokens.
FEW = {"candidate_topk_blocks": 4, "candidate_block_size": 4}


def make(folder, **changes) -> Runner:
    checkpoint = open_checkpoint(t6.write(folder, **changes))
    return Runner(
        checkpoint.config,
        load_weights(checkpoint, draft=False),
        registry.build("cpu"),
        slots=2,
        pages=2 * PAGES,
        page_tokens=PAGE,
        token_map=t6.token_map()[0],
    )


@pytest.fixture(scope="module", params=["float", "quantised"])
def runner(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t6") / "m"
    return make(folder, quantised=request.param == "quantised", **FEW)


def rule(runner: Runner, mode: str, keep: int = t6.KEEP) -> ReplayRule:
    config = runner.config
    return ReplayRule(
        config.num_hidden_layers, config.decoder_start, config.sliding_window, mode, keep
    )


def ids(count: int) -> tuple[int, ...]:
    return tuple(11 + (at * at * 7 + at) % 256 for at in range(count))


def run(runner: Runner, plan: ReplayPlan, chunk: int, start: int | None = None) -> torch.Tensor:
    """Logits of the last row of the plan's prompt, run in chunks in slot 0."""
    tokens, logits = ids(plan.tokens), None
    for at in range(plan.first if start is None else start, plan.tokens, chunk):
        end = min(at + chunk, plan.tokens)
        pages = tuple(range(-(-end // PAGE)))
        last = int(end == plan.tokens)
        piece = Chunk(0, at, tokens[at:end], pages, last, replay=plan)
        logits = runner.forward(StepPlan((piece,)))
    return logits


def check(runner: Runner, meter: Meter, plan: ReplayPlan) -> None:
    found = meter.measured(plan.tokens)
    assert found.layers == plan.all_ranges()
    assert found.flops_by_layer == cost.plan_flops(runner.config, plan)
    assert found.head == cost.head_flops(runner.config, 1)
    assert found.total_flops == cost.total_flops(runner.config, plan)
    assert set(found.flops) == set(cost.COMPONENTS)
    saved = cost.saving(runner.config, plan)
    if not plan.cached:
        assert found.layer_rows == saved.rows


@pytest.mark.parametrize("mode", ["off", "mask", "compact"])
@pytest.mark.parametrize("tokens", [1, 2, 17, t6.KEEP, t6.KEEP + 1, 61, 90])
def test_prefill(runner, mode, tokens):
    plan = rule(runner, mode).plan(tokens)
    for chunk in (tokens, 7):
        with Meter(runner) as meter:
            run(runner, plan, chunk)
        check(runner, meter, plan)


@pytest.mark.parametrize("mode", ["off", "mask", "compact"])
@pytest.mark.parametrize("refill", [0, 16])
def test_resumed_prefill(runner, mode, refill):
    tokens, cached = 90, 48
    whole = rule(runner, "off").plan(cached)
    plan = rule(runner, mode).plan(tokens, cached=cached, refill=refill)
    for chunk in (tokens, 7):
        run(runner, whole, cached)  # what a cache would hold
        with Meter(runner) as meter:
            run(runner, plan, chunk)
        check(runner, meter, plan)


def test_candidates_are_limited(runner):
    """The later index owner is scored against at most 16 entries, whatever block is half full."""
    plan = rule(runner, "off").plan(90)
    limited = runner.config.layers[5]
    assert limited.uses_candidates
    flops = cost.layer_flops(runner.config, plan, 5)["indexer"]
    assert flops < cost.layer_flops(runner.config, plan, 3)["indexer"]


def test_a_layout_that_cannot_be_cut(tmp_path):
    runner = make(tmp_path / "m", compress_ratios=[0, 2, 2, 2, 2, 2, 0, 0])
    plan = ReplayRule(6, None, runner.config.sliding_window).plan(40)
    with Meter(runner) as meter:
        run(runner, plan, 16)
    check(runner, meter, plan)


def test_decoding_counts_and_leaves_the_ranges(runner):
    """Rows behind the prompt cost FLOPs and are no part of its ranges."""
    plan = rule(runner, "compact").plan(61)
    with Meter(runner) as meter:
        run(runner, plan, 61)
        before = meter.measured(61)
        page = tuple(range(-(-62 // PAGE)))
        runner.forward(StepPlan((Chunk(0, 61, (12,), page, 1, replay=plan),)))
    after = meter.measured(61)
    assert after.layers == before.layers
    assert after.flops["moe"] > before.flops["moe"] and after.head == 2 * before.head


def test_a_closed_meter_counts_nothing_and_a_reset_one_starts_again(runner):
    plain, model = dict(vars(runner.ops)), runner.model
    plan = rule(runner, "compact").plan(40)
    with Meter(runner) as meter:
        run(runner, plan, 40)
        meter.reset()
        watched = run(runner, plan, 40)
        check(runner, meter, plan)
    assert vars(runner.ops) == plain and runner.model is model
    assert torch.equal(watched, run(runner, plan, 40))
    check(runner, meter, plan)


def test_work_done_twice_is_told(runner):
    plan = rule(runner, "compact").plan(40)
    with Meter(runner) as meter:
        run(runner, plan, 40)
        run(runner, plan, 40)
    with pytest.raises(InternalError, match="more than once"):
        meter.measured(40)


def test_a_difference_shows(runner):
    """Another plan than the one that ran does not pass."""
    plan = rule(runner, "compact").plan(61)
    with Meter(runner) as meter:
        run(runner, plan, 61)
    found = meter.measured(61)
    other = rule(runner, "compact", t6.KEEP + 1).plan(61)
    assert found.layers != other.all_ranges()
    assert found.flops_by_layer != cost.plan_flops(runner.config, other)
    assert found.layers != replace(plan, mode="mask").all_ranges()
