"""The nouns of speculation: what was drafted, what stood, and the one way to count both.

A drafter fills in a `Proposal` per request and step, verification answers with a `Verdict`, the
engine adds both up in `Counts`. Nothing here knows a tensor, a rule or a probability, nor may it
import torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of one request for the tokens that follow its newest one.

    position: absolute position of the first draft; the newest token is at position - 1.
    drafts: ids in order; -1 where the drafter's numbers were broken, which is never accepted.
    survivals: for each draft the chance that it and all before it stand (`schedule.survivals`).
    """

    position: int
    drafts: tuple[int, ...]
    survivals: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step decided for one request.

    accepted: how many of its drafts stand. tokens: these, then one token of the target's own: the
    correction of the first draft that fell, or the bonus behind the last. broken: the row that
    would have given that token was not finite or left nothing to choose; tokens is then the
    accepted drafts alone, and the request fails, unless one of them ends it (behind the end of a
    grammar nothing can be chosen, and nothing need be).
    """

    accepted: int
    tokens: tuple[int, ...]
    broken: bool = False


@dataclass(slots=True)
class Counts:
    """Sums over steps (serving semantics §8). A step is one target pass over one request.

    drafted: drafts made, those behind an end of sequence included. verified: of these, drafts the
    target looked at. accepted: of these, drafts delivered. discarded: drafts behind one that ended
    the answer, looked at or not. committed: tokens delivered, corrections and bonus included.
    """

    steps: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    discarded: int = 0
    committed: int = 0

    def add(self, drafted: int, verified: int, accepted: int, committed: int, ended: bool) -> None:
        """Count a step; accepted: drafts that stand; committed: tokens that were delivered; ended:
        the last of them ended the answer."""
        delivered = min(accepted, committed)
        self.steps += 1
        self.drafted += drafted
        self.verified += verified
        self.accepted += delivered
        if ended and committed <= accepted:  # with a draft
            self.discarded += drafted - committed
        self.committed += committed

    def add_all(
        self, steps: int, drafted: int, verified: int, accepted: int, committed: int
    ) -> None:
        """Count steps of which none ended the answer, by their sums."""
        self.steps += steps
        self.drafted += drafted
        self.verified += verified
        self.accepted += accepted
        self.committed += committed

    @property
    def accepted_length(self) -> float | None:
        """Tokens committed / steps, bonus or corrected token included."""
        return self.committed / self.steps if self.steps else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts / drafted."""
        return self.accepted / self.drafted if self.drafted else None

    def as_json(self) -> dict[str, object]:
        """The `speculation` object of a result; accepted_length is null before the first step."""
        return {
            "steps": self.steps,
            "drafted": self.drafted,
            "verified": self.verified,
            "accepted": self.accepted,
            "accepted_length": self.accepted_length,
        }
