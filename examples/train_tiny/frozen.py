"""The trained backbone as training's ops read it, when it is no longer trained.

Comes in: a checkpoint folder. Goes out: its weights, dequantised, as handles without gradients; and
the op table for passes at changing positions. It must not know what the passes are for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from deepinfer.ops.torch import rowwise
from deepinfer.quant import codec
from deepinfer.quant.formats import Packed
from examples.train_tiny.ops import Stored, Table, TrainingOps


class DraftOps(TrainingOps):
    """The ops of training where positions change from pass to pass and distributions are compared:
    tables are made anew, wide outputs are float32."""

    def rope_table(self, positions: torch.Tensor, freqs: torch.Tensor) -> Table:
        return rowwise.rope_table(positions, freqs)

    def linear_f32(self, x: torch.Tensor, weight: Stored) -> torch.Tensor:
        return F.linear(self._input(x, weight).float(), weight.value.float())


def frozen(weights: Mapping[str, torch.Tensor | Packed]) -> dict[str, torch.Tensor | Stored]:
    """Handles of a checkpoint's weights; the values of the formats fit bfloat16 exactly."""
    out: dict[str, torch.Tensor | Stored] = {}
    for name, value in weights.items():
        packed = isinstance(value, Packed)
        wide = codec.unpack(value, torch.float32) if packed else value.float()
        if wide.dim() == 1 or name.endswith((".q_weight", ".k_weight")):
            out[name] = wide
        else:
            out[name] = Stored(wide, wide.to(torch.bfloat16), quantised=packed)
    return out


class Recorded:
    """A function without arguments: on a GPU recorded once as a graph and then replayed.

    All it reads and writes must lie in buffers that never move. Making it calls it ``warm`` times.
    ``error`` says why a GPU has no graph.
    """

    def __init__(
        self, function: Callable[[], None], device: torch.device, warm: int = 3, graph: bool = True
    ):
        self.function, self.error = function, ""
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda" or not graph:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm):
                function()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(recorded):
                function()
            self.graph = recorded
        except Exception as error:  # noqa: BLE001 - a failed capture only costs speed
            torch.cuda.synchronize()
            self.error = f"{type(error).__name__}: {error}"

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.function()
