"""`Piece`: the interval of one parameter that this rank's optimizer updates."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Piece", "hand_over"]


class Piece:
    """The master weight of an interval of one parameter, and the gradient that is being summed for it.

    One-dimensional, but where the interval is all of a parameter that nobody shares: then of its shape.
    """

    __slots__ = ("gradient", "home", "interval", "master", "name", "param", "shape", "source", "version")

    def __init__(
        self,
        name: str,
        param: nn.Parameter,
        shape: torch.Size,
        interval: tuple[int, int],
        source: Tensor,
        master: nn.Parameter | None = None,
    ) -> None:
        self.name = name
        self.param = param
        self.shape = shape
        """Of the whole parameter."""
        self.interval = interval
        self.source = source
        """The same interval in the dtype of the model: where the updated master is published to."""
        self.master = nn.Parameter(source, requires_grad=True) if master is None else master
        self.gradient: Tensor | None = None
        """What has been summed so far, in the dtype in which gradients are accumulated; None if nothing has come."""
        self.home: Tensor | None = None
        """Memory that is kept for the gradient between steps; None where it comes and goes."""
        self.version = param._version

    @property
    def separate(self) -> bool:
        """True if the master is a copy in another dtype."""
        return self.master.dtype != self.source.dtype

    def widen(self, dtype: torch.dtype) -> None:
        """Give the piece a master of its own in another dtype."""
        if dtype != self.source.dtype:
            self.master = nn.Parameter(self.source.detach().to(dtype), requires_grad=True)

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over what somebody wrote into the parameter since the last step."""
        if self.separate:
            self.master.copy_(self.source)

    def take_state(self, optimizer: Optimizer) -> None:
        """Take over this interval of what the optimizer knows about the whole parameter, if it was used before."""
        if self.param not in optimizer.state:
            return
        start, stop = self.interval
        optimizer.state[self.master] = {
            key: value.detach().reshape(-1)[start:stop].clone()
            if isinstance(value, Tensor) and value.shape == self.shape and value.dim() > 0
            else value
            for key, value in optimizer.state[self.param].items()
        }

    @torch.no_grad()
    def put_gradient(self, values: Tensor, dtype: torch.dtype) -> None:
        """Replace the gradient, where the old one lies: what is measured as one tensor stays true."""
        if self.gradient is None:
            self.gradient = self.home if self.home is not None else torch.empty_like(values, dtype=dtype)
        self.gradient.copy_(values)


@torch.no_grad()
def hand_over(pieces: Sequence[Piece], lines: dict[Hashable, Tensor]) -> None:
    """Make the summed gradients those of the masters, in their dtype; the memory that they fill is added to `lines`.

    Gradients that share memory, a bucket's or the group's, have nothing but zeros between them and are cast as one.
    """
    for piece in pieces:
        if piece.gradient is None and piece.home is not None:
            piece.home.zero_()  # the gradient of an earlier step
    for piece in pieces:
        grad, piece.gradient = piece.gradient, None
        if grad is None:
            piece.master.grad = None
            continue
        storage, wanted = grad.untyped_storage(), piece.master.dtype
        key = (storage.data_ptr(), wanted)
        line = lines.get(key)
        if line is None:
            line = lines[key] = grad.new_empty(0).set_(storage).to(wanted)
        if grad.dtype == wanted:
            piece.master.grad = grad
        else:
            at = int(grad.storage_offset())
            piece.master.grad = line[at : at + grad.numel()]
