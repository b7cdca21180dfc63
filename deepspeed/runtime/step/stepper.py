"""The optimizer step as one readable list: reduce, measure, judge, clip, update, publish."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import Pending
from deepspeed.errors import DeepSpeedError
from deepspeed.ops.multi_tensor import scale_
from deepspeed.ops.one_pass import Conditions, OnePass
from deepspeed.ops.onebit.base import OneBitOptimizer
from deepspeed.ops.optimizer import BatchOptimizer
from deepspeed.ops.precompile import Scene
from deepspeed.precision.scale import LossScale
from deepspeed.runtime.backward import Backward, ModelParameters
from deepspeed.zero.interface import (
    GradientReducer,
    OptimizerStates,
    StateOwner,
    StatePiece,
    WholeGroup,
    clip_coefficient,
    plain_access,
    plain_grad,
    tiles_well,
    twin,
)

if TYPE_CHECKING:
    from deepspeed.runtime.step.in_backward import InBackward


class ScalarOnHost:
    """Copies a scalar to the host behind what is queued now; `value()` waits for that, not for what is queued later."""

    __slots__ = ("_event", "_home")

    def __init__(self, scalar: Tensor) -> None:
        self._home = torch.empty((), dtype=scalar.dtype, pin_memory=scalar.device.type == "cuda")
        self._home.copy_(scalar, non_blocking=True)
        self._event = get_accelerator().Event()
        self._event.record()

    def value(self) -> float:
        """The number."""
        self._event.synchronize()
        return float(self._home)


def steps_ahead(optimizer: Optimizer, device: torch.device) -> bool:
    """True if a step over parameters on `device` can be queued; the same on all ranks, whatever each of them holds."""
    if isinstance(optimizer, BatchOptimizer):
        return optimizer.takes_conditions(device)
    # torch's fused kernels take what its gradient scaler gives them
    return device.type == "cuda" and isinstance(optimizer, Adam) and all(g.get("fused") for g in optimizer.param_groups)


def in_one_pass(optimizer: Optimizer, device: torch.device) -> bool:
    """True if such a step reads gradients as they arrived, and writes what the model computes with."""
    return reads_narrow(optimizer, device) and not getattr(optimizer, "cpu_only", False)


def reads_narrow(optimizer: Optimizer, device: torch.device) -> bool:
    """The same of a step that is taken when the norm is known, also by an optimizer for host memory."""
    return isinstance(optimizer, BatchOptimizer) and optimizer.takes_one_pass(device)


@contextmanager
def under_conditions(optimizer: Optimizer, conditions: Conditions) -> Iterator[None]:
    """Steps that are taken inside obey these conditions."""
    if isinstance(optimizer, BatchOptimizer):
        with optimizer.under(conditions):
            yield
        return
    values = {"grad_scale": conditions.divisor, "found_inf": conditions.skip}
    for name, value in values.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in values:
            delattr(optimizer, name)


def undo_step_count(optimizer: Optimizer) -> None:
    """The last step was skipped by its conditions: do not count it; torch's own count on the device."""
    if isinstance(optimizer, BatchOptimizer):
        optimizer.take_back()


Norm = Tensor | float | None
"""A tensor where a device still computes it; None where it is not reported."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of an optimizer step."""

    applied: bool
    norm: Pending[Norm]
    """Who waits for it first waits for other ranks, if nothing in the step depended on it."""
    scale_before: float
    scale_after: float
    empty: bool = False
    """There was no gradient on any rank: nothing happened."""

    @property
    def grad_norm(self) -> Norm:
        """The norm, before clipping and without the loss scale; waited for if that was not done yet."""
        return self.norm.wait()


@dataclass
class Stepper:
    """Takes one optimizer step with what the backward passes left."""

    optimizer: Optimizer
    states: OptimizerStates
    owner: StateOwner
    reducer: GradientReducer
    backward: Backward
    scale: LossScale
    check_overflow: bool
    """A step whose gradients are inf or NaN is skipped."""
    clipping: float
    parameters: ModelParameters
    report_norm: bool = True
    stop: bool = False
    """Such a step is an error, unless a loss scale adapts to it."""
    in_backward: InBackward | None = None
    """What has updated parameters already while backward ran."""
    clip: Callable[[], None] | None = None
    """A script's own way to clip gradients; see `clips_in_place`."""

    def step(self) -> StepOutcome:
        """Reduce what is not reduced yet, then update, or skip where a gradient is inf or NaN."""
        self.owner.require_sole()
        self.owner.require_own()
        self.backward.expect_gradients()
        self.reducer.conclude()
        if self.in_backward is not None:
            found = self.in_backward.complete(self.backward.unit)
            self.drop_gradients()
            shown = found if found is None or found.device.type != "cpu" else float(found)
            norm = self._reported(Pending(shown))
            value = self.scale.value
            return StepOutcome(found is not None, norm, value, value, empty=found is None)
        alone = not self.states.staged and not (isinstance(self.optimizer, OneBitOptimizer) and self.optimizer.local)
        if self._empty and alone:  # else all stages, or ranks, measure and count the step
            self.drop_gradients()
            return StepOutcome(False, Pending(None), self.scale.value, self.scale.value, empty=True)
        device = self.states.device
        ahead = not self.states.away and self.clip is None and steps_ahead(self.optimizer, device)
        one_pass = (ahead and in_one_pass(self.optimizer, device)) or self._narrow_on_device(device)
        one_pass = one_pass and self.states.in_place and self.clip is None
        self.states.take_gradients(narrow=one_pass, measure=self.report_norm or self._judges or bool(self.states.away))
        before = self.scale.value
        take = self._step_ahead if ahead else self._step_behind
        norm, overflow = take(one_pass=one_pass)
        return self._finished(norm, overflow, before)

    @property
    def _empty(self) -> bool:
        """True if no rank has had a gradient of what the optimizer trains; the same on all of them."""
        replicated = self.reducer.replicated
        if replicated is None or self.reducer.empty:
            return self.reducer.empty
        trained = (param for group in self.states.groups for param in group.params)
        return all(param.grad is None and replicated.holder(param).grad is None for param in trained)

    @property
    def clips_in_place(self) -> bool:
        """True if gradients are clipped on the parameters of an fp32 model: there a script may do it by itself."""
        whole = self.states.in_place and not self.states.away and self.in_backward is None and self.scale.value == 1.0
        groups = self.states.groups
        plain = all(isinstance(group, WholeGroup) and not piece.separate for group in groups for piece in group.pieces)
        return whole and plain and self.clipping > 0

    @property
    def _judges(self) -> bool:
        """Whether it depends on the norm what an update does."""
        return self.check_overflow or self.clipping > 0

    def _norm(self) -> Tensor:
        """Of the gradients, without the loss scale."""
        return _times(self.states.norm.wait(), self.backward.unit)

    def _norm_later(self) -> Pending[Norm]:
        """The same where nothing depends on it, after the update.

        The host goes on without it. The stream of a device waits for it here, which delays nothing: so streams that are
        ordered behind the step see it.
        """
        if not self.report_norm:
            return Pending(None)
        begun, unit = self.states.norm, self.backward.unit
        if self.states.device.type != "cpu":
            return Pending(_times(begun.wait(), unit))
        return Pending(None, begun, lambda _: float(_times(begun.wait(), unit)))

    def _step_behind(self, *, one_pass: bool) -> tuple[Pending[Norm], bool]:
        """Update once the norm is known, if anything depends on it; else while ranks still tell their parts of it."""
        norm = known = None
        if self._judges or self.states.away:
            norm = self._norm()
            known = self._known(norm)
        overflow = self.check_overflow and known is not None and not math.isfinite(known)
        if not overflow:
            if not one_pass:
                self._prepare([grad for _, grad in self.states.gradients()], norm, known)
            self.states.update(self.optimizer, self._factor(known) if self.states.away else 1.0, one_pass=one_pass)
        if norm is None:
            return self._norm_later(), overflow
        return Pending(norm if known is None else known), overflow

    def _narrow_on_device(self, device: torch.device) -> bool:
        """Whether what stays on the device, where not all does, is updated from gradients as they came.

        So it takes no more there than was planned. Tiles that hold both kinds are updated in the host's way.
        """
        if not self.states.away or self.states.deferral is not None or not tiles_well(self.optimizer):
            return False
        return reads_narrow(self.optimizer, device)

    def _finished(self, norm: Pending[Norm], overflow: bool, before: float) -> StepOutcome:
        self.drop_gradients()
        if overflow and self.stop and not self.scale.dynamic:
            raise DeepSpeedError(
                f"nonfinite_gradients is 'stop', and the norm of the gradients of this step is {norm.wait()}: some "
                "gradient is inf or NaN. Weights and optimizer states are those of the step before. Look at the loss "
                "and the data of this step; torch.autograd.set_detect_anomaly(True) finds the operation."
            )
        self.scale.update(overflow)
        return StepOutcome(not overflow, self._reported(norm), before, self.scale.value)

    def _reported(self, norm: Pending[Norm]) -> Pending[Norm]:
        return norm if self.report_norm else Pending(None)

    @torch.no_grad()
    def _step_ahead(self, *, one_pass: bool) -> tuple[Pending[Norm], bool]:
        """Queue the whole step before the norm is known: the device unscales, clips, and skips where it must.

        The host learns the norm while the device updates, so that the device never waits for the host.
        """
        norm = self._norm() if self._judges else None
        factor = torch.full((), self.backward.unit, dtype=torch.float32, device=self.states.device)
        skip = torch.zeros_like(factor)
        if norm is not None and self.clipping > 0:
            factor = clip_coefficient(norm, self.clipping) * factor
        if norm is not None and self.check_overflow:
            skip = (~torch.isfinite(norm)).float()
        told = ScalarOnHost(norm) if norm is not None and self.check_overflow else None
        with under_conditions(self.optimizer, Conditions(factor.reciprocal(), skip)):
            self.states.update(self.optimizer, one_pass=one_pass)
        if norm is None:
            return self._norm_later(), False
        if told is None:
            return Pending(norm), False
        known = told.value()
        overflow = not math.isfinite(known)
        if overflow:
            undo_step_count(self.optimizer)
        return Pending(known), overflow

    def zero_grad(self) -> None:
        """Drop the gradients of all that the optimizer trains."""
        self.states.zero_grad()
        self.backward.forget()

    def drop_gradients(self) -> None:
        """Drop all gradients, also of parameters that the optimizer does not have: none may count in a later step."""
        self.zero_grad()
        with plain_access():
            for param in self.parameters():
                if plain_grad(param) is not None:
                    param.grad = None

    def _known(self, norm: Tensor) -> float | None:
        """The norm as a number, where waiting for it costs nothing or is needed anyway."""
        if self.check_overflow or norm.device.type == "cpu" or bool(self.states.away):
            return float(norm)
        return None

    def _factor(self, known: float | None) -> float:
        """What brings gradients of this norm to their true size and clips them."""
        unit = self.backward.unit
        if self.clipping <= 0 or known is None:
            return unit
        return float(clip_coefficient(torch.tensor(known), self.clipping)) * unit

    def _prepare(self, gradients: list[Tensor], norm: Tensor | None, known: float | None) -> None:
        """Bring gradients to their true size and clip them, in one multiplication."""
        unit = self.backward.unit
        if self.clipping <= 0 or self.clip is not None:
            if unit != 1.0:
                scale_(gradients, unit)
            if self.clip is not None:
                self.clip()
            return
        if known is None:
            assert norm is not None, "gradients are clipped by their norm"
            coefficient = clip_coefficient(norm, self.clipping)
            scale_(gradients, coefficient if unit == 1.0 else coefficient * unit)
            return
        factor = self._factor(known)
        if factor != 1.0:
            with torch.no_grad():
                scale_(gradients, factor)


def _times(norm: Tensor, unit: float) -> Tensor:
    return norm if unit == 1.0 else norm * unit


def step_scenes(optimizer: Optimizer, states: OptimizerStates, accumulate: torch.dtype) -> Iterator[Scene]:
    """A step over one parameter of each kind; nothing where no kernel of ours takes it.

    Gradients of shards lie in `accumulate`, those of whole parameters in the dtype of these.
    """
    if states.away or not states.in_place or not in_one_pass(optimizer, states.device):
        return
    for group in states.groups:
        # one whose size is no multiple of 16 decides for all that a kernel updates together
        trained = (piece for piece in group.pieces if piece.param.requires_grad)
        for piece in sorted(trained, key=lambda each: each.master.numel() % 16 == 0)[:1]:
            grad = piece.param.dtype if isinstance(group, WholeGroup) else accumulate
            place = next(at for at, options in enumerate(optimizer.param_groups) if options is group.options)
            yield partial(_compile_step, optimizer, place, piece, grad)


def _compile_step(optimizer: Optimizer, place: int, piece: StatePiece, dtype: torch.dtype) -> None:
    """One step over a parameter like this piece."""
    made = twin(optimizer)
    made.state = defaultdict(dict)
    shape, narrow = piece.master.shape, dtype != piece.master.dtype
    master = nn.Parameter(torch.empty(shape, dtype=piece.master.dtype, device="meta"))
    grad = torch.empty(shape, dtype=dtype, device="meta")
    for at, options in enumerate(made.param_groups):
        options["params"] = [master] if at == place else []
    outs: dict[Tensor, Tensor] = (
        {master: torch.empty(shape, dtype=piece.source.dtype, device="meta")} if piece.separate else {}
    )
    grads: dict[Tensor, Tensor] = {master: grad} if narrow else {}
    master.grad = None if narrow else grad
    made.one_pass = OnePass(1.0, grads, outs)  # type: ignore[attr-defined]
    scalar = torch.empty((), device="meta")
    with under_conditions(made, Conditions(scalar, scalar)):
        made.step()
