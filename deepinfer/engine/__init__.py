"""The loop that knows the other rooms: plan, run, sample, commit."""

from deepinfer.engine.engine import LLM

__all__ = ["LLM"]
