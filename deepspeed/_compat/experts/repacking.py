"""Weights of a model's experts, however it keeps them, as three stacked ones: w1 (gate), w2 (down), w3 (up)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from deepspeed._compat.experts.fused_layout import classify_fused_gate_up_layout
from deepspeed.errors import UsageError
from deepspeed.fragments import deal

__all__ = [
    "ExpertSpec",
    "repack_expert_requires_grad_flags",
    "repack_expert_source_params",
    "repack_expert_weights",
]

Three = tuple[Tensor, Tensor, Tensor]


class ExpertSpec(Protocol):
    """What is told of a layer of experts."""

    expert_w1_name: str
    """Of the gate's weight in the module of the experts, or in each of them: a parameter or a linear layer."""
    expert_w2_name: str
    expert_w3_name: str | None
    """None: gate and up are one weight, w1."""
    num_experts: int
    hidden_size: int


def repack_expert_weights(experts_source: nn.Module, spec: ExpertSpec, ep_rank: int, ep_size: int) -> Three:
    """Copies of the weights of this rank's experts: w1 and w3 [local, ffn, hidden], w2 [local, hidden, ffn].

    `experts_source` has stacked parameters, either way round, or is a list of experts. Biases are no part of it.
    """
    first, last = _own(spec, ep_rank, ep_size)
    if not _listed(experts_source):
        weights = [_parameter(experts_source, name) for name in _names(spec)]
        with torch.no_grad():
            return _copied(_stacked(experts_source, spec, [each.detach()[first:last] for each in weights]))
    weights_of = [[_parameter(each, name).detach() for name in _names(spec)] for each in _members(experts_source, spec)]
    stacked = [torch.stack(each) for each in zip(*weights_of[first:last], strict=True)]
    return _copied(_three(stacked, interleaved=False))


def repack_expert_source_params(
    experts_source: nn.Module, spec: ExpertSpec, ep_rank: int, ep_size: int
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """The parameters that w1, w2 and w3 of this rank's experts are taken from; gate and up may be in the same ones."""
    first, last = _own(spec, ep_rank, ep_size)
    owners = [experts_source] if not _listed(experts_source) else list(_members(experts_source, spec))[first:last]
    found = [[_parameter(owner, name) for owner in owners] for name in _names(spec)]
    return found[0], found[1], found[2] if len(found) == 3 else list(found[0])


def repack_expert_requires_grad_flags(
    experts_source: nn.Module, spec: ExpertSpec, ep_rank: int, ep_size: int
) -> tuple[bool, bool, bool]:
    """Whether w1, w2 and w3 are trained; experts of which some are and others are not cannot be one parameter."""
    flags = []
    sources = repack_expert_source_params(experts_source, spec, ep_rank, ep_size)
    for name, params in zip(("w1", "w2", "w3"), sources, strict=True):
        kinds = {param.requires_grad for param in params}
        if len(kinds) > 1:
            frozen = [place for place, param in enumerate(params) if not param.requires_grad]
            raise UsageError(
                f"{name} of experts {frozen} of this rank's {len(params)} is frozen and that of the others is trained; "
                "stacked they are one parameter: freeze all of them or none"
            )
        flags.append(kinds.pop())
    return flags[0], flags[1], flags[2]


def _own(spec: ExpertSpec, ep_rank: int, ep_size: int) -> tuple[int, int]:
    """The numbers of this rank's experts, [first, last)."""
    if not 0 <= ep_rank < ep_size or spec.num_experts % ep_size:
        raise UsageError(
            f"{spec.num_experts} experts, ep_size {ep_size} and ep_rank {ep_rank}: ep_size must divide the number of "
            "experts, and ranks count from 0"
        )
    return deal(spec.num_experts, ep_size)[ep_rank]


def _names(spec: ExpertSpec) -> list[str]:
    return [name for name in (spec.expert_w1_name, spec.expert_w2_name, spec.expert_w3_name) if name is not None]


def _listed(source: nn.Module) -> bool:
    return isinstance(source, (nn.ModuleList, nn.ModuleDict))


def _members(source: nn.Module, spec: ExpertSpec) -> Iterator[nn.Module]:
    members = list(source.children())
    if len(members) != spec.num_experts:
        raise UsageError(f"a list of {len(members)} experts, but the spec says that there are {spec.num_experts}")
    yield from members


def _parameter(owner: nn.Module, name: str) -> nn.Parameter:
    found = getattr(owner, name, None)
    found = found.weight if isinstance(found, nn.Module) else found
    if not isinstance(found, nn.Parameter):
        raise UsageError(f"{type(owner).__name__} has no weight {name!r}; say in the spec what it is called")
    if found.numel() == 0:
        raise UsageError(
            f"{name} of {type(owner).__name__} is sharded; take it within deepspeed.zero.GatheredParameters"
        )
    return found


def _stacked(source: nn.Module, spec: ExpertSpec, weights: list[Tensor]) -> Three:
    """Of stacked parameters [experts, …], turned as linear layers keep theirs."""
    if len(weights) == 2:
        layout = classify_fused_gate_up_layout(tuple(weights[0].shape), tuple(weights[1].shape))
        if layout is None or layout.hidden_size != spec.hidden_size:
            shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in zip(_names(spec), weights, strict=True))
            raise UsageError(f"{shapes}: these are no gate and up in one, and down, of hidden size {spec.hidden_size}")
        turned = layout.needs_transpose
    else:
        turned = weights[0].shape[-1] != spec.hidden_size
    if turned:
        weights = [each.transpose(1, 2) for each in weights]
    return _three(weights, interleaved=not getattr(source, "is_concatenated", True))


def _three(weights: list[Tensor], *, interleaved: bool) -> Three:
    """w1, w2 and w3 [experts, out, in], of which gate and up may be one: one behind the other, or in turns."""
    if len(weights) == 3:
        return weights[0], weights[1], weights[2]
    both, down = weights
    gate, up = (both[:, 0::2], both[:, 1::2]) if interleaved else both.chunk(2, 1)
    return gate, down, up


def _copied(weights: Three) -> Three:
    one, two, three = (each.clone(memory_format=torch.contiguous_format) for each in weights)
    return one, two, three
