"""Reference Engram: row ids of hashed n-grams, table look-up, and the gate into the streams.

Comes in: mapped token ids around each position, tables, streams. Goes out: row ids, or streams.
Source: model spec §3.4.
"""

from __future__ import annotations

import torch

from deepinfer.ops.torch.blocked import row_sum
from deepinfer.ops.torch.rowwise import inverse_rms, sigmoid
from deepinfer.quant import Packed, codec


def engram_rows(
    ngrams: torch.Tensor, multipliers: torch.Tensor, primes: torch.Tensor
) -> torch.Tensor:
    """Table rows int64 [N, (n - 1) heads] of mapped ids [N, n] (column s: the id s back, or pad).

    ``multipliers`` int64 [n], ``primes`` int64 [n - 1, heads]; columns follow each other in the
    table, each as long as its prime.
    """
    n = ngrams.shape[1]
    offsets = torch.cumsum(primes.flatten(), 0) - primes.flatten()
    mixed = ngrams[:, 0] * multipliers[0]
    rows = []
    for s in range(1, n):
        mixed = mixed ^ (ngrams[:, s] * multipliers[s])
        rows.append(mixed.unsqueeze(-1) % primes[s - 1])
    return torch.cat(rows, -1) + offsets


def engram_lookup(table: Packed | torch.Tensor, rows: torch.Tensor, dtype: torch.dtype):
    """Concatenated table rows [N, columns * width] in ``dtype`` for ids [N, columns]; exact."""
    if not isinstance(table, Packed):
        return table[rows].flatten(1).to(dtype)
    codes = table.codes.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
    values = codec.fp8_values(codes, table.scales[rows], table.block[1])
    return values.flatten(1).to(dtype)


def engram_gate(
    streams: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    image: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S[k] + gate_k value, and the gates [N, C]; kv [N, (C + 1) H] holds C keys, then the value.

    ``image`` bool [N]: positions whose gate is zero.
    """
    copies, hidden = streams.shape[1:]
    s = streams.float()
    keys, value = kv.float().unflatten(-1, (copies + 1, hidden)).split((copies, 1), 1)
    g = q_weight.float() * k_weight.float()
    rho = inverse_rms(s, eps) * inverse_rms(keys, eps)
    dot = row_sum(s * g * keys).float() * rho * hidden**-0.5
    gate = sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    if image is not None:
        gate = gate.masked_fill(image.unsqueeze(-1), 0.0)
    return (s + gate.unsqueeze(-1) * value).to(streams.dtype), gate
