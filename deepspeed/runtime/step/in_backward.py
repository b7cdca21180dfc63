"""`InBackward`: parameters are updated while backward brings their gradients, which never exist all at once.

On one rank a gradient is used when it is whole, see [Note: when a gradient is whole]; on several when it is whole on
all of them and lies with its owner, see [Note: gradients that are used up]. What is updated then is this rank's part:
the other ranks see it after the backward, so that nothing changes that is still being used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.log import log_dist
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.multi_tensor import scale_, sum_of_squares
from deepspeed.ops.one_pass import Conditions
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.step.stepper import in_one_pass, under_conditions
from deepspeed.zero.interface import (
    GradientReducer,
    OptimizerStates,
    Placement,
    StatePiece,
    clip_coefficient,
    tiles_well,
    update_some,
)

# The number of the backward that is running in this thread, -1 outside one; nested ones have their own.
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class GradientCounts:
    """Counts gradients to know whether more may come of one in the backward that runs.

    [Note: when a gradient is whole] A parameter's hook is called after autograd has summed what one backward gives it;
    its weight is then not needed any more. Only a backward inside the backward (reentrant checkpointing) may bring more
    later. So a gradient is whole when it has come as often as in the last backward; in the first one, if it came in the
    outer backward and its parameter has one name only. Of everything else that is known when the backward is over.
    """

    def __init__(self, params: Callable[[], Iterable[nn.Parameter]]) -> None:
        """`params` are the model's, tied ones as often as named."""
        self._params = params
        self._seen: Counter[int] = Counter()
        self._expected: Counter[int] | None = None
        self._whole: set[int] = set()
        self._shared: frozenset[int] = frozenset()
        self._task = -1

    def begin(self) -> None:
        """Called from inside the outer backward, before any gradient comes."""
        names = Counter(id(param) for param in self._params())
        self._shared = frozenset(key for key, count in names.items() if count > 1)
        self._seen.clear()
        self._whole.clear()
        self._task = _graph_task()

    def end(self) -> None:
        """The backward is over."""
        if self._seen:
            self._expected = Counter(self._seen)

    def note(self, param: nn.Parameter) -> None:
        """A gradient has come, or more of it."""
        key = id(param)
        self._seen[key] += 1
        known = None if self._expected is None else self._expected.get(key)
        if known is None:
            known = 1 if _graph_task() == self._task and key not in self._shared else None
        if known is not None and self._seen[key] >= known:
            self._whole.add(key)

    def is_whole(self, param: nn.Parameter) -> bool:
        """True if nothing more comes of a gradient."""
        return id(param) in self._whole


KEY = "optimizer_in_backward.enabled"
LAST_NORM = "last_grad_norm"
"""In the optimizer's groups, so that checkpoints have it; 0 before the first step."""

_TOGETHER = 1 << 22  # elements that are updated by one call: fewer would be more calls, more wait longer


class InBackward:
    """Takes the steps of an optimizer in pieces, as gradients come."""

    def __init__(
        self,
        optimizer: Optimizer,
        states: OptimizerStates,
        counts: GradientCounts,
        *,
        clipping: float,
        reducer: GradientReducer | None = None,
    ) -> None:
        """`clipping` by the norm of the last step; 0: none. `reducer` brings the gradients of several ranks."""
        self._optimizer, self._states, self._counts, self._clipping = optimizer, states, counts, clipping
        self._reducer = reducer
        self._together = _TOGETHER
        self._handles: dict[int, Any] = {}
        self._pieces: dict[int, StatePiece] = {}
        self._gone: set[int] = set()
        """Parameters that were updated, or are about to be on all ranks."""
        self._done: set[int] = set()
        self._waiting: list[StatePiece] = []
        self._size = 0
        self._squares: dict[tuple[Placement, int], Tensor] = {}
        self._armed = self._begun = False
        self._factor = 1.0
        for group in optimizer.param_groups:
            group.setdefault(LAST_NORM, 0.0)
        if reducer is not None:
            reducer.use_up(self)

    @property
    def taken(self) -> bool:
        """True between the first update of a step and `engine.step()`."""
        return bool(self._done) or (self._begun and self._reducer is not None)

    def require_first(self) -> None:
        """Refuse a backward whose gradients would come after the update that they belong to."""
        if self.taken:
            raise UsageError(
                f"{KEY}: parameters were updated by the last backward, and another one begins before engine.step(). "
                "Call engine.step() after each backward of the last micro step; run all other backward passes of a "
                "step inside engine.no_sync(), or after engine.set_gradient_accumulation_boundary(False)."
            )

    def begin(self, unit: float) -> None:
        """The last backward of a step runs: update what comes from now on; gradients are worth `unit`."""
        self._states.adopt_edits()
        self._counts.begin()
        self._look()
        self._armed = self._begun = True
        self._gone = set(self._done)
        self._factor = unit
        last = max(float(group[LAST_NORM]) for group in self._optimizer.param_groups)
        if self._clipping > 0 and last > 0:
            self._factor *= float(clip_coefficient(torch.tensor(last), self._clipping))

    def finish(self) -> None:
        """The backward is over: what waited is updated, on several ranks what was reduced."""
        if not self._armed:
            return
        self._armed = False
        self._counts.end()
        if self._reducer is None:
            self._update_rest()

    def abandon(self) -> None:
        """The backward failed; what it has updated stays so."""
        self._armed, self._begun, self._size = False, False, 0
        self._waiting.clear()

    @torch.no_grad()
    def complete(self, unit: float) -> Tensor | None:
        """End a step: update what no backward has, and return the norm; None if there was no gradient at all."""
        if not self._begun:
            self.begin(unit)
        self._armed = self._begun = False
        if self._reducer is not None and self._reducer.empty:
            return None
        self._states.drop_absent()
        self._update_rest()
        if not self._done and self._reducer is None:
            return None
        if not self._done:  # schedules and hooks look at steps, also of a rank that has nothing to update
            update_some(self._optimizer, [], self._states.group_of, one_pass=False)
        self._done.clear()
        squares, self._squares = self._squares, {}
        norm = self._states.norm_of(squares) * unit
        for group in self._states.groups if self._reducer is not None else ():
            group.spread()
        if self._clipping > 0:
            known = float(norm)
            for options in self._optimizer.param_groups:  # one that is not finite says nothing of the next step
                options[LAST_NORM] = known if known < float("inf") else options[LAST_NORM]
        return norm

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    # ---- several ranks: `deepspeed.zero.gradients.interfaces.GradientConsumer`

    def arrived(self, param: nn.Parameter) -> None:
        """A gradient came on this rank."""
        if not self._armed:
            return
        if id(param) in self._gone:
            raise UsageError(
                f"{KEY}: a gradient of {self._name(param)} came after its update in the same backward. It is used in "
                "several parts under reentrant checkpointing, otherwise than in the backward before; use "
                "use_reentrant=False, or turn the key off."
            )
        self._counts.note(param)

    def leaves_whole(self, param: nn.Parameter) -> bool:
        if not self._armed or id(param) in self._gone or not self._counts.is_whole(param):
            return False
        self._gone.add(id(param))
        return True

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """Update what this rank owns of these."""
        for param in params:
            piece = self._pieces.get(id(param))
            if piece is not None:
                self._wait(piece)

    def _name(self, param: nn.Parameter) -> str:
        named = (each for group in self._states.groups for each in zip(group.names, group.params, strict=True))
        return next((name for name, other in named if other is param), "a parameter")

    # ---- one rank

    def _look(self) -> None:
        """Follow parameters that are trained by now."""
        for group in self._states.groups:
            for piece in group.pieces:
                key = id(piece.param)
                self._pieces[key] = piece
                if self._reducer is None and key not in self._handles and piece.param.requires_grad:
                    self._handles[key] = piece.param.register_post_accumulate_grad_hook(self._hook(piece))

    def _hook(self, piece: StatePiece) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            self.arrived(piece.param)
            if self.leaves_whole(piece.param):
                self._wait(piece)

        return arrived

    # ---- the update

    def _wait(self, piece: StatePiece) -> None:
        """Update a piece soon, together with others."""
        self._waiting.append(piece)
        self._size += piece.master.numel()
        if self._size >= self._together:
            self._flush()

    def _update_rest(self) -> None:
        """Update whatever has a gradient and was not."""
        self._waiting = [
            piece
            for group in self._states.groups
            for piece, grad in zip(group.pieces, group.gradients(), strict=True)
            if grad is not None and id(piece.param) not in self._done
        ]
        self._flush()

    @torch.no_grad()
    def _flush(self) -> None:
        """Update what waits, and free its gradients."""
        pieces, self._waiting, self._size = self._waiting, [], 0
        if not pieces:
            return
        device = pieces[0].master.device
        one_pass = in_one_pass(self._optimizer, device) and self._states.in_place
        grads = self._take(pieces, narrow=one_pass)
        given: Any = nullcontext()
        if one_pass:
            zero = torch.zeros((), device=device)
            given = under_conditions(self._optimizer, Conditions(zero + 1.0 / self._factor, zero))
        elif self._factor != 1.0:
            scale_(grads, self._factor)
        del grads
        with given:
            update_some(self._optimizer, pieces, self._states.group_of, one_pass=one_pass)
        self._done.update(id(piece.param) for piece in pieces)

    def _take(self, pieces: Sequence[StatePiece], *, narrow: bool) -> list[Tensor]:
        """The gradients that the optimizer sees, measured."""
        taken: list[Tensor] = []
        counted: dict[tuple[Placement, int], list[Tensor]] = {}
        for piece in pieces:
            group, kind = self._states.group_of(piece), self._states.kind_of(piece.param)
            grad = group.take(piece, narrow=narrow)
            if grad is None:
                continue
            taken.append(grad)
            if kind is not None:
                counted.setdefault((group.placement, kind), []).append(grad)
        for key, grads in counted.items():
            squares, before = sum_of_squares(grads), self._squares.get(key)
            self._squares[key] = squares if before is None else before + squares
        return taken


def update_in_backward(parts: Parts, optimizer: Optimizer, states: OptimizerStates) -> InBackward | None:
    """As the config says; an error where a step cannot be taken in pieces, as that of a model in stages."""
    schema = parts.config.schema
    if not schema.optimizer_in_backward.enabled:
        return None
    _require_possible(parts, optimizer)
    clipping = schema.gradient_clipping if schema.optimizer_in_backward.clip_by_last_norm else 0.0
    how = f"clipped to {clipping:g} by the norm of the step before" if clipping > 0 else "not clipped"
    log_dist(f"{KEY}: parameters are updated in backward; gradients are {how}, steps with inf or NaN are not skipped")
    module = parts.module
    counts = GradientCounts(lambda: (param for _, param in module.named_parameters(remove_duplicate=False)))
    reducer = parts.reducer if parts.reducer.replicated is None else None
    return InBackward(optimizer, states, counts, clipping=clipping, reducer=reducer)


def _require_possible(parts: Parts, optimizer: Optimizer) -> None:
    if not parts.kind.whole:
        raise DeepSpeedConfigError(
            f"{KEY}: not for pipelines. A stage adds up the gradients of all micro-batches before its last backward, "
            "so that none would be freed early; and the last stages would be updated while an earlier one can still "
            "fail, after which nothing must have been. Turn it off",
            path=KEY,
        )
    clipped = isinstance(optimizer, FusedLamb) and any(group["max_grad_norm"] for group in optimizer.param_groups)
    if not tiles_well(optimizer) or clipped:
        raise DeepSpeedConfigError(
            f"{KEY}: a step of {type(optimizer).__name__} is not known to be the sum of its parameters' steps; use an "
            "optimizer of the config, of deepspeed.ops or of torch.optim (not LBFGS, nor Lamb with max_grad_norm, nor "
            "on several ranks Muon, whose matrices all of them compute together), or turn the key off",
            path=KEY,
        )
    if parts.scale.dynamic or parts.scale.value != 1.0:
        raise DeepSpeedConfigError(f"{KEY}: a loss scale tells of overflows too late for it; use bf16", path=KEY)
