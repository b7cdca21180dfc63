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
from deepspeed.ops.multi_tensor import sum_of_squares
from deepspeed.parallel import AxisGroup
from deepspeed.zero.gradients.reducer import ShardReducer
from deepspeed.zero.states.group import ShardGroup
from deepspeed.zero.states.piece import Piece, hand_over
from deepspeed.zero.states.tiles import tile

__all__ = ["HeldShard", "Measure", "ShardedStates"]


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


class HeldShard:
    """`deepspeed.zero.states.held.Held` for a parameter of a shard group."""

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
        """See `Held`."""
        return None if self._piece is None else self._piece.gradient

    def has_gradient(self) -> bool:
        """See `Held`."""
        return self._reducer is not None and self._reducer.had_gradient(self._param)

    def put_gradient(self, values: Tensor) -> None:
        """See `Held`."""
        if self._piece is not None:
            self._piece.gradient = values.to(self._group.dtypes.accumulate)
        if self._reducer is not None:
            self._reducer.note_gradient(self._param)

    def publish(self) -> None:
        """See `Held`."""
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
        meet: Callable[[], None] | None = None,
        tile_numel: int = 0,
    ) -> None:
        """`meet` is called at the begin of every step, on all ranks; `tile_numel` elements are updated at a time."""
        self._tile = tile_numel
        self._meet = meet
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

    def held(self, param: nn.Parameter) -> HeldShard | None:
        """What this rank holds of a parameter; None if the optimizer does not train it."""
        group, place = self._places.get(id(param), (None, 0))
        return None if group is None else HeldShard(group, place, self.reducer)

    def adopt_edits(self) -> None:
        """Take over parameters that somebody wrote since the last step, instead of undoing that silently."""
        for group in self.groups:
            group.adopt_edits()

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Hand the reduced gradients to the optimizer's pieces, and measure them."""
        if self._meet is not None:
            self._meet()
        self.adopt_edits()
        lines = hand_over([piece for group in self.groups for piece in group.pieces])
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
        """Let the optimizer take its step; over tiles of pieces, where its temporary memory has to be bounded."""
        tiles = tile(optimizer, self._tile) if self._tile else []
        if len(tiles) < 2:
            optimizer.step()
            return
        everything = [options["params"] for options in optimizer.param_groups]
        try:
            for params in tiles:
                for options, chosen in zip(optimizer.param_groups, params, strict=True):
                    options["params"] = chosen
                optimizer.step()
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

    def _exchange(self, lines: list[Tensor]) -> None:
        """One small all-reduce: squares of the shards' norms, and which parameters have a gradient on any rank.

        In float64, so that the norm does not depend on how gradients are cut into shards.
        """
        params = [param for group in self.groups for param in group.params]
        device = params[0].device if params else torch.device("cpu")
        reducer, measure = self.reducer, self._measure
        had = [float(reducer is None or reducer.had_gradient(param)) for param in params]
        if measure.model_group is None:
            squares = [sum_of_squares(lines).to(device), torch.zeros((), dtype=torch.float64, device=device)]
        else:
            kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
            for param, grad in self.gradients():
                kinds[measure.is_split(param)].append(grad)
            squares = [sum_of_squares(grads).to(device) for grads in kinds]
        vector = torch.cat([torch.stack(squares), torch.tensor(had, dtype=torch.float64, device=device)])
        with comm.labelled("gradient norm"):
            comm.all_reduce(vector, group=measure.axis.group)
        if measure.model_group is not None:
            comm.all_reduce(vector[1:2], group=measure.model_group)
        self._norm = vector[:2].sum().sqrt().float()
        if not all(had) or measure.axis.size > 1:
            self._drop_absent(params, vector[2:])

    def _drop_absent(self, params: list[nn.Parameter], counts: Tensor) -> None:
        """A parameter that no rank used keeps no gradient, so that the optimizer leaves it alone."""
        absent = {id(param) for param, count in zip(params, counts.tolist(), strict=True) if count == 0}
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
