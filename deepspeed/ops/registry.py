"""Which implementation of an operation runs here: registration, choice, and the reasons for the choice.

    @reference("adam")                                                  the torch version, the tests' oracle
    def adam(params, grads, ...): ...

    @implements("adam", name="foreach")                                 a faster one
    def adam_foreach(params, grads, ...): ...

    @implementation("adam", name="native", requires=has_cxx_compiler, rank=20)
    def _load_native():                                                 may import, may compile; called once
        return library("adam").update

    op("adam")(params, grads, ...)

The implementation of the highest rank whose requirements hold is taken; if it cannot be loaded, a warning says so
and the next one is taken. `DS_OP_ADAM=reference` takes that one or nothing.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from deepspeed.errors import OpUnavailable
from deepspeed.log import logger
from deepspeed.ops.capability import FAILURES, Capability, always, has_triton, on_cuda
from deepspeed.ops.precompile import follow_compilation

Kernel = Callable[..., Any]
F = TypeVar("F", bound=Kernel)

# The modules whose import registers the library's own operations.
_FAMILIES = (
    "deepspeed.ops.multi_tensor",
    "deepspeed.ops.adam",
    "deepspeed.ops.lion",
    "deepspeed.ops.lamb",
    "deepspeed.ops.adagrad",
    "deepspeed.ops.muon.momentum",
    "deepspeed.ops.muon.muon",
    "deepspeed.ops.grouped",
    "deepspeed.ops.model.norm",
    "deepspeed.ops.model.gated",
    "deepspeed.ops.model.assignments",
    "deepspeed.ops.model.linear",
    "deepspeed.ops.model.rotary",
    "deepspeed.ops.model.linear_loss",
    "deepspeed.ops.codecs.rows",
    "deepspeed.ops.fp8.quantise",
    "deepspeed.ops.fp8.groups",
    "deepspeed.ops.fp8.product",
    "deepspeed.ops.generate.attention",
    "deepspeed.ops.generate.pages",
    "deepspeed.ops.generate.streaming",
    "deepspeed.ops.generate.experts",
    "deepspeed.ops.generate.packed",
    "deepspeed.ops.generate.sampling",
    "deepspeed.ops.sparse_attention.attend",
    "deepspeed.ops.evoformer",
)


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run an operation: what it needs, how to get it, and its place among the others."""

    name: str
    requires: Capability
    load: Callable[[], Kernel]
    rank: int


class State(str, Enum):
    """What became of an implementation."""

    CHOSEN = "chosen"
    AVAILABLE = "available"
    UNAVAILABLE = "not available"
    FAILED = "failed to load"


@dataclass(frozen=True, slots=True)
class Explanation:
    """One line of the answer to "what runs here, and why"."""

    op: str
    implementation: str
    rank: int
    state: State
    reason: str


class RegisteredOp:
    """An operation and its implementations; the choice among them is made once, at the first use."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.variable = "DS_OP_" + re.sub(r"\W", "_", name).strip("_").upper()
        self._implementations: dict[str, Implementation] = {}
        self._chosen: tuple[Implementation, Kernel] | None = None
        self._failures: dict[str, str] = {}

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        """All of them, the preferred first."""
        return tuple(sorted(self._implementations.values(), key=lambda each: -each.rank))

    def add(self, candidate: Implementation) -> None:
        """Register; a choice already made is made again at the next use."""
        if candidate.name in self._implementations:
            raise ValueError(f"op {self.name!r} already has an implementation called {candidate.name!r}")
        self._implementations[candidate.name] = candidate
        self.forget()

    def forget(self) -> None:
        """Choose again at the next use: the environment, or the implementations, have changed."""
        self._chosen = None
        self._failures.clear()

    @property
    def chosen(self) -> tuple[Implementation, Kernel]:
        """The implementation that runs, and its function."""
        if self._chosen is None:
            self._chosen = self._choose()
        return self._chosen

    def demand(self, name: str) -> Implementation:
        """The implementation called `name`, as `DS_OP_<NAME>` asks for it; an error if it cannot run here."""
        each = self._implementations.get(name)
        if each is None:
            known = ", ".join(known.name for known in self.implementations)
            raise OpUnavailable(f"{self.variable}={name}: op {self.name!r} has no such implementation; it has {known}")
        if not each.requires.holds:
            raise OpUnavailable(
                f"{self.variable}={name}: this implementation cannot run here: {each.requires.reason}. "
                f"Unset {self.variable} to let the best available one be chosen."
            )
        return each

    def explain(self) -> tuple[Explanation, ...]:
        """Every implementation with its state; nothing is loaded for it, so nothing is built either."""
        forced = os.environ.get(self.variable) or None
        able = (each for each in self.implementations if each.requires.holds and forced in (None, each.name))
        chosen = self._chosen[0] if self._chosen else next(able, None)  # what would be tried first
        return tuple(
            Explanation(self.name, each.name, each.rank, *self._state(each, chosen, forced))
            for each in self.implementations
        )

    def _state(self, each: Implementation, chosen: Implementation | None, forced: str | None) -> tuple[State, str]:
        if each.name in self._failures:
            return State.FAILED, self._failures[each.name]
        if not each.requires.holds:
            return State.UNAVAILABLE, each.requires.reason
        if each is chosen:
            state, why = State.CHOSEN, f"{self.variable}={each.name}" if forced else "the best that runs here"
        else:
            state, why = State.AVAILABLE, f"{self.variable}={each.name} chooses it"
        return state, "; ".join(part for part in (why, each.requires.reason) if part)

    def _choose(self) -> tuple[Implementation, Kernel]:
        forced = os.environ.get(self.variable)
        for each in (self.demand(forced),) if forced else self.implementations:
            if not each.requires.holds:
                continue
            try:
                return each, _loaded(each)
            except FAILURES as error:
                self._failures[each.name] = why = f"{type(error).__name__}: {error}"
                if forced:
                    raise OpUnavailable(
                        f"{self.variable}={forced}: this implementation could not be loaded: {why}. "
                        f"Unset {self.variable} to let the best available one be chosen."
                    ) from error
                logger.warning(
                    "op %s: implementation %s could not be loaded, the next one is used: %s", self.name, each.name, why
                )
        found = "; ".join(f"{line.implementation}: {line.reason}" for line in self.explain()) or "none is registered"
        raise OpUnavailable(f"op {self.name!r} has no implementation that runs here ({found})")


def _loaded(each: Implementation) -> Kernel:
    if each.name == "triton":
        follow_compilation()
    return each.load()


_OPS: dict[str, RegisteredOp] = {}


def implementation(
    op: str, *, name: str, requires: Capability = always, rank: int = 10
) -> Callable[[Callable[[], Kernel]], Callable[[], Kernel]]:
    """Register the decorated loader: a function without arguments that returns the kernel."""

    def register(load: Callable[[], Kernel]) -> Callable[[], Kernel]:
        _OPS.setdefault(op, RegisteredOp(op)).add(Implementation(name, requires, load, rank))
        return load

    return register


def implements(op: str, *, name: str, requires: Capability = always, rank: int = 10) -> Callable[[F], F]:
    """Register the decorated function itself."""

    def register(kernel: F) -> F:
        implementation(op, name=name, requires=requires, rank=rank)(lambda: kernel)
        return kernel

    return register


def reference(op: str) -> Callable[[F], F]:
    """Register the decorated function itself as the torch version that always runs."""
    return implements(op, name="reference", rank=0)


def by_triton(op: str, requires: Capability = always) -> Callable[[F], F]:
    """Register the decorated function itself as the version that launches kernels of Triton."""
    return implements(op, name="triton", requires=has_triton & on_cuda & requires, rank=20)


@functools.lru_cache(None)
def _load_families() -> None:
    for module in _FAMILIES:
        importlib.import_module(module)


def operations() -> dict[str, RegisteredOp]:
    """Every registered operation by its name."""
    _load_families()
    return dict(_OPS)


def op(name: str) -> Kernel:
    """The function that runs operation `name` on this machine."""
    return _found(name).chosen[1]


def chosen(name: str) -> str:
    """Which implementation of operation `name` runs on this machine."""
    return _found(name).chosen[0].name


def _found(name: str) -> RegisteredOp:
    found = _OPS.get(name)
    if found is None:
        found = operations().get(name)
    if found is None:
        raise OpUnavailable(f"there is no op {name!r}; there are {', '.join(sorted(_OPS))}")
    return found


def explain() -> tuple[Explanation, ...]:
    """Every implementation of every operation, and what became of it."""
    return tuple(line for _, each in sorted(operations().items()) for line in each.explain())
