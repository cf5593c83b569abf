"""Specs of the row-wise ops."""

from deepinfer.ops.specs import OpSpec, Tolerance

SPECS = (
    OpSpec("rmsnorm", "rowwise", "RMS norm, one rounding at the end", Tolerance("ulp", 1, 0.01)),
    OpSpec("rope", "rowwise", "rotate adjacent pairs of the last channels", Tolerance("ulp", 1)),
    OpSpec("rope_table", "rowwise", "cos and sin of float32 angles", Tolerance("relative", 2e-7)),
)
