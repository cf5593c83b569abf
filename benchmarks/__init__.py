"""Measurements of deepinfer, each a script that runs alone: `python -m benchmarks.NAME`."""

from deepinfer.settings.registry import rest_idle_threads

# As the command does, and before any script imports torch.
rest_idle_threads()
