"""Probes of compilers, CUDA, CANN and torch: found, needed, verdict and the command that helps.

Comes in: an accelerator and the environment as a mapping. Goes out: `Probe` rows, and the error
that a missing requested toolchain deserves. It compiles nothing, never imports torch, and must not
know settings or the model.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from deepinfer.device.detect import Found, version_of
from deepinfer.errors import EnvironmentProblem

__all__ = ["ARCHITECTURES", "Probe", "compiler", "probe", "problem", "version_line"]

# What kernels need: C++17 with current vector extensions; sm_100a; the Ascend 950 generation.
GCC = (11, 0)
CLANG = (14, 0)
NVCC = (12, 8)
CANN = (9, 0)
TORCH = (2, 11)
ARCHITECTURES = ("9.0", "10.0", "10.3")
CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
CANN_FOLDER = "usr/local/Ascend/ascend-toolkit/latest"
SET_ENV = "/usr/local/Ascend/ascend-toolkit/set_env.sh"


@dataclass(frozen=True)
class Probe:
    """One row. `verdict`: ok, warn (works without) or missing (needed to build)."""

    name: str
    found: str
    needed: str
    verdict: str
    path: str = ""
    hint: str = ""

    def as_json(self) -> dict[str, str]:
        return {key: value for key, value in asdict(self).items() if value or key == "found"}


def probe(
    accelerator: str, environ: Mapping[str, str], found: Found, root: Path = Path("/")
) -> list[Probe]:
    """Every probe that matters to `nvidia`, `ascend` or `cpu`; never raises."""
    rows = [_torch(accelerator), compiler(environ)]
    if accelerator == "nvidia":
        rows += [_nvcc(environ), _nvidia_device(found)]
    if accelerator == "ascend":
        rows += [_cann(environ, root), _on_path(environ, "hivmc-a5"), *_torch_npu()]
        rows += [_ascend_device(found)]
    return [replace(row, hint="") if row.verdict == "ok" else row for row in rows]


def problem(accelerator: str, rows: Sequence[Probe]) -> EnvironmentProblem | None:
    """The error for a requested accelerator whose toolchain lacks something, else None."""
    missing = [row for row in rows if row.verdict == "missing"]
    if not missing:
        return None
    facts = []
    for row in missing:
        place = f" ({row.path})" if row.path else ""
        fix = "" if row is missing[0] or not row.hint else f": {row.hint}"
        facts.append(f"{row.name}: found {row.found}, needed {row.needed}{place}{fix}")
    return EnvironmentProblem(
        "toolchain-missing",
        f"the toolchain for {accelerator} is not complete",
        facts,
        missing[0].hint or "deepinfer doctor",
    )


def compiler(environ: Mapping[str, str]) -> Probe:
    """The C++ compiler: $CXX, else the first of g++ and clang++ that is new enough."""
    needed = f"g++ {_dotted(GCC)} or clang++ {_dotted(CLANG)}, or newer"
    hint = "install g++ (Debian and Ubuntu: apt install g++), or set CXX"
    asked = environ.get("CXX", "").strip()
    rows = []
    for name in [asked] if asked else ["g++", "clang++"]:
        place = shutil.which(name, path=environ.get("PATH", ""))
        if place is None:
            continue
        text = _output([place, "--version"])
        clang = "clang" in text
        version = _version(text.split("\n")[0].rsplit(")")[-1]) or _version(text)
        enough = version is not None and version >= (CLANG if clang else GCC)
        word = f"{'clang' if clang else 'gcc'} {_dotted(version) if version else '?'}"
        rows.append(Probe("C++ compiler", word, needed, "ok" if enough else "missing", place, hint))
    found = f"nothing named {asked} (CXX)" if asked else "none"
    rows.append(Probe("C++ compiler", found, needed, "missing", hint=hint))
    return next((row for row in rows if row.verdict == "ok"), rows[0])


def version_line(path: str) -> str:
    """What a compiler says about its version, in one line; a new one makes other objects."""
    return _output([path, "--version"]).split("\n")[0].strip()


def _torch(accelerator: str) -> Probe:
    text = version_of("torch")
    needed = f"{_dotted(TORCH)} or newer"
    version = _version(text or "")
    enough = version is not None and version >= TORCH
    verdict = "ok" if enough else "missing"
    if enough and accelerator == "nvidia" and "+cpu" in (text or ""):
        return Probe("torch", f"{text}, no CUDA", needed + ", with CUDA to run", "warn",
                     hint="cross build only; to run, install a CUDA build of torch")  # fmt: skip
    return Probe("torch", text or "none", needed, verdict, hint='pip install "torch>=2.11"')


def _nvcc(environ: Mapping[str, str]) -> Probe:
    needed = f"{_dotted(NVCC)} or newer"
    hint = f"set CUDA_HOME to a CUDA toolkit {needed}, or --accelerator cpu"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = environ.get(variable, "").strip()
        if home:
            place = str(Path(home) / "bin" / "nvcc")
            if not Path(place).is_file():
                return Probe("nvcc", f"nothing at {variable}", needed, "missing", place, hint)
            return _nvcc_row(place, variable, needed, hint)
    on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
    if on_path is None:
        return Probe("nvcc", "none", needed, "missing", hint=hint)
    return _nvcc_row(on_path, "PATH", needed, hint)


def _nvcc_row(place: str, via: str, needed: str, hint: str) -> Probe:
    match = re.search(r"release (\d+)\.(\d+)", _output([place, "--version"]))
    version = (int(match[1]), int(match[2])) if match else None
    found = f"{_dotted(version) if version else '?'} (from {via})"
    verdict = "ok" if version and version >= NVCC else "missing"
    return Probe("nvcc", found, needed, verdict, place, hint)


def _nvidia_device(found: Found) -> Probe:
    needed = "compute capability " + ", ".join(ARCHITECTURES)
    here = [d for d in found.devices if d.accelerator == "nvidia"]
    if not here:
        return Probe("device", "none", needed, "warn", hint="cross build: nothing can run here")
    names = ", ".join(f"{d.name or 'GPU'} ({d.architecture or '?'})" for d in here)
    good = all(d.architecture in ARCHITECTURES for d in here if d.architecture)
    hint = "" if good else "--accelerator cpu uses the torch reference"
    return Probe("device", names, needed, "ok" if good else "missing", hint=hint)


def _cann(environ: Mapping[str, str], root: Path) -> Probe:
    needed = f"{_dotted(CANN)} or newer"
    hint = f"source {SET_ENV}, then run the same command"
    home = next((environ[v] for v in CANN_VARIABLES if environ.get(v, "").strip()), "")
    if not home:
        found = f"{CANN_VARIABLES[0]} is not set"
        if (root / CANN_FOLDER).exists():
            found += ", but a toolkit is installed"
        else:
            hint = f"install CANN {needed}, source {SET_ENV}"
        return Probe("CANN", found, needed, "missing", hint=hint)
    version, place = _cann_version(Path(home))
    if version is None:
        return Probe("CANN", "no version file", needed, "missing", home, hint)
    verdict = "ok" if version >= CANN else "missing"
    return Probe("CANN", _dotted(version), needed, verdict, place,
                 f"install CANN {needed}, source its set_env.sh")  # fmt: skip


def _cann_version(home: Path) -> tuple[tuple[int, ...] | None, str]:
    names = ("version.cfg", "version.info", "ascend_toolkit_install.info", "*/version.info",
             "*/ascend_toolkit_install.info")  # fmt: skip
    for name in names:
        for place in sorted(home.glob(name)):
            try:
                text = place.read_text(errors="replace")
            except OSError:
                continue
            match = re.search(r"version\S*?[=:\[\s]+[^\d\n]*(\d+\.\d+)", text, re.IGNORECASE)
            if match:
                return _version(match[1]), str(place)
    return None, str(home)


def _on_path(environ: Mapping[str, str], name: str) -> Probe:
    place = shutil.which(name, path=environ.get("PATH", ""))
    if place is None:
        return Probe(name, "not on PATH", "from CANN", "missing",
                     hint=f"install CANN {_dotted(CANN)} or newer, source {SET_ENV}")  # fmt: skip
    return Probe(name, "here", "from CANN", "ok", place)


def _torch_npu() -> list[Probe]:
    npu, torch = version_of("torch-npu"), version_of("torch")
    if npu is None:
        hint = "pip install -e '.[ascend]' in this checkout"
        return [Probe("torch-npu", "none", "the version of torch", "missing", hint=hint)]
    pair = _dotted(_version(npu) or ())
    if torch is None or _version(npu) != _version(torch):
        found = f"{npu} beside torch {torch or 'none'}"
        hint = f'pip install "torch=={pair}.*" "torch-npu=={npu}"'
        return [Probe("torch-npu", found, f"torch {pair}.*", "missing", hint=hint)]
    return [Probe("torch-npu", npu, f"torch {pair}.*", "ok")]


def _ascend_device(found: Found) -> Probe:
    count = sum(d.accelerator == "ascend" for d in found.devices)
    if not count:
        return Probe(
            "device", "none", "Ascend 950", "warn", hint="cross build: nothing can run here"
        )
    return Probe("device", f"{count} NPU", "Ascend 950", "ok")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout or done.stderr


def _version(text: str) -> tuple[int, int] | None:
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
