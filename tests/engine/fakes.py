"""A scripted model, a byte tokenizer and an engine around them: the test decides every logit.

Tables (prefix -> logits) stand in for the network, so that a test of the loop needs no weights and
knows the right answer. Also the target half of the "scripted pair" of the hard inputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from deepinfer.core.step import StepPlan
from deepinfer.engine.assembly import Parts, Sizes
from deepinfer.engine.engine import LLM
from deepinfer.tokenizer.tokenizer import Tokenizer, _byte_alphabet

BOS, EOS, PAD, THINK = 256, 257, 258, 259
VOCAB = 260

Script = Callable[[tuple[int, ...]], Sequence[float]]


class ScriptedRunner:
    """Keeps the tokens of every slot and asks `script(prefix)` for the logits of the next token.

    Checks the plan as a real runner cannot: chunks continue where the slot stands, pages cover
    them and belong to one slot only. `plans` records what ran.
    """

    def __init__(self, script: Script, page_tokens: int = 4) -> None:
        self.script = script
        self.page_tokens = page_tokens
        self.slots: dict[int, list[int]] = {}
        self.plans: list[StepPlan] = []
        self.hook: Callable[[int, torch.Tensor], None] | None = None

    def forward(self, plan: StepPlan) -> torch.Tensor:
        used: set[int] = set()
        rows = []
        for chunk in plan.chunks:
            if chunk.start == 0:
                self.slots[chunk.slot] = []
            tokens = self.slots[chunk.slot]
            assert len(tokens) == chunk.start, "a chunk must continue its slot"
            assert len(chunk.pages) == -(-chunk.end // self.page_tokens), "pages cover the rows"
            assert not used & set(chunk.pages), "a page has one owner"
            used |= set(chunk.pages)
            tokens += chunk.token_ids
            assert chunk.logits in (0, 1, len(chunk.token_ids))
            for end in range(chunk.end - chunk.logits + 1, chunk.end + 1):
                rows.append(self.script(tuple(tokens[:end])))
        self.plans.append(plan)
        width = len(rows[0]) if rows else 0
        logits = torch.tensor(np.array(rows, dtype=np.float32)).reshape(len(rows), width)
        if self.hook:
            self.hook(len(self.plans), logits)
        return logits


def one_hot(token: int, vocab: int = VOCAB, high: float = 10.0) -> list[float]:
    row = [0.0] * vocab
    row[token] = high
    return row


def says(*answer: int, start: int, vocab: int = VOCAB) -> Script:
    """After a prompt of `start` tokens the most likely tokens are `answer`, then EOS."""

    def script(prefix: tuple[int, ...]) -> list[float]:
        at = len(prefix) - start
        return one_hot(answer[at] if 0 <= at < len(answer) else EOS, vocab)

    return script


def hashed(prefix: tuple[int, ...], vocab: int = VOCAB) -> np.ndarray:
    """Arbitrary but fixed logits that depend on the whole prefix."""
    seed = hash(prefix) & 0xFFFFFFFF  # ints hash to themselves: the same in every process
    return np.random.default_rng(seed).normal(size=vocab).astype(np.float32) * 3


def tokenizer_json() -> dict:
    """256 bytes, no merges, three special tokens and one that is not."""
    vocab = {character: byte for character, byte in _byte_alphabet().items()}
    contents = {BOS: "<|bos|>", EOS: "<|eos|>", PAD: "<|pad|>", THINK: "<think>"}
    common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": token, "content": content, "special": token != THINK, **common}
            for token, content in contents.items()
        ],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def byte_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_json()), encoding="utf-8")
    return Tokenizer(path, BOS)


def engine(
    script: Script,
    *,
    tokenizer: Tokenizer | None = None,
    slots: int = 8,
    pages: int = 256,
    page_tokens: int = 4,
    max_model_len: int = 512,
    max_rows: int = 64,
    chunk: int = 64,
    vocab: int = VOCAB,
    eos: int = EOS,
    **more: object,
) -> LLM:
    """An engine around a script; `engine(...).parts.runner` is the ScriptedRunner."""
    parts = Parts(
        runner=ScriptedRunner(script, page_tokens),
        tokenizer=tokenizer,
        vocab_size=vocab,
        eos_ids=(eos,),
        sizes=Sizes(slots, pages, page_tokens, max_model_len, max_rows, chunk),
    )
    return LLM.from_parts(parts, **more)


def idle(llm: LLM) -> bool:
    """Has everything come back: pages, slots, sequences?"""
    policy = llm._policy
    return (
        policy.blocks.free == policy.blocks.total
        and policy.slots_in_use == 0
        and not policy.running
        and not policy.waiting
        and not llm._running
    )
