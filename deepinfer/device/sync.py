"""Where the host would wait for the device, and a guard that turns waiting into an error.

Comes in: the device that a piece of code works on. Goes out: nothing, or the error at the call that
waits: a value read by the host, a size that the host must learn, a copy from memory that is not
pinned. The guard costs time and is for tests; it must not know what the code computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Calls that read values, or bring host data in, before any operation runs.
_READS = {"item", "tolist", "numpy", "cpu", "__array__", "__contains__"}
_READS |= {"__bool__", "__int__", "__float__", "__complex__", "__index__"}
_BRINGS = {"tensor", "as_tensor", "asarray", "new_tensor"}
# Operations whose result, or its size, goes to the host.
_OPS = {"_local_scalar_dense", "equal", "allclose", "nonzero", "masked_select", "bincount"}
_OPS |= {"_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}


def waits(x: torch.Tensor) -> bool:
    """Whether the host would have to wait for the values of ``x``."""
    return x.device.type != "cpu"


class SyncError(RuntimeError):
    """The host would wait for the device."""


@contextmanager
def no_sync(device: torch.device | str) -> Iterator[None]:
    """Raise where the host would wait for ``device`` inside.

    On cuda torch's own sync debug mode raises a RuntimeError. Elsewhere, where nothing ever waits,
    ``SyncError`` names the calls that would on an accelerator: values read, sizes that depend on
    values, tensors made of host data. `torch.from_numpy` and copies with `to` pass.
    """
    if torch.device(device).type == "cuda":
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    else:
        with _Calls(), _Operations():
            yield


class _Calls(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS:
            raise SyncError(f"{name} reads a value on the host")
        if name in _BRINGS and not isinstance(args[-1], torch.Tensor):
            raise SyncError(f"{name} copies from memory that is not pinned")
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list) for part in index):
                raise SyncError(f"{name} copies a list from memory that is not pinned")
            bounds = [
                b for part in index if isinstance(part, slice) for b in (part.start, part.stop)
            ]
            if any(isinstance(bound, torch.Tensor) for bound in bounds):
                raise SyncError(f"{name} reads the bound of a slice on the host")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in _OPS:
            raise SyncError(f"{name} gives the host a value or a size")
        if name == "repeat_interleave" and func._overloadname != "self_int":
            if kwargs.get("output_size") is None:
                raise SyncError("repeat_interleave without output_size gives the host a size")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
                raise SyncError(f"{name} with a mask gives the host a size")
        with self:  # what is made of other operations may hide one
            result = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result
