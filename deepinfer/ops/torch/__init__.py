"""The torch back end: one reference per op, the oracle every other back end is compared with.

Comes in: tensors and weight handles made by ``prepare``. Goes out: tensors. Each op gives a row
the same bits whatever rows stand beside it: sums run in a fixed order (``rowsum``), matrix
products add exact block sums in K order (``blocked``), and every other step is elementwise.
"""

_EVERY = frozenset(
    "rmsnorm rope rope_table prepare linear linear_f32 grouped_linear hc_mix hc_collapse"
    " hc_norm hc_expand store extend pool quantise_index index_scores select candidate_blocks"
    " choose sparse_attention router moe engram_rows engram_lookup engram_gate window_places"
    " page_places group_places group_rows entry_table ngrams live_rows ends append draw".split()
)
# Device type -> ops whose rows keep their bits in any company (model spec §7.2). Nothing is claimed
# for a device on which it was never measured.
FIXED_ORDER = {"cpu": _EVERY, "cuda": _EVERY}
