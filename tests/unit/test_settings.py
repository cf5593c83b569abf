"""Resolution of settings: spellings, precedence, sources, unknown names, files."""

import pickle
from pathlib import Path

import pytest

from deepinfer.errors import UsageError
from deepinfer.settings import registry, resolve
from deepinfer.settings.registry import SETTINGS
from deepinfer.settings.resolve import parse_pairs

# Two good spellings of each type, the value each stands for, and one that must be refused.
GOOD = {
    "switch": (("on", True), ("0", False), "enabled"),
    "whole number": (("7", 7), ("9", 9), "7.5"),
    "number": (("0.25", 0.25), ("0.5", 0.5), "half"),
    "whole number or full": (("200", 200), ("full", "full"), "some"),
    "size": (("2GiB", 2 * 1024**3), ("1.5 MB", 1_500_000), "ten"),
    "OP=NAME list": (("all=torch", {"all": "torch"}), ("a=b,c=d", {"a": "b", "c": "d"}), "torch"),
    "number or list": (("2.0", (2.0,)), ("3", (3.0,)), "a,b"),
}
USED = [setting for setting in SETTINGS if setting.used]
NAMES = [setting.attribute for setting in USED]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def spellings(setting, tmp_path):
    """Two (spelling, value) pairs and a bad spelling (None where every text is good)."""
    kind = setting.kind
    if kind.choices and kind.name not in GOOD:
        return (kind.choices[0], kind.choices[0]), (kind.choices[1], kind.choices[1]), "foo"
    if kind.name == "path":
        one, two = tmp_path / "one", tmp_path / "two"
        for path in (one, two):
            path.touch()
        return (str(one), str(one)), (str(two), str(two)), None
    return GOOD[kind.name]


@pytest.mark.parametrize("name", [n for n in NAMES if n != "config"])
def test_flag_beats_environment_beats_file_beats_model_beats_default(name, tmp_path):
    setting = registry.find(name)
    (one, value_one), (two, value_two), _ = spellings(setting, tmp_path)
    file = tmp_path / "settings.toml"
    file.write_text(f'{name} = "{one}"\n')
    # Rules across settings have their own tests; here they must not get in the way.
    calm = {"replay_mode": "compact"} if name != "replay_mode" else {}
    base = dict(environ={}, config_file=file)
    settings = resolve(calm, **base)
    assert settings.source(name) == "file"
    assert settings.origin(name) == str(file)
    if name not in ("max_rollback", "swa_keep"):
        assert settings.values[name].value == value_one
    if setting.variable:
        environ = {setting.variable: two}
        settings = resolve(calm, environ=environ, config_file=file)
        assert settings.source(name) == "environment"
        assert settings.origin(name) == setting.variable
        settings = resolve({**calm, name: one}, environ=environ, config_file=file, source="flag")
    else:
        settings = resolve({**calm, name: two}, **base, source="flag")
    assert settings.source(name) == "flag"
    assert settings.origin(name) == (setting.flag or name)
    settings = resolve({}, environ={}, model_defaults={name: value_two} if value_two else {})
    assert settings.source(name) in ("model", "default")
    assert resolve({}, environ={}).source(name) == "default"


@pytest.mark.parametrize("name", NAMES)
def test_bad_values_are_refused_everywhere_with_the_accepted_spellings(name, tmp_path):
    setting = registry.find(name)
    *_, bad = spellings(setting, tmp_path)
    if bad is None:
        bad = "a\0path"
    file = tmp_path / "settings.toml"
    file.write_text(f"{name} = {'5' if name == 'backend' else '{ a = 1 }'}\n")
    with pytest.raises(UsageError) as caught:
        resolve({name: bad}, environ={})
    assert caught.value.exit_status == 2
    assert name in str(caught.value) and caught.value.hint
    if name != "config":
        with pytest.raises(UsageError) as caught:
            resolve({}, environ={}, config_file=file)
        assert caught.value.exit_status == 2
    if setting.variable and name != "config":
        with pytest.raises(UsageError) as caught:
            resolve({}, environ={setting.variable: bad})
        assert caught.value.code == "bad-variable"
        assert setting.variable in caught.value.message
        assert setting.kind.accepted in caught.value.facts[0]


def test_an_environment_value_is_checked_even_when_a_flag_wins():
    with pytest.raises(UsageError, match='DEEPINFER_USE_NEXTN_DECODE="five" is not a whole'):
        resolve({"mtp": 5}, environ={"DEEPINFER_USE_NEXTN_DECODE": "five"})


# DI-52


@pytest.mark.parametrize("word", ["0", "false", "FALSE", "no", "off", "", "  "])
def test_di_52_off_spellings_and_empty(word):
    settings = resolve({}, environ={"DEEPINFER_BATCH_INVARIANT": word})
    assert settings.batch_invariant is False
    assert settings.source("batch_invariant") == ("environment" if word.strip() else "default")


@pytest.mark.parametrize("word", ["1", "true", "yes", "on", "On", "TRUE"])
def test_di_52_on_spellings(word):
    assert resolve({}, environ={"DEEPINFER_BATCH_INVARIANT": word}).batch_invariant is True


@pytest.mark.parametrize("word", ["enabled", "2", "y", "nope"])
def test_di_52_other_spellings_are_errors_that_list_the_accepted_ones(word):
    with pytest.raises(UsageError) as caught:
        resolve({}, environ={"DEEPINFER_BATCH_INVARIANT": word})
    text = str(caught.value)
    for accepted in ("0", "1", "true", "false", "yes", "no", "on", "off"):
        assert accepted in text
    assert caught.value.exit_status == 2


def test_di_52_misspelt_name_gets_the_nearest_known_one():
    settings = resolve({}, environ={"DEEPINFER_BATCH_INVARIENT": "1"})
    assert settings.batch_invariant is False
    assert settings.warnings == (
        "DEEPINFER_BATCH_INVARIENT is not a setting; did you mean DEEPINFER_BATCH_INVARIANT?",
    )


# unknown, recognised, injected


def test_official_names_without_use_get_one_line_each():
    names = [s.variable for s in SETTINGS if not s.used]
    assert len(names) == 19
    settings = resolve({}, environ=dict.fromkeys(names, "anything"))
    assert sorted(settings.warnings) == sorted(
        f"`{name}` is an official setting that this toolkit does not use" for name in names
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEEPINFER_SERVICE_HOST", "10.0.0.1"),
        ("DEEPINFER_API_SERVICE_PORT", "80"),
        ("DEEPINFER_API_SERVICE_PORT_HTTP", "80"),
        ("DEEPINFER_API_PORT", "tcp://10.0.0.1:80"),
        ("DEEPINFER_API_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("DEEPINFER_API_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("DEEPINFER_LOG_PORT_53_UDP_PROTO", "udp"),
    ],
)
def test_names_that_orchestrators_inject_are_ignored(name, value):
    assert resolve({}, environ={name: value}).warnings == ()


def test_a_name_like_nothing_is_still_reported():
    [line] = resolve({}, environ={"DEEPINFER_ZZZZZZZZ": "1"}).warnings
    assert line == "DEEPINFER_ZZZZZZZZ is not a setting"


def test_a_removed_name_says_its_replacement(monkeypatch):
    gone = registry.Setting(
        "old", "DEEPINFER_OLD", None, registry.kinds.text, None, "Gone", used=False,
        replaced_by="DEEPINFER_NEW",
    )  # fmt: skip
    monkeypatch.setattr(registry, "SETTINGS", (*SETTINGS, gone))
    assert resolve({}, environ={"DEEPINFER_OLD": "1"}).warnings == (
        "DEEPINFER_OLD was removed; use DEEPINFER_NEW",
    )


def test_unknown_override_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean swa_keep") as caught:
        resolve({"swa_kep": 1}, environ={})
    assert caught.value.code == "unknown-setting"


def test_set_pairs_reach_any_setting_by_any_spelling():
    pairs = ["mtp=2", "--swa-keep=200", "DEEPINFER_PAGE_TOKENS=64", "max-num-seqs=3"]
    assert parse_pairs(pairs) == {
        "mtp": "2", "swa_keep": "200", "page_tokens": "64", "max_num_seqs": "3",
    }  # fmt: skip
    with pytest.raises(UsageError, match="did you mean"):
        parse_pairs(["page_token=1"])
    with pytest.raises(UsageError, match="not KEY=VALUE"):
        parse_pairs(["mtp"])


# files


def test_local_file_is_found_and_user_folder_is_the_fallback(tmp_path):
    user = tmp_path / "config" / "deepinfer"
    user.mkdir(parents=True)
    (user / "config.toml").write_text("max_num_seqs = 3\n")
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert resolve({}, environ=environ).max_num_seqs == 3
    Path("deepinfer.toml").write_text("max-num-seqs = 4\nDEEPINFER_PAGE_TOKENS = 64\n")
    settings = resolve({}, environ=environ)
    assert (settings.max_num_seqs, settings.page_tokens) == (4, 64)
    assert settings.as_json()["max_num_seqs"] == {
        "value": 4, "source": "file", "origin": "deepinfer.toml",
    }  # fmt: skip


@pytest.mark.parametrize("how", ["argument", "variable", "override"])
def test_a_named_file_that_is_missing_is_an_error(how):
    given = {
        "argument": dict(config_file="no.toml", environ={}),
        "variable": dict(environ={"DEEPINFER_CONFIG": "no.toml"}),
        "override": dict(overrides={"config": "no.toml"}, environ={}),
    }[how]
    with pytest.raises(UsageError) as caught:
        resolve(**given)
    assert caught.value.code == "config-missing"


@pytest.mark.parametrize("content", [b"mtp = ", b"\xff\xfe", b"[[["])
def test_a_file_that_is_not_toml(content, tmp_path):
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        resolve({}, environ={}, config_file=file)
    assert caught.value.code == "config-invalid"


def test_an_unknown_key_in_a_file_is_an_error_with_the_file_named(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text("mpt = 1\n")
    with pytest.raises(UsageError, match="did you mean mtp") as caught:
        resolve({}, environ={}, config_file=file)
    assert caught.value.facts == (f"from {file}",)


# the object


def test_settings_are_frozen_values_with_attributes():
    settings = resolve({"mtp": 2}, environ={})
    assert settings.mtp == 2 and settings.source("mtp") == "argument"
    assert settings.as_json()["DEEPINFER_USE_NEXTN_DECODE"]["value"] == 2
    with pytest.raises(AttributeError):
        settings.mtp = 3
    with pytest.raises(AttributeError, match="mpt"):
        _ = settings.mpt
    assert pickle.loads(pickle.dumps(settings)).mtp == 2


def test_json_shows_no_folder_of_the_user(tmp_path):
    settings = resolve({"model_dir": str(tmp_path / "model")}, environ={})
    assert settings.as_json()["DEEPINFER_HF_MODEL_DIR"]["value"] == "model"


def test_defaults_are_the_documented_ones():
    settings = resolve({}, environ={})
    assert settings.warnings == ()
    shown = {name: settings.values[name].value for name in (
        "accelerator", "swa_keep", "replay_mode", "max_rollback", "mtp", "mtp_varlen", "verify",
        "batch_invariant", "overlap", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk",
        "prefix_cache", "prefix_cache_bytes", "encoder_replay", "page_tokens", "log_level",
    )}  # fmt: skip
    assert shown == {
        "accelerator": "auto", "swa_keep": 140, "replay_mode": "compact", "max_rollback": 6,
        "mtp": 5, "mtp_varlen": False, "verify": "rejection", "batch_invariant": False,
        "overlap": True, "max_num_seqs": 256, "max_num_batched_tokens": 4096,
        "prefill_chunk": 4096, "prefix_cache": True, "prefix_cache_bytes": 10 * 1024**3,
        "encoder_replay": False, "page_tokens": 128, "log_level": "warning",
    }  # fmt: skip


def test_what_has_no_code_yet_says_so_once_when_asked_for():
    environ = {"DEEPINFER_JIT_CACHE_DIR": "kernels"}
    lines = resolve({"swa_keep": 200, "overlap": True}, environ=environ, source="flag").warnings
    assert lines == (
        "DEEPINFER_JIT_CACHE_DIR is not in this version: nothing is compiled while running",
    )
    calm = {"mtp": 0, "prefix_cache": False, "replay_mode": "mask", "overlap": False}
    assert resolve(calm, environ={}).warnings == ()


def test_registry_is_consistent():
    for field in ("attribute", "variable", "flag"):
        values = [getattr(s, field) for s in SETTINGS if getattr(s, field)]
        assert len(values) == len(set(values)), field
    for setting in USED:
        assert setting.doc and not setting.doc.endswith("."), setting.attribute
        assert registry.find(setting.attribute) is setting
        assert setting.variable is None or registry.find(setting.variable) is setting
        assert setting.flag is None or registry.find(setting.flag) is setting
        if setting.default is not None and setting.kind.name != "OP=NAME list":
            assert setting.kind.parse(setting.default) == setting.default
