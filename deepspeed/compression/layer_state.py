"""What a compressed layer knows: how its weight and its inputs are rounded, what of it is pruned, and what is on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from deepspeed import comm
from deepspeed.compression.snip import BlockRemoval
from deepspeed.errors import UsageError
from deepspeed.ops.codecs.rows import dither
from deepspeed.ops.quantizer.quantizer import GroupCodes, Reduce, round_groups
from deepspeed.parallel.regions import ParameterCut

PRUNINGS = ("sparse_pruning", "row_pruning", "head_pruning", "channel_pruning")
"""In the order in which masks are applied."""


@dataclass(frozen=True, slots=True)
class WeightRounding:
    """How a weight is rounded, apart from when."""

    start_bits: int
    target_bits: int
    period: int = 1
    groups: int = 1
    asym: bool = False
    stochastic: bool = False
    in_forward: bool = True
    change_ratio: float | None = None
    """By how much the share of the unrounded weight falls with each step; None: it has none."""
    store_integers: bool = False
    verbose: bool = False


@dataclass(slots=True)
class BitPace:
    """How many bits a weight has after so many steps of its quantisation; each takes twice the steps of the last."""

    rounding: WeightRounding
    bits: int
    since: int = 0
    """The step at which the last bit went."""
    edge: int = 0
    """The step at which the next one goes."""
    factor: int = 1
    """How many times longer the bits after the next one last."""
    factors: list[int] = field(default_factory=list)
    """What it was when each bit went."""

    @classmethod
    def of(cls, rounding: WeightRounding) -> BitPace:
        return cls(rounding, rounding.start_bits, edge=rounding.period)

    def advance(self, steps: int) -> bool:
        """Go to a step, also to one before; true if the number of bits changed."""
        before, start = self.bits, self.rounding.start_bits
        self.bits, self.since, self.edge = start, 0, self.rounding.period
        while self.bits > self.rounding.target_bits and steps >= self.edge:
            if len(self.factors) == start - self.bits:
                self.factors.append(self.factor)
            self.since, self.edge = self.edge, self.edge * 2 * self.factors[start - self.bits]
            self.bits -= 1
        return self.bits != before

    def unrounded(self, steps: int) -> float:
        """The share of the unrounded weight: it begins anew with each change of bits."""
        ratio = self.rounding.change_ratio
        return 0.0 if ratio is None else max(0.0, 1.0 - ratio * (steps - self.since))


@dataclass(slots=True)
class ActivationRounding:
    """How inputs are rounded."""

    bits: int
    asym: bool = False
    static: bool = False
    on: bool = False


@dataclass(slots=True)
class Pruning:
    """How much of a layer is kept, and by what."""

    method: Literal["l1", "topk", "snip_momentum"]
    ratio: float
    heads: int = 1
    on: bool = False
    removal: BlockRemoval | None = None
    """Of snip_momentum: when which blocks go."""


@dataclass
class LayerCompression:
    """The compression of one layer."""

    original: type[nn.Module]
    """The class that the layer had, and gets back."""
    name: str = ""
    """Of the module, for messages and random numbers."""
    weights: WeightRounding | None = None
    pace: BitPace | None = None
    activations: ActivationRounding | None = None
    prunings: dict[str, Pruning] = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)
    """Hooks on the layer."""
    weights_on: bool = False
    step: int = 0
    """Steps since the quantisation of the weight began."""
    follows: list[Any] = field(default_factory=list)
    """Of a batch norm: the convolutions before it."""
    grid: Any = None
    """Of a layer that is being cleaned: the numbers that its weight may have, if it is to rest as integers."""
    _kept: tuple[tuple[Any, ...], Tensor] | None = None
    """What the weight was rounded to in this step."""

    @property
    def techniques(self) -> list[str]:
        """Those of the config that the layer has."""
        found = [*self.prunings]
        found += ["weight_quantization"] if self.weights is not None else []
        return [*found, "activation_quantization"] if self.activations is not None else found

    def round_weight(self, weight: Tensor, cut: ParameterCut | None, *, keep: bool) -> Tensor:
        """The rounded weight, without a gradient; with `keep` it is computed once for each step."""
        assert self.pace is not None, "the weight is quantised"
        key = (self.step, self.pace.bits, weight._version, weight.data_ptr(), weight.dtype)
        if keep and self._kept is not None and self._kept[0] == key:
            return self._kept[1]
        share = self.pace.unrounded(self.step)
        found = self.codes(weight, self.pace.bits, cut).values.view(weight.shape)
        if share > 0:
            found = found.lerp_(weight.detach().float(), share)
        found = found.to(weight.dtype)
        self._kept = (key, found) if keep else None
        return found

    def codes(self, weight: Tensor, bits: int, cut: ParameterCut | None = None) -> GroupCodes:
        """The weight in groups of codes of so many bits."""
        assert self.weights is not None, "the weight is quantised"
        groups, reduce = groups_here(self.weights.groups, weight, cut, self.name)
        rows = weight.detach().reshape(groups, -1)
        noise = None
        if self.weights.stochastic and bits > 2:
            noise = dither(rows, seed_of(self.name, self.step), 0)
        return round_groups(rows, bits, asym=self.weights.asym, noise=noise, reduce=reduce)


def seed_of(name: str, step: int) -> int:
    """Of the random numbers of a layer in a step: the same on all ranks, and in a run that is resumed."""
    return (sum(ord(letter) * (place + 1) for place, letter in enumerate(name)) * 65537 + step) % 2**31


def groups_here(groups: int, weight: Tensor, cut: ParameterCut | None, name: str) -> tuple[int, Reduce]:
    """How many groups this rank's part of a weight has, and how their facts become those of whole groups."""
    split = None if cut is None else cut.splits.get("weight")
    if cut is None or split is None:
        return groups, lambda fact, _: fact
    whole = split.whole_shape(weight.shape)
    rows, ranks = whole[0], cut.axis.size
    plain = split.parts == tuple(
        ((rank * whole[split.dim] // ranks, (rank + 1) * whole[split.dim] // ranks),) for rank in range(ranks)
    )
    if groups == 1 or (split.dim > 0 and rows % groups == 0):
        return groups, _over(cut)
    if split.dim == 0 and plain and groups % ranks == 0:
        return groups // ranks, lambda fact, _: fact
    raise UsageError(
        f"compression_training: quantize_groups is {groups}, and {ranks} tensor-parallel ranks share the {rows} rows "
        f"of {name}; use 1 group, or a multiple of {ranks} that divides the rows"
    )


def _over(cut: ParameterCut) -> Reduce:
    operations = {"max": comm.ReduceOp.MAX, "sum": comm.ReduceOp.SUM}

    def reduce(fact: Tensor, kind: str) -> Tensor:
        fact = fact.contiguous()
        comm.all_reduce(fact, op=operations[kind], group=cut.axis.group)
        return fact

    return reduce


def over_inputs(cut: ParameterCut | None) -> Reduce | None:
    """For facts about inputs of which each rank has a part; None where the rank has all."""
    split = None if cut is None else cut.splits.get("weight")
    return _over(cut) if cut is not None and split is not None and split.dim == 1 else None


def require_whole(weight: Tensor | None, what: str) -> None:
    """Refuse a weight whose values are not all here."""
    if weight is None or weight.is_meta or hasattr(weight, "ds_id") or not weight.numel():
        raise UsageError(
            f"{what} looks at the values of weights, and this model has none here, or parts of them; build it outside "
            "deepspeed.zero.Init and off the meta device"
        )
