"""Devices: which accelerators, drivers and versions exist. Knows neither operations nor model."""

from deepinfer.device.detect import Found, find, pick

__all__ = ["Found", "find", "pick"]
