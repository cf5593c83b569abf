"""Spec of the op that draws tokens."""

from deepinfer.ops.specs import EXACT, OpSpec

SPECS = (OpSpec("draw", "sampling", "arg-max of allowed logits, with noise where drawn", EXACT),)
