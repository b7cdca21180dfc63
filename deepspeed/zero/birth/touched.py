"""Sharded parameters that constructors touch: they become whole, and what rank 0 wrote into them is kept.

[Note: touch] Whoever made a module goes on to initialise its weights and to read their shapes. So while a constructor
runs, a function of torch that is given a sharded parameter finds it whole. One that writes into it leaves it sharded
again; after any other it stays whole until the constructor, or the visit of `Module.apply`, ends: there may be views.
Constructors run alike on all ranks, which gathering needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from deepspeed.zero.parameters import gather as fetch
from deepspeed.zero.parameters.parameter import ZeroParameter
from deepspeed.zero.parameters.shard import Shard, shards_of

_READS_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that give access to its values; all others only describe it."""

_DESCRIBES = frozenset(
    {"__hash__", "__repr__", "__format__", "is_floating_point", "is_complex", "register_hook", "requires_grad_"}
    | {"register_post_accumulate_grad_hook", "retain_grad", "is_shared", "data_ptr", "has_names"}
)

_SHAPE: dict[str, Callable[..., Any]] = {
    "shape": lambda shard: shard.shape,
    "ndim": lambda shard: len(shard.shape),
    "dim": lambda shard: len(shard.shape),
    "ndimension": lambda shard: len(shard.shape),
    "numel": lambda shard: shard.numel,
    "nelement": lambda shard: shard.numel,
    "__len__": lambda shard: shard.shape[0],
    "size": lambda shard, dim=None: shard.shape if dim is None else shard.shape[dim],
}


class TouchedParameters(TorchFunctionMode):
    """See [Note: touch]."""

    def __init__(self) -> None:
        super().__init__()
        self._frames: list[list[Shard]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, with what it needs whole."""
        kwargs = kwargs or {}
        shards = _sharded_in(args, kwargs)
        if not shards:
            return func(*args, **kwargs)
        name, attribute = func.__name__, getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__get__":
            describes = attribute not in _READS_VALUES
        elif name in ("__set__", "__delete__"):
            describes = attribute != "data" or _is_own(shards[0], args[-1])
        else:
            describes = name in _DESCRIBES
        known = _SHAPE.get(attribute if name == "__get__" else name)
        if self._frames and known is not None:
            rest = () if name == "__get__" else args[1:]
            return known(shards[0], *rest, **{key: value for key, value in kwargs.items() if key == "dim"})
        if describes or known is not None:
            return func(*args, **kwargs)
        if name.endswith("_") and not name.endswith("__"):
            with self.frame(shards):
                return func(*args, **kwargs)
        if self._frames:
            self._hold(shards)
        return func(*args, **kwargs)

    @contextmanager
    def frame(self, shards: Iterable[Shard] = ()) -> Iterator[None]:
        """Until it ends, what is touched stays whole, as do `shards`; then rank 0's values are kept."""
        held: list[Shard] = []
        self._frames.append(held)
        try:
            self._hold([shard for shard in shards if not shard.whole and shard.numel])
            yield
        except BaseException:
            self._end(held)
            raise
        else:
            fetch.spread(held)
            self._end(held)

    def _hold(self, shards: Sequence[Shard]) -> None:
        fetch.gather(shards)
        for shard in shards:
            shard.holds += 1
        self._frames[-1].extend(shards)

    def _end(self, held: list[Shard]) -> None:
        self._frames.pop()  # frames end in the reverse order of their begin
        for shard in held:
            shard.holds -= 1
        fetch.release(held)

    @contextmanager
    def in_parameters(self) -> Iterator[None]:
        """Let `nn.Parameter` take a sharded parameter, as it takes any other one."""
        before = nn.Parameter.__new__

        def __new__(kind: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> Any:
            return before(kind, data.data if isinstance(data, ZeroParameter) else data, requires_grad)

        with ExitStack() as undo:
            undo.callback(setattr, nn.Parameter, "__new__", staticmethod(before))
            nn.Parameter.__new__ = staticmethod(__new__)  # type: ignore[assignment]
            yield

    @contextmanager
    def in_apply(self) -> Iterator[None]:
        """Let `Module.apply` gather the parameters of the module that it visits."""
        before = nn.Module.apply

        @functools.wraps(before)
        def apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
            for child in module.children():
                child.apply(fn)
            with self.frame(shards_of(module.parameters(recurse=False))):
                fn(module)
            return module

        with ExitStack() as undo:
            undo.callback(setattr, nn.Module, "apply", before)
            nn.Module.apply = apply  # type: ignore[method-assign,assignment]
            yield


def _sharded_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Shard]:
    """The shards that are not whole, of the parameters in the arguments."""
    tensors = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
    return [shard for shard in shards_of(tensors) if not shard.whole and shard.numel]


def _is_own(shard: Shard, value: Any) -> bool:
    """True if a parameter's data is set by gathering or letting go."""
    return value is shard.full or (isinstance(value, torch.Tensor) and value.numel() == 0)
