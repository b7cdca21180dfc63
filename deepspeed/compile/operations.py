"""The operations that passes put into graphs: they name a parameter by its number, and an engine carries them out.

Each of them writes a token that the graph begins with. So compilers keep their order, which all ranks share, and keep
them although nothing reads what they return. The memory of a parameter is filled by `wait` and freed by `release`; both
say that they write the parameter, so that what reads it stays behind `wait`; `release` takes the results of all that
reads it, since compilers put off what they compute element by element.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import torch
from torch import Tensor, library

_LIBRARY = library.Library("deepspeed_compile", "DEF")
_handles = itertools.count()


class GraphRuntime(Protocol):
    """Carries out the operations of an engine's graphs."""

    def start(self, numbers: list[int]) -> None:
        """Begin to gather parameters that are not whole."""

    def wait(self, number: int) -> None:
        """Return when a parameter is whole; it stays so until `release`."""

    def release(self, number: int) -> None:
        """This graph does not need a parameter any more."""

    def reduce(self, number: int, grad: Tensor) -> None:
        """A gradient is there, in memory that nothing else uses."""

    def room(self, nbytes: int, *, wait: bool) -> None:
        """This graph holds so many bytes, beside parameters: as many of what it does not use may be away."""

    def leave(self, saved: Tensor) -> None:
        """Forward has read a tensor for the last time that is saved for backward."""

    def fetch(self, saved: Tensor) -> None:
        """Backward needs it soon."""

    def arrive(self, saved: Tensor) -> None:
        """Backward reads it from now on."""


RUNTIMES: dict[int, GraphRuntime] = {}
"""The engines whose graphs can run, by handle."""


def enrol(runtime: GraphRuntime) -> int:
    """A handle by which operations find this runtime, until `dismiss`."""
    handle = next(_handles)
    RUNTIMES[handle] = runtime
    return handle


def dismiss(handle: int) -> None:
    """The runtime's graphs do not run any more."""
    RUNTIMES.pop(handle, None)


def _start(numbers: list[int], token: Tensor, handle: int) -> None:
    RUNTIMES[handle].start(numbers)


def _wait(param: Tensor, token: Tensor, handle: int, number: int) -> None:
    RUNTIMES[handle].wait(number)


def _release(param: Tensor, token: Tensor, handle: int, number: int, readers: list[Tensor]) -> None:
    RUNTIMES[handle].release(number)


def _reduce(grad: Tensor, token: Tensor, handle: int, number: int, owned: bool) -> None:
    RUNTIMES[handle].reduce(number, grad if owned else grad.clone())


def _room(nbytes: int, token: Tensor, handle: int, wait: bool, after: list[Tensor]) -> None:
    RUNTIMES[handle].room(nbytes, wait=wait)


def _leave(saved: Tensor, token: Tensor, handle: int) -> None:
    RUNTIMES[handle].leave(saved)


def _fetch(saved: Tensor, token: Tensor, handle: int) -> None:
    RUNTIMES[handle].fetch(saved)


def _arrive(saved: Tensor, token: Tensor, handle: int) -> None:
    RUNTIMES[handle].arrive(saved)


def _no_result(*_: Any) -> None:
    """What the operations return to who traces them."""


for _schema, _function in (
    ("start(int[] numbers, Tensor(a!) token, int handle) -> ()", _start),
    ("wait(Tensor(a!) param, Tensor(b!) token, int handle, int number) -> ()", _wait),
    ("release(Tensor(a!) param, Tensor(b!) token, int handle, int number, Tensor[] readers) -> ()", _release),
    ("reduce(Tensor grad, Tensor(a!) token, int handle, int number, bool owned) -> ()", _reduce),
    ("room(int nbytes, Tensor(a!) token, int handle, bool wait, Tensor[] after) -> ()", _room),
    ("leave(Tensor(a!) saved, Tensor(b!) token, int handle) -> ()", _leave),
    ("fetch(Tensor(a!) saved, Tensor(b!) token, int handle) -> ()", _fetch),
    ("arrive(Tensor(a!) saved, Tensor(b!) token, int handle) -> ()", _arrive),
):
    _name = _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    library.register_fake(f"deepspeed_compile::{_name}", _no_result, lib=_LIBRARY)

START: Any = torch.ops.deepspeed_compile.start.default
WAIT: Any = torch.ops.deepspeed_compile.wait.default
RELEASE: Any = torch.ops.deepspeed_compile.release.default
REDUCE: Any = torch.ops.deepspeed_compile.reduce.default
ROOM: Any = torch.ops.deepspeed_compile.room.default
LEAVE: Any = torch.ops.deepspeed_compile.leave.default
FETCH: Any = torch.ops.deepspeed_compile.fetch.default
ARRIVE: Any = torch.ops.deepspeed_compile.arrive.default
