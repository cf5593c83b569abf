"""Find each setting's value: flag or argument > environment > file > model default > built-in.

Comes in: what the caller chose, the environment, a TOML file. Goes out: `Settings`, or a
`UsageError` that names the malformed spelling and where it stood. It must not know what a value
means to the engine; rules across settings live in `settings/rules.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from deepinfer.errors import UsageError
from deepinfer.settings import registry, rules
from deepinfer.settings.kinds import BadValue
from deepinfer.settings.registry import PREFIX, Setting
from deepinfer.settings.values import Settings, Value

__all__ = ["LOCAL_FILE", "parse_pairs", "resolve", "unknown_variables"]

LOCAL_FILE = "deepinfer.toml"
# What container orchestrators inject for a service whose name starts with "deepinfer".
_SERVICE_LINK = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)


def resolve(
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    config_file: str | Path | None = None,
    *,
    source: str = "argument",
    model_defaults: Mapping[str, object] | None = None,
) -> Settings:
    """Resolve every setting.

    `overrides` are values by Python name (None = not given) of level `source` ("argument" for
    Python callers, "flag" for the command line). `environ` None means the process environment,
    `config_file` None the usual places. Raises UsageError for unknown or malformed settings and
    for combinations that contradict each other.
    """
    environ = registry.environment() if environ is None else environ
    chosen = _known(overrides or {})
    file_path = _file_path(config_file or chosen.get("config"), environ)
    in_file = {} if file_path is None else _read_file(file_path)
    values: dict[str, Value] = {}
    warnings = list(unknown_variables(environ))
    for setting in registry.SETTINGS:
        if not setting.used:
            continue
        levels = [Value(setting.default)]
        if model_defaults and setting.attribute in model_defaults:
            levels.append(Value(model_defaults[setting.attribute], "model", "the checkpoint"))
        if setting.attribute in in_file:
            raw, origin = in_file[setting.attribute], str(file_path)
            levels.append(Value(_parsed(setting, raw, "file", origin), "file", origin))
        # An empty variable means unset, as in a shell script that clears it.
        variable = environ.get(setting.variable or "", "")
        if setting.variable and variable.strip():
            origin = setting.variable
            parsed = _parsed(setting, variable, "environment", origin)
            levels.append(Value(parsed, "environment", origin))
        if setting.attribute in chosen:
            origin = setting.flag if source == "flag" and setting.flag else setting.attribute
            parsed = _parsed(setting, chosen[setting.attribute], source, origin)
            levels.append(Value(parsed, source, origin))
        values[setting.attribute] = levels[-1]
    if values["build_dir"].value is None:
        values["build_dir"] = Value(_cache_folder(environ))
    values, derived_warnings = rules.derive(values)
    rules.check(values)
    return Settings(values, (*warnings, *derived_warnings, *_notes(values)))


def parse_pairs(pairs: list[str]) -> dict[str, str]:
    """`--set KEY=VALUE` strings as overrides; raises UsageError for an unknown key."""
    chosen: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError("bad-option", f'--set "{pair}" is not KEY=VALUE', hint="--set mtp=0")
        chosen[_named(key, "--set").attribute] = value
    return chosen


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """One line per DEEPINFER_* variable that this toolkit does not know, dropped or ignores."""
    lines = []
    known = {s.variable: s for s in registry.SETTINGS if s.variable}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or not environ[name].strip():
            continue
        setting = known.get(name)
        if setting is None:
            if _SERVICE_LINK.search(name) or _service_address(name, environ[name]):
                continue
            close = registry.nearest(name, variables=True)
            guess = f"; did you mean {close[0]}?" if close else ""
            lines.append(f"{name} is not a setting{guess}")
        elif setting.replaced_by:
            lines.append(f"{name} was removed; use {setting.replaced_by}")
        elif not setting.used:
            lines.append(f"`{name}` is an official setting that this toolkit does not use")
    return lines


def _service_address(name: str, value: str) -> bool:
    return name.endswith("_PORT") and "://" in value


def _known(overrides: Mapping[str, object]) -> dict[str, object]:
    return {_named(k, k).attribute: v for k, v in overrides.items() if v is not None}


def _named(key: str, where: str) -> Setting:
    setting = registry.find(key)
    if setting is None or not setting.used:
        close = registry.nearest(key)
        facts = [f"from {where}"] if where != key else []
        raise UsageError(
            "unknown-setting",
            f"{key} is not a setting" + (f"; did you mean {', '.join(close)}?" if close else ""),
            facts,
            hint="deepinfer doctor --settings",
        )
    return setting


def _parsed(setting: Setting, raw: object, source: str, origin: str) -> object:
    try:
        return setting.kind.parse(raw)
    except BadValue as bad:
        if isinstance(raw, list):  # an option that may be repeated
            raw = ",".join(map(str, raw))
        spelled = f'{origin} "{raw}"' if source == "flag" else f'{origin}="{raw}"'
        if source == "file":
            spelled = f'{setting.attribute}="{raw}"'
        code = {"environment": "bad-variable", "file": "bad-config"}.get(source, "bad-option")
        facts = [f"accepted: {setting.kind.accepted}"]
        if source == "file":
            facts.append(f"from {origin}")
        fix = {
            "environment": f"unset {origin}, to use the default ({setting.default_text})",
            "flag": f"deepinfer doctor --settings, or leave {origin} out",
        }.get(source, f"leave it out, to use the default ({setting.default_text})")
        raise UsageError(code, f"{spelled} {bad}", facts, fix) from None


def _file_path(chosen: object, environ: Mapping[str, str]) -> Path | None:
    named, origin = chosen, "--config"
    if named is None and environ.get("DEEPINFER_CONFIG", "").strip():
        named, origin = environ["DEEPINFER_CONFIG"], "DEEPINFER_CONFIG"
    if named is not None:
        path = Path(str(named)).expanduser()
        if not path.is_file():
            raise UsageError(
                "config-missing",
                f"{path} does not exist",
                [f"from {origin}"],
                "leave it out, or name a TOML file",
            )
        return path
    home = environ.get("XDG_CONFIG_HOME") or (
        str(Path(environ["HOME"]) / ".config") if environ.get("HOME") else ""
    )
    usual = [Path(LOCAL_FILE)] + ([Path(home) / "deepinfer" / "config.toml"] if home else [])
    return next((path for path in usual if path.is_file()), None)


def _cache_folder(environ: Mapping[str, str]) -> str | None:
    home = environ.get("XDG_CACHE_HOME") or (
        str(Path(environ["HOME"]) / ".cache") if environ.get("HOME") else ""
    )
    return str(Path(home) / "deepinfer") if home else None


def _read_file(path: Path) -> dict[str, object]:
    import tomllib

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise UsageError(
            "config-invalid",
            f"{path} cannot be read as TOML",
            [str(problem)],
            "lines such as: mtp = 0",
        ) from None
    return {_named(key, str(path)).attribute: value for key, value in table.items()}


def _notes(values: Mapping[str, Value]) -> list[str]:
    """One line per setting that somebody chose and that this version has no code for."""
    lines = []
    for setting in registry.SETTINGS:
        if setting.used and setting.note:
            entry = values[setting.attribute]
            if entry.chosen and entry.value not in setting.inert:
                lines.append(f"{entry.origin} {setting.note}")
    return lines
