"""Specs of the ops that say where things lie: integers in, integers out, and what is moved with
them. Their rows name places, so they are nothing that a row's company could change."""

from deepinfer.ops.specs import EXACT, OpSpec

SPECS = (
    OpSpec("window_places", "places", "window columns of rows, and where they stay", EXACT),
    OpSpec("page_places", "places", "where rows lie in their pages", EXACT),
    OpSpec("group_places", "places", "rows of compression groups, and their entries", EXACT),
    OpSpec("group_rows", "places", "rows of groups, kept ones and new ones", EXACT),
    OpSpec("entry_table", "places", "entries that rows may see, by request", EXACT),
    OpSpec("ngrams", "places", "mapped ids up to each row, the ring behind them", EXACT),
)
