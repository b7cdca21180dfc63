"""ZenFlow: the device updates the columns with the largest gradients, the host defers and applies the rest.

[Note: deferred gradients] The chosen columns of a parameter have master and moments of their own where the parameter is
used: each step updates them. The rest is added up on the host; now and then a step applies its mean to everything
there, and writes the chosen columns over it. They are given back before states are looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from deepspeed.config.zero import ZenFlowConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.memory.host import host_empty
from deepspeed.ops.moments import MomentKeeper
from deepspeed.zero.piece import StatePiece
from deepspeed.zero.states.host_step import in_one_pass
from deepspeed.zero.states.tiles import OffloadedTile, TileUpdate, twin


@dataclass(frozen=True)
class UpdateDecision:
    """What a step does."""

    defers: bool
    """Only important columns are updated; without it everything is, as ever."""
    share: float | None = None
    """So much of what was deferred until now, this step's part included, is applied; None: nothing is."""
    parts: bool = False
    """The columns are chosen anew by the next step."""


class UpdateSchedule:
    """Counts steps; `every` of them, or whoever asks, applies what was deferred."""

    def __init__(self, section: ZenFlowConfig) -> None:
        self._section = section
        self._warm = int(section.full_warm_up_rounds)
        self._every = None if section.update_interval == "auto" else max(int(section.update_interval), 1)
        self._select: int | None = None
        self.waiting = 0
        """Steps whose deferred gradients were not applied yet."""
        self._chosen_for = 0
        if section.select_strategy == "step":
            self._select = int(section.select_interval)
        elif section.steps_per_epoch:
            self.know_epoch(int(section.steps_per_epoch))

    @property
    def by_itself(self) -> bool:
        """True if it does not have to be asked."""
        return self._every is not None

    def know_epoch(self, steps: int) -> None:
        """So many steps are an epoch; without a word, columns that are chosen by epochs stay."""
        section = self._section
        if section.select_strategy == "step" or steps < 1 or self._select is not None:
            return
        self._select = steps * (1 if section.select_interval == "auto" else int(section.select_interval))
        if self._every is not None and self._every > self._select:
            raise DeepSpeedConfigError(
                f"zero_optimization.zenflow.update_interval: {self._every} steps are more than the {self._select} "
                f"after which columns are chosen anew (an epoch has {steps} steps); lower it",
                path="zero_optimization.zenflow.update_interval",
            )

    def decide(self, *, asked: bool = False) -> UpdateDecision:
        """What the step does that is taken now."""
        if self._warm > 0:
            self._warm -= 1
            return UpdateDecision(defers=False)
        self.waiting += 1
        self._chosen_for += 1
        if not (asked if self._every is None else self.waiting >= self._every):
            return UpdateDecision(defers=True)
        share, self.waiting = 1.0 / self.waiting, 0
        parts = self._select is not None and self._chosen_for >= self._select
        if parts:
            self._chosen_for = 0
        return UpdateDecision(defers=True, share=share, parts=parts)

    def forget(self) -> None:
        """Nothing is deferred any more."""
        self.waiting = 0


def choose_columns(piece: StatePiece, share: float) -> Tensor:
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


class SelectedColumns:
    """See the file. `param` is what an optimizer updates; it is gone while the host has the values."""

    def __init__(self, piece: StatePiece, places: Tensor, device: torch.device) -> None:
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
        if self.param is not None and self._seen != self.piece.adopted:  # the parameter was written
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


_KEY = "zero_optimization.zenflow"


class _Owed:
    """What was deferred of an arena's gradients, added up."""

    def __init__(self, arena: OffloadedTile) -> None:
        self.flat = host_empty(arena.numel, torch.float32, pinned=False).zero_()
        parts = self.flat.split(arena.sizes)
        self.parts = {id(piece): part for piece, part in zip(arena.pieces, parts, strict=True)}
        self.pieces: dict[int, StatePiece] = {}
        """Those of which something was."""


class DeferredUpdates:
    """See [Note: deferred gradients]."""

    def __init__(self, section: ZenFlowConfig, optimizer: Optimizer) -> None:
        if not (in_one_pass(optimizer) or type(optimizer) in (Adam, AdamW)):
            raise DeepSpeedConfigError(
                f"{_KEY}: {type(optimizer).__name__} does not update every element by itself, or not by a rule that is "
                "known to; use Adam, AdamW, Lion or Adagrad",
                path=_KEY,
            )
        if isinstance(optimizer, MomentKeeper) and optimizer.moment_bits == 8:
            raise DeepSpeedConfigError(
                f"{_KEY}: optimizer.params.moment_bits is 8, and codes of blocks cannot be taken apart by columns; use "
                "16 or 32",
                path="optimizer.params.moment_bits",
            )
        self._section = section
        self._columns, self._enough = float(section.topk_ratio), float(section.auto_ratio)
        self.schedule = UpdateSchedule(section)
        self._home = optimizer
        self._here = twin(optimizer)
        self._here.state = defaultdict(dict)
        if isinstance(self._here, MomentKeeper):
            self._here.new_state = None
            self._here.mixed = True  # type: ignore[attr-defined]
        self._chosen: dict[int, SelectedColumns] = {}
        """By the identity of the piece."""
        self._owed: dict[OffloadedTile, _Owed] = {}

    def direct(self, turns: Sequence[TileUpdate], factor: float) -> None:
        """Update what is important now, and tell every turn what the host does."""
        section = self._section
        coming = [piece for turn in turns for piece in turn.pieces]
        decision = self.schedule.decide(asked=not self.schedule.by_itself and self._ask(coming, factor))
        if not decision.defers:
            return
        for piece in coming:
            if id(piece) not in self._chosen:
                device = torch.device("cpu") if section.offload else piece.param.device
                self._chosen[id(piece)] = SelectedColumns(piece, choose_columns(piece, self._columns), device)
        self._update(turns, coming, factor)
        for turn in turns:
            self._defer(turn, factor, decision.share)
        if decision.parts:
            self._part()

    def _update(self, turns: Sequence[TileUpdate], coming: Sequence[StatePiece], factor: float) -> None:
        """One step of the chosen elements of pieces that have a gradient."""
        group_of = {
            id(master): place for turn in turns for place, some in enumerate(turn.tile.params) for master in some
        }
        groups: list[list[Tensor]] = [[] for _ in self._home.param_groups]
        for piece in coming:
            chosen = self._chosen[id(piece)]
            param = chosen.enter(self._home, self._here)
            param.grad = chosen.gradient(factor)
            groups[group_of[id(piece.master)]].append(param)
        self._here.param_groups += [{} for _ in groups[len(self._here.param_groups) :]]
        for mine, options, params in zip(self._here.param_groups, self._home.param_groups, groups, strict=True):
            mine.update({key: value for key, value in options.items() if key != "params"})
            mine["params"] = params
        self._here.step()
        for piece in coming:
            chosen = self._chosen[id(piece)]
            assert chosen.param is not None, "entered above"
            chosen.param.grad = piece.picked = None
            chosen.publish()

    def _defer(self, turn: TileUpdate, factor: float, share: float | None) -> None:
        """Let the host add this step's gradients; with `share`, apply that much of the sum."""
        arena = turn.tile.arena
        assert arena is not None, "its optimizer takes tiles one by one"
        if arena not in self._owed:
            self._owed[arena] = _Owed(arena)
        owed = self._owed[arena]
        owed.pieces.update({id(piece): piece for piece in turn.pieces})
        adds = [(owed.parts[id(piece)], grad) for piece, grad in zip(turn.pieces, turn.grads, strict=True)]

        def before() -> None:
            for total, grad in adds:
                total.add_(grad.view(-1), alpha=factor)

        turn.before = before
        if share is None:
            turn.only_before = True
            return
        turn.pieces = list(owed.pieces.values())
        turn.grads = [owed.parts[id(piece)] for piece in turn.pieces]
        turn.factor = share
        chosen = [self._chosen[key] for key in owed.pieces]
        for each in chosen:
            each.enter(self._home, self._here)  # one that had a gradient in an earlier step may have been given back
        values = [each.values(self._here) for each in chosen]
        owed.pieces.clear()

        def after(outs: Sequence[Tensor]) -> None:
            for each, known, out in zip(chosen, values, outs, strict=True):
                each.write(known, self._home, out)
            owed.flat.zero_()

        turn.after = after

    def _ask(self, coming: Sequence[StatePiece], factor: float) -> bool:
        """Whether enough parameters have had as much deferred as their important columns are moved by at once."""
        asking = 0
        for piece in coming:
            chosen = self._chosen.get(id(piece))
            if chosen is None:
                continue
            important = float(chosen.gradient(factor).norm())
            whole = float(piece.measured().norm()) * factor
            chosen.owed += max(whole**2 - important**2, 0.0) ** 0.5
            asking += chosen.owed >= important
        enough = bool(coming) and asking >= self._enough * len(coming)
        if enough:
            for chosen in self._chosen.values():
                chosen.owed = 0.0
        return enough

    def _part(self) -> None:
        """Let the next step choose anew; the turns of this one have what the host needs."""
        for chosen in self._chosen.values():
            chosen.drop(self._here)
            chosen.piece.chosen = chosen.piece.picked = None
        self._chosen.clear()

    def give_back(self) -> None:
        """Let the states of the host be complete, until the next step."""
        for chosen in self._chosen.values():
            chosen.leave(self._home, self._here)

    def forget(self) -> None:
        """States were written by others: what is here, and what was deferred, counts no more."""
        for chosen in self._chosen.values():
            chosen.drop(self._here)
        for owed in self._owed.values():
            owed.flat.zero_()
            owed.pieces.clear()
        self.schedule.forget()
