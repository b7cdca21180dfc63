"""What a coordinator remembers: the uses of a model, where a running pass is, what is known about a kind of pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from deepspeed.zero.parameters.plan import Event, Plan
from deepspeed.zero.parameters.shard import Shard

__all__ = ["Known", "Pass", "Use"]


@dataclass(eq=False)
class Use:
    """A module and the parameters that have to be whole while it runs."""

    number: int
    name: str
    module: nn.Module
    shards: list[Shard]


@dataclass
class Pass:
    """Where a running pass is."""

    key: tuple[object, ...]
    plan: Plan | None
    next: int = 0
    strayed: bool = False
    """This rank has left the plan."""
    events: list[Event] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    """The uses that all ranks gathered, in order, while asking."""


@dataclass
class Known:
    """What is known about one kind of pass."""

    plan: Plan | None = None
    misfits: int = 0
