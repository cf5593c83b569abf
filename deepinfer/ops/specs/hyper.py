"""Specs of the hyper-connection ops."""

from deepinfer.ops.specs import OpSpec, Tolerance

SPECS = (
    OpSpec("hc_mix", "hyper", "pre, post, comb of the streams", Tolerance("relative", 1e-5)),
    OpSpec("hc_collapse", "hyper", "weighted sum of the copies", Tolerance("ulp", 1, 0.01)),
    OpSpec("hc_norm", "hyper", "hc_collapse, then rmsnorm", Tolerance("ulp", 1, 0.01)),
    OpSpec("hc_expand", "hyper", "new copies of output and old ones", Tolerance("ulp", 1, 0.01)),
)
