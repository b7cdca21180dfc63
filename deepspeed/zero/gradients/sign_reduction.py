"""The reduction of an optimizer that exchanges momenta as signs: of gradients while it wants them, of momenta then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm import Pending
from deepspeed.comm.compressed import SignErrors, sign_mean
from deepspeed.comm.operations import ReduceOp
from deepspeed.log import log_dist
from deepspeed.ops.onebit.base import OneBitOptimizer
from deepspeed.parallel import AxisGroup
from deepspeed.zero.gradients.reduction import Reduction, Share

_KINDS = ("worker_error", "server_error")


class SignReduction:
    """A `Reduction` of whole gradients, and the `MomentumExchange` of the optimizer that they are for."""

    def __init__(self, plain: Reduction, axis: AxisGroup, optimizer: OneBitOptimizer) -> None:
        self._plain, self._axis, self._optimizer = plain, axis, optimizer
        self._errors: dict[Any, SignErrors] = {}
        self._loaded: dict[str, Tensor] = {}
        self._told = False
        self.name_of: Callable[[Any], str] = str
        """What checkpoints call the tensor of an error."""
        optimizer.exchange = self

    # ---- of gradients

    @property
    def size(self) -> int:
        """See `Reduction`."""
        return self._plain.size

    @property
    def rank(self) -> int:
        """See `Reduction`."""
        return self._plain.rank

    @property
    def few(self) -> int:
        """See `Reduction`."""
        return self._plain.few

    @property
    def late(self) -> AxisGroup | None:
        """See `Reduction`."""
        return None

    def start(self, send: Tensor, share: Share) -> Pending[Tensor]:
        """See `Reduction`; gradients that stay are the mean over the samples of this rank."""
        if not self._optimizer.local:
            return self._plain.start(send, share)
        if not self._told:
            self._told = True
            log_dist(
                f"{type(self._optimizer).__name__}: from step {self._optimizer.steps + 1} on there are steps whose "
                "gradients stay on their ranks, which exchange signs. The norm of such gradients, and what "
                "gradient_clipping does by it, are those of each rank alone."
            )
        return Pending(send)

    def stepped(self) -> None:
        """See `Reduction`."""

    # ---- of what takes their place

    @torch.no_grad()
    def sign_mean(self, values: Mapping[Any, Tensor]) -> None:
        """See `MomentumExchange`."""
        errors = [self._errors_of(key, value) for key, value in values.items()]
        with comm.labelled("signs of momenta"):
            sign_mean(list(values.values()), errors, self._axis.group)

    @torch.no_grad()
    def exact_mean(self, values: Sequence[Tensor]) -> None:
        """See `MomentumExchange`."""
        with comm.labelled("gradients of parameters without a variance"):
            for value in values:
                comm.all_reduce(value, group=self._axis.group)
                value.div_(self._axis.size)

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """See `MomentumExchange`."""
        device = comm.group_device()
        known = torch.tensor(flags, dtype=torch.int32, device=device)
        with comm.labelled("which parameters have a gradient"):
            comm.all_reduce(known, op=ReduceOp.MAX, group=self._axis.group)
        return [bool(flag) for flag in known.tolist()]

    def forget(self) -> None:
        """See `MomentumExchange`."""
        self._errors.clear()
        self._loaded.clear()

    def _errors_of(self, key: Any, value: Tensor) -> SignErrors:
        found = self._errors.get(key)
        if found is None or found.worker.numel() != value.numel():
            found = self._errors[key] = self._restored(key, value)
        return found

    def _restored(self, key: Any, value: Tensor) -> SignErrors:
        """What a checkpoint brought for this tensor, else zeros."""
        zero, name = SignErrors.zero(value, self._axis.size), self.name_of(key)
        mine = zero.worker, zero.server
        saved = [each for kind in _KINDS if (each := self._loaded.pop(f"{kind}:{name}", None)) is not None]
        if [each.numel() for each in saved] == [each.numel() for each in mine]:
            for own, each in zip(mine, saved, strict=True):
                own.copy_(each)
        return zero

    # ---- checkpoints

    def state_dict(self) -> dict[str, Tensor]:
        """See `Reduction`: the errors of each tensor by its name."""
        found = dict(self._loaded)
        for key, errors in self._errors.items():
            name = self.name_of(key)
            found.update({f"worker_error:{name}": errors.worker, f"server_error:{name}": errors.server})
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `Reduction`; errors find their tensors when these are sent next."""
        self.forget()
        self._loaded = dict(state)
        if not state and self._optimizer.steps and self._optimizer.local:
            log_dist(
                f"{type(self._optimizer).__name__}: the checkpoint has no errors of signs for this number of ranks; "
                "they begin anew, from zero"
            )

    def close(self) -> None:
        """See `Reduction`."""
        self.forget()
        self._optimizer.exchange = None
        self._plain.close()
