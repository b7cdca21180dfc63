"""`Shard`: what this rank holds of one stage-3 parameter, how it becomes whole, and what users see of it.

[Note: one storage] A parameter alternates between an empty placeholder and one stable tensor whose storage is resized.
What autograd saved of the whole parameter, views of it for instance, aliases that storage, so that a parameter that
was released after forward and gathered again before backward needs no patched functions. Filling the storage goes
through a tensor of its own, whose version counter no saved tensor knows.
"""

from __future__ import annotations

import itertools
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.comm import Pending
from deepspeed.parallel import AxisGroup

__all__ = ["Shard", "ZeroParamStatus", "ZeroParamType", "ZeroParameter", "shard_of", "shards_of"]

_numbers = itertools.count()


class ZeroParamStatus(Enum):
    """Whether a parameter can be used now."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """How a parameter is held."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class Shard:
    """This rank's chunk of one parameter: `[rank * chunk, (rank + 1) * chunk)` of its elements, padded with zeros."""

    __slots__ = (
        "axis", "chunk", "data", "dtype", "edits", "flat", "full", "gradient", "holds", "name", "number", "numel",
        "param", "pending", "persistent", "shape", "strict", "users", "version", "whole",
    )  # fmt: skip

    made = 0
    """How many there have been, so that a model which got new ones can be noticed."""

    def __init__(self, param: nn.Parameter, axis: AxisGroup, name: str = "") -> None:
        """Cut a whole parameter; it stays whole until `release`."""
        self.param = param
        self.axis = axis
        self.name = name or f"parameter of shape {tuple(param.shape)}"
        self.number = next(_numbers)
        self.shape = param.shape
        self.numel = param.numel()
        self.dtype = param.dtype
        self.chunk = -(-self.numel // axis.size)
        self.persistent = False
        """Stays whole between uses."""
        self.holds = 0
        """How many uses need the parameter whole at this moment."""
        self.users: set[Any] = set()
        """Numbers of the modules that use it now, as clients see them."""
        self.edits = 0
        """How often a user changed the values; masters follow."""
        self.gradient: Tensor | None = None
        """A whole gradient that waits to be reduced."""
        self.pending: Pending[Any] | None = None
        self.strict = False
        """An edit that would be lost is an error."""
        self.version = param._version
        """Of the parameter, when its values were last known."""
        self.whole = True
        Shard.made += 1
        self._adopt(param.detach())

    @torch.no_grad()
    def _adopt(self, values: Tensor) -> None:
        self.flat = torch.zeros(self.chunk * self.axis.size, dtype=self.dtype, device=values.device)
        self.flat[: self.numel].copy_(values.reshape(-1))
        self.full = self.flat[: self.numel].view(self.shape)
        start = self.axis.rank * self.chunk
        self.data = self.flat[start : start + self.chunk].clone()
        self.param.data = self.full

    @property
    def interval(self) -> tuple[int, int]:
        """The [start, stop) of the parameter's elements that lie here."""
        start = self.axis.rank * self.chunk
        return min(start, self.numel), min(start + self.chunk, self.numel)

    @property
    def local(self) -> Tensor:
        """The chunk without its padding."""
        start, stop = self.interval
        return self.data[: stop - start]

    @property
    def status(self) -> ZeroParamStatus:
        """Whether the parameter can be used now."""
        if self.whole:
            return ZeroParamStatus.AVAILABLE
        return ZeroParamStatus.NOT_AVAILABLE if self.pending is None else ZeroParamStatus.INFLIGHT

    def allocate(self) -> None:
        """Give the whole parameter its memory back; what is in it is undefined."""
        size = self.flat.numel() * self.flat.element_size()
        if self.flat.untyped_storage().size() != size:
            self.flat.untyped_storage().resize_(size)

    def attach(self) -> None:
        """Let the parameter be the whole tensor; its memory has been filled."""
        if not self.whole:
            self.param.data = self.full
            self.whole = True
        self.pending = None

    def release(self) -> None:
        """Let go of the whole parameter; the chunk remains."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        self.param.data = torch.empty(0, dtype=self.dtype, device=self.data.device)
        self.flat.untyped_storage().resize_(0)
        self.whole = False

    @torch.no_grad()
    def store(self) -> None:
        """Take this rank's chunk from the whole parameter, which was changed."""
        start = self.axis.rank * self.chunk
        if self.param.data_ptr() != self.full.data_ptr():  # the data was replaced, not written
            self.full.copy_(self.param.detach())
            self.param.data = self.full
        self.data.copy_(self.flat[start : start + self.chunk])
        self.edits += 1

    @torch.no_grad()
    def convert(self, dtype: torch.dtype, device: torch.device) -> None:
        """Hold the parameter in another dtype or on another device; only while it is not whole."""
        if (dtype, device) == (self.dtype, self.data.device):
            return
        self.dtype = dtype
        self.data = self.data.to(device, dtype)
        self.flat = torch.empty(self.chunk * self.axis.size, dtype=dtype, device=device)
        self.full = self.flat[: self.numel].view(self.shape)
        self.flat.untyped_storage().resize_(0)
        self.param.data = torch.empty(0, dtype=dtype, device=device)

    def __repr__(self) -> str:
        return f"Shard({self.name!r}, {tuple(self.shape)}, {self.status.name.lower()}, {self.axis!r})"


class ZeroParameter(nn.Parameter):
    """A parameter of which this rank may hold a shard only; the same object as before, with another class.

    Outside of its use it is empty (`numel() == 0`); `ds_shape` and `ds_numel` tell what it is as a whole.
    """

    _zero: Shard

    ds_id = property(lambda self: self._zero.number, doc="A number of its own.")
    ds_shape = property(lambda self: self._zero.shape, doc="The shape of the whole parameter.")
    ds_numel = property(lambda self: self._zero.numel, doc="The elements of the whole parameter.")
    ds_status = property(lambda self: self._zero.status, doc="Whether it can be used now.")
    ds_persist = property(lambda self: self._zero.persistent, doc="True if it stays whole between uses.")
    ds_tensor = property(lambda self: self._zero.data, doc="This rank's chunk, padded.")
    ds_active_sub_modules = property(lambda self: self._zero.users, doc="The modules that use it now.")
    ds_process_group = property(lambda self: self._zero.axis.group, doc="The ranks that hold it.")
    ds_param_type = property(lambda self: ZeroParamType.PARTITIONED, doc="How it is held.")

    def partition_numel(self) -> int:
        """Elements of a rank's chunk, padding included."""
        return self._zero.chunk

    def padding_size(self) -> int:
        """Elements of padding over all ranks."""
        return self._zero.chunk * self._zero.axis.size - self._zero.numel

    def ds_summary(self, *_: object, **__: object) -> dict[str, Any]:
        """What is known about the parameter, for messages."""
        shard = self._zero
        return {
            "id": shard.number,
            "name": shard.name,
            "status": shard.status.name,
            "numel": self.numel(),
            "ds_numel": shard.numel,
            "shape": tuple(self.shape),
            "ds_shape": tuple(shard.shape),
            "requires_grad": self.requires_grad,
            "grad_shape": None if self.grad is None else tuple(self.grad.shape),
            "persist": shard.persistent,
            "active_sub_modules": set(shard.users),
            "ds_tensor.shape": tuple(shard.data.shape),
        }


def shard_of(param: Tensor) -> Shard | None:
    """The shard of a parameter; None for an ordinary tensor."""
    shard = getattr(param, "_zero", None)
    return shard if isinstance(shard, Shard) else None


def shards_of(params: Any) -> list[Shard]:
    """The shards among some parameters, each once."""
    found = {id(shard): shard for shard in map(shard_of, params) if shard is not None}
    return list(found.values())
