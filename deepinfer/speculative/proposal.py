"""The one way to count what was drafted and what stood.

Steps come in one by one or in sums, the `speculation` object of a result goes out. Nothing here
knows a tensor, a rule or a probability, nor may it import torch.
"""

from __future__ import annotations

from dataclasses import dataclass


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
