"""ZenFlow as a policy of the step: important columns at once on the device, the rest later and together on the host.

[Note: deferred gradients] Gradients come to host memory as with any offload. Of each parameter the columns whose
gradients have most energy are chosen, and have master and moments of their own where the parameter is used: each step
updates them. The rest is added up on the host; now and then a step applies its mean to everything there, and what the
chosen columns have become in between is written over it. Whoever looks at states finds those of the chosen columns in
them, since they are given back first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from deepspeed.config.zenflow import ZenFlowConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.memory.host import host_empty
from deepspeed.ops.moments import MomentKeeper
from deepspeed.zero.states.afar import in_one_pass
from deepspeed.zero.states.arena import Arena
from deepspeed.zero.states.chosen import Chosen, choose_columns
from deepspeed.zero.states.piece import Piece
from deepspeed.zero.states.rhythm import Rhythm
from deepspeed.zero.states.tiles import twin
from deepspeed.zero.states.turn import Turn

__all__ = ["Deferral"]

_KEY = "zero_optimization.zenflow"


class _Owed:
    """What was deferred of an arena's gradients, added up."""

    def __init__(self, arena: Arena) -> None:
        self.flat = host_empty(arena.numel, torch.float32, pinned=False).zero_()
        parts = self.flat.split(arena.sizes)
        self.parts = {id(piece): part for piece, part in zip(arena.pieces, parts, strict=True)}
        self.pieces: dict[int, Piece] = {}
        """Those of which something was."""


class Deferral:
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
        self.rhythm = Rhythm(section)
        self._home = optimizer
        self._here = twin(optimizer)
        self._here.state = defaultdict(dict)
        if isinstance(self._here, MomentKeeper):
            self._here.new_state = None
            self._here.mixed = True  # type: ignore[attr-defined]
        self._chosen: dict[int, Chosen] = {}
        """By the identity of the piece."""
        self._owed: dict[Arena, _Owed] = {}

    def direct(self, turns: Sequence[Turn], factor: float) -> None:
        """Update what is important now, and tell every turn what the host does."""
        section = self._section
        coming = [piece for turn in turns for piece in turn.pieces]
        beat = self.rhythm.beat(asked=not self.rhythm.by_itself and self._ask(coming, factor))
        if not beat.defers:
            return
        for piece in coming:
            if id(piece) not in self._chosen:
                device = torch.device("cpu") if section.offload else piece.param.device
                self._chosen[id(piece)] = Chosen(piece, choose_columns(piece, self._columns), device)
        self._update(turns, coming, factor)
        for turn in turns:
            self._defer(turn, factor, beat.share)
        if beat.parts:
            self._part()

    def _update(self, turns: Sequence[Turn], coming: Sequence[Piece], factor: float) -> None:
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

    def _defer(self, turn: Turn, factor: float, share: float | None) -> None:
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

    def _ask(self, coming: Sequence[Piece], factor: float) -> bool:
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
        """States were written by somebody else: what is here, and what was deferred, counts no more."""
        for chosen in self._chosen.values():
            chosen.drop(self._here)
        for owed in self._owed.values():
            owed.flat.zero_()
            owed.pieces.clear()
        self.rhythm.forget()
