"""Random weights made where they will be used: packed as a checkpoint stores them, without one.

A configuration, a device and a seed come in, `Weights` go out, of the sizes that `synth.py` gives
random checkpoints. Nothing is ever there unpacked as a whole: codes are drawn as bytes, chunk by
chunk in the device's memory. It must not know what the weights are for.
"""

from __future__ import annotations

import math
import zlib

import torch

from deepinfer.checkpoint.load import Destinations, LoadReport, Weights
from deepinfer.checkpoint.match import Coverage
from deepinfer.checkpoint.names import parameters
from deepinfer.checkpoint.synth import deviation, scaled
from deepinfer.model.config import ModelConfig
from deepinfer.quant.formats import Packed

__all__ = ["random_weights"]

CHUNK = 1 << 20  # bytes, or elements, drawn at once: they stay in a cache
SMALL = 1 << 16  # elements of what is drawn on the host
# Root mean squares: of the bytes -127.5 ... 127.5, and of the sixteen E2M1 values.
BYTE_RMS = math.sqrt((256**2 - 1) / 12)
E2M1_RMS = math.sqrt(8.5625)


def random_weights(
    config: ModelConfig, device: torch.device | str = "cpu", seed: int = 0, draft: bool = True
) -> Weights:
    """Weights of every parameter on `device`; `draft=False` leaves the stages out.

    Values have the deviations of `synth.random_tensors` (model spec §9) and a uniform law instead
    of a normal one; an expert's FP4 codes are uniform and its scales one of two neighbours. The
    same seed gives the same bits on the same kind of device: every entry has a stream of its own.
    """
    params = parameters(config, vision=False)
    if config.tie_word_embeddings:
        del params["head.weight"]
    if not draft:
        params = {name: p for name, p in params.items() if p.group != "draft"}
    destinations = Destinations(params, torch.device(device))
    entries = destinations.entries
    for name, entry in entries.items():
        where = entry.device if isinstance(entry, Packed) or entry.numel() > SMALL else "cpu"
        draw = torch.Generator(where).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        if not isinstance(entry, Packed):
            _plain(config, name, entry, draw)
        elif entry.kind == "fp4":
            _fp4(entry, deviation(name, entry.shape[-1]), draw)
        else:
            _fp8(entry, deviation(name, entry.shape[-1]), draw)
    if config.tie_word_embeddings:
        entries["head.weight"] = entries["embed.weight"]
    nbytes = sum(view.nbytes for view in destinations.views.values())
    return Weights(entries, LoadReport(Coverage({}, {}, {}), nbytes))


def _plain(config: ModelConfig, name: str, into: torch.Tensor, draw: torch.Generator) -> None:
    if into.numel() <= SMALL:
        noise = torch.randn(into.shape, generator=draw)
        into.copy_(scaled(config, name, noise))
        return
    for rows in into.split(max(CHUNK // into.shape[-1], 1)):
        rows.copy_(scaled(config, name, _unit(rows.numel(), draw).view(rows.shape)))


def _fp8(packed: Packed, wanted: float, draw: torch.Generator) -> None:
    """Codes of a deviation from 48 to 96, one scale: nothing is clipped, little is subnormal."""
    exponent = math.floor(math.log2(wanted / 48))
    packed.scales.fill_(exponent + 127)
    for part in packed.codes.view(-1).split(CHUNK):
        part.copy_(_unit(part.numel(), draw) * (wanted / 2.0**exponent))


def _fp4(packed: Packed, wanted: float, draw: torch.Generator) -> None:
    """Uniform codes; so many scales are one step larger that the mean square is as wanted."""
    exponent = math.floor(math.log2(wanted / E2M1_RMS))
    larger = ((wanted / E2M1_RMS / 2.0**exponent) ** 2 - 1) / 3
    for part in packed.codes.view(-1).split(CHUNK):
        _bytes(part, draw)
    for part in packed.scales.view(-1).split(CHUNK):
        _bytes(part, draw)
        part.copy_((part < round(256 * larger)) + (exponent + 127))


def _unit(count: int, draw: torch.Generator) -> torch.Tensor:
    """float32 [count] of mean 0 and deviation 1 on the generator's device, from a byte each."""
    drawn = torch.empty(count, dtype=torch.uint8, device=draw.device)
    _bytes(drawn, draw)
    return drawn.float().sub_(127.5).div_(BYTE_RMS)


def _bytes(into: torch.Tensor, draw: torch.Generator) -> None:
    """Fill uint8 [n] with random bytes, eight at a time as far as that goes."""
    whole = len(into) // 8 * 8
    into[:whole].view(torch.int64).random_(-(2**63), None, generator=draw)
    into[whole:].random_(0, 256, generator=draw)
