"""Numbers on their way to the device, one copy for all of a step, and back, without waiting.

Comes in: arrays, or tensors of the device. Goes out: tensors of the same shapes on the other side.
Must not know what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def send(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Tensors on ``device``, of the arrays' common type. The host goes on at once, and may change
    its arrays."""
    if device.type == "cpu":
        common = np.result_type(*arrays)
        return [torch.from_numpy(a.astype(common, order="C")) for a in arrays]
    flat = torch.from_numpy(np.concatenate([a.ravel() for a in arrays]))
    flat = flat.pin_memory().to(device, non_blocking=True) if len(flat) else flat.to(device)
    parts = flat.split([a.size for a in arrays])
    return [part.view(a.shape) for part, a in zip(parts, arrays, strict=True)]


def receive(tensor: torch.Tensor) -> torch.Tensor:
    """The same on the host, once the device has got so far."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
