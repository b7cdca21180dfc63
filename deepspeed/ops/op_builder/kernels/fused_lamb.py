"""Op `fused_lamb`."""

from __future__ import annotations

from torch import Tensor

from deepspeed.ops.lamb.rule import LambRule, lamb_
from deepspeed.ops.optimizer import Batch

__all__ = ["lamb"]


def lamb(
    p: Tensor,
    p_copy: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    max_coeff: float,
    min_coeff: float,
    eps: float,
    combined_scale: float,
    step: int,
    eps_mode: int,
    bias_correction: int,
    weight_decay: float,
) -> Tensor:
    """Update one parameter and its moments; its coefficient, a 0-dim tensor.

    Gradients are divided by `combined_scale`; `eps` is added under the square root if `eps_mode` is 0; a `p_copy`
    that is not empty receives the parameter in its own dtype.
    """
    rule = LambRule(
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        max_coeff=max_coeff,
        min_coeff=min_coeff,
        bias_correction=bool(bias_correction),
        eps_inside_sqrt=eps_mode == 0,
        scale=combined_scale,
    )
    coefficient = lamb_(Batch(step, ([exp_avg], [exp_avg_sq]), [p], [grad]), rule)[0]
    if p_copy.numel():
        p_copy.copy_(p)
    return coefficient
