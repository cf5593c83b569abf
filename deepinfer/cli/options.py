"""Option types that commands share, and the options that the settings registry describes.

Comes in: a command function and the settings it takes. Goes out: the same function with one option
per setting, whose texts come from the registry, so help and settings cannot drift apart. It must
not know what any option does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from deepinfer.settings import registry
from deepinfer.settings.registry import Setting

__all__ = ["Chosen", "Color", "Help", "HelpAll", "Json", "Quiet", "with_settings"]

PANELS = (
    "Input", "Model", "Sampling", "Speculation", "Replay", "Device", "Output", "Advanced",
)  # fmt: skip
_SHORT = {"model_dir": "-m"}
_METAVAR = {
    "model_dir": "DIR", "swa_keep": "N|full", "backend": "PAIR", "config": "FILE",
    "build_dir": "DIR", "prefix_cache_dir": "DIR", "prefix_cache_bytes": "SIZE",
    "mtp_threshold": "X",
}  # fmt: skip
_SPELLED_OUT = ("accelerator", "replay_mode", "verify", "dtype", "cpu_level", "log_level")
# A metavar of one blank: the default one prints the Python type, which says nothing to a user.
SWITCH = " "

Chosen = dict[str, object]


def _color(word: str) -> str:
    if word not in ("auto", "always", "never"):
        raise typer.BadParameter(f"{word} is not one of auto, always, never")
    return word


def _show(context: typer.Context, wanted: bool) -> None:
    if not wanted:
        return
    text = context.get_help()
    if text:
        typer.echo(text)
    raise typer.Exit(0)


def _show_all(context: typer.Context, wanted: bool) -> None:
    if not wanted:
        return
    for parameter in context.command.params:
        parameter.hidden = False  # type: ignore[attr-defined]
        if parameter.secondary_opts:
            # One column for both spellings leaves room for the texts on a narrow terminal.
            parameter.opts = [f"--[no-]{parameter.opts[0][2:]}"]
            parameter.secondary_opts = []
    context.command.epilog = (context.command.epilog or "") + EXIT_CODES
    _show(context, wanted)


EXIT_CODES = """

Exit codes: 0 done; 1 something the user asked to be checked failed; 2 usage or settings;
3 environment; 4 checkpoint; 5 does not fit; 70 our bug; 130, 143 interrupted; 141 pipe closed."""

# Declared here because Typer's own help option has no section and costs a library at start-up.
Help = Annotated[
    bool,
    typer.Option(
        "-h", "--help", callback=_show, is_eager=True, metavar=SWITCH, help="Show this page.",
        rich_help_panel="Output",
    ),
]  # fmt: skip
HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", callback=_show_all, is_eager=True, metavar=SWITCH,
        help="Show every option.",
        rich_help_panel="Output",
    ),
]  # fmt: skip
Json = Annotated[
    bool,
    typer.Option("--json", metavar=SWITCH, help="Print JSON on stdout.", rich_help_panel="Output"),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "-q",
        "--quiet",
        metavar=SWITCH,
        help="Print only the value a script wants.",
        rich_help_panel="Output",
    ),
]
Color = Annotated[
    str,
    typer.Option(
        "--color", metavar="WORD", callback=_color, show_default=False,
        help="Colour on stderr: auto, always, never. Default: auto, and NO_COLOR is respected.",
        rich_help_panel="Output", hidden=True,
    ),
]  # fmt: skip


def with_settings(
    *attributes: str, hidden: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command an option per setting named; its parameter `chosen` receives those typed.

    `--set KEY=VALUE` reaches every other setting. Options are ordered by help section. hidden: left
    out of the short help.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values()
               if p.name != "chosen"]  # fmt: skip
        added = [_option(registry.find(name), name in hidden) for name in attributes]
        added += [_verbose(), _set()]
        names = [parameter.name for parameter in added]

        @functools.wraps(command)
        def wrapper(**given: Any) -> Any:
            typed = {name: given.pop(name) for name in names}
            return command(chosen=_chosen(typed), **given)

        ordered = sorted([*own, *added], key=_panel)
        wrapper.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in ordered]
        )
        return wrapper

    return decorate


def _chosen(typed: dict[str, Any]) -> Chosen:
    from deepinfer.settings.resolve import parse_pairs

    chosen: Chosen = dict(parse_pairs(typed.pop("set_pairs") or []))
    if typed.pop("verbose") and typed.get("log_level") is None:
        typed["log_level"] = "info"
    chosen.update({k: v for k, v in typed.items() if v not in (None, [])})
    return chosen


def _panel(parameter: inspect.Parameter) -> int:
    info = next(iter(getattr(parameter.annotation, "__metadata__", ())), None)
    panel = getattr(info, "rich_help_panel", None)
    return PANELS.index(panel) if panel in PANELS else -1


def _option(setting: Setting | None, hidden: bool = False) -> inspect.Parameter:
    if setting is None or setting.flag is None:
        raise ValueError("an option needs a registered setting with a flag")
    flag = setting.flag
    kind: Any = str | None
    declared = [*([_SHORT[setting.attribute]] if setting.attribute in _SHORT else []), flag]
    metavar = _METAVAR.get(setting.attribute) or ("WORD" if setting.kind.choices else "N")
    if setting.kind.name == "switch":
        kind, metavar = bool | None, SWITCH
        if setting.attribute != "no_progress":
            declared = [f"{flag}/--no-{flag[2:]}"]
    elif setting.attribute == "backend":
        kind = list[str] | None
    choices = list(setting.kind.choices)
    # What this version has no code for stays out of the short help.
    hidden = hidden or setting.advanced or not setting.available
    info = typer.Option(
        *declared,
        metavar=metavar,
        help=_help(setting),
        rich_help_panel="Advanced" if setting.advanced else setting.panel,
        hidden=hidden,
        show_default=False,
        autocompletion=(lambda: choices) if choices else None,
    )
    return inspect.Parameter(
        setting.attribute, inspect.Parameter.KEYWORD_ONLY, default=None,
        annotation=Annotated[kind, info],
    )  # fmt: skip


def _help(setting: Setting) -> str:
    words = f": {', '.join(setting.kind.choices)}" if setting.attribute in _SPELLED_OUT else ""
    later = " Not used in this version." if setting.note else ""
    # The variable stands last and bare: with punctuation the longest ones do not fit 80 columns.
    return f"{setting.doc}{words}.{later} Default: {setting.default_text}. {setting.variable or ''}"


def _verbose() -> inspect.Parameter:
    info = typer.Option("-v", "--verbose", metavar=SWITCH, help="Same as --log-level info.",
                        rich_help_panel="Output", hidden=True)  # fmt: skip
    return inspect.Parameter(
        "verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, info]
    )


def _set() -> inspect.Parameter:
    info = typer.Option("--set", metavar="K=V", help="Set any registered setting.",
                        rich_help_panel="Advanced", hidden=True)  # fmt: skip
    return inspect.Parameter(
        "set_pairs", inspect.Parameter.KEYWORD_ONLY, default=None,
        annotation=Annotated[list[str] | None, info],
    )  # fmt: skip
