"""Matrix products of the cpu back end. Meaning and shapes: `deepinfer.ops.torch.linear`.

`prepare` puts a weight's codes in the order that the kernels read (csrc/include/deepinfer/codes.h);
they take no more bytes than before, but for what fills up the last panel. What the kernels do not
hold goes to the torch reference: float32 rows, FP8 and FP4 with other block shapes or with scales
far from 1, and weights that are not finite.
"""

from __future__ import annotations

import ctypes

import torch

from deepinfer.ops.cpu.library import INT, LONG, PTR, TYPES, Library
from deepinfer.ops.torch import blocked
from deepinfer.ops.torch import linear as reference
from deepinfer.ops.torch.linear import Weight
from deepinfer.quant import Packed
from deepinfer.quant.formats import blocks

LANES, GROUP = 16, 32
_KINDS = {"fp8": 0, "fp4": 1, torch.bfloat16: 2, torch.float32: 3}
_BLOCKS = {"fp8": (32, 32), "fp4": (1, 32)}
# Scale bytes with which no group's arithmetic can leave float32's normal range.
_LEAST, _MOST = 127 - 57, 127 + 60
_BEFORE = 64  # bytes that may be read before the first panel; keeps panels aligned
_CHECKED = 1 << 24  # elements looked at together


class _Order:
    """A panel's bytes [16 columns, bytes of a column] cut into more dimensions, and re-ordered."""

    def __init__(self, shape: tuple[int, ...], to: tuple[int, ...]):
        self.shape = shape
        self.to = (0, *(i + 1 for i in to))
        self.back = tuple(sorted(range(len(self.to)), key=self.to.__getitem__))

    def panels(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """uint8 [..., N, bytes] -> [count * panels, ...]; columns are zero up to ``width``."""
        n = x.shape[-2]
        fill = (0, width - x.shape[-1], 0, -n % LANES)
        if any(fill):
            x = torch.nn.functional.pad(x, fill)
        x = x.reshape(x.numel() // (LANES * width), *self.shape).permute(self.to)
        return torch.empty(_BEFORE + x.numel(), dtype=x.dtype)[_BEFORE:].view(x.shape).copy_(x)

    def matrix(self, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The inverse; ``shape`` [..., N, bytes]."""
        n, width = shape[-2:]
        x = x.permute(self.back).reshape(-1, blocks(n, LANES) * LANES, x[0].numel() // LANES)
        return x[:, :n, :width].reshape(shape)


def _plain(unit: int) -> _Order:
    """Units of ``unit`` bytes a column."""
    return _Order((LANES, -1, unit), (1, 0, 2))


_SCALES = _plain(1)


def _order(kind: str | torch.dtype, level: str) -> _Order:
    if kind == "fp4" and level == "avx2":  # codes.h
        return _Order((2, 2, 4, -1, 2), (3, 1, 4, 2, 0))
    return _plain(4)


class _Matrix(ctypes.Structure):
    """`Matrix` of csrc/include/deepinfer/panels.h."""

    _fields_ = [
        ("codes", PTR),
        ("scales", PTR),
        ("kind", LONG),
        ("n", LONG),
        ("k", LONG),
        ("count", LONG),
    ]


class Panels:
    """A matrix [..., N, K], or a stack, in the kernels' order; ``address`` is what they take."""

    def __init__(self, source: Packed | torch.Tensor, level: str):
        packed = isinstance(source, Packed)
        self.kind = source.kind if packed else source.dtype
        self.quantised = packed
        self.shape = tuple(source.shape)
        self._order = _order(self.kind, level)
        codes = (source.codes if packed else source).contiguous().view(torch.uint8)
        n, k = self.shape[-2:]
        self._bytes = (*self.shape[:-1], codes.shape[-1])  # as stored
        width = codes.shape[-1] * blocks(k, GROUP) * GROUP // k
        self._codes = self._order.panels(codes, width)
        scales = source.scales.contiguous() if packed else None
        self._scales = _SCALES.panels(scales, scales.shape[-1]) if self.kind == "fp4" else scales
        where = 0 if self._scales is None else self._scales.data_ptr()
        count = self._codes.shape[0] // blocks(n, LANES)
        self._passed = _Matrix(self._codes.data_ptr(), where, _KINDS[self.kind], n, k, count)
        self.address = ctypes.addressof(self._passed)

    def source(self) -> Packed | torch.Tensor:
        """The matrix as it was, made anew."""
        codes = self._order.matrix(self._codes, self._bytes)
        if isinstance(self.kind, torch.dtype):
            return codes.view(self.kind)
        if self.kind == "fp8":
            return Packed(codes.view(torch.float8_e4m3fn), self._scales, (32, 32), "fp8")
        shape = (*self.shape[:-1], self.shape[-1] // GROUP)
        return Packed(codes, _SCALES.matrix(self._scales, shape), (1, 32), "fp4")


class PanelWeight(Weight):
    """A handle that holds panels alone; the reference ops see the source, made anew each time."""

    def __init__(self, panels: Panels):
        self.panels = panels
        self.quantised = panels.quantised
        self._keep, self._kept = False, None

    @property
    def source(self) -> Packed | torch.Tensor:
        return self.panels.source()


def _supported(source: Packed | torch.Tensor) -> bool:
    if not isinstance(source, Packed):
        parts = source.reshape(-1).split(_CHECKED)
        return source.dtype in _KINDS and all(part.isfinite().all() for part in parts)
    if source.block != _BLOCKS.get(source.kind) or source.shape[-1] % GROUP:
        return False
    if source.scales.numel() and not _LEAST <= source.scales.min() <= source.scales.max() <= _MOST:
        return False
    if source.kind == "fp4":
        return True
    codes = source.codes.contiguous().view(torch.uint8).view(-1)
    return not any((part & 127 == 127).any() for part in codes.split(_CHECKED))


def panels(weight: Weight, level: str) -> Panels | None:
    """The panels of a handle; None where the kernels do not hold it."""
    try:
        return weight.panels
    except AttributeError:
        source = weight.source
        if not isinstance(source, Packed) and source.dtype == torch.float32:
            # As the reference sees it: linear_f32 is compared value by value.
            snapped = blocked.snap(source).flatten(-2)[..., : source.shape[-1]]
            source = snapped.float()
        weight.panels = Panels(source, level) if _supported(source) else None
        return weight.panels


def together(level: str, *weights: Weight) -> list[Panels | None]:
    """The panels of handles that an op takes together, kept on the first: they stay together."""
    first, others = weights[0], weights[1:]
    kept = getattr(first, "together", None)
    if kept is None or kept[0] != others:
        first.together = kept = others, [panels(w, level) for w in weights]
    return kept[1]


def multiplies(held: Panels | None) -> bool:
    """Whether `linear` and `grouped_linear` take a matrix."""
    return held is not None and held.kind != torch.float32


def prepare(library: Library):
    def prepare(source: Packed | torch.Tensor, keep: bool) -> Weight:
        # float32 rows need the reference, and so the matrix as it is.
        wide = isinstance(source, torch.Tensor) and source.dtype == torch.float32
        if wide or not _supported(source):
            return reference.prepare(source, keep)
        return PanelWeight(Panels(source, library.level))

    return prepare


def linear(library: Library):
    call = library.op("linear", PTR, LONG, PTR, PTR)

    def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
        w = panels(weight, library.level)
        if not multiplies(w) or x.dtype != torch.bfloat16:
            return reference.linear(x, weight)
        x = x.contiguous()
        rows = x.shape[0]
        out = x.new_empty(rows, w.shape[0])
        if rows:
            call(x.data_ptr(), rows, w.address, out.data_ptr())
        return out

    return linear


def linear_f32(library: Library):
    call = library.op("linear_f32", PTR, INT, LONG, PTR, PTR)

    def linear_f32(x: torch.Tensor, weight: Weight) -> torch.Tensor:
        w = panels(weight, library.level)
        if w is None or weight.quantised:
            return reference.linear_f32(x, weight)
        x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty(rows, w.shape[0])
        if rows:
            call(x.data_ptr(), TYPES[x.dtype], rows, w.address, out.data_ptr())
        return out

    return linear_f32


def grouped_linear(library: Library):
    call = library.op("grouped_linear", PTR, LONG, LONG, PTR, PTR)

    def grouped_linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
        w = panels(weight, library.level)
        if not multiplies(w) or x.dtype != torch.bfloat16:
            return reference.grouped_linear(x, weight)
        x = x.contiguous()
        rows, groups = x.shape[:2]
        out = x.new_empty(rows, w.shape[0])
        if rows:
            call(x.data_ptr(), rows, groups, w.address, out.data_ptr())
        return out

    return grouped_linear
