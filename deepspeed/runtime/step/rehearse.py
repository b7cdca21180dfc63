"""The kernels of an optimizer's step, compiled before its first one; see [Note: rehearsals]."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.ops.conditions import Conditions
from deepspeed.ops.one_pass import OnePass
from deepspeed.ops.rehearsal import Scene
from deepspeed.runtime.step.ahead import in_one_pass, under
from deepspeed.zero.states.piece import Piece
from deepspeed.zero.states.states import States
from deepspeed.zero.states.tiles import twin
from deepspeed.zero.states.whole import WholeGroup

__all__ = ["scenes_of"]


def scenes_of(optimizer: Optimizer, states: States, accumulate: torch.dtype) -> Iterator[Scene]:
    """A step over one parameter of each kind; nothing where no kernel of ours takes it.

    Gradients of shards lie in `accumulate`, those of whole parameters in the dtype of these.
    """
    if states.away or not states.in_place or not in_one_pass(optimizer, states.device):
        return
    for group in states.groups:
        # one whose size is no multiple of 16 decides for all that a kernel updates together
        for piece in sorted(group.pieces, key=lambda each: each.master.numel() % 16 == 0)[:1]:
            grad = piece.param.dtype if isinstance(group, WholeGroup) else accumulate
            place = next(at for at, options in enumerate(optimizer.param_groups) if options is group.options)
            yield partial(_step, optimizer, place, piece, grad)


def _step(optimizer: Optimizer, place: int, piece: Piece, dtype: torch.dtype) -> None:
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
    with under(made, Conditions(scalar, scalar)):
        made.step()
