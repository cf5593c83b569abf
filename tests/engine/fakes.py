"""A scripted model, a byte tokenizer and an engine around them: the test decides every logit.

Tables (prefix -> logits) stand in for the network, so that a test of the loop needs no weights and
knows the right answer. With a second table for the drafts it is the "scripted pair" of the hard
inputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from deepinfer.core.step import Chunk, StepPlan
from deepinfer.engine.assembly import Parts, Sizes
from deepinfer.engine.engine import LLM
from deepinfer.kvcache.draft import DraftRequest
from deepinfer.speculative.schedule import DraftRules
from deepinfer.speculative.timing import StepTimes
from deepinfer.tokenizer.tokenizer import Tokenizer, _byte_alphabet

BOS, EOS, PAD, THINK = 256, 257, 258, 259
VOCAB = 260

Script = Callable[[tuple[int, ...]], Sequence[float]]
DraftScript = Callable[[tuple[int, ...], int], tuple[Sequence[float], float]]
"""(prefix with the drafts before, number of the draft) -> its logits and raw confidence logit."""


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
            self._roll_back(chunk)
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

    def _roll_back(self, chunk: Chunk) -> None:
        assert not chunk.drafts, "drafts without a drafter"


class ScriptedPair(ScriptedRunner):
    """The same with a drafter, `draft(prefix, i)`, whose block is as long as `block` says.

    A chunk may begin before the end of its slot, but only among the drafts of the last one.
    `blocks` records the (requests, slots asked for) of each draft pass.
    """

    def __init__(
        self, script: Script, draft: DraftScript, page_tokens: int = 4, block: int = 5
    ) -> None:
        super().__init__(script, page_tokens)
        self.draft, self.block = draft, block
        self.certain: dict[int, int] = {}
        self.blocks: list[ScriptedBlock] = []

    def _roll_back(self, chunk: Chunk) -> None:
        tokens = self.slots[chunk.slot]
        if chunk.start:
            assert self.certain[chunk.slot] <= chunk.start, "what is certain was taken back"
        assert len(tokens) - chunk.start <= self.block, "longer than a block"
        assert 0 <= chunk.drafts <= self.block and chunk.certain > chunk.start
        assert not chunk.drafts or chunk.logits == len(chunk.token_ids), "a row for each draft"
        del tokens[chunk.start :]
        self.certain[chunk.slot] = chunk.certain

    def draft_block(self, requests: Sequence[DraftRequest]) -> ScriptedBlock:
        block = ScriptedBlock(self, requests)
        self.blocks.append(block)
        return block


class ScriptedBlock:
    def __init__(self, pair: ScriptedPair, requests: Sequence[DraftRequest]) -> None:
        assert len({request.slot for request in requests}) == len(requests)
        self.pair, self.requests, self.slots = pair, tuple(requests), 0
        self.prefixes = []
        for request in requests:
            tokens = pair.slots[request.slot]
            assert 0 <= request.first <= request.last + 1 <= len(tokens), "context must be there"
            assert pair.certain[request.slot] <= request.last + 1
            self.prefixes.append((*tokens[: request.last + 1], request.anchor))

    def slot(self, i: int, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        assert i == self.slots < self.pair.block, "slot after slot"
        self.slots += 1
        if i:
            self.prefixes = [(*p, token) for p, token in zip(self.prefixes, tokens, strict=True)]
        assert [prefix[-1] for prefix in self.prefixes] == list(tokens)
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
    **more: object,
) -> LLM:
    """An engine around a script; `engine(...).parts.runner` is the ScriptedRunner.

    draft: of a ScriptedPair. rules: None for blocks of five drafts, by rejection.
    """
    runner = ScriptedRunner(script, page_tokens)
    if draft is not None:
        runner = ScriptedPair(script, draft, page_tokens)
        rules = rules or DraftRules(length=5)
    parts = Parts(
        runner=runner,
        tokenizer=tokenizer,
        vocab_size=vocab,
        eos_ids=(eos,),
        sizes=Sizes(slots, pages, page_tokens, max_model_len, max_rows, chunk),
        drafting=rules,
        times=times or StepTimes(),
    )
    return LLM.from_parts(parts, **more)


def idle(llm: LLM) -> bool:
    """Has everything come back: pages, window pages, slots, sequences, drafts?"""
    policy, windows, drafter = llm._policy, llm._prefix.windows, llm._drafter
    return (
        policy.blocks.free == policy.blocks.total
        and windows.free == windows.total
        and policy.slots_in_use == 0
        and not policy.running
        and not policy.waiting
        and not llm._running
        and (drafter is None or not (drafter._held or drafter._judged or drafter._scores))
    )
