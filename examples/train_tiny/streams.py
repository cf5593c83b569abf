"""Token streams on disk, training batches made by worker processes, and held-out windows.

The work folder written by `prepare.py` comes in; numpy batches of ids and weights go out. A batch
is a pure function of (seed, rank, step), whatever the number of workers. Workers are plain
subprocesses that never import torch; it knows nothing of the model or of training.
"""

from __future__ import annotations

import json
import lzma
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.train_tiny import exercises
from examples.train_tiny.chat import ANSWER, WEIGHTS
from examples.train_tiny.tokenizer import BOS, EOS, Vocabulary

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(__file__).parent / "work"
STREAMS = ("library", "packages", "heldout")
MIX = (5 / 32, 15 / 32, 12 / 32)  # library, packages, exercises
_XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 32 << 20, "lc": 0, "lp": 1, "pb": 1}]


# --- on disk --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Streams:
    """Memory-mapped uint16 ids: bos file eos bos file eos ..."""

    library: np.ndarray
    packages: np.ndarray
    heldout: np.ndarray


def pack(work: Path, part_tokens: int = 9_000_000) -> list[Path]:
    """Compresses the streams into `packed/NAME.K.xz` parts; returns the files."""
    folder = work / "packed"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.xz"):
        old.unlink()
    jobs = []
    for name in STREAMS:
        size = (work / f"{name}.bin").stat().st_size // 2
        parts = max(1, math.ceil(size / part_tokens))
        bounds = [size * k // parts for k in range(parts + 1)]
        for k in range(parts):
            target = folder / f"{name}.{k:02d}.xz"
            jobs.append((work / f"{name}.bin", target, bounds[k], bounds[k + 1]))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # lzma releases the interpreter lock
        return list(pool.map(_pack_part, *zip(*jobs, strict=True)))


def _pack_part(source: Path, target: Path, lo: int, hi: int) -> Path:
    ids = np.memmap(source, np.uint16, "r")[lo:hi]
    target.write_bytes(lzma.compress(ids.tobytes(), lzma.FORMAT_XZ, filters=_XZ))
    return target


def _unpack_part(source: Path) -> bytes:
    return lzma.decompress(source.read_bytes())


def unpack(work: Path = WORK) -> None:
    """Writes the missing `NAME.bin` streams from `packed/`, on all cores; atomic per stream."""
    missing = [n for n in STREAMS if not (work / f"{n}.bin").exists()]
    if not missing:
        return
    parts = [p for n in missing for p in sorted((work / "packed").glob(f"{n}.*.xz"))]
    if not parts:
        raise FileNotFoundError(f"{work}/packed has no streams; run prepare.py")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        data = dict(zip(parts, pool.map(_unpack_part, parts), strict=True))
    for name in missing:
        partial = work / f"{name}.bin.{os.getpid()}"  # ranks may race; each rename is whole
        partial.write_bytes(b"".join(data[p] for p in parts if p.name.startswith(name + ".")))
        partial.rename(work / f"{name}.bin")


def load_streams(work: Path = WORK) -> Streams:
    """The three streams (library, packages, heldout), unpacked first where needed."""
    unpack(work)
    return Streams(*(np.memmap(work / f"{n}.bin", np.uint16, "r") for n in STREAMS))


def load_vocabulary(work: Path = WORK) -> Vocabulary:
    """The trained tokenizer."""
    return Vocabulary(work / "tokenizer.json")


def load_docs(work: Path = WORK) -> list[tuple[str, str]]:
    """(dotted name, first sentence) pairs of the library."""
    return [tuple(p) for p in json.loads((work / "docs.json").read_text(encoding="utf-8"))]


def training_material(work: Path = WORK) -> exercises.Material:
    """Docstrings and training code, for training exercises."""
    s = load_streams(work)
    return exercises.Material(load_vocabulary(work), (s.library, s.packages), load_docs(work))


def heldout_material(work: Path = WORK) -> exercises.Material:
    """Docstrings and held-out code, for evaluation questions."""
    s = load_streams(work)
    return exercises.Material(load_vocabulary(work), (s.heldout,), load_docs(work))


# --- held-out text --------------------------------------------------------------------------


def heldout_windows(
    length: int, n: int | None = None, work: Path = WORK
) -> tuple[np.ndarray, np.ndarray]:
    """Disjoint windows of held-out text, spread evenly over the stream.

    Returns (ids int32 [n, length + 1], bytes int64 [n]). Predict ids[:, 1:] from ids[:, :-1];
    bytes counts the UTF-8 bytes of those targets (bos and eos have none), so that
    bits per byte = sum of nats / (ln 2 * bytes.sum()).
    """
    stream = load_streams(work).heldout
    size = np.array([len(t) for t in load_vocabulary(work).token_bytes], np.int64)
    most = (len(stream) - 1) // length
    count = most if n is None else min(n, most)
    starts = [int(k * most / count) * length for k in range(count)]
    ids = np.stack([np.asarray(stream[s : s + length + 1], np.int32) for s in starts])
    return ids, size[ids[:, 1:]].sum(axis=1)


# --- rows -----------------------------------------------------------------------------------


class RowFactory:
    """Rows of `length` + 1 ids with weight codes (indices into WEIGHTS).

    A code of position j is the weight of predicting id j. `mix` are the shares of library,
    packages and exercises.
    """

    def __init__(
        self,
        length: int,
        mix: Sequence[float] = MIX,
        work: Path = WORK,
        assistant_only: bool = False,
    ) -> None:
        self.length = length
        self.mix = tuple(mix)
        streams = load_streams(work)
        self._code = (streams.library, streams.packages)
        self.material = training_material(work)
        self._assistant_only = assistant_only
        text = self.material.vocabulary.token_bytes
        self._newline = np.array([t != b"" and not t.strip(b"\r\n") for t in text])
        opening = {b"def", b"class", b"import", b"from", b"async", b"@"}
        self._opening = np.array([t in opening for t in text])

    def row(self, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
        """(ids uint16 [length + 1], codes uint8 [length + 1])."""
        kind = rng.choices((0, 1, 2), self.mix)[0]
        if kind == 2:
            return self.exercise(rng)
        return self.code(rng, self._code[kind])

    def exercise(self, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
        """A row of one exercise kind, cut to length."""
        n = self.length + 1
        segments = exercises.exercise_row(rng, self.material, n)
        ids, codes = exercises.encode_segments(self.material.vocabulary, segments)
        return np.array(ids[:n], np.uint16), np.array(codes[:n], np.uint8)

    def code(self, rng: random.Random, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A window of a stream: anywhere (70 %), from a file start or from a top-level statement.

        Windows from a statement get a bos in front, as a prompt typed by a user has.
        """
        n = self.length + 1
        codes = np.full(n, ANSWER, np.uint8)
        start = rng.randrange(len(stream) - n - 4096)
        ids = np.array(stream[start : start + n + 4096])
        p = rng.random()
        if p < 0.15:
            starts = np.flatnonzero(ids[:4096] == BOS)
            first = int(starts[0]) if len(starts) else 0
        elif p < 0.30:
            starts = np.flatnonzero(self._newline[ids[:4096]] & self._opening[ids[1:4097]])
            first = int(starts[0]) if len(starts) else 0
            ids[first] = BOS
        else:
            first = 0
        return ids[first : first + n], codes


def _batch(
    factory: RowFactory, batch: int, seed: int, rank: int, step: int
) -> tuple[np.ndarray, np.ndarray]:
    rows = [factory.row(random.Random(f"{seed} {rank} {step} {b}")) for b in range(batch)]
    return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])


# --- batches --------------------------------------------------------------------------------


class Batches:
    """Endless iterator of (tokens int32 [B, T+1], weights float32 [B, T+1]), prefetched.

    The share of row kinds is exact on average, not per batch. Batch `step` of `rank` is the same
    whatever `workers` is; the ranks of a `world` draw different rows. Close it (or leave the
    `with` block) to end the workers; they also end when this process does.

    Args:
        length: T, tokens a row predicts.
        batch: rows a rank takes each step.
        seed, rank, world, first_step: name the rows; resume with first_step.
        mix: shares of library, packages, exercises.
        workers: processes; default all cores of the rank's share but one.
    """

    def __init__(
        self,
        length: int,
        batch: int,
        seed: int = 0,
        mix: Sequence[float] = MIX,
        rank: int = 0,
        world: int = 1,
        workers: int | None = None,
        work: Path = WORK,
        first_step: int = 0,
    ) -> None:
        unpack(work)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
        self.workers = workers or max(1, min(15, cores // world - 1))
        self.length, self.batch, self.step = length, batch, first_step
        environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        )
        self._processes = []
        for w in range(self.workers):
            job = {
                "length": length, "batch": batch, "seed": seed, "rank": rank, "mix": list(mix),
                "work": str(work), "first": first_step + w, "stride": self.workers,
            }  # fmt: skip
            command = [sys.executable, "-m", "examples.train_tiny.streams", json.dumps(job)]
            self._processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=ROOT)
            )
        self._first = first_step
        self._table = np.array(WEIGHTS, np.float32)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return self

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        process = self._processes[(self.step - self._first) % self.workers]
        count = self.batch * (self.length + 1)
        data = process.stdout.read(3 * count) if process.stdout else b""
        if len(data) != 3 * count:
            raise RuntimeError(f"data worker ended early with status {process.poll()}")
        self.step += 1
        ids = np.frombuffer(data, np.uint16, count).reshape(self.batch, self.length + 1)
        codes = np.frombuffer(data, np.uint8, count, 2 * count).reshape(ids.shape)
        return ids.astype(np.int32), self._table[codes]

    def close(self) -> None:
        """Ends the workers."""
        for process in self._processes:
            process.terminate()
            if process.stdout:
                process.stdout.close()
        for process in self._processes:
            process.wait()
        self._processes = []

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(job: dict) -> None:
    """Worker: writes batches first, first + stride, ... to stdout until nobody reads."""
    factory = RowFactory(job["length"], job["mix"], Path(job["work"]))
    step = job["first"]
    out = sys.stdout.buffer
    try:
        while True:
            ids, codes = _batch(factory, job["batch"], job["seed"], job["rank"], step)
            out.write(ids.tobytes() + codes.tobytes())
            out.flush()
            step += job["stride"]
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(0)  # the reader is gone; skip the flush of a broken stdout at exit


def measure(length: int = 2048, rows: int = 64) -> dict[str, float]:
    """Rows a second of one process, by row kind."""
    factory = RowFactory(length)
    out = {}
    makers = {f.__name__: f for f in exercises.ROWS}
    for name, make in makers.items():
        rng = random.Random(1)
        start = time.perf_counter()
        for _ in range(rows // 4):
            segments = make(rng, factory.material, length + 1)
            exercises.encode_segments(factory.material.vocabulary, segments)
        out[name] = rows // 4 / (time.perf_counter() - start)
    start = time.perf_counter()
    for i in range(rows):
        factory.row(random.Random(i))
    out["mix"] = rows / (time.perf_counter() - start)
    return out


def write_stream(path: Path, vocabulary: Vocabulary, texts: list[str]) -> int:
    """Encodes texts as bos file eos ... into a uint16 file; returns the number of ids."""
    total = 0
    partial = path.with_suffix(".partial")
    with partial.open("wb") as f:
        for ids in vocabulary.encode_many(texts):
            f.write(np.array([BOS, *ids, EOS], np.uint16).tobytes())
            total += len(ids) + 2
    partial.rename(path)
    return total


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
