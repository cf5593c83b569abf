"""Which layer x token ranges a prompt needs. Imports only its torch-free half: the plan."""

from deepinfer.replay.plan import LayerRanges, ReplayPlan, ReplayRule

__all__ = ["LayerRanges", "ReplayPlan", "ReplayRule"]
