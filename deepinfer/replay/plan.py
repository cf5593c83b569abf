"""Which rows of a prompt each layer computes, keeps keys of, reads from a cache, or skips.

Comes in: the shape of a model, the truncation setting, a prompt's length and what is known of it
already. Goes out: a `ReplayPlan`, which the engine executes and `replay-inspect` draws; nothing
else decides. It must not know tensors, pages or requests. Source: model spec §5, serving semantics
§2 and §3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deepinfer.errors import InternalError

MODES = ("off", "mask", "compact")

Range = tuple[int, int]
"""Half-open token range [a, b)."""


@dataclass(frozen=True, slots=True)
class LayerRanges:
    """One layer of a plan: disjoint half-open ranges that together cover the prompt.

    role: "encoder", "boundary" or "decoder". computed: the whole layer ran. keys_only: its
    compressed KV and index keys alone. read: state taken from a cache. skipped: nothing at all.
    """

    index: int
    role: str
    computed: tuple[Range, ...]
    keys_only: tuple[Range, ...]
    read: tuple[Range, ...]
    skipped: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Prefill of one prompt of `tokens` tokens; what comes behind it runs through every layer.

    boundary: first layer of the decoder half (`layers` where the model has none). cached: tokens
    whose compressed KV and index keys are there, 0 or a page boundary. refill: rows before `cached`
    that run again only to fill windows (encoder replay); 0 where the windows are there too. kept:
    the decoder half sees nothing before this token, and in mode "compact" runs no row before it.
    """

    mode: str
    layers: int
    boundary: int
    tokens: int
    cached: int = 0
    refill: int = 0
    kept: int = 0

    @property
    def first(self) -> int:
        """The first row that runs."""
        return self.cached - self.refill

    def rows_from(self, layer: int) -> int:
        """The first row that the whole layer computes."""
        if layer >= self.boundary and self.mode == "compact":
            return max(self.kept, self.first)
        return self.first

    def sees_from(self, layer: int) -> int:
        """The first token whose window entry the layer's rows may see."""
        replayed = self.first if self.refill else 0
        return max(self.kept, replayed) if layer >= self.boundary else replayed

    def ranges(self, layer: int) -> LayerRanges:
        """What becomes of the prompt's tokens in a layer."""
        first = min(self.rows_from(layer), self.tokens)
        # Where the decoder half is cut nothing of it was kept, so nothing can be read.
        drops = layer > self.boundary and self.kept > 0
        read = 0 if drops else min(self.first, first)
        keys = first
        if layer == self.boundary and self.mode == "compact":
            read = min(self.cached, first)
            keys = read
        role = "encoder" if layer < self.boundary else "decoder"
        return LayerRanges(
            index=layer,
            role="boundary" if layer == self.boundary else role,
            computed=_range(first, self.tokens),
            keys_only=_range(keys, first),
            read=_range(0, read),
            skipped=_range(read, keys),
        )

    def all_ranges(self) -> tuple[LayerRanges, ...]:
        return tuple(self.ranges(layer) for layer in range(self.layers))


class Shape(Protocol):
    """What a rule must know of a model; `model.config.ModelConfig` is one."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def decoder_start(self) -> int | None: ...
    @property
    def sliding_window(self) -> int: ...
    @property
    def cut_obstacles(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class ReplayRule:
    """How prompts of one model are cut.

    layers, boundary, window: of the model; boundary None: it cannot be cut, so mode must be "off".
    keep: rows at the end of a prompt that run through the decoder half.
    """

    layers: int
    boundary: int | None
    window: int
    mode: str = "off"
    keep: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES or (self.mode != "off" and self.boundary is None):
            raise InternalError(
                "replay-rule", f"mode {self.mode!r} with boundary layer {self.boundary}"
            )

    @classmethod
    def of(cls, model: Shape, mode: str, keep: int | str) -> ReplayRule:
        """The rule of a model for the settings `replay_mode` and `swa_keep` (tokens or "full");
        a model that cannot be cut (`cut_obstacles`) is not."""
        if keep == "full" or model.cut_obstacles:
            mode = "off"
        return cls(
            layers=model.num_hidden_layers,
            boundary=model.decoder_start,
            window=model.sliding_window,
            mode=mode,
            keep=0 if mode == "off" else int(keep),
        )

    @property
    def cuts(self) -> bool:
        return self.mode != "off"

    @property
    def decoder_layers(self) -> int:
        return self.layers - (self.layers if self.boundary is None else self.boundary)

    @property
    def stateful(self) -> int:
        """Layers 0 .. stateful - 1 run on every row, so a resume needs their windows."""
        return self.boundary if self.cuts and self.boundary is not None else self.layers

    def minimum(self, rollback: int) -> int:
        """The smallest keep: a whole window after `rollback` tokens are taken back."""
        return self.window + rollback

    @property
    def exact(self) -> int:
        """The keep from which on the last row equals an uncut prefill: its whole window halo."""
        return 1 + (self.window - 1) * self.decoder_layers

    def latest_resume(self, tokens: int) -> int:
        """The last token at which a prompt may resume: what must run again lies behind it."""
        return max(tokens - self.keep, 0) if self.cuts else max(tokens - 1, 0)

    def window_pages(self, size: int) -> int:
        """Pages of `size` tokens whose window rows let a prompt resume, kept before its end and
        before the end of its answer: a window, and what the latest resume may lie back."""
        return -(-self.window // size) + (-(-self.keep // size) if self.cuts else 1)

    def plan(
        self, tokens: int, *, cached: int = 0, refill: int = 0, full: bool = False
    ) -> ReplayPlan:
        """The plan of a prompt. full: run every layer on every row, whatever the mode.

        Raises InternalError where the resume point lies behind what must run again.
        """
        off = full or not self.cuts
        kept = 0 if off else max(tokens - self.keep, 0)
        latest = max(tokens - 1, 0) if off else kept
        if not 0 <= refill <= cached <= latest:
            raise InternalError(
                "replay-plan", f"cached {cached}, refill {refill} of {tokens} tokens, kept {kept}"
            )
        return ReplayPlan(
            mode="off" if off else self.mode,
            layers=self.layers,
            boundary=self.layers if self.boundary is None else self.boundary,
            tokens=tokens,
            cached=cached,
            refill=refill,
            kept=kept,
        )

    def plan_with_hit(
        self, tokens: int, cached: int, page: int, encoder_replay: bool = False
    ) -> ReplayPlan:
        """The plan of a prompt of which `cached` tokens are known already.

        It resumes at the last page boundary (of `page` tokens) that is cached and may be resumed
        at. encoder_replay: no window state is there, so a window of rows before it runs again.
        """
        resume = min(cached, self.latest_resume(tokens)) // page * page
        refill = min(self.window, resume) if encoder_replay else 0
        return self.plan(tokens, cached=resume, refill=refill)


def _range(start: int, stop: int) -> tuple[Range, ...]:
    return ((start, stop),) if stop > start else ()
