"""The guard against waiting for the device, where nothing ever waits: on the CPU."""

import numpy as np
import pytest
import torch

from deepinfer.device.sync import SyncError, no_sync

X = torch.arange(6.0).view(2, 3)
I = torch.tensor([1, 0])  # noqa: E741
MASK = X > 2

WAITING = {
    "item": lambda: X[0, 0].item(),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "asarray": lambda: np.asarray(X),
    "cpu": lambda: X.cpu(),
    "bool": lambda: bool(MASK.any()),
    "if": lambda: 1 if MASK.any() else 2,
    "int": lambda: int(I[0]),
    "float": lambda: float(X[0, 0]),
    "index": lambda: list(range(6))[I[0]],
    "slice": lambda: X[: I[0]],
    "in": lambda: 3.0 in X,
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(MASK),
    "argwhere": lambda: torch.argwhere(MASK),
    "masked_select": lambda: X.masked_select(MASK),
    "unique": lambda: torch.unique(I),
    "unique with counts": lambda: I.unique(return_counts=True),
    "unique rows": lambda: torch.unique(X, dim=0),
    "unique_consecutive": lambda: torch.unique_consecutive(I),
    "bincount": lambda: torch.bincount(I),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "mask": lambda: X[MASK],
    "mask of rows": lambda: X[MASK[:, 0]],
    "mask assigned": lambda: X.clone().__setitem__(MASK, X[0, 0]),
    "list": lambda: X[[1, 0]],
    "list behind a slice": lambda: X[:, [1, 0]],
    "list assigned": lambda: X.clone().__setitem__([1, 0], X),
    "repeat_interleave": lambda: torch.repeat_interleave(I),
    "repeat_interleave of rows": lambda: X.repeat_interleave(I, 0),
    "tensor": lambda: torch.tensor([1, 2]),
    "as_tensor": lambda: torch.as_tensor(np.arange(3)),
    "new_tensor": lambda: X.new_tensor([1.0]),
}

FINE = {
    "arithmetic": lambda: (X * 2 + 1 / 3).sum(-1).clamp_min(0.5),
    "compare": lambda: torch.where(MASK, X, 0.0),
    "masked_fill": lambda: X.masked_fill(MASK, -1.0),
    "gather": lambda: X[I],
    "scatter": lambda: X.clone().__setitem__(I, X[I]),
    "slices": lambda: X[1:, 0],
    "repeat_interleave": lambda: torch.repeat_interleave(I, output_size=1),
    "rows": lambda: X.repeat_interleave(I, 0, output_size=1),
    "each twice": lambda: X.repeat_interleave(2, -1),
    "sort": lambda: X.sort(-1).indices.cumsum(-1),
    "topk": lambda: X.topk(2, -1),
    "from_numpy": lambda: torch.from_numpy(np.arange(3)).to("cpu", non_blocking=True),
    "as_tensor of a tensor": lambda: torch.as_tensor(X),
    "full": lambda: torch.full((), 0.5),
    "shape": lambda: len(X) + X.numel(),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_named(name):
    with pytest.raises(SyncError), no_sync("cpu"):
        WAITING[name]()
    with pytest.raises(SyncError), torch.inference_mode(), no_sync("cpu"):
        WAITING[name]()
    WAITING[name]()


@pytest.mark.parametrize("name", FINE)
def test_what_does_not_wait_passes(name):
    with no_sync("cpu"):
        FINE[name]()
    with torch.inference_mode(), no_sync("cpu"):
        FINE[name]()


def test_the_error_names_the_call():
    with pytest.raises(SyncError, match="tolist"), no_sync("cpu"):
        X.tolist()
