"""How much memory a run takes: what was asked for is kept or refused, the rest is cut to fit."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import deepinfer
from deepinfer.checkpoint.names import parameters
from deepinfer.engine.assembly import plan_sizes, plan_weights
from deepinfer.errors import CapacityError, UsageError
from deepinfer.kvcache.pools import bytes_per_slot, bytes_per_token
from deepinfer.model.config import ModelConfig
from deepinfer.settings import resolve
from tests import t6

CONFIG = t6.model_config()
TOKEN, SLOT = bytes_per_token(CONFIG), bytes_per_slot(CONFIG)
PLENTY = 1 << 40


def sizes(free: int = PLENTY, **settings):
    return plan_sizes(resolve(settings, environ={}), CONFIG, free)


def test_with_plenty_every_request_may_be_as_long_as_the_model():
    got, warnings = sizes(max_num_seqs=4, page_tokens=128)
    assert (got.slots, got.max_model_len, warnings) == (4, 4096, ())
    assert got.pages * 128 == 4 * 4096 and got.chunk == got.max_rows == 4096


def test_what_nobody_asked_for_is_cut_to_a_quarter_of_the_memory():
    free = int(4 * (16 * SLOT + 1000 * TOKEN))
    got, warnings = sizes(free)
    assert got.slots < 256 and not warnings
    assert got.slots * SLOT + got.pages * got.page_tokens * TOKEN <= free / 4
    assert got.max_model_len == min(4096, got.pages * 128)
    _, warnings = sizes(free, max_num_seqs=200)
    assert len(warnings) == 1 and "max_num_seqs 200" in warnings[0]


def test_what_was_asked_for_is_kept_or_refused():
    free = int(4 * (8 * SLOT + 1000 * TOKEN))
    for wrong, flag in ((dict(max_model_len=4096), "--max-model-len"),
                        (dict(kv_cache_tokens=10**9), "--kv-cache-tokens")):  # fmt: skip
        with pytest.raises(CapacityError) as caught:
            sizes(free, max_num_seqs=2, **wrong)
        asked = next(iter(wrong.values()))
        assert caught.value.code == "kv-too-small"
        assert caught.value.message == f"{asked:,} tokens do not fit"
        assert "free after weights" in caught.value.facts[0]
        fitting = int(caught.value.hint.removeprefix(flag))
        assert 0 < fitting < asked
        sizes(free, max_num_seqs=2, **{next(iter(wrong)): fitting})  # the hint works
    with pytest.raises(CapacityError):
        sizes(-1)
    with pytest.raises(UsageError, match="less than one page"):
        sizes(kv_cache_tokens=127, page_tokens=128)


def test_a_small_pool_leaves_the_model_its_length():
    got, _ = sizes(kv_cache_tokens=64, page_tokens=4)
    assert (got.pages, got.max_model_len) == (16, 4096)


def test_the_planning_half_needs_no_torch():
    code = (
        "import sys, deepinfer.scheduler, deepinfer.kvcache, deepinfer.core.request,"
        " deepinfer.core.sequence, deepinfer.core.step, deepinfer.tokenizer.tokenizer,"
        " deepinfer.engine.assembly; assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)


class Stored:
    """What `plan_weights` reads of a checkpoint."""

    config = CONFIG

    def __init__(self, weight_bytes):
        self.weight_bytes = weight_bytes


def test_weights_that_do_not_fit_are_refused_before_they_are_read():
    with pytest.raises(CapacityError) as caught:
        plan_weights(Stored(8 << 30), 4 << 30, drafts=True)
    assert caught.value.code == "weights-too-big"
    assert "8.0 GiB" in str(caught.value) and "4.0 GiB" in str(caught.value)


def test_unpacked_weights_are_kept_only_where_there_is_room():
    held = parameters(CONFIG, vision=False).values()
    for drafts in (False, True):
        unpacked = 8 * sum(
            math.prod(p.shape) for p in held if p.group in ("target", "draft")[: 1 + drafts]
        )
        left, keep = plan_weights(Stored(1 << 20), (1 << 20) + 2 * unpacked, drafts)
        assert keep and left == unpacked
        left, keep = plan_weights(Stored(1 << 20), (1 << 20) + 2 * unpacked - 1, drafts)
        assert not keep and left == 2 * unpacked - 1


def test_state_has_the_published_sizes():
    """890 bytes a token and 2.70 MB of window rings a request (model spec §4)."""
    text = (Path(deepinfer.__file__).parent / "embedded" / "v41-flash.json").read_text()
    config = ModelConfig.from_dict(json.loads(text))
    assert bytes_per_token(config) == 890
    open_groups, history = 3 * 2 * 4 * 512, 3 * 8
    assert bytes_per_slot(config) == 2_703_360 + open_groups + history
