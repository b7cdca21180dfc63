"""Op `cpu_adagrad`."""

from __future__ import annotations

from torch import Tensor

from deepspeed.ops.adagrad.host import cpu_adagrad_
from deepspeed.ops.adagrad.rule import AdagradRule
from deepspeed.ops.op_builder.kernels.handles import Handles
from deepspeed.ops.optimizer import Batch

__all__ = ["adagrad_update", "create_adagrad", "destroy_adagrad"]

_MADE: Handles[None] = Handles("cpu_adagrad")


def create_adagrad(
    optimizer_id: int, alpha: float = 1e-2, eps: float = 1e-8, weight_decay: float = 0, should_log: bool = False
) -> int:
    """Make optimizer `optimizer_id`; every update brings its numbers itself."""
    return _MADE.make(optimizer_id, None)


def adagrad_update(
    optimizer_id: int,
    step: int,
    lr: float,
    epsilon: float,
    weight_decay: float,
    params: Tensor,
    grads: Tensor,
    exp_avg_sq: Tensor,
) -> int:
    """Update one tensor and its sums of squares."""
    _MADE.get(optimizer_id)
    cpu_adagrad_(Batch(step, ([exp_avg_sq],), [params], [grads]), AdagradRule(lr, epsilon, weight_decay))
    return 0


def destroy_adagrad(optimizer_id: int) -> int:
    """Forget optimizer `optimizer_id`."""
    return _MADE.drop(optimizer_id)
