"""Keeps the training loop fed: a reader thread in front of the data workers.

Comes in: an endless iterator of numpy batches. Goes out: the next batch at once. Where the workers
fall behind, a batch of the recent past is shown again rather than letting the accelerator wait, and
counted. A worker that dies ends nothing as long as there are batches to show. It must not know what
is in a batch.
"""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from collections.abc import Iterator

import numpy as np

Batch = tuple[np.ndarray, np.ndarray]


class Feed:
    """`next()` gives a batch; `repeated` counts those shown again."""

    def __init__(self, source: Iterator[Batch], depth: int = 8, history: int = 256):
        self.repeated = 0
        self.error: Exception | None = None
        self._ready: queue.Queue[Batch] = queue.Queue(depth)
        self._past: deque[Batch] = deque(maxlen=history)
        self._random = random.Random(0)
        self._source = source
        self._open = True
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> Batch:
        """The next batch. Raises the reader's error if there was never enough to go on with."""
        try:
            if len(self._past) >= 16:
                batch = self._ready.get_nowait()
            else:
                batch = self._wait()
        except queue.Empty:
            self.repeated += 1
            return self._past[self._random.randrange(len(self._past))]
        self._past.append(batch)
        return batch

    def close(self) -> None:
        """Stops the reader and the workers behind it."""
        self._open = False
        close = getattr(self._source, "close", None)
        if close is not None:
            close()

    def _wait(self) -> Batch:
        while True:
            try:
                return self._ready.get(timeout=1.0)
            except queue.Empty:
                if self.error is None:
                    continue
                if not self._past:
                    raise self.error from None
                raise

    def _read(self) -> None:
        try:
            for batch in self._source:
                while self._open:
                    try:
                        self._ready.put(batch, timeout=0.5)
                        break
                    except queue.Full:
                        continue
                if not self._open:
                    return
        except Exception as error:  # noqa: BLE001 - whatever ended the data, training goes on
            self.error = error


def synthetic(vocabulary: int, length: int, batch: int, seed: int) -> Iterator[Batch]:
    """Endless random batches: for rehearsals without data."""
    rng = np.random.default_rng(seed)
    while True:
        ids = rng.integers(0, vocabulary, (batch, length + 1), dtype=np.int32)
        weights = np.ones((batch, length + 1), np.float32)
        weights[: batch // 2, ::3] = 0.1
        yield ids, weights
