"""The running requests as the device knows them: tensors with a row per slot.

What a request needs is written when it begins and when it gets a page; its newest token, its length
and its drafts never leave the device to be used there. Goes out: rows for the model, columns for
the sampler. It must not know plans, logits or how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.core.sequence import Sequence as Generation
from deepinfer.core.step import Growth
from deepinfer.device.transfer import send
from deepinfer.kvcache.live import LiveRows
from deepinfer.model.memory import Ops
from deepinfer.sampling import rng
from deepinfer.sampling.logits import WHOLE, Rows, min_p_floor

_TOGETHER = 4  # page columns


@dataclass(frozen=True, slots=True)
class Drawing:
    """What the host knows of how the open requests draw: see `sampling.logits.Rows`. scored: does
    any want log-probabilities?"""

    drawn: bool
    widest: int
    floored: bool
    scored: bool = False


class Live:
    """State of `slots` slots. Everything is int64 unless said otherwise.

    last: newest token of each request, not in memory yet; length: its tokens, that one included;
    end: most tokens it may have; limit: tokens that its pages hold. drafts, survivals (float64),
    raw (float32) [slots, K]: of the step before; made: how many there are, useful: how many may
    stand (`TraceStep.useful`).
    """

    def __init__(
        self,
        *,
        slots: int,
        pages: int,
        window_pages: int,
        page_tokens: int,
        max_model_len: int,
        drafts: int,
        device: torch.device | str,
        ops: Ops,
        judged: bool = True,
    ) -> None:
        """pages, window_pages: of the pools; those numbers name their scratch pages. ops: of the
        device. judged: drafts stand for what they are (`DraftRules.chance`)."""
        self.device, self._ops = torch.device(device), ops
        self.page_tokens, self.width = page_tokens, drafts
        self._scratch, self._judged = (pages, window_pages), judged
        # Rows may reach past the pages of the longest request: its drafts do, and once it has
        # ended its newest token too.
        self._beyond = -(-(drafts + 1) // page_tokens) if drafts else 0
        columns = -(-max_model_len // page_tokens) + self._beyond

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros((slots, *shape), dtype=dtype, device=device)

        self.last, self.length, self.end, self.limit = zeros(), zeros(), zeros(), zeros()
        self._seed, self._top_k, self._attempt, self.first = zeros(), zeros(), zeros(), zeros()
        self._temperature, self._top_p, self._floor = (zeros(dtype=torch.float64) for _ in "tpf")
        self._stops = zeros(1) - 1
        self._pages, self._windows = zeros(columns) + pages, zeros(columns) + window_pages
        self.drafts, self.survivals = zeros(drafts), zeros(drafts, dtype=torch.float64)
        self.raw = zeros(drafts, dtype=torch.float32)
        self.made, self.useful = zeros(), zeros()
        self._named: dict[tuple[int, ...], torch.Tensor] = {}

    # from the host

    def slots(self, slots: tuple[int, ...]) -> torch.Tensor:
        """Slot numbers as a tensor [R]; the last ones asked for are kept."""
        found = self._named.get(slots)
        if found is None:
            [found] = send([np.array(slots, dtype=np.int64)], self.device)
            self._named = {**dict(list(self._named.items())[-1:]), slots: found}
        return found

    def begin(self, requests: Sequence[tuple[Generation, tuple[int, ...], int]]) -> None:
        """Requests of which the device knows nothing yet: (sequence, ids that end its answer,
        lowest position with draft context). Their tokens all are in memory after this step."""
        if not requests:
            return
        scratch, none = self._scratch
        most = max(len(stops) for _, stops, _ in requests)
        if most > self._stops.shape[1]:
            more = self._stops.new_full((len(self._stops), most - self._stops.shape[1]), -1)
            self._stops = torch.cat((self._stops, more), 1)
        columns, stops = self._pages.shape[1], self._stops.shape[1]
        whole = np.full((len(requests), 8 + stops + 2 * columns), -1, dtype=np.int64)
        real = np.empty((len(requests), 3))
        for row, numbers, (sequence, ends, first) in zip(whole, real, requests, strict=True):
            request, params = sequence.request, sequence.request.params
            seed = rng.signed(request.seed)
            room = len(sequence.pages) * self.page_tokens
            row[:8] = (sequence.slot, len(sequence.tokens), request.end, room, seed,
                       min(params.top_k, WHOLE), sequence.preemptions, first)  # fmt: skip
            row[8 : 8 + len(ends)] = ends
            pages, windows = row[8 + stops : -columns], row[-columns:]
            pages[:], windows[:] = scratch, none
            pages[: len(sequence.pages)] = sequence.pages
            for index, page in sequence.windows.items():
                windows[index] = page
            numbers[:] = params.temperature, params.top_p, min_p_floor(params)
        [sent], [floats] = send([whole], self.device), send([real], self.device)
        slots = sent[:, 0]
        for at, column in enumerate(
            (self.length, self.end, self.limit, self._seed, self._top_k, self._attempt,
             self.first), start=1,
        ):  # fmt: skip
            column[slots] = sent[:, at]
        self._stops[slots] = sent[:, 8 : 8 + stops]
        self._pages[slots] = sent[:, 8 + stops : -columns]
        self._windows[slots] = sent[:, -columns:]
        for at, column in enumerate((self._temperature, self._top_p, self._floor)):
            column[slots] = floats[:, at]
        self.made.index_fill_(0, slots, 0)
        self.useful.index_fill_(0, slots, 0)

    def grow(self, grown: Iterable[Growth]) -> None:
        """Requests got pages, each in order."""
        none = self._scratch[1]
        rows = [(g.slot, g.index, g.page, none if g.window is None else g.window) for g in grown]
        if not rows:
            return
        [sent] = send([np.array(rows, dtype=np.int64)], self.device)
        slots, index = sent[:, 0], sent[:, 1]
        self._pages[slots, index] = sent[:, 2]
        self._windows[slots, index] = sent[:, 3]
        # Of several pages of one request the last counts, whatever the order of writing.
        self.limit.scatter_reduce_(0, slots, (index + 1) * self.page_tokens, "amax")

    # rows of the decoding requests

    def columns_of(self, pages: int) -> int:
        """Page columns of rows whose longest request has so many pages: where steps are kept as
        graphs, more than are needed now, so that shapes last."""
        columns = pages + self._beyond
        if self._ops.graphs is None:
            return columns
        return min(-(-columns // _TOGETHER) * _TOGETHER, self._pages.shape[1])

    @property
    def stops(self) -> int:
        """Most ids that end an answer: with it, the tensor of them is another one."""
        return self._stops.shape[1]

    def may_stand(self, slots: torch.Tensor) -> torch.Tensor:
        """How many drafts of each request may be verified: useful ones that have pages [R]."""
        room = self.limit[slots] - self.length[slots]
        return torch.minimum(self.useful[slots], room).clamp_min(0)

    def rows(
        self, slots: torch.Tensor, pages: int, allotted: torch.Tensor, extra: int, most: int
    ) -> LiveRows:
        """Rows of requests: the newest token and `allotted` drafts of each, int64 [R], `extra` in
        all, at most `most` of one. pages: of the longest of them."""
        columns = self.columns_of(pages)
        starts, counts, offsets, of, positions, ids, behind, pages_of, windows = (
            self._ops.live_rows(
                slots, allotted, self.length, self.last, self.drafts, self._pages, self._windows,
                len(slots) + extra, columns,
            )
        )  # fmt: skip
        return LiveRows(
            starts, counts, offsets, of, positions, slots, ids, behind, pages_of, windows,
            most=most + 1, longest=columns * self.page_tokens,
        )  # fmt: skip

    # columns for the sampler

    def columns(
        self,
        slots: torch.Tensor,
        behind: torch.Tensor | int,
        drawing: Drawing,
        of: torch.Tensor | None = None,
    ) -> Rows:
        """What chooses the token that comes `behind` tokens after the newest one, for each of the
        slots [rows]; of: the slots of these numbers [rows]."""
        if not drawing.drawn and self._judged:
            return Rows.greedy(len(slots if of is None else of), self.device, self._ops.draw)
        slots = slots if of is None else slots[of]
        return Rows(
            seed=self._seed[slots],
            position=self.length[slots] + behind,
            attempt=self._attempt[slots],
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            floor=self._floor[slots],
            drawn=drawing.drawn,
            widest=drawing.widest,
            floored=drawing.floored,
            draw=self._ops.draw,
        )

    def ends(self, slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Would each of the tokens [R, n] end the answer of its request? bool [R, n]."""
        return self._ops.ends(tokens, slots, self._stops)

    def append(
        self,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        accepted: torch.Tensor,
        broken: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What verification gave (`speculative.verify.Judged`) goes to the requests, up to the
        token that ends the answer. How many each got, and whether the last one ends it by itself
        or it is broken, bool [R]."""
        return self._ops.append(
            tokens, accepted, broken, slots, self._stops, self.end, self.length, self.last
        )
