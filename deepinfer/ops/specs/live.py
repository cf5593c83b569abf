"""Specs of the ops on the running requests, a row per state slot. What a request gets depends on
its own slot alone; its rows are no rows of the model."""

from deepinfer.ops.specs import EXACT, OpSpec

SPECS = (
    OpSpec("live_rows", "live", "rows of decoding requests: ids, places, pages", EXACT),
    OpSpec("ends", "live", "tokens that end their request", EXACT),
    OpSpec("append", "live", "new tokens, up to the one that ends the request", EXACT),
)
