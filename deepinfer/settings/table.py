"""The settings page: the registry as a Markdown table.

Comes in: nothing. Goes out: the lines between the two marks of README.md, which a test compares.
It must not know any value that is in effect; `deepinfer doctor --settings` shows those.
"""

from __future__ import annotations

from deepinfer.settings.registry import PREFIX, SETTINGS, Setting

__all__ = ["BEGIN", "END", "markdown"]

BEGIN = "<!-- settings: made by python -m deepinfer.settings -->"
END = "<!-- end of settings -->"


def markdown() -> str:
    """The table, one row per setting, and one sentence with the names that are only recognised."""
    lines = ["| flag | variable or file key | type | default | meaning |", "|---|---|---|---|---|"]
    lines += [_row(setting) for setting in SETTINGS if setting.used]
    unused = ", ".join(
        f"`{(s.variable or '').removeprefix(PREFIX)}`" for s in SETTINGS if not s.used
    )
    lines += ["", f"Recognised, not used (after `{PREFIX}`): {unused}."]
    return "\n".join(lines)


def _row(setting: Setting) -> str:
    flag = f"`{setting.flag}`" if setting.flag else ""
    if setting.kind.name == "switch" and setting.flag and setting.attribute != "no_progress":
        flag += f", `--no-{setting.flag[2:]}`"
    doc = setting.doc + (" (checked, not used in this version)" if setting.note else "")
    cells = (flag, f"`{setting.key}`", setting.kind.name, setting.default_text, doc)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
