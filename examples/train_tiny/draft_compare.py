"""Accepted lengths of one drafter over those of others, from the files that `draft.py` left.

    python -m examples.train_tiny.draft_compare one/draft.json two/draft.json

Comes in: draft.json files of runs over the same evaluation texts. Goes out: a table of accepted
lengths by kind of text, and the ratios of the first drafter to each other one with the interval
that drawing texts anew gives. It must not know models.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.train_tiny.draft_quality import interval

NOT_HEADS = ("kind", "temperature", "tokens")


def gather(files: list[dict]) -> tuple[list[dict], list[str]]:
    """(texts with the steps of every drafter, their names); a name that comes twice gets a number.

    Raises ValueError where the files are not of the same texts.
    """
    count = min(len(file["texts"]) for file in files)  # a run may have had no time for all
    given = [[{n: t[n] for n in NOT_HEADS} for t in file["texts"][:count]] for file in files]
    if any(one != given[0] for one in given):
        raise ValueError("the files are not of the same texts")
    texts, names = given[0], []
    for file in files:
        for head in (name for name in file["texts"][0] if name not in NOT_HEADS):
            names.append(head if head not in names else f"{head} {len(names)}")
            for text, found in zip(texts, file["texts"], strict=False):
                text[names[-1]] = found[head]
    return texts, names


def table(texts: list[dict], names: list[str]) -> dict[str, dict[str, object]]:
    """Per temperature and kind: accepted lengths, and ratios of the first drafter [value, low,
    high]."""
    out: dict[str, dict[str, object]] = {}
    for temperature, label in ((0.0, "greedy"), (1.0, "t1")):
        for kind in [*dict.fromkeys(sorted(t["kind"] for t in texts)), "all"]:
            chosen = [
                t for t in texts if t["temperature"] == temperature and kind in ("all", t["kind"])
            ]
            if not chosen:
                continue
            tokens = sum(t["tokens"] for t in chosen)
            steps = {name: [t[name] for t in chosen] for name in names}
            row: dict[str, object] = {"texts": len(chosen), "tokens": tokens}
            row["accepted_length"] = {n: round(tokens / sum(s), 4) for n, s in steps.items()}
            # The same tokens in fewer steps: the ratio of lengths is that of the others' steps.
            row["ratio"] = {
                name: [
                    round(sum(steps[name]) / sum(steps[names[0]]), 4),
                    *interval(steps[name], steps[names[0]]),
                ]
                for name in names[1:]
            }
            out[f"{label} {kind}"] = row
    return out


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    a = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    a.add_argument("files", type=Path, nargs="+", help="draft.json; the first names the drafter")
    args = a.parse_args(argv)
    files = [json.loads(path.read_text(encoding="utf-8")) for path in args.files]
    print(json.dumps(table(*gather(files)), indent=1))


if __name__ == "__main__":
    main()
