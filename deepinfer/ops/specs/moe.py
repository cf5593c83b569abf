"""Specs of the router and the experts."""

from deepinfer.ops.specs import OpSpec, Tolerance

SPECS = (
    OpSpec("router", "moe", "expert ids and weights", Tolerance("relative", 1e-5)),
    OpSpec("moe", "moe", "routed and shared experts, combined", Tolerance("ulp", 1, 0.01)),
)
