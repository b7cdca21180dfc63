"""Parameters of experts: how to tell them, and how an optimizer's groups are split by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.moe.layer import MoE
from deepspeed.moe.stacked_experts import SpreadStack

__all__ = [
    "configure_moe_param_groups",
    "has_moe_layers",
    "is_moe_param",
    "split_experts",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]

DENSE = "dense-params"
"""The name that a group of a plain list of parameters gets."""


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has such layers, and the number of experts of the last one (0 if it has none)."""
    numbers = [
        module.num_experts if isinstance(module, MoE) else module.stack.experts
        for module in m.modules()
        if isinstance(module, (MoE, SpreadStack))
    ]
    return bool(numbers), numbers[-1] if numbers else 0


def is_moe_param(param: Tensor) -> bool:
    return hasattr(param, "allreduce") and not param.allreduce


def split_params_into_shared_and_expert_params(
    params: list[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(those that all ranks share, those of experts)."""
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: int | float = 178956971,
) -> list[dict[str, Any]]:
    """Groups without expert parameters, then those of experts: one for each of them and each size (`ep_size_<n>`).

    A group of experts has `moe` true, the other options of the group that it comes from, and at most
    `max_group_size` elements unless one parameter has more (None: any number). Groups need a `name`.
    """
    given = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    added: list[dict[str, Any]] = []
    for group in given:
        if "name" not in group:
            raise UsageError(
                "a parameter group has no 'name', by which the groups of its experts would be found; add "
                "'name': ... to each group"
            )
        shared, experts = split_params_into_shared_and_expert_params(list(group["params"]))
        group["params"] = shared
        kinds: dict[str, list[nn.Parameter]] = {}
        for param in experts:
            kinds.setdefault(getattr(param, "group_name", ""), []).append(param)
        for kind, members in kinds.items():
            options = {key: value for key, value in group.items() if key not in ("params", "name")}
            for part in _parts(members, max_group_size):
                added.append({**options, "name": kind, "moe": True, "params": part})
    return [*given, *added]


def _parts(params: Sequence[nn.Parameter], limit: int | float | None) -> list[list[nn.Parameter]]:
    """Runs of parameters of at most `limit` elements each, or of one parameter."""
    parts: list[list[nn.Parameter]] = []
    filled: float = 0
    for param in params:
        size = int(getattr(param, "ds_numel", param.numel()))  # a sharded parameter has no elements of its own
        if not parts or (limit is not None and filled + size > limit):
            parts.append([])
            filled = 0
        parts[-1].append(param)
        filled += size
    return parts


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Parameters, or groups of them, with the experts' ones in groups of their own; the same list without experts."""
    for group in model_parameters:
        if isinstance(group, dict) and not isinstance(group["params"], list):  # as torch does
            group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    members = (each["params"] if isinstance(each, dict) else [each] for each in model_parameters)
    if not any(is_moe_param(param) for params in members for param in params):
        return model_parameters
    if isinstance(model_parameters[0], dict):
        groups = [{"name": f"group-{place}", **group} for place, group in enumerate(model_parameters)]
    else:
        groups = [{"params": list(model_parameters), "name": DENSE}]
    return [group for group in split_params_into_different_moe_groups_for_optimizer(groups) if group["params"]]


def split_experts(parameters: list[Any] | None, module: nn.Module) -> list[Any] | None:
    """What an optimizer is made of for a model: as given, with the parameters of experts in groups of their own."""
    if parameters is None and not any(is_moe_param(param) for param in module.parameters()):
        return None
    return configure_moe_param_groups(list(module.parameters()) if parameters is None else parameters)
