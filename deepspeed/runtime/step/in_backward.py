"""`InBackward`: parameters are updated while backward brings their gradients, which never exist all at once.

[Note: when a gradient is whole] A parameter's hook is called after autograd has summed what one backward gives it; its
weight is then not needed any more. Only a backward inside the backward (reentrant checkpointing) may bring more later.
So a parameter is updated when it has come as often as in the last backward; in the first one, if it came in the outer
backward and has one name only. Everything else waits for the end of the backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.errors import DeepSpeedConfigError, FeatureUnavailable, UsageError
from deepspeed.log import log_dist
from deepspeed.ops.conditions import Conditions
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.multi_tensor import scale_, sum_of_squares
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.step.ahead import in_one_pass, under
from deepspeed.zero.states.norm import clip_coefficient
from deepspeed.zero.states.piece import Piece
from deepspeed.zero.states.states import States
from deepspeed.zero.states.tiles import tiles_well

__all__ = ["KEY", "InBackward", "update_in_backward"]

KEY = "optimizer_in_backward.enabled"
LAST_NORM = "last_grad_norm"
"""In the optimizer's groups, so that checkpoints have it; 0 before the first step."""

_TOGETHER = 1 << 22  # elements that are updated by one call: fewer would be more calls, more wait longer

# The number of the backward that is running in this thread, -1 outside one; nested ones have their own.
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class InBackward:
    """Takes the steps of an optimizer in pieces, as gradients come; see [Note: when a gradient is whole]."""

    def __init__(
        self, optimizer: Optimizer, states: States, params: Callable[[], Iterable[nn.Parameter]], *, clipping: float
    ) -> None:
        """`clipping` by the norm of the last step; 0: none. `params` are the model's, tied ones as often as named."""
        self._optimizer, self._states, self._params, self._clipping = optimizer, states, params, clipping
        self._together = _TOGETHER
        self._handles: dict[int, Any] = {}
        self._pieces: dict[int, Piece] = {}
        self._seen: Counter[int] = Counter()
        self._expected: Counter[int] | None = None
        self._done: set[int] = set()
        self._waiting: list[Piece] = []
        self._size = 0
        self._squares: Tensor | None = None
        self._armed = False
        self._task = -1
        self._factor = 1.0
        for group in optimizer.param_groups:
            group.setdefault(LAST_NORM, 0.0)

    @property
    def taken(self) -> bool:
        """True between the first update of a step and `engine.step()`."""
        return bool(self._done)

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
        self._look()
        self._armed, self._task = True, _graph_task()
        self._seen.clear()
        self._factor = unit
        last = max(float(group[LAST_NORM]) for group in self._optimizer.param_groups)
        if self._clipping > 0 and last > 0:
            self._factor *= float(clip_coefficient(torch.tensor(last), self._clipping))

    def finish(self) -> None:
        """The backward is over: what waited is updated."""
        if not self._armed:
            return
        self._armed = False
        if self._seen:
            self._expected = Counter(self._seen)
        left = [piece for key, piece in self._pieces.items() if key not in self._done]
        self._waiting = [piece for piece in left if _grad(piece) is not None]
        self._flush()

    def abandon(self) -> None:
        """The backward failed; what it has updated stays so."""
        self._armed, self._size = False, 0
        self._waiting.clear()

    @torch.no_grad()
    def complete(self, unit: float) -> Tensor | None:
        """End a step: update what no backward has, and return the norm; None if there was no gradient at all."""
        if not self._done:
            self.begin(unit)
        self._armed = True
        self.finish()
        if not self._done:
            return None
        self._done.clear()
        squares, self._squares = self._squares, None
        assert squares is not None, "what is updated is measured"
        norm = squares.sqrt().float() * unit
        if self._clipping > 0:
            known = float(norm)
            for group in self._optimizer.param_groups:  # one that is not finite says nothing of the next step
                group[LAST_NORM] = known if known < float("inf") else group[LAST_NORM]
        return norm

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _look(self) -> None:
        """Follow parameters that are trained by now."""
        names = Counter(id(param) for param in self._params())
        for group in self._states.groups:
            for piece in group.pieces:
                key = id(piece.param)
                self._pieces[key] = piece
                if key not in self._handles and piece.param.requires_grad:
                    arrived = self._arrived(piece, shared=names[key] > 1)
                    self._handles[key] = piece.param.register_post_accumulate_grad_hook(arrived)

    def _arrived(self, piece: Piece, *, shared: bool) -> Callable[[Tensor], None]:
        key = id(piece.param)

        def arrived(_: Tensor) -> None:
            if not self._armed:
                return
            if key in self._done:
                raise UsageError(
                    f"{KEY}: a gradient of {piece.name} came after its update in the same backward. It is used in "
                    "several parts under reentrant checkpointing, otherwise than in the backward before; use "
                    "use_reentrant=False, or turn the key off."
                )
            self._seen[key] += 1
            known = None if self._expected is None else self._expected.get(key)
            if known is None:
                known = 1 if _graph_task() == self._task and not shared else None
            if known is not None and self._seen[key] >= known:
                self._waiting.append(piece)
                self._size += piece.param.numel()
                if self._size >= self._together:
                    self._flush()

        return arrived

    @torch.no_grad()
    def _flush(self) -> None:
        """Update what waits, and free its gradients."""
        pieces, self._waiting, self._size = self._waiting, [], 0
        if not pieces:
            return
        device = pieces[0].master.device
        one_pass = in_one_pass(self._optimizer, device) and self._states.in_place
        grads = self._states.take_some(pieces, narrow=one_pass)
        squares = sum_of_squares(grads)
        self._squares = squares if self._squares is None else self._squares + squares
        given: Any = nullcontext()
        if one_pass:
            zero = torch.zeros((), device=device)
            given = under(self._optimizer, Conditions(zero + 1.0 / self._factor, zero))
        elif self._factor != 1.0:
            scale_(grads, self._factor)
        del grads
        with given:
            self._states.update_some(self._optimizer, pieces, one_pass=one_pass)
        self._done.update(id(piece.param) for piece in pieces)


def _grad(piece: Piece) -> Tensor | None:
    return piece.param.grad if piece.param.grad is not None else piece.master.grad


def update_in_backward(parts: Parts, optimizer: Optimizer, states: States) -> InBackward | None:
    """As the config says; an error where a step cannot be taken in pieces."""
    schema = parts.config.schema
    clipping = schema.gradient_clipping if schema.optimizer_in_backward.clip_by_last_norm else 0.0
    if not schema.optimizer_in_backward.enabled:
        return None
    if parts.layout["dp", "sp"].size > 1 or parts.layout["pp", "tp"].size > 1 or parts.layers is not None:
        raise FeatureUnavailable(f"{KEY}: not part of this version yet on several ranks; turn it off", path=KEY)
    clipped = isinstance(optimizer, FusedLamb) and any(group["max_grad_norm"] for group in optimizer.param_groups)
    if not tiles_well(optimizer) or clipped:
        raise DeepSpeedConfigError(
            f"{KEY}: a step of {type(optimizer).__name__} is not known to be the sum of its parameters' steps; use an "
            "optimizer of the config, of deepspeed.ops or of torch.optim (not LBFGS, nor Lamb with max_grad_norm), or "
            "turn the key off",
            path=KEY,
        )
    if parts.scale.dynamic or parts.scale.value != 1.0:
        raise DeepSpeedConfigError(f"{KEY}: a loss scale tells of overflows too late for it; use bf16", path=KEY)
    how = f"clipped to {clipping:g} by the norm of the step before" if clipping > 0 else "not clipped"
    log_dist(f"{KEY}: parameters are updated in backward; gradients are {how}, steps with inf or NaN are not skipped")
    module = parts.module
    return InBackward(
        optimizer,
        states,
        lambda: (param for _, param in module.named_parameters(remove_duplicate=False)),
        clipping=clipping,
    )
