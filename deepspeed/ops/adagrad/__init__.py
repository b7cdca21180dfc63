"""Adagrad for parameters on the CPU; elsewhere torch.optim.Adagrad serves.

g ← g + decay·p;  v ← v + g²;  p ← p − lr·g / (√v + eps)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.ops.batch_rule import BatchRule, register_on_host, update_by_torch
from deepspeed.ops.moments import Group, wide
from deepspeed.ops.optimizer import ParameterBatch, TensorLists, contiguous, widely
from deepspeed.ops.registry import implements, op, reference
from deepspeed.ops.rule_optimizers import HostOptimizer

__all__ = ["DeepSpeedCPUAdagrad"]

Tensors = list[Tensor]


@dataclass(frozen=True, slots=True)
class AdagradRule:
    """The numbers of one update; weight decay is an L2 term of the gradient."""

    lr: float
    eps: float = 1e-10
    weight_decay: float = 0.0

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> AdagradRule:
        """The rule of a parameter group."""
        return cls(float(group["lr"]), group["eps"], group["weight_decay"])


@reference("adagrad")
@torch.no_grad()
def adagrad_reference(params: Tensors, grads: Tensors, sums: Tensors, rule: AdagradRule) -> None:
    """Tensor by tensor, computed in float32 (float64 for float64) and rounded once."""
    for param, grad, total in zip(params, grads, sums, strict=True):
        dtype = wide(param.dtype)
        p, g, v = (tensor.to(dtype) for tensor in (param, grad, total))
        g = g + rule.weight_decay * p
        v = v + g * g
        param.copy_(p - rule.lr * g / (v.sqrt() + rule.eps))
        total.copy_(v)


def _numbers(batch: ParameterBatch, rule: AdagradRule) -> tuple[float, ...]:
    return (rule.weight_decay, rule.lr, rule.eps)


ADAGRAD = BatchRule(
    "adagrad", oracle=adagrad_reference, signed=(False,), arguments=lambda batch, rule: (rule,), numbers=_numbers
)
"""Adagrad for whole batches."""


@implements("adagrad", name="foreach")
@torch.no_grad()
def _adagrad_foreach(params: Tensors, grads: Tensors, sums: Tensors, rule: AdagradRule) -> None:
    def update(lists: TensorLists) -> None:
        p, g, v = lists
        if rule.weight_decay:
            g = list(torch._foreach_add(g, p, alpha=rule.weight_decay))
        torch._foreach_addcmul_(v, g, g, 1.0)
        denominators = torch._foreach_sqrt(v)
        torch._foreach_add_(denominators, rule.eps)
        torch._foreach_addcdiv_(p, g, denominators, -rule.lr)

    widely(update, (params, grads, sums))


@implements("adagrad", name="fused", rank=20)
@torch.no_grad()
def _adagrad_fused(params: Tensors, grads: Tensors, sums: Tensors, rule: AdagradRule) -> None:
    lists = (params, grads, sums)
    if not params:
        return
    if params[0].device.type != "cpu" or not contiguous(lists):
        _adagrad_foreach(params, grads, sums, rule)
        return
    count = torch.ones(())  # matters only to a decaying learning rate, which this rule does not have

    def update(lists: TensorLists) -> None:
        p, g, v = lists
        torch._fused_adagrad_(
            p, g, v, [count] * len(p),
            lr=rule.lr, lr_decay=0.0, weight_decay=rule.weight_decay, eps=rule.eps, maximize=False,
        )  # fmt: skip

    widely(update, lists)


register_on_host(ADAGRAD)


class DeepSpeedCPUAdagrad(HostOptimizer):
    """Adagrad with an L2 term, of parameters on the CPU.

    The sums of squares are float32, or have the dtype of their parameter if `fp32_optimizer_states` is false;
    `moment_bits` chooses itself: 32, 16 (bfloat16) or 8 (block-wise). A sparse gradient updates the rows that it has,
    and weight decay is applied to these alone. `adamw_mode` is there for client libraries that hand it to every CPU
    optimizer; it changes nothing.
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)
    rule: ClassVar[BatchRule] = ADAGRAD
    takes_sparse: ClassVar[bool] = True

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        *,
        adamw_mode: bool | None = None,
        moment_bits: int | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("Adagrad has no AMSGrad variant; leave amsgrad out")
        self.fp32_optimizer_states = fp32_optimizer_states
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "amsgrad": False}
        self._set_up(model_params, defaults, moment_bits)

    def _update_group(self, group: Group) -> None:
        params = group["params"]
        sparse = [param for param in params if (grad := self._gradient(param)) is not None and grad.is_sparse]
        for param in sparse:
            self._update_rows(group, param)
        if sparse:
            done = set(map(id, sparse))
            group = {**group, "params": [param for param in params if id(param) not in done]}
        super()._update_group(group)

    def _update_rows(self, group: Group, param: Tensor) -> None:
        """Update what a sparse gradient has of a parameter: copies of those rows are a batch of their own."""
        grad, state = self._gradient(param), self.state[param]
        assert grad is not None, "the caller has looked"
        grad, out = grad.coalesce(), None if self.one_pass is None else self.one_pass.out(param)
        if "step" not in state:
            self._begin(group, param, state, self.moments)
        state["step"] += 1
        at, sums = tuple(grad.indices()), self.moment(param, "exp_avg_sq")
        rows = ParameterBatch(state["step"], ([sums[at]],), [param[at]], [grad.values()])
        if self.one_pass is not None:
            rows.factor = self.one_pass.factor
        if not rows.grads[0].numel():
            return
        self._apply(group, rows)
        param[at], sums[at] = rows.params[0], rows.moments[0][0]
        if out is not None:
            out[at] = rows.params[0].to(out.dtype)
        if sums is not state["exp_avg_sq"]:  # what 8-bit codes stand for
            self.set_moment(param, "exp_avg_sq", sums)

    def _rule_of(self, group: Group) -> AdagradRule:
        return AdagradRule.of(group)

    def _apply(self, group: Group, batch: ParameterBatch) -> None:
        if batch.params[0].device.type == "cpu":
            super()._apply(group, batch)
        else:
            update_by_torch(self.rule, batch, self._rule_of(group), op(self.rule.name))
