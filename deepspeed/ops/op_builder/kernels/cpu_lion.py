"""Op `cpu_lion`."""

from __future__ import annotations

from torch import Tensor

from deepspeed.ops.lion.host import cpu_lion_
from deepspeed.ops.lion.rule import LionRule
from deepspeed.ops.op_builder.kernels.handles import Handles
from deepspeed.ops.optimizer import Batch

__all__ = ["create_lion", "destroy_lion", "lion_update"]

_MADE: Handles[None] = Handles("cpu_lion")


def create_lion(
    optimizer_id: int,
    alpha: float = 1e-3,
    betta1: float = 0.9,
    betta2: float = 0.999,
    weight_decay: float = 0,
    should_log: bool = False,
) -> int:
    """Make optimizer `optimizer_id`; every update brings its numbers itself."""
    return _MADE.make(optimizer_id, None)


def lion_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
) -> int:
    """Update one tensor and its momentum."""
    _MADE.get(optimizer_id)
    cpu_lion_(Batch(step, ([exp_avg],), [params], [grads]), LionRule(lr, beta1, beta2, weight_decay))
    return 0


def destroy_lion(optimizer_id: int) -> int:
    """Forget optimizer `optimizer_id`."""
    return _MADE.drop(optimizer_id)
