"""`ZeroParameter`: what users and clients see of a parameter that is sharded.

[Note: copies] A deep copy of a sharded parameter is a shard of its own, over the same ranks. Copied while it is held
whole, by `GatheredParameters` for instance, it becomes an ordinary whole parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from deepspeed.log import warn_once
from deepspeed.parallel import AxisGroup
from deepspeed.zero.parameters import gather as fetch
from deepspeed.zero.parameters.data import WatchedData
from deepspeed.zero.parameters.offloaded import ChunkTier
from deepspeed.zero.parameters.shard import Shard, ZeroParamType, shards_of

_CLIPPING = clip_grad.__file__
_GRAD: Any = torch.Tensor.grad
set_plain_grad = _GRAD.__set__
"""As an assignment to the gradient, without the property of `_TakenGradient`."""
plain_grad = _GRAD.__get__
"""The gradient of a parameter, without the errors and warnings that scripts get for `param.grad`."""


def _chunk(param: ZeroParameter) -> Tensor:
    chunk = param._zero.data
    chunk.ds_numel = param._zero.chunk  # type: ignore[attr-defined]
    return chunk


class EngineParameter(WatchedData, nn.Parameter):
    """A parameter whose class an engine has changed."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An ordinary parameter: clients make new ones of the class of an old one."""
        return ordinary_class(cls)(*args, **kwargs)


class ZeroParameter(EngineParameter):
    """A parameter of which this rank may hold a shard only; the same object as before, with another class.

    Outside of its use it is empty (`numel() == 0`); `ds_shape` and `ds_numel` tell what it is as a whole.
    """

    _zero: Shard

    ds_id = property(lambda self: self._zero.number, doc="A number of its own.")
    ds_shape = property(lambda self: self._zero.shape, doc="The shape of the whole parameter.")
    ds_numel = property(lambda self: self._zero.numel, doc="The elements of the whole parameter.")
    ds_status = property(lambda self: self._zero.status, doc="Whether it can be used now.")
    ds_persist = property(lambda self: self._zero.persistent, doc="True if it stays whole between uses.")
    ds_tensor = property(_chunk, doc="This rank's chunk, padded.")
    ds_active_sub_modules = property(lambda self: set(self._zero.users), doc="The modules that use it now.")
    ds_process_group = property(lambda self: self._zero.axis.group, doc="The ranks that hold it.")
    ds_param_type = property(
        lambda self: ZeroParamType.PARTITIONED if self._zero.remote is None else ZeroParamType.REMOTE,
        doc="How it is held.",
    )

    def _data_replaced(self, value: Tensor) -> None:
        """While it is empty, this rank keeps its part of a whole value."""
        shard = self._zero
        if not shard.whole and shard.numel and value.shape == shard.shape:
            shard.release()
            shard.cut(value)

    def partition_numel(self) -> int:
        """Elements of a rank's chunk, padding included."""
        return self._zero.chunk

    def padding_size(self) -> int:
        """Elements of padding over all ranks."""
        return self._zero.chunk * self._zero.axis.size - self._zero.numel

    def all_gather(self, param_list: Iterable[nn.Parameter] | None = None, async_op: bool = False) -> Any:
        """Make this parameter, or those given, whole; on all ranks together, until `partition` or their next use ends.

        With `async_op` the result's `wait()` must be called before use.
        """
        gathering = self.all_gather_coalesced([self] if param_list is None else param_list)
        return gathering if async_op else gathering.wait()

    def all_gather_coalesced(self, params: Iterable[nn.Parameter]) -> Any:
        """Begin to make these parameters whole; `wait()` of the result finishes that."""
        shards = [shard for shard in shards_of(params) if not shard.whole]
        fetch.start(shards)
        return SimpleNamespace(wait=partial(fetch.finish, shards))

    def partition(self, param_list: Iterable[nn.Parameter] | None = None, has_been_updated: bool = False) -> None:
        """Let go of what `all_gather` made whole; with `has_been_updated` every rank keeps its part of the changes."""
        shards = [shard for shard in shards_of([self] if param_list is None else param_list) if shard.whole]
        if has_been_updated:
            for shard in shards:
                shard.store()
        fetch.release(shards)

    def opened(self) -> AbstractContextManager[None]:
        """Inside, it is whole and ordinary, on all ranks together; what it has become is sharded as it was before."""
        return reopened([self._zero])

    def convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter]) -> None:
        """Shard further parameters over the same ranks."""
        for param in param_list:
            if not isinstance(param, ZeroParameter):
                shard_parameter(param, self._zero.axis).release()

    def item(self) -> Any:
        """The value of a parameter of one element; where it is not whole, on all ranks together."""
        missing = [] if self._zero.whole else [self._zero]
        fetch.gather(missing)
        value = super().item()
        fetch.release(missing)
        return value

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

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """See [Note: copies]."""
        if id(self) not in memo:
            held = self._zero.holds > 0
            values = self.detach().clone() if held else torch.empty(0, dtype=self.dtype, device=self.device)
            copy: nn.Parameter = nn.Parameter(values, requires_grad=self.requires_grad)
            copy.__class__ = ordinary_class(type(self)) if held else type(self)
            if not held:
                copy._zero = self._zero.copy(copy)  # type: ignore[attr-defined]
            memo[id(self)] = copy
        result: nn.Parameter = memo[id(self)]
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        shard = self._zero
        if not shard.whole and shard.numel:
            warn_once(
                f"{shard.name} was pickled while it is sharded, as an empty tensor. Save engine.module_state_dict() or "
                "engine.save_16bit_model(), or pickle inside deepspeed.zero.GatheredParameters(model.parameters())."
            )
        return torch._utils._rebuild_parameter, (self.data, self.requires_grad, {})


class _TakenGradient:
    """A parameter whose gradient is reduced to its owners at once, so that it is not where plain PyTorch looks."""

    @property
    def grad(self) -> Tensor | None:
        """As of any tensor; a warning is logged where torch's clipping finds none."""
        found: Tensor | None = _GRAD.__get__(self)
        if found is None and sys._getframe(1).f_code.co_filename == _CLIPPING:
            warn_once(
                "torch.nn.utils.clip_grad_norm_ was called with parameters whose gradients lie in shards: it clips "
                "nothing. Set gradient_clipping in the config; engine.get_global_grad_norm() tells the norm."
            )
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        set_plain_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)


class SpreadParameter(_TakenGradient, ZeroParameter):
    """One that lies on several ranks, empty outside of its uses: a copy made then is worth a warning."""

    def detach(self) -> Tensor:
        self._warn_if_empty()
        return super().detach()

    def clone(self, *, memory_format: torch.memory_format | None = None) -> Tensor:
        self._warn_if_empty()
        return super().clone(memory_format=memory_format)

    def _warn_if_empty(self) -> None:
        shard: Shard | None = getattr(self, "_zero", None)  # None while a copy is made
        if shard is None or shard.whole or not shard.numel:
            return
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if not caller.startswith(("deepspeed.", "torch.nn.modules.")):
            warn_once(
                f"{caller} copies {shard.name}, which is sharded and empty between its uses. Averages of weights and "
                "other copies are made of whole values inside deepspeed.zero.GatheredParameters(params), or of this "
                "rank's part by deepspeed.utils.safe_get_local_fp32_param(param)."
            )


class WholeParameter(EngineParameter):
    """One that is whole, while its master lies elsewhere; a copy, pickled or not, is an ordinary parameter."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        if ordinary_class(type(self)) is nn.Parameter:
            return torch._utils._rebuild_parameter, (self.data, self.requires_grad, {})
        self._drop_given()
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class ResidentParameter(_TakenGradient, WholeParameter):
    """One that is whole, while its gradient lies in shards."""


def watch(name: str, param: nn.Parameter, kind: type[WholeParameter] = WholeParameter) -> None:
    """Let a parameter that stays whole be of a `kind` that notices things, also if its class is the user's own.

    One that an earlier engine has left so stays of the kind that notices more.
    """
    if isinstance(param, (ZeroParameter, kind)):
        return
    ordinary = ordinary_class(type(param))
    try:
        if "data" in vars(ordinary) or nn.Parameter not in type(param).__mro__:
            raise TypeError("it has its own idea of data")
        param.__class__ = _noticing(ordinary, kind)
    except TypeError:
        warn_once(
            f"{name} is a {type(param).__name__}, whose class cannot be extended: what a script writes through its "
            "`.data` is not noticed, and the next step undoes it. Write into the parameter itself, inside "
            "torch.no_grad()."
        )


def shard_parameter(param: nn.Parameter, axis: AxisGroup, name: str = "", remote: ChunkTier | None = None) -> Shard:
    """Cut a whole parameter; it stays the same object, and whole until it is released."""
    shard = Shard(param, axis, name, remote)
    param.__class__ = _noticing(ordinary_class(type(param)), ZeroParameter if shard.alone else SpreadParameter)
    param._zero = shard  # type: ignore[attr-defined]
    return shard


@contextmanager
def reopened(shards: Sequence[Shard], axis: AxisGroup | None = None) -> Iterator[None]:
    """Inside, parameters are whole and ordinary; afterwards they are sharded again, over `axis` if it is given."""
    fetch.gather([shard for shard in shards if not shard.whole])
    for shard in shards:
        shard.param.__class__ = ordinary_class(type(shard.param))
        del shard.param._zero  # type: ignore[attr-defined]
    yield
    for shard in shards:
        mine = shard_parameter(shard.param, axis or shard.axis, shard.name, shard.remote)
        mine.strict, mine.gather, mine.replicas = shard.strict, shard.gather, shard.replicas
        if mine.numel and not mine.alone:
            mine.release()


def spread_class(param: nn.Parameter) -> None:
    """Let a parameter that was whole for good behave as one that is empty between its uses."""
    if isinstance(param, ZeroParameter) and not isinstance(param, SpreadParameter):
        kind = _noticing(ordinary_class(type(param)), SpreadParameter)
        param.__class__ = kind  # type: ignore[assignment]


def ordinary_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class that a parameter had before an engine changed it."""
    return next((b for b in kind.__mro__ if issubclass(b, nn.Parameter) and not issubclass(b, EngineParameter)), kind)


@cache
def _noticing(kind: type[nn.Parameter], base: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of a parameter of this kind that an engine has made one of `base`."""
    return base if kind is nn.Parameter else type(f"Zero{kind.__name__}", (base, kind), {})
