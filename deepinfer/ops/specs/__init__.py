"""Op specs, one file a family: name, meaning and tolerance; the implementations live elsewhere.

A spec exists before any implementation, and its torch reference before any other back end. The
tolerance is what another back end may differ by from the reference on the same inputs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """``metric``: "exact" (bit for bit), "ulp" (last places of the output dtype, on at most
    ``share`` of the elements), "relative" (of each value) or "rms" (of the whole tensor).
    """

    metric: str
    limit: float = 0.0
    share: float = 1.0


EXACT = Tolerance("exact")


@dataclass(frozen=True)
class OpSpec:
    """One op. ``family`` names the module of every back end that may hold it."""

    name: str
    family: str
    meaning: str
    tolerance: Tolerance
