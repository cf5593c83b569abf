"""The checks of `deepinfer doctor`, each alone: a broken one is a row, never a crash.

Comes in: settings and the environment as a mapping. Goes out: `Check` rows and the bundle file.
Anything that could crash or hang (importing torch, vendor libraries) runs in a child process with a
time limit; nothing here prints.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer.device.detect import find, version_of
from deepinfer.errors import DeepinferError, UsageError
from deepinfer.settings import Settings
from deepinfer.settings.resolve import unknown_variables
from deepinfer.toolchain import built
from deepinfer.toolchain.plan import LEVELS
from deepinfer.toolchain.probe import compiler, probe

__all__ = ["Check", "run_all", "verdict", "write_bundle"]

_TIMEOUT_S = 60
_GIB = 1024**3
_PRIVATE = (
    (re.compile(r"(?<![\w.])(/(?:home|Users)/[^/\s]+|/root)(?=/|\b)"), "~"),
    (re.compile(r"\b(hf|sk|ghp|gho|github_pat)[_-][A-Za-z0-9_-]{16,}"), "[removed]"),
    (re.compile(r"(?i)((?:token|secret|password|api_?key)\s*[=:]\s*)[^\s,]+"), r"\1[removed]"),
)
_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
npu = getattr(torch, "npu", None)
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda,
    "cxx11": torch.compiled_with_cxx11_abi(), "threads": torch.get_num_threads(),
    "nvidia": torch.cuda.device_count() if cuda else 0,
    "ascend": npu.device_count() if npu is not None and npu.is_available() else 0}))
"""


@dataclass(frozen=True)
class Check:
    """One row. `verdict`: ok, warn or fail; `area` decides the exit code of a failure."""

    name: str
    verdict: str
    found: str
    hint: str = ""
    area: str = "environment"

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def run_all(settings: Settings, environ: Mapping[str, str]) -> list[Check]:
    """Every check, in the order of a diagnosis. Raises UsageError: no such model folder."""
    torch = _torch_facts(environ)
    steps: list[tuple[str, Callable[[], list[Check]]]] = [
        ("Python", _python),
        ("torch", lambda: [_torch(torch)]),
        ("accelerator", lambda: [_accelerator(settings, torch)]),
        ("toolchain", lambda: _toolchain(settings, environ)),
        ("compiled kernels", lambda: [_kernels(settings, torch)]),
        ("Triton", _triton),
        ("memory", _memory),
        ("checkpoint", lambda: [_checkpoint(settings)]),
        ("variables", lambda: _variables(environ)),
    ]
    rows: list[Check] = []
    for name, step in steps:
        try:
            rows += step()
        except UsageError:
            # The question itself was wrong (a folder that does not exist); that is no finding.
            raise
        except Exception as problem:
            rows.append(
                Check(name, "warn", f"the check broke: {type(problem).__name__}: {problem}")
            )
    return rows


def verdict(rows: list[Check]) -> str:
    """The worst of all rows: ok, warn or fail."""
    present = {row.verdict for row in rows}
    return next(word for word in ("fail", "warn", "ok") if word in present or word == "ok")


def write_bundle(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report as readable JSON, home folders and anything like a secret removed."""
    text = json.dumps(_cleaned(report), indent=1, ensure_ascii=False, default=str) + "\n"
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as problem:
        raise UsageError(
            "bundle-not-written", f"{path} cannot be written", [problem.strerror or str(problem)],
            "deepinfer doctor --bundle report.txt",
        ) from None  # fmt: skip


def _cleaned(value: Any) -> Any:
    """The same structure; only texts change, so the bundle stays valid JSON."""
    if isinstance(value, Mapping):
        return {key: _cleaned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(item) for item in value]
    if isinstance(value, str):
        for pattern, shown in _PRIVATE:
            value = pattern.sub(shown, value)
    return value


def _torch_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-c", _TORCH]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=dict(environ)
        )
    except (OSError, subprocess.SubprocessError) as problem:
        return {"problem": type(problem).__name__}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        return {"problem": lines[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _python() -> list[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    return [
        Check("Python", "ok" if good else "fail", version, "" if good else "Python 3.11 or newer")
    ]


def _torch(facts: Mapping[str, Any]) -> Check:
    if "problem" in facts:
        text = str(facts["problem"])
        if re.search(r"lib(hccl|ascendcl|acl\w*|ge_runner|graph)\.so|torch_npu", text):
            hint = "source the CANN toolkit's set_env.sh, then run the same command"
            return Check("torch", "fail", f"torch-npu failed to load: {text}", hint)
        return Check("torch", "fail", text, "./build.sh, or pip install 'torch>=2.11'")
    major, minor = (int(part) for part in facts["version"].split(".")[:2])
    abi = "new" if facts["cxx11"] else "old"
    found = f"{facts['version']}, CUDA {facts['cuda'] or 'none'}, {abi} C++ ABI"
    good = (major, minor) >= (2, 11)
    return Check(
        "torch", "ok" if good else "fail", found, "" if good else "pip install 'torch>=2.11'"
    )


def _accelerator(settings: Settings, torch: Mapping[str, Any]) -> Check:
    devices = find().devices
    usable = [kind for kind in ("nvidia", "ascend") if torch.get(kind)] + ["cpu"]
    names = ", ".join(
        " ".join(
            filter(
                None, (d.name or d.accelerator, d.architecture, d.driver and f"driver {d.driver}")
            )
        )
        for d in devices
    )
    wanted = settings.accelerator
    if wanted != "auto" and wanted not in usable:
        state = f"{wanted} cannot run here; {names or 'no device node'}"
        hint = f"--accelerator auto, or deepinfer build --accelerator {wanted}"
        return Check("accelerator", "fail", state, hint)
    chosen = usable[0] if wanted == "auto" else wanted
    unused = [d for d in devices if d.accelerator not in usable]
    hint = "this torch cannot use the device: install a build of torch for it" if unused else ""
    found = f"{chosen}{f'; {names}' if names else ''}"
    return Check("accelerator", "warn" if unused else "ok", found, hint)


def _toolchain(settings: Settings, environ: Mapping[str, str]) -> list[Check]:
    found = find(query=False)
    wanted = found.accelerators[0] if settings.accelerator == "auto" else settings.accelerator
    rows = [row for row in probe(wanted, environ, found) if row.name not in ("torch", "device")]
    if not rows:
        rows = [compiler(environ)]
    # Compilers are for building; running needs none of them in this version.
    return [
        Check(row.name, "ok" if row.verdict == "ok" else "warn",
              f"{row.found} (needed to build: {row.needed})", row.hint)
        for row in rows
    ]  # fmt: skip


def _kernels(settings: Settings, torch: Mapping[str, Any]) -> Check:
    """What is built, for these sources or others, and the level that would run."""
    name, wanted = "compiled kernels", settings.accelerator
    device = next((kind for kind in ("nvidia", "ascend") if torch.get(kind)), "cpu")
    if (device if wanted == "auto" else wanted) != "cpu":
        return Check(name, "ok", "none for this accelerator in this version; torch serves it")
    here = built.find(settings.build_dir)
    if here.path is None:
        return Check(name, "warn", f"cpu: {here.problem}; the torch back end serves", built.COMMAND)
    place = built.shown(here.path)
    try:
        best = list(LEVELS)[: ctypes.CDLL(str(here.path)).di_level() + 1]
    except (OSError, AttributeError) as problem:
        return Check(name, "warn", f"{place}: {problem}", f"{built.COMMAND} --clean")
    level = settings.cpu_level or next((x for x in reversed(best) if x in here.levels), "")
    found = f"cpu: runs at {level or 'none'}, built are {', '.join(here.levels)}; {place}"
    if level in best and level in here.levels:
        return Check(name, "ok", found)
    return Check(name, "warn", found, f"this processor has {', '.join(best)}")


def _triton() -> list[Check]:
    version = version_of("triton")
    return [
        Check("Triton", "ok", f"{version or 'not installed'}; no kernel needs it in this version")
    ]


def _memory() -> list[Check]:
    cpu = find(query=False).cpu
    if cpu.free_bytes is None or cpu.memory_bytes is None:
        return [Check("memory", "warn", "unknown")]
    found = f"{cpu.free_bytes / _GIB:.1f} GiB free of {cpu.memory_bytes / _GIB:.1f} GiB"
    low = cpu.free_bytes < _GIB
    return [Check("memory", "warn" if low else "ok", found, "close other programs" if low else "")]


def _checkpoint(settings: Settings) -> Check:
    from deepinfer.checkpoint.layout import open_checkpoint
    from deepinfer.settings import for_model
    from deepinfer.speculative.temperatures import read_temperatures
    from deepinfer.tokenizer.tokenizer import Tokenizer

    folder = settings.model_dir or str(Path(__file__).parents[1] / "embedded")
    origin = settings.origin("model_dir")
    try:
        checkpoint = open_checkpoint(folder, origin)
        for_model(settings, checkpoint.config)
        config = checkpoint.config
        if checkpoint.tokenizer_file:
            Tokenizer(checkpoint.tokenizer_file, config.bos_token_id, config.vocab_size)
        if config.num_nextn_predict_layers:
            read_temperatures(checkpoint.path, config.dspark_block_size)
    except DeepinferError as problem:
        if problem.exit_status == 2:
            raise
        found = "; ".join((problem.message, *problem.facts))
        return Check("checkpoint", "fail", found, problem.hint, "checkpoint")
    name = Path(folder).name if settings.model_dir else "embedded"
    draft = (
        f"draft blocks of {config.dspark_block_size}"
        if config.num_nextn_predict_layers
        else "no draft head"
    )
    found = (
        f"{name}: {config.num_hidden_layers} layers, {len(checkpoint.files)} file(s), "
        f"{checkpoint.weight_bytes / _GIB:.2f} GiB to load, {draft}"
    )
    more = "; ".join(checkpoint.warnings)
    return Check("checkpoint", "warn" if more else "ok", f"{found}{f'; {more}' if more else ''}")


def _variables(environ: Mapping[str, str]) -> list[Check]:
    lines = unknown_variables(environ)
    if not lines:
        return [Check("variables", "ok", "no unknown DEEPINFER_ variable")]
    return [Check("variables", "warn", line, "deepinfer doctor --settings") for line in lines]
