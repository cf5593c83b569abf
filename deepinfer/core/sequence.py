"""A request on its way: its tokens so far, how many are in memory, and where.

The scheduler moves it between waiting and running and gives it pages and a slot, the engine appends
tokens. It does not know why it is scheduled, nor what a token says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deepinfer.core.request import Request

if TYPE_CHECKING:
    from deepinfer.replay.plan import ReplayPlan


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one request; identity is the object.

    order: arrival number, small is old. full: run every layer on every row, from token 0, and give
    the logits of all of them. tokens: prompt and generated ids, as far as they were told. computed:
    how many of its prompt's are in memory or planned to be. slot, pages: what it owns while
    running, None and [] otherwise. preemptions: how often it lost its memory; ready: the step whose
    tokens must be told before it runs again. counts: of generated ids, kept only where penalties
    need them.
    replay: how its prompt is computed. names: of its whole pages (`kvcache.prefix`), the first
    `named` of which others can find. windows: page of the sequence -> window page being filled.
    restore: window pages that its first rows need. answered: pages of its answer whose window rows
    it has given a name.
    """

    request: Request
    order: int
    full: bool = False
    tokens: list[int] = field(init=False)
    computed: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    preemptions: int = 0
    ready: int = 0
    counts: Counter[int] = field(default_factory=Counter)
    replay: ReplayPlan | None = None
    names: list[bytes] = field(default_factory=list)
    named: int = 0
    windows: dict[int, int] = field(default_factory=dict)
    restore: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def pending(self) -> int:
        """Tokens not yet in memory: 1 while decoding, more while prefilling."""
        return len(self.tokens) - self.computed

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self.request.params.penalised:
            self.counts[token] += 1
