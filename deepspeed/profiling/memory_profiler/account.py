"""`Account`: the memory of one device from birth to death, each piece with its kind and the module that made it.

Torch's dispatcher shows what an operation returns; a weak reference to its storage tells when it is freed. That needs
no allocator that counts, so that a CPU has an account as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed.profiling.memory_profiler.whereabouts import Place

__all__ = ["ELASTIC", "OTHERS", "Account", "Held"]

OTHERS = "everything else"
ELASTIC = "parameters"
"""The kind whose memory comes and goes under the same storage, as gathered parameters do."""


@dataclass(slots=True, eq=False)
class Held:
    """Memory of one storage."""

    nbytes: int
    kind: str
    module: str | None


@dataclass(frozen=True, slots=True)
class Moment:
    """What was alive when most was."""

    total: int
    place: Place
    operation: str
    alive: tuple[Held, ...]


class Account(TorchDispatchMode):
    """While it is entered, keeps the moment at which most memory of `device` was in use.

    `allocator` tells the most that it had in use since the beginning; None: what is alive is summed.
    """

    def __init__(
        self, device: torch.device, where: Callable[[], Place], allocator: Callable[[], int] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moment: Moment | None = None
        self._device = device
        self._where = where
        self._allocator = allocator
        self._alive: dict[int, Held] = {}
        self._ends: dict[int, weakref.ref[Any]] = {}
        self._elastic: set[int] = set()
        self._bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in self._ours(tree_leaves((args, kwargs))):
            self._know(tensor, OTHERS)  # what was there before anybody looked
        place = self._where()
        out = func(*args, **(kwargs or {}))
        for tensor in self._ours(tree_leaves(out)):
            self._know(tensor, place.makes, place.module)
        self.look(place, str(func._overloadpacket))
        return out

    def name(self, kinds: Mapping[str, Iterable[Tensor]]) -> None:
        """These tensors are of these kinds, the first one where they share memory; moments of the past see it, too."""
        seen: set[int] = set()
        for kind, tensors in kinds.items():
            for tensor in self._ours(tensors):
                key = tensor.untyped_storage()._cdata
                if key not in seen:
                    seen.add(key)
                    self._know(tensor, kind).kind = kind
                    if kind == ELASTIC:
                        self._elastic.add(key)

    def close(self) -> None:
        """Forget all but the moment."""
        self._ends.clear()
        self._elastic.clear()
        self._alive.clear()

    def look(self, place: Place, operation: str) -> None:
        """See whether this is the moment."""
        self._stretch()
        total = self._bytes if self._allocator is None else self._allocator()
        if self.moment is None or total > self.moment.total:
            self.moment = Moment(total, place, operation, tuple(self._alive.values()))

    def _ours(self, values: Iterable[Any]) -> Iterable[Tensor]:
        """Tensors that have memory of their own on the device; wrappers show what they wrap."""
        for value in values:
            if (
                isinstance(value, Tensor)
                and value.device == self._device
                and value.layout is torch.strided
                and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
            ):
                yield value

    def _know(self, tensor: Tensor, kind: str, module: str | None = None) -> Held:
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self._alive.get(key)
        if held is None:
            held = self._alive[key] = Held(storage.nbytes(), kind, module)
            self._ends[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._bytes += held.nbytes
        return held

    def _forget(self, key: int) -> None:
        self._ends.pop(key, None)
        self._elastic.discard(key)
        held = self._alive.pop(key, None)
        if held is not None:
            self._bytes -= held.nbytes

    def _stretch(self) -> None:
        """Read the sizes of what grows and shrinks."""
        for key in tuple(self._elastic):
            storage, held = self._ends[key](), self._alive[key]
            if storage is not None and (now := storage.nbytes()) != held.nbytes:
                self._bytes += now - held.nbytes
                self._alive[key] = replace(held, nbytes=now)  # a moment of the past keeps the size that it saw
