"""The cpu back end: compiled kernels of `csrc/cpu`, bound by ctypes.

Comes in: the library that `deepinfer build --accelerator cpu` made, tensors, and weight handles of
its own ``prepare``. Goes out: tensors. Each op adds in an order that depends on the row alone: the
same kernel runs for every number of rows, threads share rows or columns, never a sum. What it does
not hold, the torch back end does.
"""

_FIXED = frozenset(
    "rmsnorm rope rope_table prepare linear linear_f32 grouped_linear hc_mix hc_collapse hc_norm"
    " hc_expand store extend pool quantise_index index_scores select candidate_blocks choose"
    " sparse_attention router moe engram_rows engram_lookup engram_gate window_places"
    " page_places group_places group_rows entry_table ngrams live_rows ends append draw".split()
)
# Device type -> ops whose rows keep their bits in any company (model spec §7.2).
FIXED_ORDER = {"cpu": _FIXED}
