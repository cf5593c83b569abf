"""A scripted model, a byte tokenizer and an engine around them: the test decides every logit.

Tables (prefix -> logits) stand in for the network, so that a test of the loop needs no weights and
knows the right answer. With a second table for the drafts it is the "scripted pair" of the hard
inputs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from deepinfer.core.step import StepPlan
from deepinfer.engine.assembly import Parts, Sizes
from deepinfer.engine.engine import LLM
from deepinfer.kvcache.live import LiveRows
from deepinfer.ops import registry
from deepinfer.speculative.schedule import DraftRules
from deepinfer.speculative.timing import StepTimes
from deepinfer.tokenizer.tokenizer import Tokenizer, _byte_alphabet
from tests.native import libraries

BOS, EOS, PAD, THINK = 256, 257, 258, 259
VOCAB = 260

Script = Callable[[tuple[int, ...]], Sequence[float]]
DraftScript = Callable[[tuple[int, ...], int], tuple[Sequence[float], float]]
"""(prefix with the drafts before, number of the draft) -> its logits and raw confidence logit."""


@functools.cache
def ops() -> registry.Ops:
    """The op table of a runner, for what the engine keeps of the running requests."""
    return registry.build("cpu", libraries=libraries())


class ScriptedRunner:
    """Keeps the tokens of every slot and asks `script(prefix)` for the logits of the next token.

    Checks the plan as a real runner cannot: chunks continue where the slot stands, pages cover
    them and belong to one slot only. `plans` records what ran.
    """

    graphs = None

    def __init__(self, script: Script, page_tokens: int = 4) -> None:
        self.ops = ops()
        self.script = script
        self.page_tokens = page_tokens
        self.slots: dict[int, list[int]] = {}
        self.plans: list[StepPlan] = []
        self.rows, self.scratch = 0, -1
        self.hook: Callable[[int, torch.Tensor], None] | None = None

    def forward(self, plan: StepPlan, live: LiveRows | None = None) -> torch.Tensor:
        used: set[int] = set()
        rows = self._live(live, used) if live is not None else []
        for chunk in plan.chunks:
            if chunk.start == 0:
                self.slots[chunk.slot] = []
            tokens = self.slots[chunk.slot]
            self._roll_back(chunk.slot, chunk.start, len(chunk.token_ids))
            assert len(tokens) == chunk.start, "a chunk must continue its slot"
            assert len(chunk.pages) == -(-chunk.end // self.page_tokens), "pages cover the rows"
            assert not used & set(chunk.pages), "a page has one owner"
            used |= set(chunk.pages)
            tokens += chunk.token_ids
            assert chunk.logits in (0, 1, len(chunk.token_ids))
            for end in range(chunk.end - chunk.logits + 1, chunk.end + 1):
                rows.append(self.script(tuple(tokens[:end])))
        self.plans.append(plan)
        self.rows += plan.rows
        width = len(rows[0]) if rows else 0
        logits = torch.tensor(np.array(rows, dtype=np.float32)).reshape(len(rows), width)
        if self.hook:
            self.hook(len(self.plans), logits)
        return logits

    def _live(self, live: LiveRows, used: set[int]) -> list[Sequence[float]]:
        rows = []
        ids, of = live.ids.tolist(), live.of.tolist()
        for r, (slot, start, pages) in enumerate(
            zip(live.slots.tolist(), live.starts.tolist(), live.pages.tolist(), strict=True)
        ):
            mine = [token for token, owner in zip(ids, of, strict=True) if owner == r]
            assert 1 <= len(mine) <= live.most and min(mine) >= 0
            own = pages[: start // self.page_tokens + 1]
            assert len(set(own)) == start // self.page_tokens + 1, "pages cover the newest token"
            own = [page for page in own if page != self.scratch]  # of one that has ended
            assert not used & set(own), "a page has one owner"
            used |= set(own)
            self._roll_back(slot, start, len(mine))
            tokens = self.slots[slot]
            assert len(tokens) == start, "a row must continue its slot"
            for token in mine:
                tokens.append(token)
                rows.append(self.script(tuple(tokens)))
        return rows

    def _roll_back(self, slot: int, start: int, rows: int) -> None:
        """Rows of a slot begin here: at its end, but for one that has ended without a token, which
        stays where it was for a step."""
        tokens = self.slots[slot]
        assert len(tokens) - start <= 1
        del tokens[start:]


class ScriptedPair(ScriptedRunner):
    """The same with a drafter, `draft(prefix, i)`, whose block is as long as `block` says.

    Rows may begin before the end of their slot, but only among the drafts of the last ones.
    `blocks` records the (requests, slots asked for) of each draft pass.
    """

    def __init__(
        self, script: Script, draft: DraftScript, page_tokens: int = 4, block: int = 5
    ) -> None:
        super().__init__(script, page_tokens)
        self.draft, self.block = draft, block
        self.certain: dict[int, int] = {}
        self.blocks: list[ScriptedBlock] = []

    def _roll_back(self, slot: int, start: int, rows: int) -> None:
        tokens = self.slots[slot]
        if start:
            # One that has ended without a token stays where it was for a step.
            assert self.certain[slot] - 1 <= start, "what is certain was taken back"
        assert len(tokens) - start <= self.block, "longer than a block"
        del tokens[start:]
        self.certain[slot] = start + 1

    def draft_block(
        self,
        slots: torch.Tensor,
        anchors: torch.Tensor,
        last: torch.Tensor,
        first: torch.Tensor,
    ) -> ScriptedBlock:
        block = ScriptedBlock(self, *(x.tolist() for x in (slots, anchors, last, first)))
        self.blocks.append(block)
        return block


class DraftRequest(NamedTuple):
    slot: int
    anchor: int
    last: int
    first: int


def requests_of(*asked: torch.Tensor) -> list[DraftRequest]:
    """What a draft pass is asked for, request by request."""
    return [DraftRequest(*one) for one in zip(*(x.tolist() for x in asked), strict=True)]


class ScriptedBlock:
    def __init__(
        self,
        pair: ScriptedPair,
        slots: list[int],
        anchors: list[int],
        last: list[int],
        first: list[int],
    ) -> None:
        assert len(set(slots)) == len(slots)
        self.pair, self.requests, self.slots = pair, len(slots), 0
        self.prefixes = []
        for slot, anchor, newest, oldest in zip(slots, anchors, last, first, strict=True):
            tokens = pair.slots[slot]
            assert 0 <= oldest <= newest + 1 <= len(tokens), "context must be there"
            # One that got no token, since it ended a step before, stays where it was.
            assert pair.certain[slot] <= newest + 2
            self.prefixes.append((*tokens[: newest + 1], anchor))

    def slot(self, i: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert i == self.slots < self.pair.block, "slot after slot"
        self.slots += 1
        newest = tokens.tolist()
        if i:
            self.prefixes = [(*p, token) for p, token in zip(self.prefixes, newest, strict=True)]
        assert [prefix[-1] for prefix in self.prefixes] == newest
        rows, raw = zip(*(self.pair.draft(prefix, i) for prefix in self.prefixes), strict=True)
        return torch.tensor(np.array(rows, dtype=np.float32)), torch.tensor(raw)


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
    draft: DraftScript | None = None,
    rules: DraftRules | None = None,
    times: StepTimes | None = None,
    overlap: bool = False,
    **more: object,
) -> LLM:
    """An engine around a script; `engine(...).parts.runner` is the ScriptedRunner.

    draft: of a ScriptedPair. rules: None for blocks of five drafts, by rejection.
    """
    runner = ScriptedRunner(script, page_tokens)
    if draft is not None:
        runner = ScriptedPair(script, draft, page_tokens)
        rules = rules or DraftRules(length=5)
    runner.scratch = pages
    parts = Parts(
        runner=runner,
        tokenizer=tokenizer,
        vocab_size=vocab,
        eos_ids=(eos,),
        sizes=Sizes(slots, pages, page_tokens, max_model_len, max_rows, chunk),
        drafting=rules,
        times=times or StepTimes(),
        overlap=overlap,
    )
    return LLM.from_parts(parts, **more)


def idle(llm: LLM) -> bool:
    """Has everything come back: pages, window pages, slots, sequences, drafts?"""
    policy, windows, planner = llm._policy, llm._prefix.windows, llm._planner
    return (
        policy.blocks.free == policy.blocks.total
        and windows.free == windows.total
        and policy.slots_in_use == 0
        and not policy.running
        and not policy.waiting
        and not policy.batch.members
        and not policy.preempted
        and not (llm._running or llm._parked or llm._flight or llm._landed or llm._leaving)
        and not any(llm._kinds.values())
        and llm._device._held is None
        and (planner is None or not planner._chosen)
    )
