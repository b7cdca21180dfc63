"""Op `fused_lion`."""

from __future__ import annotations

from torch import Tensor

from deepspeed.ops.lion.rule import LionRule, lion_
from deepspeed.ops.op_builder.kernels.flag import raised
from deepspeed.ops.optimizer import Batch

__all__ = ["multi_tensor_lion"]


def multi_tensor_lion(
    chunk_size: int,
    noop_flag_buffer: Tensor | None,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    step: int,
    weight_decay: float,
) -> None:
    """Update lists [gradients, parameters, momenta]; a raised flag leaves all as it is.

    `chunk_size` divides the work of a kernel that needs it; Lion's update does not depend on `step`.
    """
    grads, params, exp_avgs = tensor_lists
    if params and not raised(noop_flag_buffer):
        lion_(Batch(step, (exp_avgs,), params, grads), LionRule(lr, beta1, beta2, weight_decay))
