"""`CheckOverflow`: is there an inf or a NaN in the gradients of this rank, or of any rank that matters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm import ReduceOp
from deepspeed.precision.overflow import has_overflow

__all__ = ["CheckOverflow", "has_inf_or_nan"]


def has_inf_or_nan(x: Tensor) -> Tensor:
    """A 0-dim bool tensor: True if any element is inf or NaN."""
    return has_overflow([x])


class CheckOverflow:
    """Asks this rank's gradients, and joins the answers of the ranks whose gradients may differ.

    Those are all ranks if gradients are sharded (`zero_reduce_scatter`) or the engine (`deepspeed`) has not reduced
    them, else the ranks of the model-parallel group of `mpu`.
    """

    def __init__(
        self,
        param_groups: Sequence[Any] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.mpu = mpu
        self.params: list[Tensor] | None = None if param_groups is None else _parameters(param_groups)
        self.zero_reduce_scatter = zero_reduce_scatter
        self.deepspeed = deepspeed

    def check_using_norm(self, norm_group: Iterable[float | Tensor], reduce_overflow: bool = True) -> bool:
        """True if a norm is -1, which stands for inf or NaN, here or on a rank that matters."""
        found = any(float(norm) == -1 for norm in norm_group)
        return self._anywhere(found) if reduce_overflow else found

    def check(self, param_groups: Sequence[Any] | None = None) -> bool:
        """True if a gradient of these groups, or of those given at first, overflowed on a rank that matters."""
        if param_groups is None and self.params is None:
            raise ValueError("CheckOverflow was made without param_groups: give them to check()")
        params = self.params if param_groups is None else _parameters(param_groups)
        return self.has_overflow(params or [])

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """True if a gradient overflowed on this rank."""
        return bool(has_overflow([param.grad for param in params]))

    def has_overflow(self, params: Iterable[Tensor], has_moe_params: bool | None = None) -> bool:
        """True if a gradient overflowed on a rank that matters; with experts, whose gradients differ, that is any."""
        return self._anywhere(self.has_overflow_serial(params), everywhere=bool(has_moe_params))

    def _anywhere(self, found: bool, *, everywhere: bool = False) -> bool:
        engine = self.deepspeed
        everywhere = everywhere or self.zero_reduce_scatter
        everywhere = everywhere or (engine is not None and not engine.enable_backward_allreduce)
        if not comm.is_initialized() or (self.mpu is None and not everywhere):
            return found
        group = comm.get_world_group() if everywhere else self.mpu.get_model_parallel_group()
        answer = torch.tensor([float(found)], device=comm.group_device(group))
        comm.all_reduce(answer, op=ReduceOp.MAX, group=group)
        return bool(answer.item())


def _parameters(param_groups: Sequence[Any]) -> list[Tensor]:
    """Of groups as optimizers have them, or plain lists."""
    return [param for group in param_groups for param in (group["params"] if isinstance(group, Mapping) else group)]
