"""What there is to compile: sources, levels and a compiler become steps with commands and keys.

Comes in: the digests of `csrc/`, a compiler, a folder. Goes out: a `Plan`, whose file names hold
the hash of all that decides their content, so that a file which is there is the right one. Nothing
runs here; it must not know settings, nor what an op means.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import deepinfer

__all__ = ["LEVELS", "Compiler", "Plan", "Sources", "Step", "csrc", "levels_for", "plan", "read"]

# Flags that each level adds; the number of a level in `DI_LEVEL` is its place here. The processor
# of the building machine is never asked: a library may move to another one.
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (
    *_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512",
)  # fmt: skip
LEVELS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vbmi"),
}
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-psabi",
)  # fmt: skip
LINK = ("-shared", "-pthread")
ONCE = frozenset({"threads"})  # the same for every level
_HEADERS = (".h", ".hpp")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its path, and the line it prints about its version."""

    path: str
    version: str


@dataclass(frozen=True)
class Sources:
    """The files of `csrc/` that the cpu library is made of: a digest for each path below `root`."""

    root: Path
    digests: Mapping[str, str]

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(name for name in self.digests if not name.endswith(_HEADERS))

    @property
    def ops(self) -> tuple[str, ...]:
        """What `--only` can name."""
        return tuple(Path(unit).stem for unit in self.units)

    def key(self, extra: Sequence[str] = ()) -> str:
        """Names the library: all sources, and the flags they are compiled with."""
        return _hash(sorted(self.digests.items()), FLAGS, LINK, sorted(LEVELS.items()), *extra)


@dataclass(frozen=True)
class Step:
    """One run of the compiler. `command` lacks the output: `-o` and a path are to be added."""

    source: str
    level: str
    command: tuple[str, ...]
    output: Path

    @property
    def op(self) -> str:
        return Path(self.source).stem

    def writing(self, output: Path) -> list[str]:
        return [*self.command, "-o", str(output)]


@dataclass(frozen=True)
class Plan:
    """Steps that may run in any order, and the one that joins what they made."""

    folder: Path
    root: Path
    sources: str
    compiler: Compiler
    levels: tuple[str, ...]
    steps: tuple[Step, ...]
    link: Step

    @property
    def manifest(self) -> Path:
        return self.link.output.with_name("manifest.json")


def csrc() -> Path:
    """The sources of this installation: beside the package in a checkout, else inside it."""
    package = Path(deepinfer.__file__).parent
    inside = package / "csrc"
    return inside if inside.is_dir() else package.parent / "csrc"


def read(root: Path) -> Sources:
    """Digests of the cpu library's files; none where the folder is missing."""
    files = sorted(p for p in (*root.glob("cpu/*"), *root.glob("include/**/*"))
                   if p.suffix in (".cpp", *_HEADERS))  # fmt: skip
    return Sources(root, {p.relative_to(root).as_posix(): _hash(p.read_bytes()) for p in files})


def levels_for(machine: str) -> tuple[str, ...]:
    """The levels that exist on a kind of machine, as `platform.machine` names it."""
    return tuple(LEVELS) if machine.lower() in ("x86_64", "amd64") else ("portable",)


def plan(
    sources: Sources,
    compiler: Compiler,
    folder: Path,
    levels: Iterable[str],
    extra: Sequence[str] = (),
) -> Plan:
    """Every step of the cpu library, at `levels`. extra: more flags, which make another library."""
    levels = tuple(levels)
    include = sources.root / "include"
    headers = [(n, d) for n, d in sorted(sources.digests.items()) if n.endswith(_HEADERS)]
    steps = []
    for unit in sources.units:
        once = Path(unit).stem in ONCE
        for level in ("",) if once else levels:
            flags = [*FLAGS, *extra]
            if level:
                flags += [*LEVELS[level], f"-DDI_LEVEL={list(LEVELS).index(level)}"]
            key = _hash(unit, sources.digests[unit], headers, flags, compiler.version)
            name = ".".join(filter(None, (Path(unit).stem, level)))
            place = ("-I", str(include), "-c", str(sources.root / unit))
            steps.append(
                Step(
                    f"csrc/{unit}",
                    level,
                    (compiler.path, *flags, *place),
                    folder / "objects" / f"{name}-{key}.o",
                )
            )
    objects = [step.output for step in steps]
    key = _hash([path.name for path in objects], LINK, extra, compiler.version)
    name = sources.key(extra)
    command = (compiler.path, *LINK, *extra, *map(str, objects))
    link = Step("", "", command, folder / name / f"{key}.so")
    return Plan(folder, sources.root, name, compiler, levels, tuple(steps), link)


def _hash(*parts: object) -> str:
    whole = parts[0] if isinstance(parts[0], bytes) else repr(parts).encode()
    return hashlib.blake2b(whole, digest_size=8).hexdigest()
