"""The torch back end: one reference per op, the oracle every other back end is compared with.

Comes in: tensors and weight handles made by ``prepare``. Goes out: tensors. Each op gives a row
the same bits whatever rows stand beside it: sums run in a fixed order (``rowsum``), matrix
products add exact block sums in K order (``blocked``), and every other step is elementwise.
"""
