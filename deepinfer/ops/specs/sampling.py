"""Spec of the op that draws tokens."""

from deepinfer.ops.specs import EXACT, OpSpec

SPECS = (OpSpec("draw", "sampling", "arg-max of scores and the noise of their streams", EXACT),)
