"""Op `fused_adam`."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.ops.adam.rule import AdamRule, adam_, takes_conditions
from deepspeed.ops.conditions import Conditions
from deepspeed.ops.op_builder.kernels.flag import raised
from deepspeed.ops.optimizer import Batch

__all__ = ["multi_tensor_adam"]


def multi_tensor_adam(
    chunk_size: int,
    noop_flag_buffer: Tensor | None,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    adam_w_mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Update lists [gradients, parameters, first moments, second moments]; a raised flag leaves all as it is.

    `chunk_size` divides the work of a kernel that needs it; those behind this function divide it themselves.
    """
    grads, params, exp_avgs, exp_avg_sqs = tensor_lists
    if not params:
        return
    rule = AdamRule(lr, beta1, beta2, epsilon, weight_decay, bool(adam_w_mode), bool(bias_correction))
    batch = Batch(step, (exp_avgs, exp_avg_sqs), params, grads)
    if noop_flag_buffer is not None and takes_conditions(params[0].device):
        skip = noop_flag_buffer.any().to(device=params[0].device, dtype=torch.float32)
        adam_(batch, rule, Conditions(torch.ones_like(skip), skip))
    elif not raised(noop_flag_buffer):
        adam_(batch, rule)
