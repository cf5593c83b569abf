"""The trainable weights: one flat float32 buffer, its gradients, and what the forward pass reads.

Comes in: the model configuration and the table of its tensors. Goes out: a mapping from checkpoint
names to differentiable tensors (bfloat16 copies of the masters, quantised in place where the phase
says so), laid out so that the optimiser sees few large arrays. It must not know losses or data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from deepinfer.checkpoint import names
from deepinfer.model.config import ModelConfig
from examples.train_tiny import fake_quant
from examples.train_tiny.ops import Stored

# Buffers that no gradient reaches: the balance rule moves the router bias.
BIASES = (".gate.bias", ".gate.bias_vl")
LAYERS = {"target": "layers", "draft": "mtp"}  # where the names of a group's layers start


@dataclass(frozen=True)
class Leaf:
    """One trainable tensor: matrices [count, out, in] or a plain array.

    `rule` is "muon" or "adam", `rate` its peak learning rate, `std` that of its first values,
    `quant` the weight format (kind, block) or None.
    """

    name: str
    shape: tuple[int, ...]
    rule: str
    rate: float
    std: float
    quant: tuple[str, tuple[int, int]] | None = None
    matrix: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass
class Span:
    """A run of the flat buffer that one rule updates: Muon matrices [count, out, in] or Adam."""

    start: int
    end: int
    matrix: tuple[int, int] | None
    rate: float


@dataclass
class Parameters:
    """Masters, gradients and the tensors of the forward pass, by checkpoint name."""

    config: ModelConfig
    device: torch.device
    quantise: bool = False
    group: str = "target"  # or "draft": the stages, trained over a frozen backbone
    extra: tuple[Leaf, ...] = ()  # what an ablation has beside the format's tensors
    leaves: dict[str, Leaf] = field(init=False)
    spans: list[Span] = field(init=False)

    def __post_init__(self) -> None:
        leaves = describe(self.config, self.group) + list(self.extra)
        leaves.sort(key=_layout)
        self.leaves = {leaf.name: leaf for leaf in leaves}
        size = sum(leaf.count for leaf in leaves)
        self.master = torch.zeros(size, device=self.device)
        self.grad = torch.zeros(size, device=self.device)
        self.shadow = torch.zeros(size, device=self.device, dtype=torch.bfloat16)
        self.places: dict[str, slice] = {}
        at = 0
        for leaf in leaves:
            self.places[leaf.name] = slice(at, at + leaf.count)
            at += leaf.count
        self.spans = _spans(leaves, self.places)
        self.adam_start = next(
            self.places[leaf.name].start for leaf in leaves if leaf.rule == "adam"
        )
        self.tensors = {}
        for leaf in leaves:
            tensor = self.master[self.places[leaf.name]].view(leaf.shape).requires_grad_()
            tensor.grad = self.grad[self.places[leaf.name]].view(leaf.shape)
            self.tensors[leaf.name] = tensor
        routers = (self.config.num_hidden_layers, self.config.n_routed_experts)
        if self.group == "draft":
            routers = (self.config.num_nextn_predict_layers, self.config.dspark_n_routed_experts)
        self.router_bias = torch.zeros(routers, device=self.device)

    def initialise(self, seed: int) -> None:
        """Draws every weight by the table of the recipe; the same on every machine."""
        generator = torch.Generator().manual_seed(seed)
        for leaf in self.leaves.values():
            value = _initial(leaf, self.config, generator)
            self.master[self.places[leaf.name]] = value.reshape(-1).to(self.device)
        self.router_bias.zero_()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Masters -> the bfloat16 copies of the forward pass, quantised where the phase says so."""
        self.shadow.copy_(self.master)
        if not self.quantise:
            return
        for quant, matrix, start, end in self._quantised_runs():
            run = self.master[start:end].view(-1, *matrix)
            self.shadow[start:end] = fake_quant.weight(run, *quant).reshape(-1)

    def weights(self) -> dict[str, torch.Tensor | Stored]:
        """What the model is built on: checkpoint name -> handle (matrices, tables) or tensor."""
        out: dict[str, torch.Tensor | Stored] = {}
        for name, leaf in self.leaves.items():
            tensor = self.tensors[name]
            if len(leaf.shape) == 1 or name.endswith((".q_weight", ".k_weight")):
                out[name] = tensor
                continue
            shadow = self.shadow[self.places[name]].view(leaf.shape)
            quantised = self.quantise and leaf.quant is not None
            # The indexer learns from its own loss alone; the model does not bend to it.
            detached = ".indexer." in name
            out[name] = Stored(tensor, shadow, quantised, detached)
        for layer, bias in enumerate(self.router_bias):
            for name in BIASES:
                out[f"{LAYERS[self.group]}.{layer}.ffn{name}"] = bias
        if self.group == "target" and self.config.tie_word_embeddings:
            out["head.weight"] = out["embed.weight"]
        return out

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Float32 copies of the masters by name, with the router biases (for saving, export)."""
        out = {n: self.master[self.places[n]].view(leaf.shape).clone()
               for n, leaf in self.leaves.items()}
        out["router_bias"] = self.router_bias.clone()
        return out

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes what `snapshot` gave, of any float type."""
        missing = set(self.leaves) - set(tensors)
        if missing:
            raise ValueError(f"the saved state lacks {sorted(missing)[:3]}: another configuration?")
        for name in self.leaves:
            self.master[self.places[name]] = tensors[name].reshape(-1).to(self.master)
        self.router_bias.copy_(tensors["router_bias"])
        self.refresh()

    @staticmethod
    def exported(
        snapshot: dict[str, torch.Tensor], group: str = "target"
    ) -> dict[str, torch.Tensor]:
        """A snapshot under the names of the checkpoint format (experts stacked), on the CPU."""
        out = {n: t.float().cpu() for n, t in snapshot.items() if n != "router_bias"}
        for layer, bias in enumerate(snapshot["router_bias"].float().cpu()):
            for name in BIASES:
                out[f"{LAYERS[group]}.{layer}.ffn{name}"] = bias.clone()
        return out

    def _quantised_runs(self):
        runs: list[tuple] = []
        for name, leaf in self.leaves.items():
            if leaf.quant is None or leaf.matrix is None:
                continue
            place = self.places[name]
            if runs and runs[-1][:2] == (leaf.quant, leaf.matrix) and runs[-1][3] == place.start:
                runs[-1] = (*runs[-1][:3], place.stop)
            else:
                runs.append((leaf.quant, leaf.matrix, place.start, place.stop))
        return runs


def describe(config: ModelConfig, group: str = "target") -> list[Leaf]:
    """Every trainable tensor of the backbone or of the draft stages, in the order of the format,
    experts stacked."""
    experts = config.n_routed_experts if group == "target" else config.dspark_n_routed_experts
    leaves: dict[str, Leaf] = {}
    for name, p in names.parameters(config, vision=False).items():
        if p.group != group or name.endswith(BIASES):
            continue
        if config.tie_word_embeddings and name == "head.weight":
            continue
        quant = None if p.block is None else (p.kind, p.block)
        if p.stack is None:
            leaves[name] = _leaf(name, p.shape, quant, config)
        elif p.stack[0] not in leaves:
            shape = (experts, *p.shape)
            leaves[p.stack[0]] = _leaf(p.stack[0], shape, quant, config)
    return list(leaves.values())


def _leaf(name: str, shape: tuple[int, ...], quant, config: ModelConfig) -> Leaf:
    def adam(rate: float, std: float) -> Leaf:
        return Leaf(name, shape, "adam", rate, std, quant, shape[-2:] if quant else None)

    if name == "embed.weight":
        return adam(6e-3, 0.5)
    if name == "head.weight":
        return adam(2e-3, 0.02)
    if name.endswith("engram.embed.weight"):
        return adam(1e-2, 0.5)
    if name.endswith("markov_head.embed.weight"):
        return adam(6e-3, 0.3)
    if name.endswith("markov_head.head.weight"):
        return adam(2e-3, 0.02)
    if name.endswith("confidence_head.proj.weight"):
        return adam(2e-3, 0.01)
    if name.endswith(("hc_attn_fn", "hc_ffn_fn")):
        return adam(2e-3, shape[-1] ** -0.5)
    if name.endswith("_base"):
        return adam(5e-3, 0.0)
    if name.endswith("_scale"):
        return adam(3e-3, 0.0)
    if name.endswith("attn_sink"):
        return adam(1e-2, 0.0)
    if name.endswith("norm.weight") or name.endswith((".q_weight", ".k_weight")):
        return adam(3e-3, 0.0)
    if ".indexer." in name or name.endswith("gate.weight"):
        return adam(2e-3, shape[-1] ** -0.5)
    rows, cols = shape[-2:]
    if name.endswith("wo_a.weight"):
        rows //= config.o_groups  # block diagonal: one matrix a group
    small = name.endswith(("wo_b.weight", ".w2", "w2.weight"))
    std = cols**-0.5 * (0.25 if small else 1.0)
    rate = (0.01 if name.startswith("mtp.") else 0.02) * max(1.0, rows / cols) ** 0.5
    return Leaf(name, shape, "muon", rate, std, quant, (rows, cols))


def _layout(leaf: Leaf):
    """Muon matrices of one shape lie together, one weight format after the other; Adam last."""
    if leaf.rule == "muon":
        return (0, leaf.matrix, str(leaf.quant))
    return (1, (0, 0), str(leaf.quant))


def _spans(leaves: list[Leaf], places: dict[str, slice]) -> list[Span]:
    spans: list[Span] = []
    for leaf in leaves:
        place = places[leaf.name]
        matrix = leaf.matrix if leaf.rule == "muon" else None
        last = spans[-1] if spans else None
        if last and last.matrix == matrix and last.rate == leaf.rate:
            last.end = place.stop
        else:
            spans.append(Span(place.start, place.stop, matrix, leaf.rate))
    return spans


def _initial(leaf: Leaf, config: ModelConfig, generator: torch.Generator) -> torch.Tensor:
    name, shape = leaf.name, leaf.shape
    if name.endswith("_base"):
        return _initial_base(name, config)
    if name.endswith("_scale"):
        return torch.full(shape, 0.2)
    if leaf.std == 0.0:
        return torch.zeros(shape) if name.endswith("attn_sink") else torch.ones(shape)
    value = torch.randn(shape, generator=generator) * leaf.std
    if name.endswith("engram.wkv.weight"):
        value[-config.hidden_size :] *= 0.25  # the value rows are a sublayer output
    return value


def _initial_base(name: str, config: ModelConfig) -> torch.Tensor:
    """pre reads copy (layer mod C) first, post is even, comb keeps the copies apart."""
    c = config.hc_mult
    layer = int(name.split(".")[1])
    pre = torch.full((c,), -3.0)
    pre[layer % c] = 0.0
    comb = torch.full((c, c), -3.0).fill_diagonal_(3.0)
    return torch.cat((pre, torch.zeros(c), comb.flatten()))
