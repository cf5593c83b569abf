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

GAMMA = 4.0  # slots count e^{-(k - 1) / gamma}, k = 1 .. B
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
    """(logits [R, B, V], raw confidence [R, B]) with the true token before every slot.

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
    confidence = draft.confidence(x.flatten(0, 1), e)
    return logits, confidence.view(-1, slots)


def slot_weights(slots: int, device: torch.device) -> torch.Tensor:
    """float32 [B], sum 1, falling as e^{-(k - 1) / 4}."""
    falling = torch.exp(-torch.arange(slots, device=device) / GAMMA)
    return falling / falling.sum()


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
    weights = slot_weights(logits.shape[1], logits.device)
    return (share * weights * each).sum(), (share * accept).sum(0)
