"""Measurements of deepinfer, each a script that runs alone: `python -m benchmarks.NAME`."""
