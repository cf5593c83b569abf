"""Collects the training text: the standard library of the running Python and permissive packages.

This module owns which files are read and which are dropped (held-out modules, leaks of them,
duplicates, tables of data) and writes three plain text archives, the docstring pairs and the list
of packages with versions and licences. It knows nothing of tokens or of the model.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from email.parser import HeaderParser
from pathlib import Path

HERE = Path(__file__).parent
WORK = HERE / "work"
PACKAGES_FILE = HERE / "packages.json"

PACKAGES = (
    "Django sympy numpy scipy pandas scikit-learn statsmodels astropy networkx sphinx ipython "
    "pygments dask celery jinja2 werkzeug flask click scrapy httpx bokeh SQLAlchemy alembic black "
    "pytest rich typer attrs twisted urllib3 pydantic fastapi mypy pip setuptools jedi tornado "
    "aiohttp requests nltk xarray matplotlib"
).split()

HELD_OUT = frozenset(
    "argparse bisect calendar chunk cmd colorsys concurrent configparser curses dbm difflib "
    "fractions gettext graphlib imaplib mailbox nntplib optparse rlcompleter sched shelve smtplib "
    "statistics tarfile turtle wsgiref".split()
)
# Tests and demos of the held-out modules quote them; they go out of training by these prefixes.
_HELD_OUT_TESTS = tuple(f"test_{m}" for m in sorted(HELD_OUT)) + ("turtledemo", "archiver_tests")

MAX_PACKAGE_BYTES = 9_000_000
_SKIPPED_PARTS = frozenset(
    "_vendor vendored externals extern _distutils_hooks site-packages locale locales data _data "
    "testdata __pycache__ lib2to3_tests cjkencodings ensurepip pydoc_data".split()
)
_TABLE_NAMES = re.compile(
    r"^(?:cp\d+|mac_\w+|iso8859_\d+|koi8_\w|\w*_builtins|_\w+_mapping|unicode_\w+|_?tables?)\.py$"
)
_SEPARATOR = "\0"  # between files in a text archive; dropped from the files themselves


class SourceFile:
    """One accepted file: `name` (stream-relative path) and `text` (str, newline = LF)."""

    __slots__ = ("name", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text


def acceptable(name: str, text: str) -> bool:
    """Size, line length and digit filters; True if a file is ordinary source text."""
    size = len(text.encode("utf-8"))
    if not 200 <= size <= 250_000:
        return False
    lines = text.split("\n")
    if max(map(len, lines)) > 800 or len(text) / len(lines) >= 90:
        return False
    if sum(c.isdigit() for c in text) > 0.25 * len(text):
        return False
    return _TABLE_NAMES.match(name.rsplit("/", 1)[-1]) is None


def _decode(raw: bytes) -> str | None:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")


def standard_library() -> tuple[list[SourceFile], list[SourceFile]]:
    """(training files, held-out files) of the running interpreter's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held = [], []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _SKIPPED_PARTS.intersection(parts[:-1]):
            continue
        top = parts[0].removesuffix(".py")
        name = "/".join(parts)
        text = _decode(path.read_bytes())
        if text is None:
            continue
        if top in HELD_OUT:
            # Held-out text is measured whole: only size and encoding tables are filtered.
            if len(text) >= 200:
                held.append(SourceFile(name, text))
        elif any(p.startswith(_HELD_OUT_TESTS) for p in parts):
            continue
        elif acceptable(name, text):
            train.append(SourceFile(name, text))
    return train, held


def download(wheels: Path) -> None:
    """Fetches one wheel a package with pip; pinned to `packages.json` where that exists."""
    wheels.mkdir(parents=True, exist_ok=True)
    have = {_canonical(w.name.split("-")[0]) for w in wheels.glob("*.whl")}
    pins = {}
    if PACKAGES_FILE.exists():
        pins = {_canonical(p["name"]): p["version"] for p in json.loads(PACKAGES_FILE.read_text())}
    for name in PACKAGES:
        key = _canonical(name)
        if key in have:
            continue
        spec = f"{name}=={pins[key]}" if key in pins else name
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels)]
        subprocess.run([*command, "--only-binary=:all:", spec], check=True)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def package_files(wheel: Path) -> Iterator[SourceFile]:
    """The accepted files of one wheel, at most MAX_PACKAGE_BYTES, chosen by hash of the name."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".py")]
        names.sort(key=lambda n: hashlib.sha1(n.encode()).digest())
        total = 0
        for name in names:
            if _SKIPPED_PARTS.intersection(name.split("/")[:-1]):
                continue
            text = _decode(archive.read(name))
            if text is None or not acceptable(name, text):
                continue
            total += len(text)
            if total > MAX_PACKAGE_BYTES:
                return
            yield SourceFile(name, text)


def licence(wheel: Path) -> dict[str, object]:
    """Name, version, licence line and licence file names of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        meta_name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        meta = HeaderParser().parsestr(archive.read(meta_name).decode("utf-8"))
        names = {n.rsplit("/", 1)[-1] for n in archive.namelist() if ".dist-info/" in n}
        files = sorted(n for n in names if re.search(r"licen[cs]e|copying", n, re.I))
    classifiers = [
        c.split("::")[-1].strip()
        for c in meta.get_all("Classifier", [])
        if c.startswith("License ::") and c.count("::") > 1
    ]
    stated = meta.get("License-Expression") or "; ".join(classifiers) or meta.get("License") or "?"
    return {
        "name": meta["Name"],
        "version": meta["Version"],
        "licence": stated.strip().split("\n")[0][:80],
        "licence_files": files,
    }


def _long_lines(text: str) -> list[str]:
    return [s for s in (line.strip() for line in text.split("\n")) if len(s) >= 30]


def remove_leaks(
    files: Iterable[SourceFile], held: Iterable[SourceFile], seen: set[bytes]
) -> Iterator[SourceFile]:
    """Drops exact duplicates (`seen` is updated) and files that share > 15 % long lines."""
    secret = {line for f in held for line in _long_lines(f.text)}
    for f in files:
        digest = hashlib.sha1(f.text.strip().encode("utf-8")).digest()
        if digest in seen:
            continue
        seen.add(digest)
        lines = _long_lines(f.text)
        if sum(line in secret for line in lines) > 0.15 * len(lines):
            continue
        yield f


def docstring_pairs(files: Iterable[SourceFile]) -> list[tuple[str, str]]:
    """(dotted name, first sentence) of every documented object outside the tests."""
    pairs = {}
    for f in files:
        if "test" in f.name or "idlelib" in f.name or "/_" in f.name:
            continue
        try:
            tree = ast.parse(f.text)
        except (SyntaxError, ValueError):
            continue
        module = f.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        stack: list[tuple[str, ast.AST]] = [(module, tree)]
        while stack:
            name, node = stack.pop()
            doc = ast.get_docstring(node)  # type: ignore[arg-type]
            if doc:
                first = re.split(r"(?<=[.!?])\s|\n\s*\n", doc.strip())[0]
                first = re.sub(r"\s+", " ", first).strip()
                if 12 <= len(first) <= 140 and first.isprintable() and ">>>" not in first:
                    pairs[name] = first
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    stack.append((f"{name}.{child.name}", child))
    return sorted(pairs.items())


def write_archive(path: Path, files: list[SourceFile]) -> int:
    """Writes the texts joined by NUL; returns the number of UTF-8 bytes of text."""
    path.write_text(_SEPARATOR.join(f.text for f in files), encoding="utf-8", newline="")
    return sum(len(f.text.encode("utf-8")) for f in files)


def read_archive(path: Path) -> list[str]:
    """The texts of an archive, in order."""
    return path.read_bytes().decode("utf-8").split(_SEPARATOR)


def collect(work: Path = WORK) -> dict[str, object]:
    """Builds library.txt, core.txt (library without tests), packages.txt, heldout.txt, docs.json.

    Returns the counts that go into the model card; also writes `packages.json` next to this file.
    """
    work.mkdir(parents=True, exist_ok=True)
    download(work / "wheels")
    train, held = standard_library()
    seen: set[bytes] = {hashlib.sha1(f.text.strip().encode("utf-8")).digest() for f in held}
    library = list(remove_leaks(train, held, seen))
    wheels = sorted((work / "wheels").glob("*.whl"), key=lambda p: p.name.lower())
    packages: list[SourceFile] = []
    table = []
    for wheel in wheels:
        files = list(remove_leaks(package_files(wheel), held, seen))
        entry = licence(wheel)
        entry["files"] = len(files)
        entry["bytes"] = sum(len(f.text.encode("utf-8")) for f in files)
        table.append(entry)
        packages += files
    rng = random.Random("corpus order")
    rng.shuffle(library)
    rng.shuffle(packages)
    core = [f for f in library if not {"test", "tests", "idle_test"} & set(f.name.split("/"))]
    pairs = docstring_pairs(library)
    archives = {"library": library, "core": core, "packages": packages, "heldout": held}
    counts: dict[str, object] = {
        name: {"files": len(files), "bytes": write_archive(work / f"{name}.txt", files)}
        for name, files in archives.items()
    }
    counts |= {
        "python": sys.version.split()[0],
        "heldout_files": [f.name for f in held],
        "docstring_pairs": len(pairs),
    }
    (work / "docs.json").write_text(json.dumps(pairs), encoding="utf-8")
    (work / "corpus.json").write_text(json.dumps(counts, indent=1), encoding="utf-8")
    PACKAGES_FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return counts


def packages_table() -> str:
    """The packages of `packages.json` as a Markdown table: name, version, licence, files, size."""
    lines = ["| package | version | licence | files | MB |", "|---|---|---|---|---|"]
    for p in json.loads(PACKAGES_FILE.read_text()):
        size = f"{p['bytes'] / 1e6:.1f}"
        cells = (p["name"], p["version"], p["licence"], str(p["files"]), size)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
