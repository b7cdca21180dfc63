"""Passes by name, what each needs and provides, and schedules: which passes apply from which step on."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.compile.graph import GraphParameter, PassLimits, StepGraph
from deepspeed.errors import DeepSpeedConfigError

PassFunction = Callable[[StepGraph], None]
ResidentChoice = Callable[[Iterable[GraphParameter], dict[int, int], PassLimits], None]
"""Adds to the bytes of parameters, by number, that stay whole."""

_MODULES = (
    "zero1_compile", "zero2_compile", "zero3_compile", "prefetch", "selective_gather", "offload_adam_states",
    "offload_activation", "autotp_compile",
)  # fmt: skip


@dataclass(frozen=True)
class PassContract:
    """What a pass relies on and what it leaves behind; names that are provided once."""

    needs: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()

    @classmethod
    def of(cls, given: PassContract | Mapping[str, Iterable[str]] | None) -> PassContract:
        """From what a script gives: a contract, or {"needs": [...], "provides": [...]}."""
        if isinstance(given, PassContract):
            return given
        values = dict(given or {})
        if unknown := sorted(values.keys() - {"needs", "provides"}):
            raise DeepSpeedConfigError(
                f"the contract of a pass has needs and provides, found {', '.join(map(repr, unknown))}",
                path="compile",
            )
        return cls(frozenset(values.get("needs", ())), frozenset(values.get("provides", ())))


@dataclass(frozen=True)
class CompilePass:
    """A pass over the graphs of a step."""

    name: str
    function: PassFunction
    contract: PassContract
    choose: ResidentChoice | None = None
    """Does the same to graphs that are compiled already: in them, gathers of what is whole do nothing."""


def _built_in() -> dict[str, CompilePass]:
    modules = (importlib.import_module(f"deepspeed.compile.passes.{name}") for name in _MODULES)
    found = (each for module in modules for each in vars(module).values() if isinstance(each, CompilePass))
    return {each.name: each for each in found}


@dataclass
class PassRegistry:
    """The passes that an engine knows."""

    known: dict[str, CompilePass] = field(default_factory=_built_in)

    def register(self, name: str, function: PassFunction, contract: Any = None) -> None:
        """Make a pass known by a name."""
        if not callable(function):
            raise DeepSpeedConfigError(
                f"register_compile_pass({name!r}) takes a function of a graph, found {type(function).__name__}",
                path="compile",
            )
        if name in self.known:
            raise DeepSpeedConfigError(f"a pass {name!r} is registered already; choose another name", path="compile")
        self.known[name] = CompilePass(name, function, PassContract.of(contract))

    def find(self, given: Any) -> CompilePass:
        """A pass by its name, or by its function, which needs no registration."""
        if isinstance(given, str):
            found = self.known.get(given)
            if found is None:
                raise DeepSpeedConfigError(
                    f"the pass {given!r} is unknown; use one of {', '.join(self.known)}, or register it by "
                    "engine.register_compile_pass",
                    path="compile",
                )
            return found
        named = next((each for each in self.known.values() if each.function is given), None)
        if named is not None:
            return named
        if isinstance(given, CompilePass):
            return given
        if not callable(given):
            raise DeepSpeedConfigError(
                f"a schedule has names of passes and functions, found {type(given).__name__}", path="compile"
            )
        return CompilePass(getattr(given, "__name__", "a function"), given, PassContract())

    def schedule(
        self, entries: Sequence[tuple[int, Sequence[Any]]], stage: int, always: Sequence[str] = ()
    ) -> PassSchedule:
        """Check a schedule, [(step, [passes])], for a ZeRO stage; passes that are `always` there, last, are added."""
        found: dict[int, tuple[CompilePass, ...]] = {}
        for step, passes in entries:
            chosen = tuple(map(self.find, passes))
            provided = {name for each in chosen for name in each.contract.provides}
            chosen += tuple(each for each in map(self.find, always) if not each.contract.provides & provided)
            require_order(step, chosen, stage)
            if step in found:
                raise DeepSpeedConfigError(f"the schedule has step {step} twice; merge the entries", path="compile")
            found[int(step)] = chosen
        if 0 not in found:
            raise DeepSpeedConfigError(
                f"the schedule begins with step {min(found, default=None)}; its first entry is for step 0",
                path="compile",
            )
        return PassSchedule(found)


@dataclass(frozen=True)
class PassSchedule:
    """Which passes apply from which step on."""

    entries: Mapping[int, tuple[CompilePass, ...]]

    def begin(self, step: int) -> int:
        """The step of the entry that holds at a step."""
        return max(each for each in self.entries if each <= step)


def require_order(step: int, passes: Sequence[CompilePass], stage: int) -> None:
    """An error that names the pass whose needs come too late or never, or what two passes provide."""
    provided: dict[str, str] = {f"stage {stage}": "the config"}
    for place, each in enumerate(passes):
        for need in sorted(each.contract.needs - provided.keys()):
            later = next((other.name for other in passes[place + 1 :] if need in other.contract.provides), None)
            raise DeepSpeedConfigError(
                f"the schedule at step {step}: {each.name} needs {need!r}, "
                + (f"which {later} provides after it; put {later} first" if later else f"which {_absent(need, stage)}"),
                path="compile",
            )
        for twice in sorted(each.contract.provides & provided.keys()):
            raise DeepSpeedConfigError(
                f"the schedule at step {step}: {each.name} and {provided[twice]} both provide {twice!r}; keep one",
                path="compile",
            )
        provided.update(dict.fromkeys(each.contract.provides, each.name))
    wanted = {"reductions"} if stage < 3 else {"reductions", "gathers"}
    if missing := sorted(wanted - provided.keys()):
        raise DeepSpeedConfigError(
            f"the schedule at step {step} has no pass that provides {' and '.join(missing)}; ZeRO stage {stage} needs "
            f"zero{stage}_compile in each entry",
            path="compile",
        )


def _absent(need: str, stage: int) -> str:
    if need.startswith("stage "):
        return f"is not the config's: zero_optimization.stage is {stage}"
    return "no pass before it provides"
