"""Which ranks hold which experts of a model: what `zero` asks of each parameter, and nothing of what it does then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from torch import Tensor, nn

from deepspeed.errors import LayoutError
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.parallel import AxisGroup, ExpertGroups, ParallelLayout
from deepspeed.parallel.current import current_layout

__all__ = ["spread_experts"]


def spread_experts(
    module: nn.Module, layout: ParallelLayout, stack: ExitStack, *, data_first: bool
) -> Callable[[Tensor], AxisGroup] | None:
    """Join every layer of experts to its ranks; returns the ranks of each parameter, None where all have all."""
    layers = [each for each in module.modules() if isinstance(each, MoE)]
    for layer in layers:
        layer.join(layout, data_first=data_first)
        stack.callback(_forget, layer.expert_group_name, current_layout.experts[layer.expert_group_name])
    named = {layer.expert_group_name: current_layout.experts[layer.expert_group_name].edp for layer in layers}
    if not named:
        return None
    buffers = {
        id(buffer): each.group_name
        for each in module.modules()
        if isinstance(each, Experts)
        for buffer in each.buffers()
    }
    return partial(_lies_on, named, buffers, layout["dp", "sp"])


def _lies_on(
    experts: dict[str, AxisGroup], buffers: dict[int, str | None], everybody: AxisGroup, tensor: Tensor
) -> AxisGroup:
    if not is_moe_param(tensor) and id(tensor) not in buffers:
        return everybody
    name = buffers.get(id(tensor)) or getattr(tensor, "group_name", None)
    if name not in experts:
        raise LayoutError(
            f"a parameter of shape {tuple(tensor.shape)} has allreduce=False and the group {name!r}, but the model has "
            f"experts in {sorted(experts)} only. Set group_name to one of these, or remove the mark."
        )
    return experts[name]


def _forget(name: str, groups: ExpertGroups) -> None:
    if current_layout.experts.get(name) is groups:
        del current_layout.experts[name]
