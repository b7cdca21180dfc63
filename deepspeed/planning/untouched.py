"""Tensors with addresses but without pages: large ones are never written, so that a step of any model fits anywhere.

[Note: untouched memory] The engine asks for addresses, resizes storages and reads small tensors on which ranks agree,
which tensors without memory do not allow. So large tensors have real storages here, whose pages the system never has
to provide, because nothing writes them: an operation with a large tensor takes its shapes from the device "meta" and
returns memory as it comes. What is small is computed, such as flags, numbers of steps and words for other ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from deepspeed.errors import UsageError
from deepspeed.profiling.common import tensors_of

FLOATS = 4 << 10
"""Bytes of the largest tensor of floating point that is computed."""
INTEGERS = 1 << 20
"""Bytes of the largest other one: they hold what ranks agree on."""

_FRESH = 64 << 10
"""Bytes of what malloc takes from its heap here, where others have written; larger memory is new, and zero."""
_USUAL = 32 << 20  # up to here malloc's own threshold grows; `keep_heap` makes it so at once
_M_MMAP_THRESHOLD = -3

Seen = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""(operation, arguments, keywords, result)."""

# They change what a tensor is, and read or write nothing.
_RESHAPES = frozenset(
    {
        *("set_", "resize_", "resize_as_", "as_strided_", "transpose_", "swapaxes_", "swapdims_"),
        *("squeeze_", "unsqueeze_", "t_", "detach_", "rename_"),
    }
)
_MAKES_NOTHING = frozenset(
    {
        *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"),
        *("detach", "alias", "_reshape_alias", "lift_fresh"),
    }
)


def _map_from(nbytes: int) -> None:
    """Let malloc map what has more bytes, where it is glibc's."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, nbytes)


class UntouchedMemory(TorchDispatchMode):
    """While it is entered, no large tensor is read or written. See [Note: untouched memory]."""

    def __init__(self, seen: Seen | None = None, sent: Callable[[Sequence[Tensor]], None] | None = None) -> None:
        """`seen` hears of every operation of torch that computes, `sent` of the tensors of a collective."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen, self.sent = seen, sent
        self.computed: set[str] = set()
        """Operations whose results depend on values, which were computed on whatever the memory holds."""
        self._known: dict[Hashable, Any] = {}
        """Operation with the shapes that it takes → what it gives: layers and micro batches are alike."""

    def __enter__(self) -> Any:
        _map_from(_FRESH)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        _map_from(_USUAL)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        tensors = [*tensors_of(args), *tensors_of(kwargs.values())]
        if func.namespace == "c10d":
            if self.sent is not None:
                self.sent(tensors)
            whole = all(tensor.numel() for tensor in tensors) and not any(map(_is_large, tensors))
            return func(*args, **kwargs) if whole else _sent(func, args, kwargs)
        name = func._schema.name.partition("::")[2]
        if name in _MAKES_NOTHING or name in _RESHAPES:
            made = _allocated(func, args, kwargs)
            return made.zero_() if name.startswith(("empty", "new_")) and made.nbytes <= _FRESH else made
        out = self._result(func, name, tensors, args, kwargs)
        if self.seen is not None:
            self.seen(func, args, kwargs, out)
        return out

    def _result(
        self, func: Any, name: str, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not any(map(_is_large, tensors)):
            makes = not tensors and any(argument.name == "device" for argument in func._schema.arguments)
            if not makes or not any(map(_is_large, tree_leaves(func(*args, **{**kwargs, "device": "meta"})))):
                return func(*args, **kwargs)
            return tree_map(_real, func(*args, **{**kwargs, "device": "meta"}))
        if func._schema.is_mutable and name.endswith("_"):
            return args[0] if func._schema.returns else None
        if name == "equal":
            return True
        key = _signature(func, args, kwargs)
        made = self._known.get(key) if key is not None else None
        if made is None:
            try:
                made = _shapes_of(func, args, kwargs, tensors)
            except RuntimeError:  # there is no such kernel: the shape of the result depends on values
                self.computed.add(str(func._overloadpacket))
                return func(*args, **kwargs)
            if key is not None:
                self._known[key] = made
        return _made_real(made, tensors)


@dataclass(frozen=True, slots=True)
class _Given:
    """In a result: the tensor of this number among those that the operation took."""

    number: int


def _made_real(made: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(made, _Given):
        return tensors[made.number]
    if isinstance(made, (list, tuple)):
        return type(made)(_made_real(each, tensors) for each in made)
    return _real(made)


def _signature(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What decides the shapes of a result; None where something in it cannot be compared."""
    key = (func, tuple(map(_comparable, args)), tuple((name, _comparable(value)) for name, value in kwargs.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_comparable, value))
    return type(value), value


def _shapes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    """The result on the device "meta"; in the place of a tensor that was given stands its number."""
    shapes: dict[int, Tensor] = {}

    def shape(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("meta")
        if not isinstance(value, Tensor):
            return value
        if id(value) not in shapes:
            shapes[id(value)] = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        return shapes[id(value)]

    out = func(*tree_map(shape, args), **tree_map(shape, kwargs))
    given = {id(shapes[id(tensor)]): _Given(number) for number, tensor in enumerate(tensors)}
    return tree_map(lambda value: given.get(id(value), value), out)


def _is_large(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.device.type == "cuda":
        return False
    return value.nbytes > (FLOATS if value.is_floating_point() or value.is_complex() else INTEGERS)


def _real(value: Any) -> Any:
    """Memory of this shape; numbers are zeros, since norms and losses are looked at."""
    if not isinstance(value, Tensor):
        return value
    made: Tensor = _allocated(torch.empty_strided, (value.size(), value.stride()), {"dtype": value.dtype})
    return made.zero_() if made.nbytes <= _FRESH else made


def _allocated(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return make(*args, **kwargs)
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        raise UsageError(
            f"this system gives out no addresses for a tensor that a plan never writes: {error}. Allow it "
            "(`sysctl vm.overcommit_memory=1`, no `ulimit -v`), or plan on a machine with more memory"
        ) from error


def _sent(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A collective of pretended ranks copies what they would send: here they exchange nothing at all."""
    given: dict[int, tuple[Tensor, Tensor]] = {}

    def nothing(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        empty = torch.empty(0, dtype=value.dtype)
        given[id(empty)] = empty, value
        return empty

    out = func(*(_no_sizes(tree_map(nothing, each)) for each in args), **tree_map(nothing, kwargs))
    for received in tree_leaves(args[0]):
        if isinstance(received, Tensor) and not _is_large(received):
            received.zero_()
    return tree_map(lambda value: given[id(value)][1] if id(value) in given else value, out)


def _no_sizes(value: Any) -> Any:
    """Sizes of parts, of which there are none."""
    return [] if isinstance(value, (list, tuple)) and all(isinstance(each, int) for each in value) else value
