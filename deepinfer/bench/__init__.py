"""Sweeps: grids of settings and workloads, run, timed and kept as rows.

Settings, axes and a folder come in; `meta.json`, `rows.jsonl` and `summary.csv` go out. It drives
the engine as a user would and must not know how a row is shown.
"""
