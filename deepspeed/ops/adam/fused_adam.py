"""`FusedAdam`: Adam and AdamW for parameters on any device."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from deepspeed.ops.adam.rule import ADAM, AdamRule, takes_conditions, takes_one_pass
from deepspeed.ops.batch_rule import BatchRule
from deepspeed.ops.moments import Group
from deepspeed.ops.rule_optimizers import DeviceOptimizer

__all__ = ["FusedAdam"]


class FusedAdam(DeviceOptimizer):
    """AdamW, or Adam with an L2 term if `adam_w_mode` is false; moments have the dtype of their parameter.

    `moment_bits` chooses itself: 32, 16 (bfloat16), or 8 (block-wise, a quarter of the memory of float32).
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    settings: ClassVar[tuple[str, ...]] = ("adam_w_mode", "set_grad_none")
    rule: ClassVar[BatchRule] = ADAM

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        moment_bits: int | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam has no AMSGrad variant; use torch.optim.AdamW(amsgrad=True)")
        self.adam_w_mode = bool(adam_w_mode)
        self.set_grad_none = set_grad_none
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        self._set_up(params, defaults | {"weight_decay": weight_decay}, moment_bits)

    def _rule_of(self, group: Group) -> AdamRule:
        return AdamRule.of(group, decoupled=self.adam_w_mode)

    def takes_one_pass(self, device: torch.device) -> bool:
        return takes_one_pass(device)

    def takes_conditions(self, device: torch.device) -> bool:
        """See `BatchOptimizer`; torch's own kernels take conditions, too."""
        return self.takes_one_pass(device) or (takes_conditions(device) and self.moment_bits != 8)
