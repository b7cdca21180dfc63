"""Op `cpu_adam`."""

from __future__ import annotations

from torch import Tensor

from deepspeed.ops.adam.host import cpu_adam_
from deepspeed.ops.adam.rule import AdamRule
from deepspeed.ops.op_builder.kernels.handles import Handles
from deepspeed.ops.optimizer import Batch

__all__ = ["adam_update", "create_adam", "destroy_adam"]

_DECOUPLED: Handles[bool] = Handles("cpu_adam")  # whether weight decay is AdamW's


def create_adam(
    optimizer_id: int,
    alpha: float = 1e-3,
    betta1: float = 0.9,
    betta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0,
    adamw_mode: bool = True,
    should_log: bool = False,
) -> int:
    """Make optimizer `optimizer_id`: AdamW or Adam; every update brings the other numbers itself."""
    return _DECOUPLED.make(optimizer_id, bool(adamw_mode))


def adam_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
) -> int:
    """Update one tensor and its moments."""
    decoupled = _DECOUPLED.get(optimizer_id)
    rule = AdamRule(lr, beta1, beta2, epsilon, weight_decay, decoupled, bool(bias_correction))
    cpu_adam_(Batch(step, ([exp_avg], [exp_avg_sq]), [params], [grads]), rule)
    return 0


def destroy_adam(optimizer_id: int) -> int:
    """Forget optimizer `optimizer_id`."""
    return _DECOUPLED.drop(optimizer_id)
