"""Experts in two tensors, [experts, 2 × inner, hidden] and [experts, hidden, inner]: their inner width is split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from deepspeed.errors import UsageError
from deepspeed.fragments import Split, even
from deepspeed.tensor_parallel.changes import Change, whole_shape
from deepspeed.tensor_parallel.rules import Kind, Rule

__all__ = ["check_products", "cut_experts", "is_experts"]

_ALIGNED = 16
"""Bytes: strides of what torch's grouped product takes are multiples of it."""


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds experts so, which expert parallelism has not dealt to ranks already."""
    names = module._parameters
    if any(getattr(param, "allreduce", True) is False for param in names.values()):
        return False
    held = [names.get(name) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(param, nn.Parameter) and len(whole_shape(param)) == 3 for param in held)


def cut_experts(path: str, module: nn.Module, rule: Rule, ranks: int, grain: int) -> Change:
    """The inner width in parts that a grouped product takes in 16 bits or else in 32 bits, where there are such."""
    up, down = whole_shape(module.gate_up_proj), whole_shape(module.down_proj)
    inner = down[-1]
    if up[1] != 2 * inner or up[2] != down[1] or getattr(module, "is_transposed", False):
        raise UsageError(
            f"tensor_parallel: {path} holds experts of shapes {up} and {down}; expected [experts, 2 × inner, hidden] "
            "and [experts, hidden, inner]. Skip it in tensor_parallel.partition_config"
        )
    if inner // grain < ranks:
        raise UsageError(
            f"tensor_parallel: {path} holds experts of the inner width {inner} (dim 2 of down_proj), which {ranks} "
            f"ranks cannot share in multiples of {grain}. Use a smaller tensor_parallel.autotp_size, or skip it in "
            "tensor_parallel.partition_config"
        )
    units = (math.lcm(_ALIGNED // size, grain) for size in (2, 4))
    cut = even(inner, ranks, next((unit for unit in units if inner % unit == 0 and inner // unit >= ranks), grain))
    fused = Split.of(1, [cut, [(start + inner, stop + inner) for start, stop in cut]])
    return Change(path, module, Kind.COLUMN, rule, {"gate_up_proj": fused, "down_proj": Split.of(2, [cut])}, ())


def check_products(changes: Sequence[Change], element_size: int | None) -> None:
    """Raise where experts are computed by torch's grouped product, and it does not take their parts.

    `element_size` is that of the dtype that the model will have; None where it keeps its own.
    """
    for change in changes:
        config: Any = getattr(change.module, "config", None)
        split = change.splits.get("down_proj")
        if split is None or getattr(config, "_experts_implementation", None) != "grouped_mm":
            continue
        weight: Any = change.module.down_proj
        unit = _ALIGNED // (element_size or weight.element_size())
        widths = [split.size(rank) for rank in range(split.ranks)]
        if any(width % unit for width in widths):
            raise UsageError(
                f"tensor_parallel: {change.path} holds experts of the inner width {split.total} (dim 2 of down_proj), "
                f"of which the ranks get {', '.join(map(str, widths))}. Torch's grouped product takes multiples of "
                f"{unit} ({_ALIGNED} bytes). Use a tensor_parallel.autotp_size of at most {max(split.total // unit, 1)}"
                ", or call model.set_experts_implementation('eager')"
            )
