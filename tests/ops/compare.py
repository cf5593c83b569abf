"""The one comparison of an op with its reference: anomalies first, then the spec's metric.

NaN and infinities must stand at the same places; the largest error is told with its place and both
values.
"""

from __future__ import annotations

import torch

from deepinfer.ops.specs import Tolerance


def places(x: torch.Tensor) -> torch.Tensor:
    """Values as integers in their order, one apart where neighbours (float32 or bfloat16)."""
    bits = x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()]).long()
    return torch.where(bits < 0, -(bits & (2 ** (8 * x.element_size() - 1) - 1)), bits)


def compare(got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> str | None:
    """What is wrong with ``got``, or None."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    if not want.numel():
        return None
    if not want.is_floating_point() or tolerance.metric == "exact":
        return worst(got, want, (got != want) & ~(got.isnan() & want.isnan()), "differs")
    for name in ("isnan", "isposinf", "isneginf"):
        a, b = getattr(got, name)(), getattr(want, name)()
        if (a != b).any():
            return worst(got, want, a != b, f"{name} elsewhere")
    finite = want.isfinite()
    a, b = got.double().where(finite, 0), want.double().where(finite, 0)
    if tolerance.metric == "rms":
        error = ((a - b).square().mean() / b.square().mean().clamp_min(1e-300)).sqrt()
        found = worst(got, want, (a - b).abs(), f"rms error {error:.2e} of {tolerance.limit}")
        return found if error > tolerance.limit else None
    if tolerance.metric == "relative":
        off = (a - b).abs() - tolerance.limit * b.abs()
        return worst(got, want, off.clamp_min(0), f"off by more than {tolerance.limit}")
    steps = (places(got) - places(want)).abs().where(finite, 0)
    share = (steps > 0).double().mean()
    if steps.max() > tolerance.limit:
        return worst(got, want, steps, f"{steps.max()} places off")
    return f"{share:.2%} of the values are off by a place" if share > tolerance.share else None


def worst(got: torch.Tensor, want: torch.Tensor, error: torch.Tensor, what: str) -> str | None:
    """``what`` with the place of the largest error and both values; None where all are 0."""
    flat = error.double().flatten()
    if not flat.any():
        return None
    at = int(flat.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(at), error.shape)]
    return f"{what} at {place}: {got.flatten()[at]!r}, wanted {want.flatten()[at]!r}"
