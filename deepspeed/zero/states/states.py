"""What an optimizer updates instead of the model's parameters, and how what it did returns to them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.comm import Pending
from deepspeed.errors import UsageError
from deepspeed.memory.tier import DeviceStore, StateStore
from deepspeed.ops.moments import MomentKeeper
from deepspeed.ops.multi_tensor import sum_of_squares
from deepspeed.ops.one_pass import OnePass
from deepspeed.parallel import AxisGroup
from deepspeed.zero.gradients.reducer import GradientReducer
from deepspeed.zero.piece import StatePiece
from deepspeed.zero.placement import Placement
from deepspeed.zero.states.groups import ShardGroup
from deepspeed.zero.states.host_step import HostStep
from deepspeed.zero.states.late_parameters import arrive
from deepspeed.zero.states.norm import NormRanks, NormTerms, PendingNorm, joint_norm, total_norm
from deepspeed.zero.states.parameter_state import ParameterState
from deepspeed.zero.states.tiles import (
    OffloadedTile,
    StepTiling,
    Tile,
    TileUpdate,
    choose,
    empty_tile,
    tile,
    tiles_well,
)
from deepspeed.zero.states.zenflow import DeferredUpdates

GroupOf = Callable[[StatePiece], ShardGroup]
"""The group that a piece belongs to."""


def one_pass_over(pieces: Sequence[StatePiece], group_of: GroupOf, factor: float = 1.0) -> OnePass:
    """Gradients that were not cast, times `factor`, and where the model reads what the optimizer writes."""
    grads: dict[Tensor, Tensor] = {}
    outs: dict[Tensor, Tensor] = {}
    for piece in pieces:
        grad = group_of(piece).narrow_gradient(piece)
        if grad is not None:
            grads[piece.master] = grad
        if piece.separate:
            outs[piece.master] = piece.source
    return OnePass(factor, grads, outs)


@torch.no_grad()
def update_some(optimizer: Optimizer, pieces: Sequence[StatePiece], group_of: GroupOf, *, one_pass: bool) -> None:
    """Update some pieces, whose gradients were taken (`ShardGroup.take`) and are freed; other ranks see nothing yet."""
    everything = [options["params"] for options in optimizer.param_groups]
    places = {id(options): place for place, options in enumerate(optimizer.param_groups)}
    chosen: list[list[nn.Parameter]] = [[] for _ in everything]
    for piece in pieces:
        chosen[places[id(group_of(piece).options)]].append(piece.master)
    try:
        if one_pass:
            optimizer.one_pass = one_pass_over(pieces, group_of)  # type: ignore[attr-defined]
        choose(optimizer, Tile(chosen, []))
        optimizer.step()
    finally:
        if one_pass:
            optimizer.one_pass = None  # type: ignore[attr-defined]
        for options, params in zip(optimizer.param_groups, everything, strict=True):
            options["params"] = params
    copied = [piece for piece in pieces if piece.separate]
    if copied and not one_pass:
        torch._foreach_copy_([piece.source for piece in copied], [piece.master for piece in copied])
    for piece in pieces:
        group_of(piece).use_up(piece)


class OptimizerStates:
    """Gives the optimizer its pieces in place of the parameters, and brings what it did back to the parameters.

    The optimizer's group dicts stay the same objects, so that schedules keep their hold. A parameter that does not
    train yet waits until it is unfrozen.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make_groups: Callable[[dict[str, Any], list[nn.Parameter]], Sequence[ShardGroup]],
        measure: NormRanks,
        *,
        waits: Callable[[nn.Parameter], bool] | None = None,
        pace: StepTiling = StepTiling(),
        store: StateStore[Tile] = DeviceStore(),
        deferral: DeferredUpdates | None = None,
    ) -> None:
        """`waits` tells the frozen parameters that enter when they are unfrozen: all of them, if None.

        `store` brings states that are in no memory; `deferral` decides what the host does of a step, and when.
        """
        self.deferral = deferral
        self._pace = pace
        self._host = HostStep(pace, store, defers=deferral is not None)
        self._optimizer = optimizer
        self._make = make_groups
        self._measure = measure
        self._waits = waits
        self._waiting: list[tuple[dict[str, Any], nn.Parameter]] = []
        self._taken = 0
        self._norms = PendingNorm()
        self.groups: list[ShardGroup] = []
        self._places: dict[int, tuple[ShardGroup, int]] = {}
        self.away: dict[int, StatePiece] = {}
        """Pieces whose states live in another tier than the parameter, by the id of their masters."""
        self._take_groups()
        if self.away and isinstance(optimizer, MomentKeeper):
            optimizer.new_state = self._new_state
            optimizer.mixed = True  # type: ignore[attr-defined]  # some of what it updates stays on the device
            self._take_disk(optimizer)
        self.local_gradients: Callable[[], list[tuple[nn.Parameter, Tensor]]] = list
        """Whole gradients that stay on this rank, which the optimizer uses in place of those of its pieces."""
        self.reducer: GradientReducer | None = None
        self.compiled = False
        """The model runs compiled, where nothing looks whether a parameter is late."""
        self.absent = ""
        """What to say to whoever needs states that are elsewhere for a while."""
        self.returning: Callable[[], None] | None = None
        """Brings states back that are elsewhere for a while."""

    @property
    def copies(self) -> bool:
        """True if the optimizer does not hold all of the model's own parameters."""
        return bool(self._waiting) or any(group.copies for group in self.groups)

    def refresh(self) -> list[nn.Parameter]:
        """Begin to train parameters that were unfrozen; returns them."""
        self._take_groups()
        unfrozen = [(options, param) for options, param in self._waiting if param.requires_grad]
        if unfrozen:
            self._waiting = [item for item in self._waiting if not item[1].requires_grad]
            for options in self._optimizer.param_groups:
                if chosen := [param for owner, param in unfrozen if owner is options]:
                    self._enter(options, chosen)
        return [param for _, param in unfrozen]

    def _take_groups(self) -> None:
        """Take over groups that were added to the optimizer."""
        for options in self._optimizer.param_groups[self._taken :]:
            self._taken += 1
            params, options["params"] = options["params"], []
            waiting = [p for p in params if not p.requires_grad and (self._waits is None or self._waits(p))]
            self._waiting += [(options, param) for param in waiting]
            later = {id(param) for param in waiting}
            self._enter(options, [param for param in params if id(param) not in later])

    def held(self, param: nn.Parameter) -> ParameterState | None:
        """What this rank holds of a parameter; None if the optimizer does not train it."""
        self.settle()
        self._claim()  # whoever asks may write
        group, place = self._places.get(id(param), (None, 0))
        return None if group is None else group.held(place, self.reducer)

    def holder(self, param: nn.Parameter) -> nn.Parameter:
        """What the optimizer updates for a parameter that is whole here; itself where there is nothing else."""
        held = self.held(param)
        return param if held is None or held.master is None else held.master

    def adopt_edits(self) -> None:
        """Take over parameters that were written since the last step, instead of undoing that silently."""
        self.settle()
        for group in self.groups:
            group.adopt_edits()

    @torch.no_grad()
    def take_gradients(self, *, narrow: bool = False, measure: bool = True) -> None:
        """Hand the reduced gradients to what the optimizer updates, and `measure` them.

        `narrow`: the optimizer will update in one pass, and reads gradients in the dtype they have.
        """
        self._norms.complete()
        self._finish()
        for group in self.groups:
            group.adopt_edits()
        placements = {id(group.placement): group.placement for group in self.groups}
        filled = []
        for placement in placements.values():
            lines: dict[Hashable, Tensor] = {}
            for group in self._of(placement):
                group.hand_over(lines, narrow=narrow)
            filled.append((placement, list(lines.values())))
        self.drop_absent()
        if measure:
            terms = self._local_terms() or [self._line(*each) for each in filled]
            self._norms.begun(total_norm(terms, self._measure, self.device))

    def gradient_norm(self) -> Tensor:
        """The norm of the reduced gradients that the next step will use, which stay where they are."""
        if self.reducer is not None:
            self.reducer.wait()
        measure, found = self._measure, []
        if terms := self._local_terms():
            return total_norm(terms, measure, self.device).wait()
        for group in self.groups:
            shared: list[Tensor] = []
            split: list[Tensor] = []
            for piece, grad in zip(group.pieces, group.gradients(), strict=True):
                if grad is not None and id(piece.param) not in measure.elsewhere:
                    (split if measure.model_group is not None and measure.is_split(piece.param) else shared).append(
                        grad
                    )
            squares = sum_of_squares(shared) if shared else None, sum_of_squares(split) if split else None
            found.append((group.placement, squares))
        return joint_norm(found, measure, self.device).wait()

    @property
    def in_place(self) -> bool:
        """True if an update of masters on the device can write the model's weights, too: both are on one device."""
        return all(piece.master.device == piece.source.device for piece in self._on_device())

    def _on_device(self) -> Iterator[StatePiece]:
        """Pieces whose states live where the parameter does."""
        return (piece for group in self.groups for piece in group.pieces if not piece.away)

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        return next((param.device for group in self.groups for param in group.params), torch.device("cpu"))

    def ranks_of(self, param: nn.Parameter) -> AxisGroup:
        """The ranks that hold the same elements of a parameter."""
        return self._measure.ranks_of(param)

    @property
    def staged(self) -> bool:
        """True if other stages have parameters of their own, which may have gradients where these have none."""
        return self._measure.stages is not None

    @property
    def norm(self) -> Pending[Tensor]:
        """Of all gradients of the whole model, which `take_gradients` began to find."""
        found = self._norms.last
        if found is None:
            raise UsageError("the gradient norm was asked for before the gradients were taken")
        return found

    def end_norm(self) -> None:
        """The last norm is found, if it was not asked for, or its failure logged; there is no other one."""
        self._norms.close()

    def norm_of(self, squares: Mapping[tuple[Placement, int], Tensor]) -> Tensor:
        """The same of gradients that are not there any more: `squares` are their sums on this rank, by `kind_of`."""
        placements = dict.fromkeys(group.placement for group in self.groups)
        found = [(each, (squares.get((each, 0)), squares.get((each, 1)))) for each in placements]
        return joint_norm(found, self._measure, self.device).wait()

    def kind_of(self, param: nn.Parameter) -> int | None:
        """0 if all ranks of a model have a parameter alike, 1 if each has a part of it; None: others count it."""
        return None if id(param) in self._measure.elsewhere else int(self._measure.is_split(param))

    def gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The gradients on the device that the optimizer is about to use, each with the model's parameter."""
        pieces = chain.from_iterable([group.pieces for group in self.groups])
        held = [(piece.param, piece.master.grad) for piece in pieces]
        return self.local_gradients() or [(param, grad) for param, grad in held if grad is not None]

    def update(self, optimizer: Optimizer, factor: float = 1.0, *, one_pass: bool = False) -> None:
        """Let the optimizer take its step, tile by tile, and publish what it did.

        In `one_pass` it reads narrow gradients and writes what the model computes with itself.

        On a device with all states at home there is one tile, unless temporary memory has to be bounded. Gradients
        that left the device are multiplied by `factor`; those that did not have been already, but in one pass. Tiles
        that live away may be updated while the caller goes on: see [Note: a step of the host].
        """
        everything = [options["params"] for options in optimizer.param_groups]
        tiles = tile(optimizer, self.away, self._pace.tile)
        there = [each for each in tiles if each.away]
        late = (
            self._pace.late
            and tiles_well(optimizer)
            and all(group.takes_late_updates and not (self.compiled and group.marks) for group in self.groups)
        )
        try:
            # without parameters it steps, too: schedules and hooks look at that
            here = [each for each in tiles if not each.away] or [empty_tile(optimizer)] * late
            self._update_here(here, optimizer, factor, one_pass=one_pass)
            turns = [TileUpdate(each) for each in there]
            if self.deferral is not None:
                self.deferral.direct(turns, factor)
            if turns:
                self._host.begin(turns, optimizer, factor, late=late)
        finally:
            for options, chosen in zip(optimizer.param_groups, everything, strict=True):
                options["params"] = chosen
        if late:
            for turn in turns:
                self._postpone(turn)
        else:
            self._host.settle()
        for group in self.groups:
            group.spread()

    def _update_here(self, tiles: Sequence[Tile], optimizer: Optimizer, factor: float, *, one_pass: bool) -> None:
        """Update tiles on the device."""
        try:
            if one_pass:
                optimizer.one_pass = one_pass_over(list(self._on_device()), self.group_of, factor)  # type: ignore[attr-defined]
            for each in tiles:
                choose(optimizer, each)
                optimizer.step()
        finally:
            if one_pass:
                optimizer.one_pass = None  # type: ignore[attr-defined]
        for group in self.groups if not one_pass else ():
            group.round()

    def group_of(self, piece: StatePiece) -> ShardGroup:
        """The group that a piece belongs to."""
        return self._places[id(piece.param)][0]

    def room(self, master: Tensor, kind: str, dtype: torch.dtype, numel: int) -> Tensor | None:
        """Where a state of what the optimizer updates is to lie, flat; None: anywhere."""
        piece = self.away.get(id(master))
        if piece is None or piece.arena is None:
            return None
        arena = piece.arena
        sizes = [numel if other is piece else self._numel(other.master, kind) for other in arena.pieces]
        at = sum(sizes[: arena.pieces.index(piece)])
        return arena.room(kind, dtype, sum(sizes))[at : at + numel]

    def _numel(self, master: Tensor, kind: str) -> int:
        """Elements of a state of what the optimizer updates."""
        layout = self._optimizer.state_layout(master) if isinstance(self._optimizer, MomentKeeper) else ()
        return next((numel for name, _, numel in layout if name == kind), master.numel())

    def _new_state(self, param: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        """See `MomentKeeper.new_state`: zeros in the arena, or where the parameter is."""
        numel, piece = self._numel(param, name), self.away.get(id(param))
        on_disk = piece is not None and piece.arena is not None and piece.arena.swap is not None
        found = None if on_disk else self.room(param, name, dtype, numel)
        return torch.zeros(numel, dtype=dtype, device=param.device) if found is None else found

    def _take_disk(self, optimizer: MomentKeeper) -> None:
        """Give moments their space on the disk now, or fail now: a step is no time for that."""
        for piece in self.away.values():
            if piece.arena is not None and piece.arena.swap is not None:
                for name, dtype, numel in optimizer.state_layout(piece.master):
                    self.room(piece.master, name, dtype, numel)

    def _postpone(self, turn: TileUpdate) -> None:
        """Let whoever needs what a turn updates wait for it."""
        for piece in turn.tile.pieces:
            assert piece.arena is not None, "pieces of a turn are away"
            piece.arena.turn = turn
            if turn.only_before:
                continue
            self._places[id(piece.param)][0].await_update(piece, turn)

    def settle(self) -> None:
        """What a step left behind is done: states, gradients and parameters are those after it."""
        self._finish()
        for arena in self._arenas():
            arena.bring_back()
        if self.deferral is not None:
            self.deferral.give_back()

    def _finish(self) -> None:
        if self.absent:
            raise UsageError(self.absent)
        if self.returning is not None:
            self.returning()
        if self.away:
            self._host.settle()
            for piece in self.away.values():
                arrive(piece.param)

    def _arenas(self) -> set[OffloadedTile]:
        return {piece.arena for piece in self.away.values() if piece.arena is not None}

    def _claim(self) -> None:
        for arena in self._arenas():
            arena.claim()

    def close(self) -> None:
        """As `settle`, for good."""
        try:
            self._finish()
            self._claim()
        finally:
            self._host.close()

    def publish(self) -> None:
        """Bring masters that were changed otherwise than by `update` into the parameters."""
        self._finish()
        if self.deferral is not None:
            self.deferral.forget()
        self._claim()
        for group in self.groups:
            group.round()
            group.bring_back()
            group.spread()

    def zero_grad(self) -> None:
        """Drop the gradients of pieces and of the parameters that they are parts of."""
        plain = type(self._optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(self._optimizer)
        if plain:  # the same without its notes for torch's profiler
            for held in self._optimizer.param_groups:
                for param in held["params"]:
                    param.grad = None
        else:
            self._optimizer.zero_grad(set_to_none=True)
        for group in self.groups:
            group.forget()

    def _of(self, placement: Placement) -> list[ShardGroup]:
        return [group for group in self.groups if group.placement is placement]

    def _local_terms(self) -> list[NormTerms]:
        """What is measured of gradients that stay on this rank; nothing if they do not."""
        measure = self._measure
        kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
        for param, grad in self.local_gradients():
            if id(param) not in measure.elsewhere:
                kinds[measure.model_group is not None and measure.is_split(param)].append(grad)
        return [(self.groups[0].placement, *kinds)] if any(kinds) else []

    def _line(self, placement: Placement, filled: list[Tensor]) -> NormTerms:
        """What is measured: memory as it is filled, or gradient by gradient where some are parts of split ones."""
        if self._measure.alone:
            return placement, filled, ()
        kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
        for owner, piece in ((group, piece) for group in self._of(placement) for piece in group.pieces):
            if id(piece.param) in self._measure.elsewhere:
                continue
            if piece.away and piece.gradient is not None:
                kinds[self._measure.is_split(piece.param)].append(piece.measured())
            else:
                grad = piece.master.grad if piece.master.grad is not None else owner.narrow_gradient(piece)
                if grad is not None:
                    kinds[self._measure.is_split(piece.param)].append(grad)
        return placement, *kinds

    def _enter(self, options: dict[str, Any], params: list[nn.Parameter]) -> None:
        for group in self._make(options, params):
            if group not in self.groups:
                self.groups.append(group)
            self._places.update({id(param): (group, place) for place, param in enumerate(group.params)})
            group.take_states(self._optimizer)
            self.away.update({id(piece.master): piece for piece in group.pieces if piece.away})
            listed = {id(each) for each in options["params"]}
            options["params"] += [piece.master for piece in group.pieces if id(piece.master) not in listed]

    def drop_absent(self) -> None:
        """A parameter that no rank used keeps no gradient, so that the optimizer leaves it alone."""
        absent = {id(param) for param in self.reducer.absent()} if self.reducer is not None else set()
        if not absent:
            return
        if self._measure.all_used:
            names = [n for g in self.groups for n, p in zip(g.names, g.params, strict=True) if id(p) in absent]
            raise UsageError(
                f"zero_optimization.ignore_unused_parameters is false, and no rank had a gradient for {names}. Use "
                "these parameters in the loss, freeze them with requires_grad_(False), or set the key to true."
            )
        for group in self.groups:
            for piece in group.pieces:
                if id(piece.param) in absent:
                    piece.master.grad = piece.gradient = None
