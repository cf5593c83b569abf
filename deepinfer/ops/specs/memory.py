"""Specs of the ops on what attention remembers."""

from deepinfer.ops.specs import EXACT, OpSpec, Tolerance

SPECS = (
    OpSpec("store", "memory", "rows to packed records at their places", EXACT),
    OpSpec("extend", "memory", "kept records, then those of new rows", EXACT),
    OpSpec("pool", "memory", "softmax-weighted mean of a group", Tolerance("rms", 1e-6)),
    OpSpec("quantise_index", "memory", "FP4 values of index queries", EXACT),
    OpSpec("index_scores", "memory", "relevance of compressed entries", Tolerance("ulp", 1, 0.01)),
    OpSpec("select", "memory", "best entries, ties to the lower index", EXACT),
    OpSpec("candidate_blocks", "memory", "best blocks, the newest always", EXACT),
    OpSpec("choose", "memory", "best entries of packed index keys", EXACT),
    OpSpec("sparse_attention", "memory", "attention over slot lists", Tolerance("rms", 4e-3)),
)
