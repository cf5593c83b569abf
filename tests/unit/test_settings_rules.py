"""Rules across settings: what follows, what is refused, what only warns."""

from types import SimpleNamespace

import pytest

from deepinfer.errors import UsageError
from deepinfer.settings import for_device, for_model, registry, resolve


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def model(window=128, block=5, stages=3, ratios=(0, 2, 1), positions=4096):
    return SimpleNamespace(
        sliding_window=window,
        compress_ratios=ratios,
        max_position_embeddings=positions,
        num_nextn_predict_layers=stages,
        dspark_block_size=block,
        cut_obstacles=(),
    )


def flags(environ=None, **chosen):
    return resolve(chosen, environ=environ or {}, source="flag")


# DI-53


def test_di_53_flag_before_variable():
    environ = {"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "200", "DEEPINFER_USE_NEXTN_DECODE": "3"}
    settings = flags(environ, swa_keep="140", mtp="5")
    assert (settings.swa_keep, settings.mtp) == (140, 5)
    shown = settings.as_json()
    assert shown["DEEPINFER_YOCO_PREFILL_KEEP_TOKENS"] == {
        "value": 140, "source": "flag", "origin": "--swa-keep",
    }  # fmt: skip
    settings = flags(environ)
    assert (settings.swa_keep, settings.mtp, settings.max_rollback) == (200, 3, 4)
    assert settings.source("mtp") == "environment"


def test_di_53_invariance_with_rejection_is_refused_with_both_names():
    with pytest.raises(UsageError) as caught:
        flags({"DEEPINFER_BATCH_INVARIANT": "1"}, verify="rejection")
    error = caught.value
    assert error.code == "invariant-verify-conflict"
    assert error.message == "--batch-invariant cannot be used with --verify rejection"
    assert "DEEPINFER_BATCH_INVARIANT" in error.facts[0] and "--verify" in error.facts[0]
    assert error.hint == "--verify coupled"


def test_di_53_invariance_with_varlen_is_allowed_and_coupled():
    environ = {"DEEPINFER_BATCH_INVARIANT": "1", "DEEPINFER_ENABLE_MTP_VARLEN": "1"}
    settings = flags(environ)
    assert settings.batch_invariant and settings.mtp_varlen
    assert settings.verify == "coupled"
    assert settings.source("verify") == "default"


def test_di_53_a_keep_length_while_truncation_is_off_warns():
    environ = {"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "off"}
    lines = flags(environ, swa_keep="200").warnings
    assert (
        "--swa-keep 200 is not used: truncation is off (DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE)"
        in lines
    )


# tail length


def test_keep_must_cover_window_and_rollback():
    settings = flags({"DEEPINFER_USE_NEXTN_DECODE": "5"}, swa_keep="100")
    with pytest.raises(UsageError) as caught:
        for_model(settings, model())
    error = caught.value
    assert error.code == "swa-keep-too-short"
    assert error.message == "--swa-keep 100 is too short for this model"
    assert error.facts == (
        "window 128 + longest rollback 6 = 134 (draft length 5 from DEEPINFER_USE_NEXTN_DECODE)",
    )
    assert error.hint == "--swa-keep 140, or --swa-keep full"


@pytest.mark.parametrize(("keep", "mtp", "good"), [
    (134, 5, True), (133, 5, False), (129, 0, True), (128, 0, False), (0, 0, False),
])  # fmt: skip
def test_the_least_keep_is_exact(keep, mtp, good):
    settings = flags(swa_keep=keep, mtp=mtp)
    if good:
        assert for_model(settings, model()).swa_keep == keep
    else:
        with pytest.raises(UsageError, match="too short"):
            for_model(settings, model())


def test_keep_from_a_variable_names_flag_and_variable():
    settings = flags({"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "100"})
    with pytest.raises(UsageError) as caught:
        for_model(settings, model())
    assert "--swa-keep 100" in caught.value.message
    assert "from DEEPINFER_YOCO_PREFILL_KEEP_TOKENS" in caught.value.facts


def test_a_default_keep_grows_with_the_window():
    settings = for_model(flags(), model(window=512))
    assert settings.swa_keep == 518 and settings.source("swa_keep") == "model"


def test_full_means_off_and_a_flag_beats_the_variable():
    settings = flags({"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "compact"}, swa_keep="full")
    assert settings.replay_mode == "off" and settings.source("replay_mode") == "flag"
    assert for_model(settings, model(window=4000)).replay_mode == "off"


def test_full_with_a_mode_of_the_same_level_is_refused():
    with pytest.raises(UsageError) as caught:
        flags(swa_keep="full", replay_mode="compact")
    assert "--swa-keep full" in caught.value.message
    assert "--replay-mode compact" in caught.value.message


# drafts


def test_rollback_is_at_least_draft_plus_one():
    settings = flags(max_rollback=3)
    assert settings.max_rollback == 6
    assert any(line.startswith("--max-rollback 3 is less than") for line in settings.warnings)
    assert flags(max_rollback=9).max_rollback == 9
    assert flags(mtp=0).max_rollback == 1


def test_a_draft_longer_than_trained_is_refused():
    with pytest.raises(UsageError) as caught:
        for_model(flags(mtp=9), model())
    error = caught.value
    assert (error.code, error.message) == (
        "mtp-too-long", "--mtp 9 exceeds this checkpoint's draft head",
    )  # fmt: skip
    assert error.facts == ("trained for blocks of 5",) and error.hint == "--mtp 5"


def test_no_draft_head():
    settings = for_model(flags(), model(stages=0))
    assert settings.mtp == 0 and settings.max_rollback == 1
    with pytest.raises(UsageError, match="has no draft head") as caught:
        for_model(flags(mtp=5), model(stages=0))
    assert caught.value.hint == "--mtp 0"


def test_the_checkpoint_gives_the_draft_length():
    settings = for_model(flags(), model(block=3))
    assert (settings.mtp, settings.max_rollback) == (3, 4)
    assert settings.source("mtp") == "model"


def test_temperatures_are_one_or_one_per_draft():
    name = "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE"
    assert flags({name: "1,2,3"}, mtp=3).mtp_temperature == (1.0, 2.0, 3.0)
    with pytest.raises(UsageError, match=f"{name} has 2 numbers for draft length 3"):
        flags({name: "1,2"}, mtp=3)
    with pytest.raises(UsageError, match="has 2 numbers for draft length 5"):
        for_model(flags({name: "1,2"}), model())


def test_varlen_without_drafts_warns():
    lines = flags(mtp=0, mtp_varlen=True).warnings
    assert "--mtp-varlen is not used: drafting is off (--mtp)" in lines


# sizes, devices, caches


def test_row_budget_follows_requests_and_drafts():
    assert flags(max_num_seqs=4096, mtp=1).max_num_batched_tokens == 8192
    assert flags(max_num_batched_tokens=64).prefill_chunk == 64


def test_a_page_is_a_multiple_of_every_ratio():
    with pytest.raises(UsageError, match="--page-tokens 129 is not a multiple") as caught:
        for_model(flags(page_tokens=129), model())
    assert caught.value.hint == "--page-tokens 130"


def test_a_length_that_the_model_does_not_have():
    with pytest.raises(UsageError) as caught:
        for_model(flags(max_model_len=5000), model())
    assert caught.value.hint == "--max-model-len 4096"


def test_fp32_needs_the_torch_back_end_on_cpu():
    assert flags(dtype="fp32", accelerator="cpu", backend=["all=torch"]).dtype == "fp32"
    for chosen in ({"accelerator": "nvidia"}, {"backend": ["moe=cpu"]}):
        with pytest.raises(UsageError, match="--dtype fp32 cannot be used with"):
            flags(dtype="fp32", **chosen)
    with pytest.raises(UsageError, match="--dtype fp32 cannot be used with nvidia"):
        for_device(flags(dtype="fp32"), "nvidia")
    assert for_device(flags(dtype="fp32"), "cpu").accelerator == "cpu"


def test_invariance_is_refused_where_an_op_has_no_fixed_order():
    ops = ("moe", "sparse_attention")
    with pytest.raises(UsageError) as caught:
        for_device(flags(batch_invariant=True), "ascend", ops)
    error = caught.value
    assert error.code == "invariant-unsupported"
    assert error.message == "batch-invariant mode is not available on ascend"
    assert error.facts[0] == "ops without a fixed-order version: moe, sparse_attention"
    assert "--batch-invariant" in error.facts[1]
    assert error.hint == "--accelerator cpu for a slow exact run"
    with pytest.raises(UsageError) as caught:
        for_device(flags(batch_invariant=True), "cpu", ops)
    assert caught.value.hint == "--backend all=torch"
    chosen = flags({"DEEPINFER_BATCH_INVARIANT": "1"}, backend=["moe=cpu"])
    with pytest.raises(UsageError) as caught:
        for_device(chosen, "cpu", ["moe"])
    assert "DEEPINFER_BATCH_INVARIANT and --backend" in caught.value.facts[1]
    assert "leave --backend out" in caught.value.hint
    assert for_device(flags(batch_invariant=True), "cpu").batch_invariant
    assert not for_device(flags(), "cpu", ops).batch_invariant


def test_invariance_refuses_the_approximate_reuse():
    with pytest.raises(UsageError, match="--encoder-replay"):
        flags(batch_invariant=True, encoder_replay=True)


def test_a_cache_folder_without_the_cache_warns():
    lines = flags(prefix_cache=False, prefix_cache_dir="x").warnings
    assert "--prefix-cache-dir is not used: the prefix cache is off (--prefix-cache)" in lines


def test_every_rule_error_helps():
    for chosen in (
        {"batch_invariant": True, "verify": "rejection"},
        {"swa_keep": "full", "replay_mode": "mask"},
        {"dtype": "fp32", "accelerator": "nvidia"},
    ):
        with pytest.raises(UsageError) as caught:
            flags(**chosen)
        assert caught.value.hint and caught.value.facts and caught.value.exit_status == 2
    assert registry.find("mtp") is not None
