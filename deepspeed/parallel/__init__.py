"""How the ranks of a job are laid out: axes, process groups, and the older shapes of the same idea."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._package import lazy

if TYPE_CHECKING:
    from deepspeed.parallel.axes import Axis, LayoutPlan
    from deepspeed.parallel.layout import AxisGroup, ExpertGroups, ParallelLayout
    from deepspeed.parallel.mpu import LayoutMpu, current_layout, layout_from_mpu

# Loaded on first use, so that the arithmetic in axes.py does not bring process groups with it.
_LAZY = {
    "Axis": "deepspeed.parallel.axes:Axis",
    "AxisGroup": "deepspeed.parallel.layout:AxisGroup",
    "ExpertGroups": "deepspeed.parallel.layout:ExpertGroups",
    "LayoutMpu": "deepspeed.parallel.mpu:LayoutMpu",
    "LayoutPlan": "deepspeed.parallel.axes:LayoutPlan",
    "ParallelLayout": "deepspeed.parallel.layout:ParallelLayout",
    "current_layout": "deepspeed.parallel.mpu:current_layout",
    "layout_from_mpu": "deepspeed.parallel.mpu:layout_from_mpu",
}

__all__ = [
    "Axis",
    "AxisGroup",
    "ExpertGroups",
    "LayoutMpu",
    "LayoutPlan",
    "ParallelLayout",
    "current_layout",
    "layout_from_mpu",
]

__getattr__ = lazy(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted(__all__)
