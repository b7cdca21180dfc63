"""`Shard`: what this rank holds of one stage-3 parameter, and how that becomes whole and is let go.

[Note: one storage] A parameter alternates between an empty placeholder and one stable tensor whose storage is resized.
Views that autograd saved alias that storage. Filling it goes through a tensor whose version counter no view knows.

[Note: one rank] On an axis of one rank the chunk is the whole: both are the same memory, which is never freed.

[Note: codes] The chunk of a parameter that is not trained may rest as codes. They are what lives here and travels; its
values are decoded each time that they are asked for, and `put` encodes what they become.
"""

from __future__ import annotations

import itertools
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed.comm import Pending
from deepspeed.parallel import AxisGroup
from deepspeed.zero.parameters.data import reclaim, show, writes

if TYPE_CHECKING:
    from deepspeed.comm.codec import Codec
    from deepspeed.zero.parameters.gather import Gather
    from deepspeed.zero.parameters.near import NearCopy
    from deepspeed.zero.parameters.offloaded import ChunkTier

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

    made = 0
    """How many there have been, so that a model which got new ones can be noticed."""

    def __init__(self, param: nn.Parameter, axis: AxisGroup, name: str = "", remote: ChunkTier | None = None) -> None:
        """Cut a whole parameter; it stays whole until `release`. The chunk lives in `remote`, if that is given."""
        self.param = param
        self.axis = axis
        self.remote = remote
        self.replicas: AxisGroup | None = None
        """Ranks that have an equal chunk, in other groups like `axis`; None if there are none."""
        self.alone = axis.size == 1 and remote is None
        """See [Note: one rank]."""
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
        self.users: dict[Any, None] = {}
        """Numbers of the modules that use it now, as clients see them."""
        self.edits = 0
        """How often a user changed the values; masters follow."""
        self.gather: Gather[Shard] | None = None
        """How it becomes whole; None: the plain way."""
        self.gradient: Tensor | None = None
        """A whole gradient that waits to be reduced."""
        self.late: Any = None
        """An update of the chunk that may still be on its way; `wait` before the chunk is read."""
        self.nothing: Tensor | None = None
        """What the parameter is while it is not whole."""
        self.pending: Pending[Any] | None = None
        self.staged: Tensor | None = None
        """The chunk on the device, while it is gathered from elsewhere."""
        self.codec: Codec | None = None
        """What the chunk rests in: [Note: codes]; None: in its own dtype."""
        self.near: NearCopy | None = None
        """What neighbours keep of the whole parameter, so that they need not ask others for it."""
        self.strict = False
        """An edit that would be lost is an error."""
        self.version = writes(param)
        """How often the parameter had been written when its values were last known."""
        self.whole = True
        Shard.made += 1
        self._adopt(param.detach())

    @torch.no_grad()
    def _adopt(self, values: Tensor) -> None:
        if self.alone:
            self.flat = self.stored = values.reshape(-1)
        else:
            device = values.device if self.remote is None else self.remote.device
            self.flat = torch.zeros(self.chunk * self.axis.size, dtype=self.dtype, device=device)
            self.flat[: self.numel].copy_(values.reshape(-1))
            self.stored = self._kept(self.flat.view(self.axis.size, self.chunk)[self.axis.rank])
        self._look_at_flat()
        self.filled = True
        show(self.param, self.full)

    def _look_at_flat(self) -> None:
        self._memory = self.flat.untyped_storage()
        self.full = self.flat[: self.numel].view(self.shape)
        self.rows = self.flat.view(self.axis.size, self.chunk)
        """The memory of the whole parameter, a row for each rank's chunk."""

    def _kept(self, chunk: Tensor) -> Tensor:
        """A copy of these values where the chunk lives."""
        return chunk.clone() if self.remote is None else self.remote.keep(chunk)

    @property
    def data(self) -> Tensor:
        """The chunk; of codes, what they say now, which `put` changes."""
        if self.codec is None:
            return self.stored
        return self.codec.decode(self.stored, self.stored.new_empty(self.chunk, dtype=self.dtype))

    @torch.no_grad()
    def put(self, chunk: Tensor) -> None:
        """Let the chunk have these values."""
        if self.codec is None:
            self.stored.copy_(chunk)
        else:
            self.stored.copy_(self.codec.encode(chunk))

    @torch.no_grad()
    def leave(self, remote: ChunkTier) -> None:
        """Let the chunk live elsewhere from now on; only while the parameter is not whole."""
        self.remote, self.alone = remote, False
        self.stored = remote.keep(self.stored)
        self.refit(self.dtype)

    @torch.no_grad()
    def return_to_device(self) -> None:
        """Let the chunk live on the device from now on; only while the parameter is not whole."""
        self.stored = torch.empty_like(self.stored, device=self.device).copy_(self.stored)
        self.remote, self.alone = None, self.axis.size == 1 and self.codec is None
        self.refit(self.dtype)

    @torch.no_grad()
    def copy(self, param: nn.Parameter) -> Shard:
        """A shard of its own with the same values, for an empty parameter; whole if this one is."""
        other = Shard(param, self.axis, self.name, self.remote)
        other.shape, other.numel, other.chunk = self.shape, self.numel, self.chunk
        other.strict, other.persistent, other.whole = self.strict, self.persistent, False
        other.gather, other.replicas = self.gather, self.replicas
        if self.whole:
            self.reclaim()
        other.codec, other.alone = self.codec, self.alone
        other.stored = self._kept(self.rows[self.axis.rank] if self.whole and self.codec is None else self.stored)
        other.refit(self.dtype)
        if self.whole:
            other.allocate()
            other.flat.copy_(self.flat)
            show(other.param, other.full)
            other.whole = True
        return other

    def refit(self, dtype: torch.dtype) -> None:
        """Fit the memory of the whole parameter, which it does not have now, to the chunk."""
        self.dtype = dtype
        size = self.chunk * self.axis.size
        device = self.stored.device if self.remote is None else self.remote.device
        self.flat = self.stored if self.alone else torch.empty(size, dtype=dtype, device=device)
        self._look_at_flat()
        self.nothing, self.filled = None, self.alone
        if not self.alone:
            self._memory.resize_(0)
        show(self.param, torch.empty(0, dtype=dtype, device=device))

    @property
    def interval(self) -> tuple[int, int]:
        """The [start, stop) of the parameter's elements that lie here."""
        start = self.axis.rank * self.chunk
        return min(start, self.numel), min(start + self.chunk, self.numel)

    @property
    def holders(self) -> int:
        """Ranks that have a chunk of it."""
        return self.axis.size * (1 if self.replicas is None else self.replicas.size)

    @property
    def device(self) -> torch.device:
        """Where the parameter is used."""
        return self.flat.device

    @property
    def sent(self) -> Tensor:
        """The chunk where the ranks can exchange it."""
        return self.data if self.staged is None else self.staged

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

    def settle(self) -> None:
        """The chunk is what the last step made of it."""
        if self.late is not None:
            self.late.wait()
            self.late = None

    def allocate(self) -> None:
        """Give the whole parameter its memory back; what is in it is undefined."""
        if not self.filled:
            self._memory.resize_(self.flat.nbytes)
            self.filled = True

    def arrive(self) -> None:
        """Wait for what was started to make it whole."""
        if self.pending is not None:
            self.pending.wait()
        if self.near is not None:
            self.near.take(self.flat)

    def release(self) -> None:
        """Let go of the whole parameter; the chunk remains."""
        if self.pending is not None:
            self.arrive()
            self.pending = self.staged = None
        show(self.param, empty_of(self) if self.nothing is None else self.nothing)
        if not self.alone:
            self._memory.resize_(0)
            self.filled = False
        self.whole = False

    def reclaim(self) -> bool:
        """If a script replaced the parameter's data instead of writing into it, write it; True if so."""
        return reclaim(self.name, self.param, self.full)

    @property
    def edited(self) -> bool:
        """True if the whole parameter was written since its values were last known."""
        param = self.param
        return self.whole and (writes(param) != self.version or param.data_ptr() != self.full.data_ptr())

    def mark(self) -> None:
        """The values of the whole parameter are known."""
        self.version = writes(self.param)

    @torch.no_grad()
    def store(self) -> None:
        """Take this rank's chunk from the whole parameter, which was changed."""
        self.reclaim()
        self.mark()
        if not self.alone:
            self.put(self.rows[self.axis.rank])
        self.note_edit()

    @torch.no_grad()
    def cut(self, value: Tensor) -> None:
        """Take this rank's part of a whole value, while the parameter is not whole."""
        self.settle()
        start, stop = self.interval
        chunk = self.data
        chunk[: stop - start].copy_(value.detach().reshape(-1)[start:stop])
        if self.codec is not None:
            self.put(chunk)
        self.note_edit()

    def note_edit(self) -> None:
        """The chunk was changed otherwise than by a step."""
        self.edits += 1
        if self.near is not None:
            self.near.outdate()

    @torch.no_grad()
    def convert(self, dtype: torch.dtype, device: torch.device) -> None:
        """Hold the parameter in another dtype or on another device; only while it is not whole."""
        if self.near is not None and (dtype, device) != (self.dtype, self.device):
            self.near.outdate()
        if self.remote is not None:
            if dtype != self.dtype:
                if self.codec is None:
                    self.stored = self.remote.keep(self.stored.to(dtype))
                self.refit(dtype)
        elif (dtype, device) != (self.dtype, self.stored.device):
            self.stored = self.stored.to(device, dtype if self.codec is None else None)
            self.refit(dtype)

    def __repr__(self) -> str:
        return f"Shard({self.name!r}, {tuple(self.shape)}, {self.status.name.lower()}, {self.axis!r})"


def empty_of(shard: Shard) -> Tensor:
    """What a parameter is while it is not whole."""
    if shard.nothing is None:
        shard.nothing = torch.empty(0, dtype=shard.dtype, device=shard.device)
    return shard.nothing


@torch.no_grad()
def rest_as(shard: Shard, codec: Codec | None) -> None:
    """Let the chunk rest as codes, or in its dtype again; only while the parameter is not whole."""
    if codec == shard.codec:
        return
    chunk = shard.data
    shard.stored = shard._kept(chunk if codec is None else codec.encode(chunk))
    shard.codec = codec
    shard.alone = shard.axis.size == 1 and shard.remote is None and codec is None
    shard.refit(shard.dtype)


def used_while_empty(name: str) -> str:
    """What to say where a loss was computed from a parameter that this rank did not have whole."""
    return (
        f"{name} was used in the loss while it is sharded and empty, outside of the forward of its module: a penalty "
        "over model.parameters()? Weight decay is the optimizer's (optimizer.params.weight_decay). Anything else that "
        "needs whole parameters goes into `with deepspeed.zero.GatheredParameters(params):`, its backward too, or "
        "into the forward of the module that has them."
    )


def shard_of(param: Tensor) -> Shard | None:
    """The shard of a parameter; None for an ordinary tensor."""
    shard = getattr(param, "_zero", None)
    return shard if isinstance(shard, Shard) else None


def shards_of(params: Any) -> list[Shard]:
    """The shards among some parameters, each once."""
    found = {id(shard): shard for shard in map(shard_of, params) if shard is not None}
    return list(found.values())
