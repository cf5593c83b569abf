"""One training step of one batch shape: forward, backward, update, captured in a CUDA graph.

Comes in: numpy batches and a rate factor. Goes out: changed parameters and running sums of what was
seen. All inputs live in buffers that never move and nothing is read back on the way, so on a GPU
the whole step is replayed as one graph. It must not know the schedule or where data comes from.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from deepinfer.model.transformer import Transformer
from examples.train_tiny.losses import cross_entropy
from examples.train_tiny.memory import SequenceMemory
from examples.train_tiny.ops import TrainingOps
from examples.train_tiny.optim import Optimiser
from examples.train_tiny.parameters import Parameters

STATS = ("steps", "code", "answers", "index", "norm", "load_low", "load_high")
BARRIERS = 2
WARM = 3  # steps before a capture


class Step:
    """Training of `parameters` on batches of one shape."""

    def __init__(
        self,
        parameters: Parameters,
        optimiser: Optimiser,
        model: Transformer,
        memory: SequenceMemory,
        ops: TrainingOps,
        *,
        sampled: int = 256,
        barriers: bool = False,
        graph: bool = False,
        seed: int = 0,
    ):
        self.p, self.optimiser, self.model = parameters, optimiser, model
        self.memory, self.ops, self.barriers = memory, ops, barriers
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        batch, length, device = memory.batch, memory.length, parameters.device
        self.tokens = torch.zeros(batch, length + 1, dtype=torch.int64, device=device)
        self.weights = torch.zeros(batch, length + 1, device=device)
        rows = min(sampled, length // 2)
        memory.sampled = torch.zeros(batch, rows, dtype=torch.int64, device=device)
        memory.barriers = torch.full((2, batch, BARRIERS), length, device=device)
        self.stats = torch.zeros(len(STATS), device=device)
        self.load = torch.zeros_like(parameters.router_bias)
        self.loss_piece = ops.piece(cross_entropy)
        self.graph = graph and device.type == "cuda"
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._random = np.random.default_rng(seed)
        self._seen: list[torch.cuda.Event] = []

    def __call__(self, batch: tuple[np.ndarray, np.ndarray], factor: float) -> None:
        """One step. The device may be two steps behind when this returns."""
        self._fill(batch)
        self.optimiser.factor.fill_(factor)
        if self._graphs:
            self._graphs[0].replay()
            self._reduce()
            if self.world > 1:
                self._graphs[1].replay()
        else:
            self._learn()
            self._reduce()
            self._update()
        if self.p.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._seen.append(event)
            if len(self._seen) > 2:
                self._seen.pop(0).synchronize()

    def warm(self, batches, factor: float) -> str:
        """A few steps one call at a time, then the capture. Returns what was done."""
        if not self.graph:
            self(next(batches), factor)
            return "no graph"
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self(next(batches), factor)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        try:
            self._capture()
        except Exception as error:  # noqa: BLE001 - a failed capture only costs speed
            self._graphs = []
            torch.cuda.synchronize()
            self.p.grad.zero_()
            return f"capture failed, going on without: {type(error).__name__}: {error}"
        return "captured"

    def read_stats(self) -> dict[str, float]:
        """Means since the last call; waits for the device."""
        values = dict(zip(STATS, self.stats.tolist(), strict=True))
        self.stats.zero_()
        steps = max(values.pop("steps"), 1.0)
        return {"steps": steps, **{k: v / steps for k, v in values.items()}}

    def nll(self, tokens: torch.Tensor) -> torch.Tensor:
        """Nats of every predicted token [B, T] of int64 [B, T + 1], without learning."""
        logits = self.logits(tokens[:, :-1])
        targets = tokens[:, 1:].reshape(-1)
        _, nll = self.loss_piece(logits, targets, torch.ones_like(targets, dtype=torch.float32))
        return nll.view(tokens.shape[0], -1)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B T, vocab] of int64 [B, T] with an uncut window. The pieces run as in training,
        gradient tape included, so that nothing is compiled anew."""
        memory = self.memory
        memory.barriers.fill_(memory.length)
        self._begin(tokens)
        memory.teach = False
        return self.model.forward(tokens.reshape(-1), memory).detach()

    def _fill(self, batch: tuple[np.ndarray, np.ndarray]) -> None:
        ids, weights = batch
        memory, length = self.memory, self.memory.length
        rows = memory.sampled.shape
        low = min(64, length // 2)
        self._copy(self.tokens, ids.astype(np.int64))
        self._copy(self.weights, weights)
        self._copy(memory.sampled, self._random.integers(low, length, rows))
        if self.barriers:
            self._copy(memory.barriers, self._draw_barriers())

    def _draw_barriers(self) -> np.ndarray:
        """Positions where a replay starts: with 3/4 one in the decoder half, half of those two;
        with 1/4 the same in the encoder half."""
        batch, length, rng = self.memory.batch, self.memory.length, self._random
        out = np.full((2, batch, BARRIERS), length)
        places = rng.integers(1, length - min(64, length // 2), (batch, BARRIERS))
        one = rng.random(batch) < 0.75
        two = one & (rng.random(batch) < 0.5)
        both = rng.random(batch) < 0.25
        out[1, one, 0] = places[one, 0]
        out[1, two, 1] = places[two, 1]
        out[0, both] = out[1, both]
        return out

    def _copy(self, target: torch.Tensor, values: np.ndarray) -> None:
        source = torch.from_numpy(values)
        if target.is_cuda:
            source = source.pin_memory()
        target.copy_(source, non_blocking=True)

    def _begin(self, tokens: torch.Tensor) -> None:
        self.ops.start()
        self.memory.start()
        self.memory.read(tokens)

    def _learn(self) -> None:
        """Forward and backward; gradients, loads and sums stay on the device."""
        self._begin(self.tokens[:, :-1])
        self.memory.teach = True
        logits = self.model.forward(self.tokens[:, :-1].reshape(-1), self.memory)
        weights = self.weights[:, 1:].reshape(-1)
        loss, nll = self.loss_piece(logits, self.tokens[:, 1:].reshape(-1), weights)
        index = sum(self.memory.index_losses, torch.zeros((), device=loss.device))
        (loss + index).backward()
        self.load.copy_(torch.stack(self.ops.loads))
        self._note(nll.view(self.weights[:, 1:].shape), index.detach())

    def _note(self, nll: torch.Tensor, index: torch.Tensor) -> None:
        weights = self.weights[:, 1:]
        exercise = (weights < 1.0).any(1, keepdim=True)
        answers = (exercise & (weights == 1.0)).float()
        code = (~exercise).float().expand_as(weights)
        self.stats[0] += 1.0
        self.stats[1] += (nll * code).sum() / code.sum().clamp_min(1.0)
        self.stats[2] += (nll * answers).sum() / answers.sum().clamp_min(1.0)
        self.stats[3] += index / max(1, len(self.memory.index_losses))

    def _reduce(self) -> None:
        if self.world > 1:
            dist.all_reduce(self.p.grad, op=dist.ReduceOp.AVG)
            dist.all_reduce(self.load)

    @torch.no_grad()
    def _update(self) -> None:
        self.optimiser.step()
        # Experts above their fair share become a little less likely, and the other way round.
        load = self.load / self.load.mean(-1, keepdim=True)
        self.p.router_bias.add_(self.optimiser.factor * 0.002 * torch.sign(1.0 - load))
        self.stats[4] += self.optimiser.norm
        self.stats[5] += load.amin()
        self.stats[6] += load.amax()
        self.p.refresh()

    def _capture(self) -> None:
        mode = "thread_local" if self.world > 1 else "global"
        first = torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, capture_error_mode=mode):
            self._learn()
            if self.world == 1:
                self._update()
        graphs = [first]
        if self.world > 1:
            second = torch.cuda.CUDAGraph()
            with torch.cuda.graph(second, pool=first.pool(), capture_error_mode=mode):
                self._update()
            graphs.append(second)
        self._graphs = graphs
