"""The file of confidence temperatures that lies beside a checkpoint.

A folder comes in, numbers go out. It must not know how they were fitted (`calibration`).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from deepinfer.errors import CheckpointError

FILE = "confidence_temperatures.json"  # beside config.json
SCHEMA = "deepinfer.calibration/1"


def read_temperatures(folder: Path, slots: int) -> tuple[float, ...] | None:
    """The temperatures fitted for a checkpoint, one per draft of its `slots`; None: none were.

    Raises CheckpointError (`calibration-invalid`).
    """
    path = folder / FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        temperatures = document["temperatures"]
        good = document["schema"] == SCHEMA and len(temperatures) == slots
        good = good and all(0 < t < math.inf for t in temperatures)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good:
        raise CheckpointError(
            "calibration-invalid",
            f"{FILE} does not hold {slots} temperatures",
            [f'expected {{"schema": "{SCHEMA}", "temperatures": [...]}}, all above 0'],
            "delete it, or deepinfer spec-trace --calibrate",
        )
    return tuple(float(t) for t in temperatures)
