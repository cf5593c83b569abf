"""Specs of the Engram ops."""

from deepinfer.ops.specs import EXACT, OpSpec, Tolerance

SPECS = (
    OpSpec("engram_rows", "engram", "table rows of hashed n-grams", EXACT),
    OpSpec("engram_lookup", "engram", "values of table rows", EXACT),
    OpSpec("engram_gate", "engram", "gated value added to the streams", Tolerance("rms", 5e-3)),
)
