"""`StatePiece`: the interval of one parameter that this rank's optimizer updates."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.ops.moments import MomentKeeper
from deepspeed.zero.parameters.data import writes

if TYPE_CHECKING:
    from deepspeed.zero.states.tiles import OffloadedTile

# States of torch's optimizers that are one number for a whole parameter.
_COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})


@dataclass(eq=False, slots=True)
class StatePiece:
    """The master weight of an interval of one parameter, and the gradient that is being summed for it.

    One-dimensional, but where the interval is all of a parameter that is not shared: then of its shape.
    """

    name: str
    param: nn.Parameter
    shape: torch.Size
    """Of the whole parameter."""
    interval: tuple[int, int]
    source: Tensor
    """The same interval in the dtype of the model: where the updated master is published to."""
    given: InitVar[nn.Parameter | None] = None
    """The master, if it is not to be made of the source."""
    master: nn.Parameter = field(init=False)
    gradient: Tensor | None = None
    """What has been summed so far, in the dtype in which gradients are accumulated; None if nothing has come."""
    home: Tensor | None = None
    """Memory that is kept for the gradient between steps; None where it comes and goes."""
    arena: OffloadedTile | None = None
    """Where master, moments and gradient live, if in another tier than the parameter."""
    norm: Tensor | None = None
    """Of a gradient that left the device, as the device saw it; None where it has to be measured in host memory."""
    version: tuple[int, int] = (0, 0)
    """What `_writes` said when the values of the parameter were last known."""
    adopted: int = 0
    """How often values that others wrote were taken over."""
    chosen: Tensor | None = None
    """Places whose gradients are looked at before they leave the device; see [Note: deferred gradients]."""
    picked: Tensor | None = None
    """The gradient at these places."""

    def __post_init__(self, given: nn.Parameter | None) -> None:  # type: ignore[override]  # mypy and slots
        self.master = nn.Parameter(self.source, requires_grad=True) if given is None else given
        self.mark()

    @property
    def away(self) -> bool:
        """True if master, moments and gradient live in another tier than the parameter."""
        return self.arena is not None

    @property
    def separate(self) -> bool:
        """True if the master is a copy, in another dtype or another tier."""
        if self.arena is not None or self.master.dtype != self.source.dtype:
            return True
        return self.master.data_ptr() != self.source.data_ptr()

    def leave(self, arena: OffloadedTile, master: Tensor, home: Tensor) -> None:
        """Live in another tier: `master`, shaped like the old one and filled, and `home` for the gradient."""
        self.arena = arena
        self.master = nn.Parameter(master, requires_grad=True)
        self.home = home

    def widen(self, dtype: torch.dtype, device: torch.device) -> None:
        """Give the piece a master of its own in another dtype or on another device."""
        if (dtype, device) != (self.source.dtype, self.source.device):
            self.master = nn.Parameter(self.source.detach().to(device, dtype), requires_grad=True)

    def measured(self) -> Tensor:
        """A tensor with the norm of the gradient of a piece that is away, where its parameter is."""
        assert self.gradient is not None, "only what came is measured"
        if self.norm is None:
            return self.gradient if self.param.device == self.gradient.device else self.gradient.to(self.param.device)
        return self.norm

    @property
    def edited(self) -> bool:
        """True if the parameter was written since its values were last known; see [Note: edits]."""
        return self._writes() != self.version

    def mark(self) -> None:
        """The values of the parameter are known."""
        self.version = self._writes()

    def _writes(self) -> tuple[int, int]:
        return writes(self.param), self.source.data_ptr()

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over what was written into the parameter since the last step.

        Elements that are still what the master was rounded to keep the master: a script that clamps its weights after
        each step would else train in the precision of the model.
        """
        if self.arena is not None:
            self.arena.claim()
        self.adopted += 1
        if self.separate:
            master, values = self.master, self.source.detach().to(self.master.device)
            kept = master.to(values.dtype) == values
            master.copy_(torch.where(kept, master, values.to(master.dtype)))
        self.mark()

    def take_state(self, optimizer: Optimizer) -> None:
        """Take over this interval of what the optimizer knows about the whole parameter, if it was used before."""
        if self.param not in optimizer.state:
            return
        if isinstance(optimizer, MomentKeeper):
            optimizer.take_part(self.master, self.param, self.interval)
            return
        start, stop = self.interval
        optimizer.state[self.master] = {
            key: as_wide(value.detach().reshape(-1)[start:stop], self).clone().view(self.master.shape)
            if is_moment(key, value, self.shape)
            else value
            for key, value in optimizer.state[self.param].items()
        }

    @torch.no_grad()
    def put_gradient(self, values: Tensor, dtype: torch.dtype) -> None:
        """Replace the gradient, where the old one lies: what is measured as one tensor stays true."""
        if self.gradient is None:
            self.gradient = self.home if self.home is not None else torch.empty_like(values, dtype=dtype)
        self.gradient.copy_(values)
        self.norm = self.picked = None


def is_moment(key: str, value: object, shape: torch.Size) -> TypeGuard[Tensor]:
    """True if a state has an element for each of a parameter's; those of a scalar look as its counters do."""
    return isinstance(value, Tensor) and value.shape == shape and (value.dim() > 0 or key not in _COUNTERS)


def as_wide(moment: Tensor, piece: StatePiece) -> Tensor:
    """A moment that was made in the dtype of the parameter, in that of the master which it belongs to from now on."""
    dtype = piece.master.dtype if moment.dtype == piece.param.dtype else moment.dtype
    return moment.to(piece.master.device, dtype)


@torch.no_grad()
def hand_over(pieces: Sequence[StatePiece], lines: dict[Hashable, Tensor], *, narrow: bool = False) -> None:
    """Make the summed gradients those of the masters, in their dtype; the memory that they fill is added to `lines`.

    Those that share memory, a bucket's or the group's, have nothing but zeros between them and are cast as one. With
    `narrow`, those of another dtype stay where they are.
    """
    for piece in pieces:
        if piece.home is not None and piece.gradient is None and piece.arena is None:
            piece.home.zero_()  # the gradient of an earlier step
    for piece in pieces:
        grad, master = piece.gradient, piece.master
        if piece.arena is not None:
            if grad is not None:  # where it lies is where it is used
                lines[id(piece)] = piece.measured()
            continue
        piece.gradient = master.grad = None
        if grad is None:
            continue
        wanted = master.dtype
        stays = narrow and grad.dtype != wanted
        if stays:
            wanted = grad.dtype
            piece.gradient = grad
        storage = grad.untyped_storage()
        key = (storage._cdata, wanted)
        if key not in lines:
            lines[key] = grad.new_empty(0).set_(storage).to(wanted)
        if stays:
            continue
        if grad.dtype != wanted:
            at = int(grad.storage_offset())
            grad = lines[key][at : at + grad.numel()]
        master.grad = grad if grad.ndim == master.ndim else grad.view(master.shape)
