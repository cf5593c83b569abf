"""What training adds to the draft network: its memory, its teacher-forced pass and its loss.

Comes in: rows of frozen backbone outputs and anchors in them. Goes out: the logits of every slot,
the loss and the acceptance it stands for. Sources: model spec §6.2-6.4, and the losses of the
DSpark paper. It must not know where rows come from, the optimiser or the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from deepinfer.model.config import ModelConfig
from deepinfer.model.draft import Draft
from examples.train_tiny.frozen import DraftOps
from examples.train_tiny.ops import StraightThrough

LEAST = 0.05  # what a slot is worth that is never reached
WEIGHTS = {"ce": 0.1, "tv": 0.9, "confidence": 1.0}


@dataclass(frozen=True)
class Anchors:
    """Anchors P in rows of T backbone outputs, and what follows them.

    targets bf16 [N, T, 3 H]; last int64 [N, A]: P; flat int64 [R]: P counted over all rows, R = N
    A; tokens int64 [R, B + 1]: the token at P + 1, to which the block is anchored, and the ones to
    draft; teacher [R, B, V]: the backbone's logits for the latter; valid float32 [R].
    """

    targets: torch.Tensor
    last: torch.Tensor
    flat: torch.Tensor
    tokens: torch.Tensor
    teacher: torch.Tensor
    valid: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        n, t = self.targets.shape[:2]
        return torch.arange(t, device=self.targets.device).repeat(n)


class AnchorMemory:
    """`DraftMemory` with gradients: every anchor sees the W context keys of its row up to P."""

    def __init__(self, config: ModelConfig, ops: DraftOps, anchors: Anchors, contexts):
        """contexts: [N T, D] per stage, rotated, not yet quantised."""
        self.config, self.ops = config, ops
        self.contexts = contexts
        self.near: dict[int, torch.Tensor] = {}
        window = config.sliding_window
        back = torch.arange(1 - window, 1, device=anchors.flat.device)
        self.seen = anchors.last.flatten().unsqueeze(-1) + back >= 0
        self.index = (anchors.flat.unsqueeze(-1) + back).clamp_min(0)

    def quantise(self, keys: torch.Tensor) -> torch.Tensor:
        return StraightThrough.apply(keys, self.ops.fp8) if self.config.quantised else keys

    def attend(
        self, stage: int, q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor
    ) -> torch.Tensor:
        block = self.quantise(kv).unflatten(0, (len(self.index), -1))
        return self.attend_to(stage, q, block, sink)

    def attend_to(
        self, stage: int, q: torch.Tensor, block: torch.Tensor, sink: torch.Tensor
    ) -> torch.Tensor:
        """q [R * S, heads, D] over the context and block [R, S', D], all of it quantised."""
        requests, heads = len(self.index), q.shape[1]
        if stage not in self.near:
            self.near[stage] = _Gather.apply(self.quantise(self.contexts[stage]), self.index)
        keys = torch.cat((self.near[stage], block), 1)
        seen = F.pad(self.seen, (0, block.shape[1]), value=True).unsqueeze(1)
        q = q.reshape(requests, -1, q.shape[-1])
        logits = torch.bmm(q, keys.mT).float() * q.shape[-1] ** -0.5
        logits = logits.masked_fill(~seen, -torch.inf)
        sinks = sink.repeat(q.shape[1] // heads)
        lse = torch.logaddexp(torch.logsumexp(logits, -1), sinks)
        p = (logits - lse.unsqueeze(-1)).exp().to(q.dtype)
        return torch.bmm(p, keys).view(-1, heads, q.shape[-1])


class _Gather(torch.autograd.Function):
    """table[index] with the gradient summed in float32."""

    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype = table.shape, table.dtype
        return table[index]

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, device=grad.device)
        total.index_add_(0, index.flatten(), grad.reshape(-1, ctx.shape[-1]).float())
        return total.to(ctx.dtype), None


def teacher_forced(
    draft: Draft, ops: DraftOps, anchors: Anchors, markov: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [R, B, V], what the confidence is read from [R, B, H + rank]) with the true token
    before every slot.

    Without ``markov`` the slots do not know each other's tokens: no bias, and the confidence sees
    the hidden state alone.
    """
    config = draft.config
    slots = config.dspark_block_size
    contexts = draft.context(anchors.targets.flatten(0, 1), anchors.positions)
    memory = AnchorMemory(config, ops, anchors, contexts)
    x, logits = draft.block(anchors.tokens[:, 0], anchors.last.flatten(), memory)
    if markov:
        e = draft.markov(anchors.tokens[:, :-1].reshape(-1))
        logits = logits + draft.bias(e).view(logits.shape)
    else:
        e = x.new_zeros(x.shape[0] * slots, config.dspark_markov_rank)
    return logits, torch.cat((x, e.view(x.shape[0], slots, -1)), -1)


def raw_confidence(draft: Draft, seen: torch.Tensor) -> torch.Tensor:
    """float32 [R, B] from what `teacher_forced` gave."""
    flat, hidden = seen.flatten(0, 1), draft.config.hidden_size
    return draft.confidence(flat[:, :hidden], flat[:, hidden:]).view(seen.shape[:2])


def fit_confidence(
    seen: torch.Tensor, chance: torch.Tensor, weight: torch.Tensor, steps: int = 60
) -> torch.Tensor:
    """float32 [F]: the confidence weights of least weighted cross entropy.

    seen [N, F]; chance [N]: of acceptance; weight [N]. Convex; L-BFGS, on the device of ``seen``.
    """
    scale = seen.float().square().mean(0).sqrt().clamp_min(1e-6)
    x = seen.float() / scale
    chance, share = chance.to(x), weight.to(x) / weight.sum().to(x)
    w = torch.zeros(x.shape[1], device=x.device, requires_grad=True)
    optimiser = torch.optim.LBFGS([w], max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        each = F.binary_cross_entropy_with_logits(x @ w, chance, reduction="none")
        value = (share * each).sum() + 1e-6 * w.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    return w.detach() / scale


def slot_weights(accept: torch.Tensor) -> torch.Tensor:
    """float32 [R, B], sum 1 a row: what a slot's acceptance is worth, without gradient.

    accept [R, B]. The expected accepted length is sum_k prod_{j <= k} a_j; its derivative by a_k is
    the chance that slot k is reached times the tokens that follow from it. ``LEAST`` keeps slots
    learning that are not reached yet.
    """
    a = accept.detach()
    slots = a.shape[1]
    reach = F.pad(torch.cumprod(a[:, :-1], 1), (1, 0), value=1.0)
    follows = [torch.ones_like(a[:, -1])]
    for k in range(slots - 1, 0, -1):
        follows.append(1.0 + a[:, k] * follows[-1])
    worth = LEAST + reach * torch.stack(follows[::-1], 1) / slots
    return worth / worth.sum(1, keepdim=True)


def accepted(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """float32 [...]: chance that a token drawn from the logits [..., V] stands, 1 - TV."""
    q = torch.softmax(logits.float(), -1)
    return 1 - 0.5 * (q - torch.softmax(teacher.float(), -1)).abs().sum(-1)


def draft_loss(
    logits: torch.Tensor, confidence: torch.Tensor, anchors: Anchors
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, acceptance [B] without gradient, mean over the valid anchors).

    Per slot 0.1 cross entropy of the true token + 0.9 total variation to the teacher + the binary
    cross entropy of the confidence against the acceptance 1 - TV. logits [R, B, V].
    """
    log_q = torch.log_softmax(logits.float(), -1)
    p = torch.softmax(anchors.teacher.float(), -1)
    tv = 0.5 * (log_q.exp() - p).abs().sum(-1)
    accept = 1 - tv.detach()
    ce = -log_q.gather(-1, anchors.tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    known = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
    each = WEIGHTS["ce"] * ce + WEIGHTS["tv"] * tv + WEIGHTS["confidence"] * known
    share = (anchors.valid / anchors.valid.sum().clamp_min(1.0)).unsqueeze(-1)
    return (share * slot_weights(accept) * each).sum(), (share * accept).sum(0)
