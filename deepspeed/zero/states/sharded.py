"""The optimizer over shards: which pieces it updates, the norm of their gradients, the return of the updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.fragments import Fragment
from deepspeed.memory.store import AtHome, Store, through
from deepspeed.ops.multi_tensor import sum_of_squares
from deepspeed.parallel import AxisGroup
from deepspeed.zero.gradients.reducer import ShardReducer
from deepspeed.zero.placement import Placement
from deepspeed.zero.states.group import ShardGroup
from deepspeed.zero.states.piece import Piece, hand_over
from deepspeed.zero.states.tiles import Tile, tile

__all__ = ["Measure", "ShardState", "ShardedStates"]


@dataclass(frozen=True)
class Measure:
    """How the gradient norm of the whole model is put together."""

    axis: AxisGroup
    """Over which shards lie."""
    model_group: Any
    """Over which parts of split parameters lie; None if there are no such parts."""
    is_split: Callable[[nn.Parameter], bool]
    all_used: bool
    """A trained parameter without any gradient is an error."""


class ShardState:
    """`deepspeed.zero.states.lookup.ParameterState` for a parameter of a shard group."""

    def __init__(self, group: ShardGroup, place: int, reducer: ShardReducer | None) -> None:
        self._group, self._place, self._reducer = group, place, reducer
        self._param = group.params[place]
        self._piece: Piece | None = next((piece for piece in group.pieces if piece.param is self._param), None)
        self.name = group.names[place]
        self.shape = torch.Size(getattr(self._param, "ds_shape", self._param.shape))
        self.axis: AxisGroup | None = group.axis
        self.interval = group.layout.interval(place, group.axis.rank)
        self.chunk = -(-self.shape.numel() // group.axis.size)
        self.dtype = group.dtypes.master
        self.device = self._param.device
        self.master = None if self._piece is None else self._piece.master

    def gradient(self) -> Tensor | None:
        """See `ParameterState`."""
        return None if self._piece is None else self._piece.gradient

    def has_gradient(self) -> bool:
        """See `ParameterState`."""
        return self._reducer is not None and self._reducer.had_gradient(self._param)

    def put_gradient(self, values: Tensor) -> None:
        """See `ParameterState`."""
        if self._piece is not None:
            self._piece.put_gradient(values, self._group.dtypes.accumulate)
        if self._reducer is not None:
            self._reducer.note_gradient(self._param)

    def publish(self) -> None:
        """See `ParameterState`."""
        self._group.publish_one(self._place)


class ShardedStates:
    """Gives the optimizer its pieces in place of the parameters, and brings what it did back to the parameters.

    The optimizer's group dicts stay the same objects, so that schedules keep their hold.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make_groups: Callable[[dict[str, Any], list[nn.Parameter]], Sequence[ShardGroup]],
        measure: Measure,
        *,
        tile_numel: int = 0,
        store: Store[Tile] = AtHome(),
    ) -> None:
        """`tile_numel` elements are updated at a time, 0 means all; `store` says where they are between steps."""
        self._tile = tile_numel
        self._store = store
        self._optimizer = optimizer
        self._make = make_groups
        self._measure = measure
        self._waiting: list[tuple[dict[str, Any], nn.Parameter]] = []
        self._norm: Tensor | None = None
        self.groups: list[ShardGroup] = []
        self._places: dict[int, tuple[ShardGroup, int]] = {}
        for options in optimizer.param_groups:
            self.add(options)
        self.reducer: ShardReducer | None = None

    copies = True
    """The optimizer does not hold the model's own parameters."""

    def refresh(self) -> list[nn.Parameter]:
        """Begin to train parameters that were unfrozen; returns them."""
        awake = [(options, param) for options, param in self._waiting if param.requires_grad]
        if awake:
            self._waiting = [item for item in self._waiting if not item[1].requires_grad]
            for options in self._optimizer.param_groups:
                self._enter(options, [param for owner, param in awake if owner is options])
        return [param for _, param in awake]

    def add(self, options: dict[str, Any]) -> None:
        """Take over a group that was added to the optimizer."""
        params, options["params"] = options["params"], []
        self._waiting += [(options, param) for param in params if not param.requires_grad]
        self._enter(options, [param for param in params if param.requires_grad])

    def held(self, param: nn.Parameter) -> ShardState | None:
        """What this rank holds of a parameter; None if the optimizer does not train it."""
        group, place = self._places.get(id(param), (None, 0))
        return None if group is None else ShardState(group, place, self.reducer)

    def adopt_edits(self) -> None:
        """Take over parameters that somebody wrote since the last step, instead of undoing that silently."""
        for group in self.groups:
            group.adopt_edits()

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Hand the reduced gradients to the optimizer's pieces, and measure them."""
        self.adopt_edits()
        placements = {id(group.placement): group.placement for group in self.groups}
        lines = [
            # Gradients of several groups came in one bucket, whose memory is measured once.
            (placement, hand_over([p for group in self.groups if group.placement is placement for p in group.pieces]))
            for placement in placements.values()
        ]
        self._drop_absent()
        self._exchange(lines)

    def measure(self) -> Tensor:
        """The norm of all gradients of the whole model, as `take_gradients` found it."""
        if self._norm is None:
            raise UsageError("the gradient norm was asked for before the gradients were taken")
        return self._norm

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The gradients that the optimizer is about to use, each with the model's parameter."""
        for group in self.groups:
            for piece in group.pieces:
                if piece.master.grad is not None:
                    yield piece.param, piece.master.grad

    def update(self, optimizer: Optimizer) -> None:
        """Let the optimizer take its step, tile by tile: fetch from the store, step, put back.

        On a device with all states at home there is one tile, unless temporary memory has to be bounded.
        """
        everything = [options["params"] for options in optimizer.param_groups]

        def step(params: Tile) -> None:
            for options, chosen in zip(optimizer.param_groups, params, strict=True):
                options["params"] = chosen
            optimizer.step()

        try:
            through((tile(optimizer, self._tile) if self._tile else []) or [everything], self._store, step)
        finally:
            for options, chosen in zip(optimizer.param_groups, everything, strict=True):
                options["params"] = chosen

    def publish(self) -> None:
        """Bring the updated pieces back into the parameters."""
        for group in self.groups:
            group.publish()

    def zero_grad(self) -> None:
        """Drop every gradient, of pieces and of the model's parameters."""
        self._optimizer.zero_grad(set_to_none=True)
        for group in self.groups:
            group.forget()

    def fragments(self) -> Iterator[Fragment]:
        """Masters and optimizer states of this rank."""
        for group in self.groups:
            yield from group.fragments(self._optimizer.state)

    def _enter(self, options: dict[str, Any], params: list[nn.Parameter]) -> None:
        for group in self._make(options, params):
            self.groups.append(group)
            self._places.update({id(param): (group, place) for place, param in enumerate(group.params)})
            for piece in group.pieces:
                piece.take_state(self._optimizer)
                options["params"].append(piece.master)
        for param in params:
            self._optimizer.state.pop(param, None)

    def _exchange(self, lines: list[tuple[Placement, list[Tensor]]]) -> None:
        """One small all-reduce of the squares of the shards' norms; the host does not wait for it.

        In float64, so that the norm hardly depends on how gradients are cut into shards.
        """
        measure = self._measure
        device = next((param.device for group in self.groups for param in group.params), torch.device("cpu"))
        squares = torch.zeros(2, dtype=torch.float64, device=device)  # of whole parameters, of parts of split ones
        for placement, filled in lines:
            kinds: tuple[list[Tensor], list[Tensor]] = (filled, [])
            if measure.model_group is not None:
                kinds = ([], [])
                for piece in (p for group in self.groups if group.placement is placement for p in group.pieces):
                    if piece.master.grad is not None:
                        kinds[measure.is_split(piece.param)].append(piece.master.grad)
            for kind, tensors in enumerate(kinds):
                if tensors:
                    squares[kind].add_(sum_of_squares(tensors).to(device), alpha=1.0 / placement.copies)
        with comm.labelled("gradient norm"):
            comm.all_reduce(squares, group=measure.axis.group)
        if measure.model_group is not None:
            comm.all_reduce(squares[1:], group=measure.model_group)
        self._norm = squares.sum().sqrt().float()

    def _drop_absent(self) -> None:
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
                    piece.master.grad = None
