"""Decides who runs in the next step. Pure planning: nothing in this package imports torch."""

from deepinfer.scheduler.policy import Policy, Step, Verify, as_many

__all__ = ["Policy", "Step", "Verify", "as_many"]
