"""Specs of the matrix products with weights. ``prepare`` turns a stored weight into a handle."""

from deepinfer.ops.specs import EXACT, OpSpec, Tolerance

SPECS = (
    OpSpec("prepare", "linear", "handle of a stored weight", EXACT),
    OpSpec("linear", "linear", "x W^T, FP8 inputs if W is quantised", Tolerance("ulp", 1, 0.01)),
    OpSpec("linear_f32", "linear", "x W^T with float32 output", Tolerance("relative", 1e-5)),
    OpSpec("grouped_linear", "linear", "block-diagonal x W^T", Tolerance("ulp", 1, 0.01)),
)
