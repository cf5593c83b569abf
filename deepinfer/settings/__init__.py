"""Settings: the only room that sees the environment and configuration files.

`resolve` gives frozen `Settings` in which every value knows its source; `for_model` and
`for_device` finish and check them once the checkpoint's shape and the device are known.
"""

from deepinfer.settings.resolve import resolve
from deepinfer.settings.rules import for_device, for_model
from deepinfer.settings.values import Settings, Value

__all__ = ["Settings", "Value", "for_device", "for_model", "resolve"]
