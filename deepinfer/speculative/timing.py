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
_SPREAD = 1.4826  # standard deviation / median absolute deviation, normal samples
_ERROR = 1.2533  # standard error of a median / of a mean


class Curve:
    """Seconds by a count: medians of the newest samples of each count, straight lines between them.

    Below the first count it is level, beyond the last it goes on with the slope of the whole. So a
    curve that knows one count takes more rows to be free, which gets them measured.
    """

    def __init__(self) -> None:
        self.samples: dict[int, deque[float]] = {}
        self._counts: list[int] = []
        self._medians: dict[int, float] = {}

    def observe(self, count: int, seconds: float) -> None:
        if count not in self.samples:
            self.samples[count] = deque(maxlen=_WINDOW)
            insort(self._counts, count)
        self.samples[count].append(seconds)
        self._medians.pop(count, None)

    def __call__(self, count: int) -> float:
        """Seconds at a count; 0 before the first sample."""
        if count in self.samples:
            return self._median(count)
        if not self._counts:
            return 0.0
        at = bisect_left(self._counts, count)
        if at == 0:
            return self._median(self._counts[0])
        if at < len(self._counts):
            low, high = self._counts[at - 1], self._counts[at]
            left, right = self._median(low), self._median(high)
            return left + (right - left) * (count - low) / (high - low)
        low, high = self._counts[0], self._counts[-1]
        end = self._median(high)
        rise = max(0.0, end - self._median(low)) / max(1, high - low)
        return end + rise * (count - high)

    def _median(self, count: int) -> float:
        if count not in self._medians:
            self._medians[count] = median(self.samples[count])
        return self._medians[count]

    @property
    def noise(self) -> float:
        """Relative standard error of a median: smaller differences of two counts mean nothing.

        The middle one of all counts with 5 samples or more; 0 if there are none.
        """
        errors = []
        for count, some in self.samples.items():
            middle = self._median(count)
            if len(some) >= 5 and middle > 0:
                away = median(abs(x - middle) for x in some)
                errors.append(_ERROR * _SPREAD * away / middle / math.sqrt(len(some)))
        return median(errors) if errors else 0.0


class StepTimes:
    """Seconds of a step: the target's pass by its rows, and drafting and sampling by requests."""

    def __init__(self) -> None:
        self.target, self.rest = Curve(), Curve()

    def observe(self, rows: int, requests: int, target: float, rest: float) -> None:
        """Add a step. Seconds of the target's pass and of all else."""
        self.target.observe(rows, target)
        self.rest.observe(requests, rest)

    def __call__(self, rows: int, requests: int) -> float:
        """Seconds, always > 0: one before anything was measured, whatever the rows."""
        return (self.target(rows) + self.rest(requests)) or 1.0

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

        Whole or not at all, also beside other processes. A folder that cannot be written is a
        warning.
        """
        document = {
            "schema": SCHEMA,
            "identity": identity,
            "saved_at": clock(),
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
            if _finite(seconds) < 0:
                raise ValueError("no duration")
            curve.observe(int(count), float(seconds))


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("no number")
    return float(value)
