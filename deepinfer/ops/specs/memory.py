"""Specs of the ops on what attention remembers."""

from deepinfer.ops.specs import EXACT, OpSpec, Tolerance

SPECS = (
    OpSpec("pool", "memory", "softmax-weighted mean of a group", Tolerance("relative", 1e-5)),
    OpSpec("quantise_index", "memory", "FP4 values of index queries", EXACT),
    OpSpec("index_scores", "memory", "relevance of compressed entries", Tolerance("ulp", 1, 0.01)),
    OpSpec("select", "memory", "best entries, ties to the lower index", EXACT),
    OpSpec("candidate_blocks", "memory", "best blocks, the newest always", EXACT),
    OpSpec("sparse_attention", "memory", "attention over slot lists", Tolerance("rms", 4e-3)),
)
