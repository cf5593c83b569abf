"""From settings to the parts of an engine: model, back ends, pool sizes, runner, tokenizer.

Settings come in, and a model where it is not the folder they name; `Parts` go out. Everything that
can be refused is refused before a weight is there. It must not know requests or the loop that will
use the parts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from deepinfer.core.step import StepPlan
from deepinfer.errors import CapacityError, CheckpointError, UsageError
from deepinfer.kvcache.prefix import Reuse, Tier
from deepinfer.replay.plan import ReplayRule
from deepinfer.speculative.schedule import DraftRules
from deepinfer.speculative.temperatures import read_temperatures
from deepinfer.speculative.timing import StepTimes
from deepinfer.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from deepinfer.checkpoint.layout import Checkpoint
    from deepinfer.checkpoint.load import Weights
    from deepinfer.model.config import ModelConfig
    from deepinfer.settings import Settings
    from deepinfer.speculative.drafter import Block

EMBEDDED = Path(__file__).parents[1] / "embedded"
_SHARE = 4  # the state of requests may fill one part in so many of the free memory
_HOST_SHARE = 8  # and pages that the device lost, one in so many of the host's


def _nothing() -> None: ...


class Runs(Protocol):
    """What the engine needs of a runner: `engine.runner.Runner`, or a scripted one in tests.
    graphs: keeps steps that only compute (`deepinfer.ops.cpu.graphs`), or None."""

    @property
    def graphs(self) -> Any: ...
    def forward(self, plan: StepPlan) -> torch.Tensor: ...
    def draft_block(
        self, slots: torch.Tensor, anchors: torch.Tensor, last: torch.Tensor, first: torch.Tensor
    ) -> Block: ...
    def read(self, kind: str, pages: Sequence[int]) -> list[bytes]: ...


class Model(Protocol):
    """What an engine is made for, before its weights are there. `identity` tells two apart by what
    their state depends on; `temperatures` are those fitted for its drafts, None if none were."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def weight_bytes(self) -> int: ...
    def identity(self) -> bytes: ...
    def tokenizer(self) -> Tokenizer | None: ...
    def token_map(self) -> Sequence[int] | None: ...
    def temperatures(self) -> tuple[float, ...] | None: ...
    def weights(self, device: str, draft: bool) -> Weights: ...


@dataclass(frozen=True)
class Folder:
    """The model of a checkpoint."""

    checkpoint: Checkpoint

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def weight_bytes(self) -> int:
        return self.checkpoint.weight_bytes

    def identity(self) -> bytes:
        return self.checkpoint.identity()

    def tokenizer(self) -> Tokenizer | None:
        file, config = self.checkpoint.tokenizer_file, self.config
        return Tokenizer(file, config.bos_token_id, config.vocab_size) if file else None

    def token_map(self) -> Sequence[int] | None:
        return _token_map(self.checkpoint)

    def temperatures(self) -> tuple[float, ...] | None:
        return read_temperatures(self.checkpoint.path, self.config.dspark_block_size)

    def weights(self, device: str, draft: bool) -> Weights:
        from deepinfer.checkpoint.load import load_weights

        return load_weights(self.checkpoint, device, draft=draft)


@dataclass(frozen=True)
class Sizes:
    """Capacities: slots, pages of page_tokens tokens, longest sequence, rows of a step, and pages
    of window rows kept for reuse."""

    slots: int
    pages: int
    page_tokens: int
    max_model_len: int
    max_rows: int
    chunk: int
    window_pages: int = 0


@dataclass(frozen=True)
class Parts:
    """Everything the loop works with. `tokenizer` None: the checkpoint takes token ids only;
    `drafting` None: no speculation. `grammar_timeout`: seconds. `keep_times` stores `times` for the
    next run."""

    runner: Runs
    tokenizer: Tokenizer | None
    vocab_size: int
    eos_ids: tuple[int, ...]
    sizes: Sizes
    rule: ReplayRule = ReplayRule(layers=1, boundary=None, window=1)
    reuse: Reuse = Reuse(enabled=False)
    tiers: tuple[Tier, ...] = ()
    durable: Tier | None = None
    drafting: DraftRules | None = None
    times: StepTimes = field(default_factory=StepTimes)
    keep_times: Callable[[], None] = _nothing
    batch_invariant: bool = False
    overlap: bool = False
    grammar_timeout: float = 20.0
    settings: Mapping[str, object] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def embedded_model() -> Path:
    """The folder of the trained checkpoint inside the package."""
    found = sorted(EMBEDDED.glob("**/config.json"))
    if not found:
        raise CheckpointError(
            "embedded-missing",
            "this installation has no embedded model",
            hint="deepinfer run -m path/to/DeepSeek-V4.1-Flash-1017 …",
        )
    return found[0].parent


def assemble(settings: Settings, warn: Callable[[str], object]) -> Parts:
    """The parts for the folder that the settings name, or for the embedded model.

    Raises what `assemble_model` raises, and what is wrong with the folder.
    """
    from deepinfer.checkpoint.layout import open_checkpoint

    folder = settings.model_dir or embedded_model()
    origin = settings.origin("model_dir") if settings.model_dir else ""
    return assemble_model(Folder(open_checkpoint(folder, origin)), settings, warn)


def assemble_model(model: Model, settings: Settings, warn: Callable[[str], object]) -> Parts:
    """Check, size, load; `warn` gets what goes wrong later without ending anything.

    Raises CheckpointError, UsageError, CapacityError and EnvironmentProblem, each before the
    weights are there where that is possible. The setting `threads` holds for the whole process.
    """
    import torch

    from deepinfer.device import detect
    from deepinfer.engine.compiled import open_compiled
    from deepinfer.engine.runner import Runner
    from deepinfer.ops import registry
    from deepinfer.settings import for_device, for_model

    settings = for_model(settings, model.config)
    accelerator = detect.pick(settings.accelerator, settings.origin("accelerator"))
    device = detect.TORCH_DEVICE[accelerator]
    overrides = [f"{op}={name}" for op, name in settings.backend.items()]
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    compiled = open_compiled(settings, device)
    libraries = compiled.libraries
    settings = for_device(
        settings, accelerator, registry.order_dependent(device, overrides, libraries)
    )
    settings = _recorded(settings, compiled.level)
    config = _with_dtype(model.config, settings.dtype)
    tokenizer, token_map = model.tokenizer(), model.token_map()
    packed = registry.packed(device, overrides, libraries)
    free, keep = plan_weights(model, free_bytes(device), settings.mtp > 0, packed)
    ops = registry.build(device, overrides, keep_weights=keep, libraries=libraries)
    rule = ReplayRule.of(config, settings.replay_mode, settings.swa_keep)
    sizes, warnings = plan_sizes(settings, config, free)
    drafting = _drafting(settings, model)
    identity = b""
    choices = registry.explain(device, overrides, libraries)
    numerics = (device, *compiled.identity, *((c.op, c.backend) for c in choices))
    if settings.prefix_cache_dir is not None:  # only what outlives the process meets other state
        identity = _identity(model, config.dtype, token_map, rule, sizes, numerics)
    reuse = Reuse(
        enabled=settings.prefix_cache,
        identity=identity,
        context=max(0, config.engram_max_ngram_size - 1),
        replay=settings.encoder_replay,
    )
    tiers, durable = _tiers(settings, reuse, warn)
    times, keep_times = _step_times(settings, model, numerics, warn)
    weights = model.weights(device, draft=drafting is not None)
    runner = Runner(
        config,
        weights.handed_over(),
        ops,
        slots=sizes.slots,
        pages=sizes.pages,
        page_tokens=sizes.page_tokens,
        device=device,
        token_map=token_map,
        rollback=settings.max_rollback if drafting else 0,
        draft=drafting is not None,
        stateful=rule.stateful,
        window_pages=sizes.window_pages,
    )
    return Parts(
        runner=runner,
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
        eos_ids=(config.eos_token_id,),
        sizes=sizes,
        rule=rule,
        reuse=reuse,
        tiers=tiers,
        durable=durable,
        drafting=drafting,
        times=times,
        keep_times=keep_times,
        batch_invariant=settings.batch_invariant,
        overlap=settings.overlap,
        grammar_timeout=settings.grammar_timeout,
        settings=settings.as_json(),
        warnings=(
            *settings.warnings, *compiled.warnings, *weights.report.warnings, *warnings,
            *uncut(settings, config),
        ),
    )  # fmt: skip


def _recorded(settings: Settings, level: str | None) -> Settings:
    """With the level and the number of threads that nobody chose, so that results tell them."""
    import torch

    level_entry, threads = settings.values["cpu_level"], settings.values["threads"]
    return settings.changed(
        {
            "cpu_level": replace(level_entry, value=level),
            "threads": replace(threads, value=torch.get_num_threads()),
        }
    )


def uncut(settings: Settings, config: ModelConfig) -> tuple[str, ...]:
    """A warning where truncation is off because the model's layout does not allow it."""
    if settings.source("replay_mode") != "model" or not config.cut_obstacles:
        return ()
    return (
        "truncation is off, every layer runs on every prompt token: "
        + "; ".join(config.cut_obstacles),
    )


def _drafting(settings: Settings, model: Model) -> DraftRules | None:
    """How to draft; temperatures nobody chose are those fitted for the checkpoint, if any."""
    if settings.mtp == 0 or not model.config.stages:
        return None
    temperatures = settings.mtp_temperature
    if not settings.values["mtp_temperature"].chosen:
        temperatures = model.temperatures() or temperatures
    return DraftRules(
        length=settings.mtp,
        verify=settings.verify,
        varlen=settings.mtp_varlen,
        threshold=settings.mtp_threshold,
        temperatures=temperatures,
    )


def _step_times(
    settings: Settings,
    model: Model,
    numerics: Sequence[object],
    warn: Callable[[str], object],
) -> tuple[StepTimes, Callable[[], None]]:
    """Times of earlier runs of this model on this device, and what stores them again."""
    import torch

    import deepinfer

    if settings.decode_perf_cache_dir is None or not settings.mtp:
        return StepTimes(), _nothing
    folder = Path(settings.decode_perf_cache_dir)
    build = (
        model.identity(), deepinfer.__version__, torch.__version__, numerics,
        settings.dtype, settings.mtp, torch.get_num_threads(),
    )  # fmt: skip
    identity = hashlib.blake2b(repr(build).encode(), digest_size=16).hexdigest()
    times = StepTimes.load(folder, identity, settings.decode_perf_cache_ttl_sec, warn)
    return times, lambda: times.save(folder, identity, warn)


def _identity(
    model: Model,
    dtype: str,
    token_map: Sequence[int] | None,
    rule: ReplayRule,
    sizes: Sizes,
    numerics: Sequence[object],
) -> bytes:
    """What kept state depends on beside the tokens: the checkpoint, how numbers are computed
    (device type, back ends, versions, activations), and how a page is laid out."""
    import torch

    import deepinfer

    parts = (
        model.identity(),
        deepinfer.__version__,
        torch.__version__,
        dtype,
        rule.stateful,
        sizes.page_tokens,
        token_map,
        numerics,
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).digest()


def _tiers(
    settings: Settings, reuse: Reuse, warn: Callable[[str], object]
) -> tuple[tuple[Tier, ...], Tier | None]:
    """Where state may be kept beside the device's memory, and which of these keeps all of it.

    Host memory gets as much as the folder, at most an eighth of what is free.
    """
    from deepinfer.kvcache.tiers import DiskTier, HostTier

    if not reuse.enabled:
        return (), None
    host = HostTier(min(settings.prefix_cache_bytes, max(free_bytes("cpu"), 0) // _HOST_SHARE))
    if settings.prefix_cache_dir is None:
        return (host,), None
    disk = DiskTier(
        Path(settings.prefix_cache_dir), settings.prefix_cache_bytes, reuse.identity.hex(), warn
    )
    return (host, disk), disk


def plan_weights(
    model: Model | Checkpoint, free: int, drafts: bool, packed: bool = False
) -> tuple[int, bool]:
    """Bytes left of `free` once the weights are in, and whether the torch back end may keep them
    unpacked (eight bytes each), which it does where that takes at most half of what is left.
    drafts: the draft stages are loaded too. packed: the back end in use never unpacks them.

    Raises CapacityError weights-too-big.
    """
    from deepinfer.checkpoint.names import parameters

    left = free - model.weight_bytes
    if left <= 0:
        raise CapacityError(
            "weights-too-big",
            f"the weights do not fit: {model.weight_bytes / 2**30:.1f} GiB",
            [f"free {max(free, 0) / 2**30:.1f} GiB"],
            "deepinfer run without -m, for the embedded model",
        )
    held = parameters(model.config, vision=False).values()
    unpacked = 8 * sum(math.prod(p.shape) for p in held if drafts or p.group == "target")
    keep = not packed and unpacked <= left // 2
    return left - (unpacked if keep else 0), keep


def plan_sizes(settings: Settings, config: ModelConfig, free: int) -> tuple[Sizes, tuple[str, ...]]:
    """How many requests and tokens to hold, `free` bytes given after the weights; and warnings.

    What was asked for is kept or refused (CapacityError kv-too-small). What was not is cut to a
    quarter of the free memory: requests at most half of that, window rows for reuse a quarter of
    what is left, tokens the rest.
    """
    from deepinfer.kvcache.pools import bytes_per_token, bytes_per_window_page

    page = settings.page_tokens
    budget = max(free, 0) // _SHARE
    slot_bytes, page_bytes = slot_size(settings, config), bytes_per_token(config) * page
    slots = max(min(settings.max_num_seqs, budget // 2 // max(slot_bytes, 1)), 1)
    warnings = []
    if slots < settings.max_num_seqs and settings.values["max_num_seqs"].chosen:
        warnings.append(
            f"{settings.origin('max_num_seqs')} {settings.max_num_seqs}: memory for {slots} "
            "requests at once, others wait"
        )
    window_pages = 0
    if settings.prefix_cache:
        rule = ReplayRule.of(config, settings.replay_mode, settings.swa_keep)
        window_bytes = bytes_per_window_page(config, page, rule.stateful)
        most = (budget - slots * slot_bytes) // 4 // window_bytes
        window_pages = max(min(slots * rule.window_pages(page), most), 0)
        budget -= window_pages * window_bytes
    fit = int(max((budget - slots * slot_bytes) // page_bytes, 0)) if page_bytes else 1 << 40
    length = settings.max_model_len or config.max_position_embeddings
    if settings.kv_cache_tokens is not None:
        pages = settings.kv_cache_tokens // page
        most = int((max(free, 0) - slots * slot_bytes) // page_bytes) if page_bytes else pages
        if pages < 1:
            raise UsageError(
                "kv-cache-tokens-few",
                f"--kv-cache-tokens {settings.kv_cache_tokens} is less than one page",
                [f"a page has {page} tokens (--page-tokens)"],
                f"--kv-cache-tokens {page}",
            )
        if pages > most:
            raise _does_not_fit(
                settings.kv_cache_tokens, most * page, free, page_bytes / page, "--kv-cache-tokens"
            )
    else:
        pages = min(slots * -(-length // page), fit)
        if settings.max_model_len is not None and pages * page < length:
            raise _does_not_fit(length, pages * page, free, page_bytes / page, "--max-model-len")
        if pages < 1:
            raise _does_not_fit(page, 0, free, page_bytes / page, "--page-tokens")
        length = min(length, pages * page)
    sizes = Sizes(
        slots, pages, page, length, settings.max_num_batched_tokens, settings.prefill_chunk,
        window_pages,
    )  # fmt: skip
    return sizes, tuple(warnings)


def slot_size(settings: Settings, config: ModelConfig) -> int:
    """Fixed bytes of a running request; what drafts need is there only where it drafts."""
    from deepinfer.kvcache.pools import bytes_per_slot

    if not settings.mtp:
        return bytes_per_slot(config)
    return bytes_per_slot(config, settings.max_rollback, len(config.stages))


def _does_not_fit(tokens: int, fit: int, free: int, token_bytes: float, flag: str) -> CapacityError:
    return CapacityError(
        "kv-too-small",
        f"{tokens:,} tokens do not fit",
        [
            f"free after weights {max(free, 0) / 2**30:.1f} GiB; "
            f"one token needs {token_bytes / 2**10:.2f} KiB; {max(fit, 0):,} fit"
        ],
        f"{flag} {max(fit, 1)}",
    )


def _with_dtype(config: ModelConfig, dtype: str | None) -> ModelConfig:
    names = {None: config.dtype, "bf16": "bfloat16", "fp32": "float32"}
    return replace(config, dtype=names[dtype])


def _token_map(checkpoint: Checkpoint) -> tuple[int, ...] | None:
    """Mapped ids for Engram: the folder's own file wins over the tokenizer's classes."""
    from deepinfer.checkpoint.layout import read_token_map
    from deepinfer.tokenizer.token_map import compute_token_map

    if not checkpoint.config.engram_layer_ids:
        return None
    if checkpoint.token_map_file:
        return read_token_map(checkpoint.token_map_file, checkpoint.config)
    if checkpoint.tokenizer_file:
        text = checkpoint.tokenizer_file.read_text(encoding="utf-8")
        try:
            return tuple(compute_token_map(text)[0])
        except ValueError as problem:
            raise CheckpointError(
                "token-map-invalid",
                f"{checkpoint.tokenizer_file.name} gives no Engram token map",
                [str(problem)],
                "put engram_token_map.json beside config.json",
            ) from None
    return None


def free_bytes(device: str) -> int:
    """Bytes that are free now on a torch device type."""
    from deepinfer.device import detect

    if device != "cpu":
        import torch

        getattr(torch, device).empty_cache()  # what an engine before this one has left
        return getattr(torch, device).mem_get_info()[0]
    free = detect.find(query=False).cpu.free_bytes
    return free if free is not None else 4 << 30  # a system that does not tell: a modest guess
