"""Every setting: name, variable, flag, type, default, meaning. The one file that reads os.environ.

Comes in: nothing. Goes out: `SETTINGS`, look-up by any spelling, and `environment()`, a copy of the
process environment that callers pass on as a value. It must not know who uses a setting, nor
which combinations make sense.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from deepinfer.settings import kinds
from deepinfer.settings.kinds import Kind

__all__ = ["PREFIX", "SETTINGS", "Setting", "environment", "find", "nearest", "rest_idle_threads"]

PREFIX = "DEEPINFER_"
SINCE = "0.1.0"


@dataclass(frozen=True)
class Setting:
    """One setting.

    `note` is not empty where this version accepts and checks the setting but has no code behind
    it yet; `inert` lists values for which that makes no difference. `used` is False for official
    names that this toolkit only recognises. `replaced_by` is the successor of a removed name.
    """

    attribute: str
    variable: str | None
    flag: str | None
    kind: Kind
    default: object
    doc: str
    panel: str = "Advanced"
    advanced: bool = False
    official: bool = False
    used: bool = True
    note: str = ""
    inert: tuple[object, ...] = ()
    shown_default: str = ""
    since: str = SINCE
    replaced_by: str | None = None

    @property
    def key(self) -> str:
        """The name in result files: the variable, or the Python name where there is none."""
        return self.variable or self.attribute

    @property
    def available(self) -> bool:
        return self.used and not self.note

    @property
    def default_text(self) -> str:
        """The default in words, for help and documents."""
        if self.shown_default:
            return self.shown_default
        if self.default is None:
            return "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return str(self.default)


def environment() -> dict[str, str]:
    """A copy of the process environment; everything that needs a variable gets it as a value."""
    return dict(os.environ)


def rest_idle_threads() -> None:
    """Let OpenMP's idle threads sleep instead of spin, unless the user chose; before torch loads.

    The model's steps are many small operations: threads that spin at each barrier wait for a core
    that another program has. Measured with a busy neighbour: first token 0.5 s instead of 7.3 s.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


_USED = (
    Setting(
        "accelerator", "DEEPINFER_ACCELERATOR", "--accelerator",
        kinds.choice("auto", "nvidia", "ascend", "cpu"), "auto",
        "Where to run or what to build for", "Device", official=True,
    ),
    Setting(
        "model_dir", "DEEPINFER_HF_MODEL_DIR", "--model-dir", kinds.path, None,
        "Checkpoint folder", "Model", official=True, shown_default="the embedded model",
    ),
    Setting(
        "swa_keep", "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "--swa-keep", kinds.keep, 140,
        "Last prompt tokens, which run the decoder half; full = all", "Replay",
        official=True,
    ),
    Setting(
        "replay_mode", "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "--replay-mode",
        kinds.choice("off", "mask", "compact"), "compact",
        "How older rows skip the decoder half; mask saves nothing", "Replay", official=True,
    ),
    Setting(
        "max_rollback", "DEEPINFER_MAX_BACKTRACKING_TOKENS", "--max-rollback", kinds.whole(1), None,
        "Most tokens that can be taken back", "Replay", advanced=True, official=True,
        shown_default="draft length + 1",
    ),
    Setting(
        "mtp", "DEEPINFER_USE_NEXTN_DECODE", "--mtp", kinds.whole(0), 5,
        "Longest draft; 0 = no drafts", "Speculation", official=True,
        shown_default="the checkpoint's",
    ),
    Setting(
        "mtp_varlen", "DEEPINFER_ENABLE_MTP_VARLEN", "--mtp-varlen", kinds.boolean, False,
        "Let confidence decide how many drafts to verify", "Speculation", official=True,
    ),
    Setting(
        "verify", "DEEPINFER_VERIFY", "--verify", kinds.choice("rejection", "coupled"), "rejection",
        "Rule that accepts drafts", "Speculation",
        advanced=True, shown_default="rejection; coupled when batch-invariant",
    ),
    Setting(
        "mtp_threshold", "DEEPINFER_MTP_THRESHOLD", "--mtp-threshold", kinds.number(0.0, 1.0), None,
        "Fixed confidence cut for experiments", "Speculation", advanced=True,
    ),
    Setting(
        "mtp_temperature", "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", None,
        kinds.temperatures, (1.0,), "Confidence temperature, one or one per draft position",
        official=True, advanced=True,
        shown_default="those fitted for the checkpoint, else 1.0",
    ),
    Setting(
        "batch_invariant", "DEEPINFER_BATCH_INVARIANT", "--batch-invariant", kinds.boolean, False,
        "Promise that a request's bits do not depend on its neighbours", "Device",
        advanced=True, official=True,
    ),
    Setting(
        "overlap", "DEEPINFER_ZERO_OVERHEAD_SCHEDULING", "--overlap", kinds.boolean, True,
        "Plan the next step while this one runs", "Device", advanced=True, official=True,
    ),
    Setting(
        "backend", "DEEPINFER_OP_BACKEND", "--backend", kinds.backends, {},
        "Back end of an operation, OP=NAME; all=NAME for every one", "Device",
        advanced=True, shown_default="auto",
    ),
    Setting(
        "max_model_len", None, "--max-model-len", kinds.whole(1), None,
        "Longest prompt and answer together, in tokens", "Model", advanced=True,
        shown_default="the model's, cut to what fits",
    ),
    Setting(
        "max_num_seqs", None, "--max-num-seqs", kinds.whole(1), 256,
        "Most requests in one step", advanced=True,
    ),
    Setting(
        "max_num_batched_tokens", None, "--max-num-batched-tokens", kinds.whole(1), None,
        "Most rows in one step", advanced=True,
        shown_default="max(4,096, max_num_seqs x (1 + mtp))",
    ),
    Setting(
        "prefill_chunk", "DEEPINFER_PREFILL_CHUNK", "--prefill-chunk", kinds.whole(1), None,
        "Most prompt rows of one request in one step", advanced=True,
        shown_default="the row budget",
    ),
    Setting(
        "prefix_cache", "DEEPINFER_PREFIX_CACHE", "--prefix-cache", kinds.boolean, True,
        "Reuse the state of prompts that begin alike", advanced=True,
    ),
    Setting(
        "prefix_cache_dir", "DEEPINFER_PREFIX_CACHE_DIR", "--prefix-cache-dir", kinds.path, None,
        "Folder that keeps reusable state between runs", advanced=True,
    ),
    Setting(
        "prefix_cache_bytes", "DEEPINFER_PREFIX_CACHE_BYTES", "--prefix-cache-bytes",
        kinds.size, 10 * 1024**3, "Size cap of that folder", advanced=True,
        shown_default="10 GiB",
    ),
    Setting(
        "encoder_replay", "DEEPINFER_PREFIX_CACHE_ENCODER_REPLAY", "--encoder-replay",
        kinds.boolean, False, "Refill encoder windows approximately on a reuse", advanced=True,
    ),
    Setting(
        "kv_cache_tokens", "DEEPINFER_KV_CACHE_TOKENS", "--kv-cache-tokens", kinds.whole(1), None,
        "Tokens the state pool holds", advanced=True, shown_default="what fits",
    ),
    Setting(
        "page_tokens", "DEEPINFER_PAGE_TOKENS", "--page-tokens", kinds.whole(1), 128,
        "Tokens of a page: a multiple of every compression ratio", advanced=True,
    ),
    Setting(
        "dtype", "DEEPINFER_DTYPE", "--dtype", kinds.choice("bf16", "fp32"), None,
        "Activations; fp32 only with the torch back end on cpu", advanced=True,
        shown_default="the checkpoint's",
    ),
    Setting(
        "build_dir", "DEEPINFER_BUILD_DIR", "--build-dir", kinds.path, None,
        "Folder for compiled kernels", advanced=True,
        shown_default="deepinfer in the user's cache folder",
    ),
    Setting(
        "cpu_level", "DEEPINFER_CPU_LEVEL", "--cpu-level",
        kinds.choice("portable", "avx2", "avx512", "avx512bf16"), None,
        "Instructions of the compiled cpu kernels", advanced=True,
        shown_default="the best of this processor",
    ),
    Setting(
        "threads", "DEEPINFER_THREADS", "--threads", kinds.whole(1), None,
        "Threads on a cpu, of torch and of compiled kernels", advanced=True,
        shown_default="torch's own number",
    ),
    Setting(
        "grammar_timeout", "DEEPINFER_XGRAMMAR_TIMEOUT", None, kinds.whole(1), 20,
        "Seconds to compile a grammar, whatever library does it", official=True, advanced=True,
    ),
    Setting(
        "log_level", "DEEPINFER_LOG", "--log-level",
        kinds.choice("debug", "info", "warning", "error"), "warning",
        "How much to say on stderr; -v = info", "Output", advanced=True,
    ),
    Setting(
        "jit_cache_dir", "DEEPINFER_JIT_CACHE_DIR", None, kinds.path, None,
        "Folder for kernels compiled while running", official=True, advanced=True,
        note="is not in this version: nothing is compiled while running",
    ),
    Setting(
        "decode_perf_cache_dir", "DEEPINFER_DECODE_PERF_CACHE_DIR", None, kinds.path, None,
        "Folder for the measured step times", official=True, advanced=True,
    ),
    Setting(
        "decode_perf_cache_ttl_sec", "DEEPINFER_DECODE_PERF_CACHE_TTL_SEC", None, kinds.whole(0),
        3600, "Life of the measured step times, in seconds", official=True, advanced=True,
    ),
    Setting(
        "config", "DEEPINFER_CONFIG", "--config", kinds.path, None,
        "Settings file (TOML)", "Output", advanced=True,
        shown_default="deepinfer.toml here, or the user's config folder",
    ),
    Setting(
        "no_progress", "DEEPINFER_NO_PROGRESS", "--no-progress", kinds.boolean, False,
        "No progress on stderr", "Output", advanced=True,
    ),
    Setting(
        "debug", "DEEPINFER_DEBUG", None, kinds.boolean, False,
        "Print tracebacks", advanced=True,
    ),
)  # fmt: skip

# Official names with no use here: recognised, answered with one line, never called unknown.
_RECOGNISED = {
    "PREFILL_ATTEMPT_INTERVAL": "Decode steps between prefill points of all ranks",
    "PREFILL_ANY_ATTEMPT_INTERVAL": "Decode steps between prefill points of any rank",
    "PREFILL_MAX_SUM_SEQLEN_K": "Cap on the summed key length of a prefill batch",
    "INDEX_ATTN_MEMORY_LIMIT": "Memory for index attention",
    "SAMPLER_FORCE_TOPK": "Force this top-k",
    "DECODE_TOKEN_BLACKLIST": "Ids never sampled",
    "COMPUTE_SUM_SMALLER_PROBS": "Return the mass below the chosen token",
    "XGRAMMAR_DISABLE_CACHE": "No grammar cache",
    "XGRAMMAR_CACHE_LIMIT_BYTES": "Grammar cache size",
    "XGRAMMAR_DEBUG": "Grammar debugging",
    "SO_BUILDER_CPUS": "Cores per device for grammar compilation",
    "ENFORCE_EAGER": "No device graph for the target",
    "DFLASH_ENFORCE_EAGER": "No device graph for the draft",
    "CUDAGRAPH_BATCH_SIZE_INTERVAL": "Spacing of graph sizes",
    "DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL": "Spacing of draft graph sizes",
    "NUM_STATE_SLOTS_RATIO": "State slots per sequence slot",
    "PREFILL_STORE_EXTRA_STATE": "Keep extra state at prefill",
    "PREFILL_STORE_EXTRA_SIZE": "How much extra state",
    "NCCL_NUM_SMS": "Processors for collectives",
}

SETTINGS: tuple[Setting, ...] = _USED + tuple(
    Setting(name.lower(), PREFIX + name, None, kinds.text, None, doc, official=True, used=False)
    for name, doc in _RECOGNISED.items()
)


def find(key: str) -> Setting | None:
    """The setting with this Python name, flag (with or without dashes) or variable."""
    plain = key.strip().lstrip("-").replace("-", "_")
    for setting in SETTINGS:
        flag = (setting.flag or "").lstrip("-").replace("-", "_")
        if plain in (setting.attribute, flag) or plain.upper() in (
            setting.variable,
            (setting.variable or "").removeprefix(PREFIX) or None,
        ):
            return setting
    return None


def nearest(key: str, variables: bool = False) -> list[str]:
    """Up to three known names that look like `key`, best first."""
    # Only a typo needs it, and every command imports this file.
    from difflib import get_close_matches

    if not variables:
        pool = [s.attribute for s in SETTINGS if s.used]
        return get_close_matches(key.lower().lstrip("-").replace("-", "_"), pool, n=3, cutoff=0.6)
    # Compared without the prefix, which would make every two names look alike.
    pool = [s.variable.removeprefix(PREFIX) for s in SETTINGS if s.variable]
    found = get_close_matches(key.upper().removeprefix(PREFIX), pool, n=3, cutoff=0.6)
    return [PREFIX + name for name in found]
