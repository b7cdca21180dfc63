"""`Chosen`: the important elements of a piece that is away, with a master and moments of their own where it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.zero.states.piece import Piece

__all__ = ["Chosen", "choose_columns"]


def choose_columns(piece: Piece, share: float) -> Tensor:
    """Places in a piece, on the host: of the columns whose gradients have most energy, all of a vector."""
    assert piece.gradient is not None, "only what came is chosen from"
    start, stop = piece.interval
    if len(piece.shape) < 2:
        return torch.arange(stop - start)
    columns = torch.arange(start, stop) % piece.shape[-1]
    energy = torch.zeros(piece.shape[-1]).index_add_(0, columns, piece.gradient.float().view(-1).square())
    best = torch.zeros(piece.shape[-1], dtype=torch.bool)
    best[energy.topk(max(round(share * len(best)), 1)).indices] = True
    return best[columns].nonzero().view(-1)


class Chosen:
    """See the file. `param` is what an optimizer updates; it is gone while the host has the values."""

    def __init__(self, piece: Piece, places: Tensor, device: torch.device) -> None:
        self.piece, self.places, self._device = piece, places, device
        self.there = places.to(piece.param.device)
        """The places, where the piece is used."""
        self.param: nn.Parameter | None = None
        self._step: Any = None
        self._seen = piece.adopted
        self.owed = 0.0
        """Norms of what was deferred, added up."""
        piece.chosen = self.there

    def gradient(self, factor: float) -> Tensor:
        """Of this step: as it was seen on the device, or where it lies by now."""
        piece = self.piece
        if piece.picked is None:
            assert piece.gradient is not None, "only what came is updated"
            piece.picked = piece.gradient.view(-1)[self.places]
        return piece.picked.to(self._device, torch.float32) * factor

    @torch.no_grad()
    def enter(self, home: Optimizer, optimizer: Optimizer) -> nn.Parameter:
        """Take master and moments from where the piece lives, unless they are here."""
        if self.param is not None and self._seen != self.piece.adopted:  # somebody wrote into the parameter
            self.param.copy_(self.piece.master.view(-1)[self.places])
        self._seen = self.piece.adopted
        if self.param is None:
            self.param = nn.Parameter(self.piece.master.view(-1)[self.places].to(self._device))
            kept: dict[str, Any] = {}
            for kind, value in home.state.get(self.piece.master, {}).items():
                whole = isinstance(value, Tensor) and value.numel() == self.piece.master.numel() and value.dim() > 0
                kept[kind] = value.view(-1)[self.places].to(self._device) if whole else _copy(value)
            if self._step is not None:
                kept["step"] = self._step
            if kept:
                optimizer.state[self.param] = kept
        return self.param

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the new values to where the parameter is used."""
        assert self.param is not None, "it was updated"
        source = self.piece.source.view(-1)
        source.index_copy_(0, self.there, self.param.detach().to(source.device, source.dtype))

    def values(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """What the host needs to know, by kind; "" is the master."""
        assert self.param is not None, "it is here"
        moments = {k: v for k, v in optimizer.state.get(self.param, {}).items() if isinstance(v, Tensor) and v.dim()}
        return {kind: value.detach().to("cpu", copy=True) for kind, value in {"": self.param, **moments}.items()}

    @torch.no_grad()
    def write(self, values: dict[str, Tensor], home: Optimizer, out: Tensor | None = None) -> None:
        """Write such values where the piece lives, and to `out` as the weights that return to the device."""
        master = self.piece.master
        for kind, value in values.items():
            target = master if not kind else _state(home, master, kind, value.dtype)
            target.view(-1)[self.places] = value.to(target.dtype)
        if out is not None:
            out.view(-1)[self.places] = values[""].to(out.dtype)

    def leave(self, home: Optimizer, optimizer: Optimizer) -> None:
        """Give everything back to the host, until the next step."""
        if self.param is not None:
            self.write(self.values(optimizer), home)
            self.drop(optimizer, home)

    def drop(self, optimizer: Optimizer, home: Optimizer | None = None) -> None:
        """Forget what is here; the host's values count."""
        if self.param is not None:
            state = optimizer.state.pop(self.param, {})
            self._step = _copy(state["step"]) if home is not None and "step" in state else None
            if home is not None and "step" in state:
                home.state[self.piece.master].setdefault("step", state["step"] * 0)  # of the host's own there was none
            self.param = None


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _state(home: Optimizer, master: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """A state of the host, zeros if a step of the host has not made it yet."""
    state = home.state[master]
    if kind not in state:
        new = getattr(home, "new_state", None)
        made = torch.zeros(master.numel(), dtype=dtype) if new is None else new(master, dtype, kind)
        state[kind] = made.view(master.shape)
    found: Tensor = state[kind]
    return found
