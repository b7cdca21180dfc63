"""What this rank's optimizer holds of one parameter, and how a parameter finds the states that belong to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.ops.moments import MomentKeeper, scale_name
from deepspeed.parallel import AxisGroup
from deepspeed.zero.parameters.data import plain_data

if TYPE_CHECKING:
    from deepspeed.zero.gradients.reducer import GradientReducer
    from deepspeed.zero.piece import StatePiece
    from deepspeed.zero.states.groups import ShardGroup

_KEY = "_states"


def plain_state(optimizer: Optimizer, param: nn.Parameter | None) -> dict[str, Any]:
    """The state of a parameter, moments in 8 bits as the values that they stand for; empty for None."""
    state: dict[str, Any] = {} if param is None else optimizer.state.get(param, {})
    if param is None or not isinstance(optimizer, MomentKeeper):
        return state
    scales = {scale_name(name) for name in state if scale_name(name) in state}
    return {
        name: optimizer.moment(param, name) if scale_name(name) in scales else value
        for name, value in state.items()
        if name not in scales
    }


@dataclass(eq=False)
class StateOwner:
    """The states of one engine's parameters."""

    find: Callable[[nn.Parameter], ParameterState | None]
    adopt: Callable[[], None]
    """Let masters follow parameters that were written."""
    optimizer: Optimizer
    unit: Callable[[], float | None]
    """What gradients that are held have to be multiplied by; None if there are none. Reduces them first."""
    spread: Callable[[Sequence[nn.Parameter], int], None]
    """Give what one rank wrote into parameters that are whole on every rank to all of them."""
    sharded: bool
    """Parameters themselves are spread over ranks, also if there is one rank only."""
    newer: weakref.WeakKeyDictionary[StateOwner, str] = field(default_factory=weakref.WeakKeyDictionary)
    """Owners that came later and train parameters of this one, with one of those."""
    older: list[weakref.ref[StateOwner]] = field(default_factory=list)
    """Those of which this one is a newer owner."""

    slots: list[tuple[str, nn.Module, str, nn.Parameter]] = field(default_factory=list)
    """The name of each trained parameter, the module that holds it, under which key, and itself."""

    def require_own(self) -> None:
        """Refuse a step after a module was given another parameter in place of a trained one: it would not learn."""
        for at, (name, module, key, param) in enumerate(self.slots):
            found = module._parameters.get(key)
            if found is param or found is None or not found.requires_grad:
                continue
            if self.find(found) is None:
                raise UsageError(
                    f"the module's {name} is not the parameter that the engine trains: another one was put in its "
                    "place, by load_state_dict(assign=True) or an assignment, and no optimizer group has it. Leave "
                    "assign=True out, which copies the values, or write them in place; a parameter that is really new "
                    "goes to engine.optimizer.add_param_group"
                )
            self.slots[at] = name, module, key, found

    def require_sole(self) -> None:
        """Refuse a step while another engine trains the same parameters: each would undo what the other did."""
        for name in self.newer.values() if self.newer else ():
            raise UsageError(
                f"another engine was made later that trains {name} and others of this engine's parameters. A step of "
                "this one would bring them back to what they were before the other's steps. Step the newer engine, or "
                "call its destroy() first."
            )


class _Handle:
    """On a parameter: leads to the owner as long as that lives. A copy of the parameter, pickled or not, has none."""

    __slots__ = ("_owner",)

    def __init__(self, owner: StateOwner | None = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)

    def owner(self) -> StateOwner | None:
        return None if self._owner is None else self._owner()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Handle, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Handle:
        return _Handle()


def attach(params: Iterable[nn.Parameter], owner: StateOwner) -> None:
    """Let parameters find their states; an engine that trained one of them before learns of the newer one."""
    for param in params:
        before = owner_of(param)
        if before is not None and before is not owner and owner not in before.newer:
            held = owner.find(param)
            if held is not None and before.find(param) is not None:
                before.newer[owner] = held.name
                owner.older.append(weakref.ref(before))
        setattr(param, _KEY, _Handle(owner))


def detach(params: Iterable[nn.Parameter], owner: StateOwner) -> None:
    """Undo `attach`, except where another engine took over meanwhile."""
    older = [other for other in (ref() for ref in owner.older) if other is not None]
    for other in older:
        other.newer.pop(owner, None)
    for param in params:
        handle = getattr(param, _KEY, None)
        if isinstance(handle, _Handle) and handle.owner() is owner:
            delattr(param, _KEY)
            for other in older:
                if other.find(param) is not None:
                    setattr(param, _KEY, _Handle(other))


def owner_of(param: Tensor) -> StateOwner | None:
    """The states that a parameter belongs to; None if no engine trains it."""
    handle = getattr(param, _KEY, None)
    return handle.owner() if isinstance(handle, _Handle) else None


@torch.no_grad()
def join(held: ParameterState, part: Tensor | None, dtype: torch.dtype, present: bool) -> Tensor | None:
    """The whole tensor of which every rank has a part; None if it is present on no rank."""
    if held.axis is None:
        return (
            part.detach().to(held.device, dtype, copy=True).view(held.shape) if part is not None and present else None
        )
    flat = torch.zeros(held.shape.numel() + 1, dtype=dtype, device=held.device)  # the last one counts who has it
    if part is not None:
        flat[held.interval[0] : held.interval[1]].copy_(part)
    flat[-1] = float(present)
    with comm.labelled(f"state of {held.name}"):
        comm.all_reduce(flat, group=held.axis.group)
    return flat[:-1].view(held.shape) if flat[-1].item() else None


class ParameterState:
    """One parameter that an optimizer trains, as this rank sees it."""

    def __init__(
        self, group: ShardGroup, place: int, piece: StatePiece | None, reducer: GradientReducer | None
    ) -> None:
        self._group, self._place, self._piece, self._reducer = group, place, piece, reducer
        self._param = group.params[place]
        self.name = group.names[place]
        self.shape = torch.Size(getattr(self._param, "ds_shape", self._param.shape))
        """Of the whole parameter."""
        self.axis: AxisGroup | None = group.axis if group.axis.size > 1 else None
        """The ranks over which the parameter is spread; None if it is whole here."""
        self.interval = group.layout.interval(place, group.axis.rank)
        """The elements that lie here; all of them where nothing is sharded."""
        self.chunk = -(-self.shape.numel() // group.axis.size)
        """Elements of a rank's part, padding included."""
        self.dtype = group.dtypes.master
        """Of the master."""
        self.device = self._param.device
        self.master = None if piece is None else piece.master
        """What the optimizer updates; None if no element lies here."""

    def gradient(self) -> Tensor | None:
        """The reduced gradient of the elements that lie here, not yet multiplied by its unit."""
        return None if self._piece is None else self._piece.gradient

    def has_gradient(self) -> bool:
        """True if this rank had a gradient for the parameter."""
        return self._reducer is not None and self._reducer.had_gradient(self._param)

    def put_gradient(self, values: Tensor) -> None:
        """Replace the gradient of the elements that lie here; one-dimensional."""
        if self._reducer is not None:
            self._reducer.note_gradient(self._param)
        if self._piece is not None:
            self._piece.put_gradient(values, self._group.dtypes.accumulate)

    def publish(self) -> None:
        """Bring the master into the model's parameter; on all ranks of the axis."""
        self._group.publish_one(self._place)


class WholeState(ParameterState):
    """Of a parameter of a `WholeGroup`: gradients lie where plain PyTorch has them."""

    def __init__(self, group: ShardGroup, place: int) -> None:
        self._own = group.pieces[place]
        super().__init__(group, place, self._own, None)
        self.dtype = self._own.master.dtype

    def gradient(self) -> Tensor | None:
        """See `ParameterState`; where gradients are accumulated in the master's dtype they lie there already."""
        grad = self._param.grad if self._param.grad is not None else self._own.master.grad
        return grad.to_dense() if grad is not None and grad.layout != torch.strided else grad

    def has_gradient(self) -> bool:
        return self.gradient() is not None

    def put_gradient(self, values: Tensor) -> None:
        holder = self._param if self._param.grad is not None else self._own.master
        holder.grad = values.to(holder.dtype).view(self.shape)

    @torch.no_grad()
    def publish(self) -> None:
        if self._own.separate:
            plain_data(self._param).copy_(self._own.master)
