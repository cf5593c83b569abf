"""Prompts of several kinds for the embedded checkpoint, none of which it was trained on.

Code is cut out of modules of the standard library that its training left out, questions come from
its recipe's evaluation sets. Token ids go out. It must not know what is measured.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from pathlib import Path

import numpy as np

from deepinfer.engine.assembly import embedded_model
from examples.train_tiny import exercises
from examples.train_tiny.tokenizer import BOS, EOS, Vocabulary

KINDS = ("code", "arithmetic", "retrieval", "chat", "tools", "copying")
HELD_OUT = (
    "argparse", "bisect", "calendar", "configparser", "difflib", "fractions", "gettext",
    "graphlib", "mailbox", "optparse", "sched", "shelve", "smtplib", "statistics", "tarfile",
)  # fmt: skip


def prompts(kind: str, count: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of a kind, 60 to 700 tokens; always the same ones for a seed."""
    material = _material()
    rng = random.Random(f"{kind} {seed}")
    if kind == "code":
        return [_code(rng, material) for _ in range(count)]
    if kind == "chat":
        shorts = (exercises.chat_short(rng, material) for _ in range(count))
        return [exercises.as_question(material.vocabulary, kind, one).prompt for one in shorts]
    if kind == "retrieval":
        questions = exercises.retrieval_eval(material, 512, "needle", count, seed)
    elif kind == "arithmetic":
        each = -(-count // 3)
        sets = [exercises.arithmetic_eval(material.vocabulary, op, each, seed) for op in "+-*"]
        questions = [one for several in zip(*sets, strict=True) for one in several]
    else:
        make = {"tools": exercises.tools_eval, "copying": exercises.copying_eval}[kind]
        questions = make(material.vocabulary, count, seed)
    return [one.prompt for one in questions[:count]]


def _code(rng: random.Random, material: exercises.Material) -> list[int]:
    return [BOS, *material.code(rng, rng.randrange(60, 400)).tolist()]


def _material() -> exercises.Material:
    vocabulary = Vocabulary(embedded_model() / "tokenizer.json")
    library = Path(sysconfig.get_path("stdlib"))
    texts = [(name, (library / f"{name}.py").read_text("utf-8")) for name in HELD_OUT]
    ids = [[BOS, *vocabulary.encode(text), EOS] for _, text in texts]
    docs = [pair for name, text in texts for pair in _sentences(name, ast.parse(text))]
    return exercises.Material(vocabulary, [np.concatenate(ids)], docs)


def _sentences(module: str, tree: ast.Module) -> list[tuple[str, str]]:
    """(dotted name, first sentence of its docstring) of the functions and classes of a module."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = (ast.get_docstring(node) or "").split("\n\n")[0].split(". ")[0]
            if 20 < len(first) < 90 and "\n" not in first:
                found.append((f"{module}.{node.name}", first.rstrip(".") + "."))
    return found
