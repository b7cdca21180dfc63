"""The reduction of an optimizer that exchanges momenta as signs: of gradients while it wants them, of momenta then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from logging import WARNING
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm import Pending
from deepspeed.comm.compressed import SignErrors, chunk_of, sign_mean
from deepspeed.comm.operations import ReduceOp
from deepspeed.log import log_dist
from deepspeed.ops.onebit.base import Member, OneBitOptimizer, gradient_of
from deepspeed.parallel import AxisGroup
from deepspeed.zero.gradients.reduction import LocalGradients, Reduction, Share

_KINDS = ("worker_error", "server_error")


class SignReduction(Reduction):
    """A `Reduction` of whole gradients, and the `MomentumExchange` of the optimizer that they are for."""

    owned = False

    def __init__(self, plain: Reduction, axis: AxisGroup, optimizer: OneBitOptimizer) -> None:
        self._plain, self._axis, self._optimizer = plain, axis, optimizer
        self.axis = plain.axis
        self._errors: dict[Any, SignErrors] = {}
        self._names: dict[Any, str] = {}
        """What checkpoints call the errors."""
        self._loaded: dict[str, Tensor] = {}
        self._came = False
        """A checkpoint brought errors."""
        self._told = self._misfit = False
        self.local: LocalGradients = {}
        self.name_of: Callable[[Any], str] = str
        """What checkpoints call the tensor of an error."""
        optimizer.exchange = self

    # ---- of gradients

    @property
    def few(self) -> int:
        return self._plain.few

    def start(self, send: Tensor, share: Share) -> Pending[Tensor]:
        """See `Reduction`; gradients that stay are the mean over the samples of this rank."""
        if not self._optimizer.local:
            return self._plain.start(send, share)
        self._tell()
        return Pending(send)

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            log_dist(
                f"{type(self._optimizer).__name__}: from step {self._optimizer.steps + 1} on there are steps whose "
                "gradients stay on their ranks, which exchange signs. The norm of such gradients, and what "
                "gradient_clipping does by it, are those of each rank alone."
            )

    # ---- of what takes their place

    def prepare(self, settled: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        if not others:
            return
        known = self._any_of([[param.grad is not None] for param in others])
        means = [param for param, (present,) in zip(others, known, strict=True) if present]
        for param in means:
            param.grad = gradient_of(param)
        self.exact_mean([param.grad for param in means if param.grad is not None])

    @torch.no_grad()
    def advance(self, members: Sequence[Member]) -> None:
        for group, param, momentum in members:
            momentum.lerp_(gradient_of(param), 1 - group["betas"][0])
        self.sign_mean({param: momentum for _, param, momentum in members})

    def mean_gradients(self, settled: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        gradients = {param: gradient_of(param).to(torch.float32, copy=True) for param in settled}
        self.sign_mean(gradients)
        return gradients

    def over_pieces(self, params: Sequence[Tensor], rows: Tensor, *, largest: bool) -> Tensor:
        """See `MomentumExchange`; a parameter is one piece."""
        return rows

    @torch.no_grad()
    def sign_mean(self, values: Mapping[Any, Tensor]) -> None:
        flat = {key: value.reshape(-1).to(torch.float32, copy=True) for key, value in values.items()}
        errors = [
            self._errors_of(key, self.name_of(key), value, (value.numel(), chunk_of(value.numel(), self._axis.size)))
            for key, value in flat.items()
        ]
        with comm.labelled("signs of momenta"):
            sign_mean(list(flat.values()), errors, self._axis.group)
        for key, value in values.items():
            value.copy_(flat[key].view(value.shape))

    @torch.no_grad()
    def exact_mean(self, values: Sequence[Tensor]) -> None:
        with comm.labelled("gradients of parameters without a variance"):
            for value in values:
                comm.all_reduce(value, group=self._axis.group)
                value.div_(self._axis.size)

    def _any_of(self, flags: Sequence[Sequence[bool]]) -> list[list[bool]]:
        """Rows of what is true on any rank."""
        known = torch.tensor(flags, dtype=torch.int32, device=comm.group_device())
        with comm.labelled("which parameters have a gradient"):
            comm.all_reduce(known, op=ReduceOp.MAX, group=self._axis.group)
        return [[bool(flag) for flag in row] for row in known.tolist()]

    def forget(self) -> None:
        self._errors.clear()
        self._loaded.clear()

    def _errors_of(self, key: Any, name: str, like: Tensor, sizes: tuple[int, int]) -> SignErrors:
        """The errors of what has this key, so many of the worker and of the server; from a checkpoint, or zero."""
        found = self._errors.get(key)
        if found is not None and found.worker.numel() == sizes[0]:
            return found
        worker, server = (torch.zeros(size, dtype=torch.float32, device=like.device) for size in sizes)
        self._names[key], self._errors[key] = name, SignErrors(worker, server)
        saved = [each for kind in _KINDS if (each := self._loaded.pop(f"{kind}:{name}", None)) is not None]
        if tuple(each.numel() for each in saved) == sizes:
            worker.copy_(saved[0])
            server.copy_(saved[1])
        elif self._came and not self._misfit:
            self._misfit = True
            log_dist(
                f"{type(self._optimizer).__name__}: the checkpoint has no errors of signs for {name} with "
                f"{sizes[0]} and {sizes[1]} elements; they begin anew, from zero. It was saved at another stage, or "
                "with other parameters",
                level=WARNING,
            )
        return self._errors[key]

    # ---- checkpoints

    def state_dict(self) -> dict[str, Tensor]:
        """See `Reduction`: the errors of each tensor by its name."""
        found = dict(self._loaded)
        for key, errors in self._errors.items():
            name = self._names[key]
            found.update({f"worker_error:{name}": errors.worker, f"server_error:{name}": errors.server})
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `Reduction`; errors find their tensors when these are sent next."""
        self.forget()
        self._loaded, self._came = dict(state), bool(state)
        if not state and self._optimizer.steps and self._optimizer.local:
            log_dist(
                f"{type(self._optimizer).__name__}: the checkpoint has no errors of signs for this number of ranks; "
                "they begin anew, from zero",
                level=WARNING,
            )

    def close(self) -> None:
        self.forget()
        self.local.clear()
        self._optimizer.exchange = None
        self._plain.close()
