"""The optimiser: Muon for the matrices inside the model, Adam for everything else.

Comes in: the flat master and gradient buffers of `Parameters`. Goes out: new masters. Everything
is a handful of large tensor operations without a look at any value on the host, so a whole step
can be captured in a CUDA graph. It must not know the model or the schedule: the rate factor is a
tensor that the caller fills.
"""

from __future__ import annotations

import torch

from examples.train_tiny.parameters import Parameters, Span

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz: gradients [count, rows, cols] -> their nearest semi-orthogonal matrices.

    Five iterations of the quintic in bfloat16 bring singular values to about 0.7 .. 1.2.
    """
    a, b, c = NEWTON_SCHULZ
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-12)).to(torch.bfloat16).contiguous()
    for _ in range(steps):
        gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a, alpha=1.0)
    return x.mT if tall else x


class Optimiser:
    """Muon (momentum 0.95, Nesterov, decay 0.05) and Adam (0.9, 0.95) over the spans."""

    momentum = 0.95
    decay = 0.05
    beta1, beta2, eps = 0.9, 0.95, 1e-10

    def __init__(self, parameters: Parameters):
        self.p = parameters
        device, adam = parameters.device, parameters.adam_start
        self.adam_start = adam
        self.velocity = torch.zeros(adam, device=device)
        size = parameters.master.numel() - adam
        self.first = torch.zeros(size, device=device)
        self.second = torch.zeros(size, device=device)
        self.rates = torch.zeros(size, device=device)
        self.muon: list[Span] = []
        for span in parameters.spans:
            if span.matrix is None:
                self.rates[span.start - adam : span.end - adam] = span.rate
            else:
                self.muon.append(span)
        # What the host sets before a step: the rate factor; and what the device keeps itself.
        self.factor = torch.zeros((), device=device)
        self.count = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)

    @torch.no_grad()
    def reset(self) -> None:
        """Forgets all momenta (the start of a phase)."""
        for tensor in (self.velocity, self.first, self.second, self.count):
            tensor.zero_()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Momenta, to continue a segment on the same machine."""
        kept = {"velocity": self.velocity, "first": self.first, "second": self.second}
        return {name: tensor.clone() for name, tensor in kept.items()} | {
            "count": self.count.clone()
        }

    @torch.no_grad()
    def restore(self, saved: dict[str, torch.Tensor]) -> None:
        """Takes what `snapshot` gave."""
        for name, tensor in saved.items():
            getattr(self, name).copy_(tensor)

    @torch.no_grad()
    def step(self) -> None:
        """One update from `parameters.grad`, which it zeroes; a non-finite one is skipped."""
        p, adam = self.p, self.adam_start
        norm = p.grad.norm()
        good = torch.isfinite(norm)
        p.grad.copy_(torch.where(good, p.grad, 0.0))
        factor = torch.where(good, self.factor, 0.0)
        self.count.add_(1.0)
        self._adam(p.master[adam:], p.grad[adam:], factor)
        self._muon(factor)
        p.grad.zero_()

    def _adam(self, master: torch.Tensor, grad: torch.Tensor, factor: torch.Tensor) -> None:
        norm = grad.norm()
        self.norm.copy_(norm)
        grad = grad * (1.0 / norm.clamp_min(1.0))
        self.first.lerp_(grad, 1 - self.beta1)
        self.second.lerp_(grad * grad, 1 - self.beta2)
        mean = self.first / (1 - torch.pow(self.beta1, self.count))
        scale = (self.second / (1 - torch.pow(self.beta2, self.count))).sqrt_().add_(self.eps)
        master.sub_(self.rates * factor * mean / scale)

    def _muon(self, factor: torch.Tensor) -> None:
        p = self.p
        grad = p.grad[: self.adam_start]
        self.velocity.lerp_(grad, 1 - self.momentum)
        grad = grad.lerp(self.velocity, self.momentum)
        for span in self.muon:
            assert span.matrix is not None
            part = slice(span.start, span.end)
            update = orthogonalise(grad[part].view(-1, *span.matrix))
            master = p.master[part].view(-1, *span.matrix)
            rate = factor * span.rate
            master.mul_(1 - rate * self.decay).sub_(rate * update)
