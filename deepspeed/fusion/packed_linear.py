"""Layers whose weights are held in few bits: linear ones, also those that ranks share, Conv1D, and stacked experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.errors import UsageError
from deepspeed.fusion.experts import NAMES, activation_of, is_stacked
from deepspeed.ops.generate.experts import routed_experts
from deepspeed.ops.generate.packed import pack, packed_linear, unpack
from deepspeed.ops.generate.packed_weight import UNIT, PackedWeight
from deepspeed.parallel.regions import cut_of
from deepspeed.transformers.replacement import class_before, replacement

_PARTS = ("packed_data", "packed_scales", "packed_zeros")


@dataclass(frozen=True)
class WeightPacking:
    """How weights are rounded: see `pack`."""

    mode: str
    group_size: int = 128
    symmetric: bool = True
    exclude: tuple[str, ...] = ()
    """Regular expressions, matched from the start of module names to leave."""
    rounded_input: Callable[[Tensor], Tensor] | None = None
    """What becomes of inputs before they are multiplied."""
    groups: int = 1
    """Above 1, groups of a row instead of their size: so many at most, since a group has whole units."""

    def size_for(self, columns: int) -> int:
        """The group size for a row of so many numbers."""
        return self.group_size if self.groups == 1 else -(-columns // (self.groups * UNIT)) * UNIT


class PackedProduct(nn.Module):
    """A layer without the parameter `weight`; the attribute of that name is widened anew on each access."""

    packed_mode: tuple[str, tuple[int, int], int, bool]
    rounded_input: Callable[[Tensor], Tensor] | None
    packed_dtype: torch.dtype
    packed_transposed: bool

    @property
    def packed(self) -> PackedWeight:
        """The weight [out, in] as it is held."""
        mode, shape, group_size, symmetric = self.packed_mode
        data, scales, zeros = (self._buffers[name] for name in _PARTS)
        assert data is not None, "it is set when a layer is packed"
        assert scales is not None, "they are set when a layer is packed"
        return PackedWeight(mode, data, scales, zeros, shape, group_size, symmetric)

    @property
    def weight(self) -> Tensor:
        """The weight that the packed one stands for, as the layer had it."""
        found = unpack(self.packed, self.packed_dtype)
        return found.t() if self.packed_transposed else found

    def product(self, inputs: Tensor, *, with_bias: bool = True) -> Tensor:
        """The product with the weight, and the bias."""
        inputs = inputs if self.rounded_input is None else self.rounded_input(inputs)
        return packed_linear(inputs, self.packed, self.bias if with_bias else None)  # type: ignore[arg-type]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of `weight`."""
        shape = self.packed_mode[1]
        return shape[::-1] if self.packed_transposed else shape

    def set_weight(self, weight: Tensor) -> None:
        """Round other values of the whole weight, in the same way and in the same memory."""
        mode, _, group_size, symmetric = self.packed_mode
        made = pack(weight.t() if self.packed_transposed else weight.flatten(0, -2), mode, group_size, symmetric)
        for name, value in zip(_PARTS, (made.data, made.scales, made.zeros), strict=True):
            if value is not None:
                self._buffers[name].copy_(value)  # type: ignore[union-attr]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedProduct:
        """Packed tensors follow to other devices, and keep their dtypes."""
        held = {name: self._buffers.pop(name) for name in _PARTS}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in held.items():
            if value is not None:
                moved = fn(value.new_empty(0, dtype=self.packed_dtype))
                held[name] = value.to(moved.device) if moved.device != value.device else value
                last = moved.dtype
        self._buffers.update(held)
        self.packed_dtype = last
        return self


class PackedLinear(PackedProduct):
    """A whole layer of that kind."""

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input)


class PackedStack(PackedProduct):
    """One of the weights [experts, out, in] of stacked experts, as the rows of one matrix."""

    packed_experts: int

    @property
    def weight(self) -> Tensor:
        return super().weight.view(self.whole_shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        rows, columns = self.packed_mode[1]
        return self.packed_experts, rows // self.packed_experts, columns


class PackedExperts(nn.Module):
    """Stacked gated experts that hold a `PackedStack` in the place of each parameter."""

    packed_kind: str

    def product(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What the experts give that tokens chose."""
        stacks = [self._modules[name] for name in NAMES]
        weights = [stack.packed for stack in stacks if isinstance(stack, PackedStack)]
        return routed_experts(hidden_states, *weights, top_k_index, top_k_weights, self.packed_kind)  # type: ignore[call-arg,arg-type]


class WholePackedExperts(PackedExperts):
    """All of them are here."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.product(hidden_states, top_k_index, top_k_weights)


def packed_parameters(model: nn.Module) -> dict[str, PackedProduct]:
    """The packed weights of a model, by the names that they had as parameters."""
    packed = ((name, each) for name, each in model.named_modules() if isinstance(each, PackedProduct))
    return {name if isinstance(each, PackedStack) else f"{name}.weight": each for name, each in packed}


@torch.no_grad()
def join(layers: Sequence[PackedProduct]) -> PackedWeight:
    """Let packed layers of one form hold views of one weight, which has the rows of all of them."""
    given = [layer.packed for layer in layers]
    rows = [each.shape[0] for each in given]
    made: list[Tensor | None] = []
    for name in _PARTS:
        parts = [part for layer in layers if (part := layer._buffers[name]) is not None]
        made.append(torch.cat(parts) if parts else None)
        for layer, view in zip(layers, made[-1].split(rows) if made[-1] is not None else (), strict=False):
            layer._buffers[name] = view
    data, scales, zeros = made
    first = given[0]
    assert data is not None, "packed layers have numbers"
    assert scales is not None, "packed layers have scales"
    return replace(first, data=data, scales=scales, zeros=zeros, shape=(sum(rows), first.shape[1]))


@torch.no_grad()
def pack_layer(module: nn.Module, packing: WeightPacking) -> None:
    """Let a layer hold its weight so; see `refusal` for which can."""
    transposed = _is_transposed(module)
    weight: Tensor = module.weight  # type: ignore[assignment]
    base = type(module)
    module.__class__ = class_before(PackedProduct if cut_of(module) is not None else PackedLinear, base)
    del module._parameters["weight"]
    _hold(module, weight, packing, transposed=transposed)


@torch.no_grad()
def pack_experts(module: nn.Module, packing: WeightPacking) -> None:
    """The same for stacked experts."""
    module.packed_kind = activation_of(module)  # type: ignore[assignment]
    module.__class__ = class_before(PackedExperts if cut_of(module) is not None else WholePackedExperts, type(module))
    for name in NAMES:
        weight = module._parameters.pop(name)
        assert weight is not None, "both are there"
        stack = PackedStack()
        stack.packed_experts = len(weight)
        _hold(stack, weight, packing)
        setattr(module, name, stack)


def _hold(module: Any, weight: Tensor, packing: WeightPacking, *, transposed: bool = False) -> None:
    """Let a module that has lost its weight hold what it is rounded to."""
    rows = weight.t().contiguous() if transposed else weight.flatten(0, -2)
    made = pack(rows, packing.mode, packing.size_for(rows.shape[1]), packing.symmetric)
    for name, value in zip(_PARTS, (made.data, made.scales, made.zeros), strict=True):
        module.register_buffer(name, value)
    module.packed_mode = made.mode, made.shape, made.group_size, made.symmetric
    module.packed_dtype, module.packed_transposed = weight.dtype, transposed
    module.rounded_input = packing.rounded_input


def pack_layers(
    model: nn.Module,
    packing: WeightPacking,
    own: Mapping[str, WeightPacking] | None = None,
    inside: Collection[str] = ("",),
) -> tuple[list[str], dict[str, str]]:
    """Pack linear layers and experts inside of modules of a model: (their names, name → why another one is left).

    `own` has parts of names → another packing for the layers that they match.
    """
    hidden = [re.compile(pattern) for pattern in packing.exclude]
    done: list[str] = []
    left: dict[str, str] = {}
    uses: dict[int, int] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            uses[id(param)] = uses.get(id(param), 0) + 1
    listed = {f"{path}.{name}".strip("."): each for path in inside for name, each in _inner(model, path)}
    for name, module in listed.items():
        stacked, linear = is_stacked(module), isinstance(module, nn.Linear) or _is_transposed(module)
        if not (stacked or linear) or isinstance(module, PackedProduct):
            continue
        matching = [part for part in own or {} if part in name]
        if len(matching) > 1:
            raise UsageError(f"{name} matches {' and '.join(map(repr, matching))}; let one of them match it")
        chosen = (own or {})[matching[0]] if matching else packing
        if not matching and any(p.match(name) for p in hidden):
            reason: str | None = "excluded"
        else:
            reason = _refusal_of_experts(module, uses, chosen) if stacked else refusal(module, uses)
        if reason is None:
            (pack_experts if stacked else pack_layer)(module, chosen)
            done.append(name)
        else:
            left[name] = reason
    return done, left


def _inner(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    return list(model.get_submodule(path).named_modules())


def refusal(module: nn.Module, uses: Mapping[int, int]) -> str | None:
    """Why a linear layer keeps its weight; None if it can be packed."""
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is no parameter, but computed"
    if uses.get(id(weight), 1) > 1:
        return "its weight is tied to another layer's"
    if weight.dim() != 2 or not weight.is_floating_point():
        return f"its weight has the shape {tuple(weight.shape)} and dtype {weight.dtype}"
    if replacement(module) is not None:
        return "another forward was put in place of its own"
    share = cut_of(module)
    if getattr(share, "rows", None) is not None:
        return "ranks hold its weight whole and compute parts"
    known = (nn.Linear.forward,)
    whole = share is None and isinstance(module, nn.Linear)
    if whole and type(module).forward not in known:
        return f"{type(module).__name__} computes in its own way"
    return None


def _refusal_of_experts(module: nn.Module, uses: Mapping[int, int], packing: WeightPacking) -> str | None:
    if any(uses.get(id(module._parameters[name]), 1) > 1 for name in NAMES):
        return "its weights are tied to those of other experts"
    if packing.rounded_input is not None:
        return "only linear layers round their inputs"
    share, others = cut_of(module), set(module._parameters) - set(NAMES)
    if others or replacement(module) is not None or (share is not None and not share.plain):
        return f"{type(module).__name__} computes in its own way"
    return None if activation_of(module) is not None else f"{type(module).__name__} is no stack of gated experts"


def _is_transposed(module: nn.Module) -> bool:
    """Transformers' Conv1D, whose weight is [in, out]."""
    return any(kind.__name__ == "Conv1D" and hasattr(module, "nf") for kind in type(module).__mro__)


def rounding(bits: int, symmetric: bool, groups: int) -> Callable[[Tensor], Tensor]:
    """Rounds inputs to integers by groups of a row, with scales of the moment, and back."""
    steps = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1

    def rounded(inputs: Tensor) -> Tensor:
        if inputs.shape[-1] % groups:
            raise UsageError(
                f"quant.activation.q_groups is {groups}, which does not divide rows of {inputs.shape[-1]} numbers"
            )
        rows = inputs.float().unflatten(-1, (groups, -1))
        low = None if symmetric else rows.amin(-1, keepdim=True)
        span = rows.abs().amax(-1, keepdim=True) if low is None else rows.amax(-1, keepdim=True) - low
        scale = (span / steps).clamp(min=1e-30)
        whole = ((rows if low is None else rows - low) / scale).round() * scale
        found: Tensor = (whole if low is None else whole + low).flatten(-2).to(inputs.dtype)
        return found

    return rounded


def packed_embedding(ids: Tensor, packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Rows of a packed table: only those that are looked up are widened."""
    chosen, places = torch.unique(ids, return_inverse=True)
    found: Tensor = functional.embedding(places, unpack(packed.part(chosen), dtype))
    return found
