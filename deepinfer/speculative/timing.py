"""How long a step takes, learned from steps: running medians by rows and by requests, kept on disk.

Measured seconds come in, `time(rows, requests)` goes out for `schedule.budget`. A file per device,
model and build saves the start; what is wrong with it is a warning, never an error. It must not
know why a step was as long as it was.
"""

from __future__ import annotations

import json
import math
import os
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from statistics import median

SCHEMA = "deepinfer.step-times/1"

_WINDOW = 15  # newest samples a median is of
_TRIES = 3  # samples that make a count known
_NEAR = 1.25  # counts this far apart need none between them
_SPREAD = 1.4826  # standard deviation / median absolute deviation, normal samples
_ERROR = 1.2533  # standard error of a median / of a mean


class Curve:
    """Seconds by a count, learned: medians of the newest samples, and between them as little as may
    be, so that what could be cheap gets tried and is known from then on.

    A count of three samples is known; where no count of a narrow range is, their samples together
    are, at the mean of their counts. Below the first known count: in proportion. Between two far
    apart: the lower one's seconds up to their geometric middle, then a straight line; between near
    ones the line alone. Beyond the last: on with the slope of the whole. One or two samples, which
    may have been disturbed, put a count between a third or two thirds of them and the whole. All of
    it follows from times alone, never from a draft.
    """

    def __init__(self) -> None:
        self.samples: dict[int, deque[float]] = {}
        self._ranges: dict[int, list[int]] = {}  # counts of each narrow range ...
        self._held: dict[int, list[float]] = {}  # ... and its known places
        self._places: list[float] = []
        self._seconds: dict[float, float] = {}
        self._errors: dict[int, float] = {}
        self._changed: set[int] = set()
        self._answers: dict[int, float] = {}  # seconds asked for since they last changed

    def observe(self, count: int, seconds: float) -> None:
        part = _part(count)
        if count not in self.samples:
            self.samples[count] = deque(maxlen=_WINDOW)
            self._ranges.setdefault(part, []).append(count)
        self.samples[count].append(seconds)
        self._changed.add(count)

    def _learn(self) -> None:
        """Take in what was observed since the last question."""
        for part in {_part(count) for count in self._changed}:
            points, held = self._points(part), self._held.get(part, ())
            if points == [(place, self._seconds[place]) for place in held]:
                continue
            self._answers.clear()
            for place in held:
                del self._places[bisect_left(self._places, place)], self._seconds[place]
            self._held[part] = [place for place, _ in points]
            for place, value in points:
                insort(self._places, place)
                self._seconds[place] = value
        for count in self._changed:
            self._answers.pop(count, None)
            some = self.samples[count]
            middle = median(some)
            if len(some) >= 5 and middle > 0:
                away = median(abs(x - middle) for x in some)
                self._errors[count] = _ERROR * _SPREAD * away / middle / math.sqrt(len(some))
        self._changed.clear()

    def __call__(self, count: int) -> float:
        """Seconds at a count; 0 before anything is known."""
        if self._changed:
            self._learn()
        seconds = self._answers.get(count)
        if seconds is None:
            seconds = self._answers[count] = self._answer(count)
        return seconds

    def _answer(self, count: int) -> float:
        if count in self._seconds:
            return self._seconds[count]
        line = self._line(count)
        some = self.samples.get(count)
        if not line or not some:
            return line
        own = median(some)
        return max(min(line, own), own * len(some) / _TRIES)

    def knows(self, count: int) -> bool:
        """Is it known, or between two known counts that are near?"""
        self._learn()
        at = bisect_left(self._places, count)
        near = self._places[max(0, at - 1) : at + 1]
        return count in self._seconds or (len(near) == 2 and near[1] <= _NEAR * near[0])

    def _points(self, part: int) -> list[tuple[float, float]]:
        """(place, seconds) of what is known in a range."""
        held = [(count, self.samples[count]) for count in self._ranges[part]]
        known = [(float(count), median(some)) for count, some in held if len(some) >= _TRIES]
        number = sum(len(some) for _, some in held)
        if known or number < _TRIES:
            return known
        mean = sum(count * len(some) for count, some in held) / number
        return [(mean, median([value for _, some in held for value in some]))]

    def _line(self, count: int) -> float:
        if not self._places:
            return 0.0
        at = bisect_left(self._places, count)
        if at == 0:
            first = self._places[0]
            return self._seconds[first] * count / first
        if at < len(self._places):
            low, high = self._places[at - 1], self._places[at]
            left, right = self._seconds[low], self._seconds[high]
            start = low if high <= _NEAR * low else math.sqrt(low * high)
            return left + (right - left) * max(0.0, count - start) / (high - start)
        low, high = self._places[0], self._places[-1]
        end = self._seconds[high]
        rise = max(0.0, end - self._seconds[low]) / max(1.0, high - low)
        return end + rise * (count - high)

    @property
    def noise(self) -> float:
        """Relative standard error of a median: smaller differences of two counts mean nothing.

        The middle one of all counts with 5 samples or more; 0 if there are none.
        """
        self._learn()
        return median(self._errors.values()) if self._errors else 0.0


def _part(count: int) -> int:
    """The range of a count: of one up to 16, then of a sixteenth to an eighth of it."""
    width = 1 << max(0, (count - 1).bit_length() - 4)
    return -(-count // width) * width


class StepTimes:
    """Seconds of a step: the target's pass by its rows, and drafting and sampling by requests."""

    def __init__(self) -> None:
        self.target, self.rest = Curve(), Curve()
        self.fresh = False  # was anything measured since they were loaded?
        self.since: float | None = None

    def observe(self, rows: int, requests: int, target: float, rest: float | None) -> None:
        """Add a step. Seconds of the target's pass, and of all else (None: nothing was drafted).

        A clock that says 0 has measured nothing.
        """
        if target > 0:
            self.target.observe(rows, target)
        if rest is not None and rest > 0:
            self.rest.observe(requests, rest)
        self.fresh = True

    def __call__(self, rows: int, requests: int) -> float:
        """Seconds, always > 0: one before anything was measured, whatever the rows."""
        seconds = self.target(rows) + self.rest(requests)
        return seconds if seconds > 0 else 1.0

    def knows(self, rows: int) -> bool:
        """Is the time of so many rows measured, not guessed?"""
        return self.target.knows(rows)

    @property
    def noise(self) -> float:
        """Part of a step's time below which a difference means nothing."""
        return self.target.noise

    def save(
        self,
        folder: Path,
        identity: str,
        on_warning: Callable[[str], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Write the samples for the next run; `identity` names device, model and build.

        Whole or not at all, also beside other processes; not where nothing was measured. What was
        loaded keeps its age. A folder that cannot be written is a warning.
        """
        if not self.fresh:
            return
        document = {
            "schema": SCHEMA,
            "identity": identity,
            "saved_at": clock() if self.since is None else self.since,
            "target": {str(count): list(some) for count, some in self.target.samples.items()},
            "rest": {str(count): list(some) for count, some in self.rest.samples.items()},
        }
        path = _path(folder, identity)
        temp = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(6).hex()}.tmp")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temp.write_text(json.dumps(document))
            os.replace(temp, path)
        except OSError as error:
            on_warning(f"step times: {folder}: {error.strerror}; not kept for the next run")
        finally:
            with suppress(OSError):
                temp.unlink(missing_ok=True)

    @classmethod
    def load(
        cls,
        folder: Path,
        identity: str,
        life: float,
        on_warning: Callable[[str], object],
        clock: Callable[[], float] = time.time,
    ) -> StepTimes:
        """What `save` wrote less than `life` seconds ago, else an empty one."""
        path = _path(folder, identity)
        try:
            document = json.loads(path.read_text())
        except FileNotFoundError:
            return cls()
        except OSError as error:
            on_warning(f"step times: {path.name}: {error.strerror}; measured anew")
            return cls()
        except (ValueError, RecursionError):
            document = None
        try:
            saved_at = _known(document, identity)
            times = cls()
            times.since = saved_at
            for name in ("target", "rest"):
                _fill(getattr(times, name), document[name])
        except (AttributeError, KeyError, TypeError, ValueError):
            on_warning(f"step times: {path.name} is damaged; measured anew")
            return cls()
        return times if 0 <= clock() - saved_at < life else cls()


def _path(folder: Path, identity: str) -> Path:
    return folder / f"step-times-{blake2b(identity.encode(), digest_size=16).hexdigest()}.json"


def _known(document: Mapping[str, object], identity: str) -> float:
    """When it was saved. Raises ValueError, KeyError or TypeError if it is not ours."""
    if document["schema"] != SCHEMA or document["identity"] != identity:
        raise ValueError("of another kind")
    return _finite(document["saved_at"])


def _fill(curve: Curve, samples: Mapping[str, list[float]]) -> None:
    for count, some in samples.items():
        if int(count) < 1 or not some:
            raise ValueError("no count")
        for seconds in some:
            if _finite(seconds) <= 0:
                raise ValueError("no duration")
            curve.observe(int(count), float(seconds))


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("no number")
    return float(value)
