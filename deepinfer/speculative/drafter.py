"""Drafts for requests that go on: the heads of a block, slot by slot; nobody waits for the device.

Comes in: a block's pass and how to draw; goes out: ids, confidences and which of them may stand. It
must not know the draft network, pages, text, steps or who verifies how many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from deepinfer.sampling.logits import Rows
from deepinfer.speculative import share
from deepinfer.speculative.schedule import DraftRules
from deepinfer.speculative.verify import propose


class Block(Protocol):
    """The parallel pass of a drafter: `model.draft.DraftBlock`, or a scripted one in tests."""

    def slot(self, i: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


def _temperature(rules: DraftRules, i: int) -> float:
    return rules.temperatures[min(i, len(rules.temperatures) - 1)]


@dataclass(frozen=True)
class Drafted:
    """Drafts of R requests, n of each: ids int64 (-1: broken numbers), raw confidences float32 and
    survivals float64 [R, n]; useful int64 [R]: how many may stand, those before a broken one and up
    to one that ends the answer. scores: float64 [R, n, vocab], what rejection needs of their
    distributions, or None."""

    ids: torch.Tensor
    raw: torch.Tensor
    survivals: torch.Tensor
    useful: torch.Tensor
    scores: torch.Tensor | None


def draft(
    block: Block,
    newest: torch.Tensor,
    made: torch.Tensor,
    count: int,
    rules: DraftRules,
    rows: Callable[[int, torch.Tensor], Rows],
    ends: Callable[[torch.Tensor], torch.Tensor],
) -> Drafted:
    """Draft `count` tokens behind the newest ones int64 [R], of which `made` int64 [R] count.

    rows(i, ids): what draws draft i behind the drafts [R, i]; ends(ids [R, n]): does each of them
    end its answer? bool [R, n].
    """
    ids, raw, scores = [], [], []
    before = newest
    for i in range(count):
        logits, confidence = block.slot(i, before)
        if rules.chance is not None:
            confidence = torch.full_like(confidence, rules.chance).logit() * _temperature(rules, i)
        so_far = torch.stack(ids, 1) if ids else newest.new_zeros((len(newest), 0))
        chosen, score = propose(logits, rows(i, so_far), i, rules.verify)
        before = chosen.clamp_min(0)
        ids.append(chosen)
        raw.append(confidence)
        scores.append(score)
    drafts, confidences = torch.stack(ids, 1), torch.stack(raw, 1)
    behind = torch.arange(count, device=newest.device)
    broken = torch.where(drafts < 0, behind, count).amin(1)
    last = torch.where(ends(drafts), behind + 1, count).amin(1)
    useful = torch.minimum(torch.minimum(broken, last), made)
    return Drafted(
        drafts,
        confidences,
        share.survivals(confidences, rules.temperatures[:count], useful),
        useful,
        None if scores[0] is None else torch.stack(scores, 1),
    )
