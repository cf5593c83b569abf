"""Reference codecs: FP8 (E4M3) and FP4 (E2M1) with power-of-two or E4M3 block scales, bit for bit.

Comes in: float tensors, or codes and scales. Goes out: the other form. Source of every formula:
model spec §2.3 and §3.0. Must not know checkpoints or layers.
"""

from __future__ import annotations

import torch

from deepinfer.quant.formats import Packed, blocks

E4M3_MAX = 448.0
E2M1_MAX = 6.0
# A value above (or, where >=, at) a threshold moves to the next code: ties go to the even code.
_E2M1_ABOVE = (0.25, 1.25, 2.5, 5.0)
_E2M1_FROM = (0.75, 1.75, 3.5)


def exponent_ceil(t: torch.Tensor) -> torch.Tensor:
    """ceil(log2 t) of positive normal float32 values, read from their bits. int32, same shape."""
    bits = t.float().view(torch.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).int()


def power_of_two(k: torch.Tensor) -> torch.Tensor:
    """2^k as float32 for integers k in [-127, 127]; exact (k = -127 is subnormal)."""
    k = k.int()
    return torch.where(k > -127, (k + 127) << 23, torch.full_like(k, 1 << 22)).view(torch.float32)


def power_above(t: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2 t) of positive normal float32 values up to 2^127; float32, exact."""
    bits = t.view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def scale_bytes(s: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (uint8) of normal float32 powers of two."""
    return (s.view(torch.int32) >> 23).to(torch.uint8)


def scale_from_bytes(scales: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (uint8) as float32 multipliers: byte b is 2^(b - 127), 255 is NaN."""
    value = power_of_two(scales.int().clamp(max=254) - 127)
    return torch.where(scales == 255, torch.nan, value)


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 code (uint8, bit 3 = sign, -0 keeps it) of float32 values within [-6, 6]."""
    a = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for t in _E2M1_ABOVE:
        code += a > t
    for t in _E2M1_FROM:
        code += a >= t
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of E2M1 codes 0..15; code 8 is -0."""
    # The sign and the three bits at the places of a float16's: the value times 2^-14.
    codes = codes.short()
    return (((codes & 8) << 12) | ((codes & 7) << 9)).view(torch.float16).float() * 2.0**14


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., n] -> bytes [..., n / 2], even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """bytes [..., n / 2] -> codes [..., n]."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _groups(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.float().unflatten(-1, (-1, group))


def _fp8(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = _groups(x, group)
    amax = g.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    # 1 / 448 is rounded to float32, as every Python number that meets a float32 tensor.
    scale = power_above(amax * (1 / E4M3_MAX))
    return (g / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def fp8_groups(x: torch.Tensor, group: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 activation quantiser: x [..., n] -> E4M3 codes [..., n], E8M0 bytes [..., n / group].

    a = max(max|x|, 1e-4), s = 2^ceil(log2(a * fl32(1/448))). ``n`` must be a multiple of ``group``.
    """
    codes, scale = _fp8(x, group)
    return codes.flatten(-2), scale_bytes(scale).squeeze(-1)


def fp8_rounded(x: torch.Tensor, group: int = 32) -> torch.Tensor:
    """float32 values of x [..., n] after the FP8 activation quantiser: codes and back."""
    codes, scale = _fp8(x, group)
    return (codes.float() * scale).flatten(-2)


def fp8_values(codes: torch.Tensor, scales: torch.Tensor, group: int = 32) -> torch.Tensor:
    """float32 values of E4M3 codes [..., n] with E8M0 bytes [..., n / group]; exact."""
    return (_groups(codes, group) * scale_from_bytes(scales).unsqueeze(-1)).flatten(-2)


def fp4_index_groups(x: torch.Tensor, group: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Index flavour of FP4: x [..., n] -> bytes [..., n / 2], E8M0 bytes [..., n / group]."""
    g = _groups(x, group)
    amax = g.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126)
    scale = power_above(amax * (1 / E2M1_MAX))
    q = (g / scale).clamp(-E2M1_MAX, E2M1_MAX)
    return pack_nibbles(e2m1_codes(q).flatten(-2)), scale_bytes(scale).squeeze(-1)


def fp4_index_values(packed: torch.Tensor, scales: torch.Tensor, group: int = 32) -> torch.Tensor:
    """float32 values of index-flavour FP4; exact."""
    g = e2m1_values(unpack_nibbles(packed)).unflatten(-1, (-1, group))
    return (g * scale_from_bytes(scales).unsqueeze(-1)).flatten(-2)


def fp4_kv_groups(x: torch.Tensor, group: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """KV flavour of FP4: x [..., n] -> packed bytes [..., n / 2], E4M3 scales [..., n / group].

    s = e4m3(max(max|x|, 6 * 2^-9) / 6), clamped to 448.
    """
    g = _groups(x, group)
    amax = g.abs().amax(-1).clamp_min(6 * 2.0**-9)
    s = (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    q = (g / s.float().unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX)
    return pack_nibbles(e2m1_codes(q).flatten(-2)), s


def fp4_kv_values(packed: torch.Tensor, scales: torch.Tensor, group: int = 16) -> torch.Tensor:
    """float32 values of KV-flavour FP4; exact."""
    g = e2m1_values(unpack_nibbles(packed)).unflatten(-1, (-1, group))
    return (g * scales.float().unsqueeze(-1)).flatten(-2)


def _expand(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """Per-element float32 scales [..., rows, cols] of a block grid (last blocks may be partial)."""
    s = scale_from_bytes(scales)
    s = s.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return s.repeat_interleave(block[1], -1)[..., : shape[-1]]


def unpack(packed: Packed, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The values of a packed tensor [..., rows, cols]; exact in bfloat16 and wider."""
    if packed.kind == "fp4":
        values = e2m1_values(unpack_nibbles(packed.codes))
    else:
        values = packed.codes.float()
    return (values * _expand(packed.scales, packed.block, packed.shape)).to(dtype)


def pack(x: torch.Tensor, kind: str, block: tuple[int, int]) -> Packed:
    """Quantise weights [..., rows, cols] to ``kind`` ("fp8" or "fp4") with one scale a block.

    The scale is the smallest power of two that brings the block's maximum into range (1 for a
    block of zeros), so values that are already representable come back unchanged.
    """
    limit = E2M1_MAX if kind == "fp4" else E4M3_MAX
    rows, cols = x.shape[-2:]
    grid_rows, grid_cols = blocks(rows, block[0]), blocks(cols, block[1])
    padded = x.new_zeros(*x.shape[:-2], grid_rows * block[0], grid_cols * block[1]).float()
    padded[..., :rows, :cols] = x
    amax = padded.abs().unflatten(-1, (grid_cols, block[1])).amax(-1)
    amax = amax.unflatten(-2, (grid_rows, block[0])).amax(-2)
    k = exponent_ceil((amax / limit).clamp_min(2.0**-126)).clamp(-126, 126)
    k = torch.where(amax > 0, k, torch.zeros_like(k))
    scales = (k + 127).to(torch.uint8)
    q = (x.float() / _expand(scales, block, x.shape)).clamp(-limit, limit)
    codes = pack_nibbles(e2m1_codes(q)) if kind == "fp4" else q.to(torch.float8_e4m3fn)
    return Packed(codes, scales, block, kind)
