"""Which accelerators this machine has, from device nodes and vendor tools; and which one to use.

Comes in: nothing, or a fake root folder. Goes out: `Found`, never an exception; `pick` alone
raises, when an accelerator was asked for by name and cannot run. It imports torch only inside
`pick`, and must not know operations or the model.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from deepinfer.errors import EnvironmentProblem

__all__ = ["TORCH_DEVICE", "Cpu", "Device", "Found", "find", "pick", "version_of"]

# Instruction sets that compiled kernels may choose between at run time.
_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd")
_NODES = {"nvidia": "nvidia[0-9]*", "ascend": "davinci[0-9]*"}
_WORDS = {"nvidia": "NVIDIA GPU", "ascend": "NPU"}
# What torch calls each accelerator.
TORCH_DEVICE = {"nvidia": "cuda", "ascend": "npu", "cpu": "cpu"}


@dataclass(frozen=True)
class Device:
    """One accelerator; what its vendor's tool did not say is empty or None."""

    accelerator: str
    name: str = ""
    architecture: str = ""
    memory_bytes: int | None = None
    driver: str = ""


@dataclass(frozen=True)
class Cpu:
    """The host: cores this process may use, its instruction sets, its memory in bytes."""

    name: str
    machine: str
    cores: int
    flags: tuple[str, ...]
    memory_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True)
class Found:
    """What is there."""

    devices: tuple[Device, ...]
    cpu: Cpu

    @property
    def accelerators(self) -> tuple[str, ...]:
        """Present kinds, the one to prefer first; always ends with `cpu`."""
        present = {device.accelerator for device in self.devices}
        return (*(kind for kind in _NODES if kind in present), "cpu")


def find(root: Path = Path("/"), query: bool = True) -> Found:
    """Look for devices below `root`; `query` False asks no vendor tool (a node is enough)."""
    devices: list[Device] = []
    for kind, pattern in _NODES.items():
        try:
            nodes = sorted((root / "dev").glob(pattern))
        except OSError:
            nodes = []
        named = _nvidia_smi() if nodes and query and kind == "nvidia" else []
        devices += named or [Device(kind) for _ in nodes]
    return Found(tuple(devices), _cpu(root))


def pick(requested: str = "auto", origin: str = "--accelerator") -> str:
    """The accelerator that torch can use here: `nvidia`, `ascend` or `cpu`.

    Raises EnvironmentProblem if one was asked for by name and torch cannot use it.
    """
    if requested == "cpu":
        return "cpu"
    for kind in _NODES if requested == "auto" else (requested,):
        if _usable(TORCH_DEVICE[kind]):
            return kind
    if requested == "auto":
        return "cpu"
    nodes = [d for d in find(query=False).devices if d.accelerator == requested]
    where = f"{len(nodes)} device node(s)" if nodes else "no device node"
    library = "torch-npu" if requested == "ascend" else "torch"
    version = version_of(library)
    state = f"{library} is installed ({version})" if version else f"{library} is not installed"
    if requested == "nvidia" and nodes:
        state += ", but cannot use CUDA"
    raise EnvironmentProblem(
        "accelerator-unavailable",
        f"--accelerator {requested} was asked for, but no {_WORDS[requested]} was found"
        if not nodes
        else f"--accelerator {requested} was asked for, but torch cannot use it",
        [f"{where}; {state}"] + ([f"from {origin}"] if origin != "--accelerator" else []),
        "deepinfer doctor",
    )


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _usable(module: str) -> bool:
    import torch

    part = getattr(torch, module, None)
    return bool(part is not None and part.is_available())


def _nvidia_smi() -> list[Device]:
    fields = "name,compute_cap,memory.total,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    devices = []
    for line in done.stdout.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            memory = int(parts[2]) * 2**20 if parts[2].isdigit() else None
            devices.append(Device("nvidia", parts[0], parts[1], memory, parts[3]))
    return devices


def _cpu(root: Path) -> Cpu:
    info = _fields(root / "proc/cpuinfo")
    memory = _fields(root / "proc/meminfo")
    known = set((info.get("flags") or info.get("Features") or "").split())
    return Cpu(
        name=info.get("model name") or platform.processor(),
        machine=platform.machine(),
        cores=_guarded(lambda: len(os.sched_getaffinity(0)), os.cpu_count() or 1),
        flags=tuple(flag for flag in _FLAGS if flag in known),
        memory_bytes=_kib(memory.get("MemTotal")),
        free_bytes=_kib(memory.get("MemAvailable")),
    )


def _fields(path: Path) -> dict[str, str]:
    """`name: value` lines of a /proc file; of repeated names (one per core) the first."""
    try:
        lines: Iterable[str] = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def _kib(text: str | None) -> int | None:
    number = (text or "").split(" ")[0]
    return int(number) * 1024 if number.isdigit() else None


def _guarded(ask: Callable[[], int], otherwise: int) -> int:
    try:
        return ask()
    except (AttributeError, OSError):
        return otherwise
