"""Choosing an implementation: rank, requirements, DS_OP_<NAME>, failing loads, explanations."""

from __future__ import annotations

import itertools
import logging

import pytest

import deepspeed.ops
from deepspeed.errors import OpUnavailable
from deepspeed.ops import registry
from deepspeed.ops.capability import Capability, ProbeResult, always
from deepspeed.ops.registry import RegisteredOp, State, explain, implementation, implements, op, operations, reference

absent = Capability("gizmo", lambda: ProbeResult(False, "there is no gizmo"))
_counter = itertools.count()


@pytest.fixture
def name(monkeypatch):
    """A name of its own for an op that disappears after the test."""
    fresh = f"toy_{next(_counter)}"
    monkeypatch.setattr(registry, "_OPS", dict(registry._OPS))
    return fresh


@pytest.fixture
def toy(name):
    """An op with a reference, a better one, and the best one, which cannot run here."""
    reference(name)(lambda: "reference")
    implementation(name, name="fast", rank=10)(lambda: lambda: "fast")
    implementation(name, name="gizmo", requires=absent, rank=20)(lambda: lambda: "gizmo")
    return registry._OPS[name]


def states(toy: RegisteredOp) -> dict[str, State]:
    return {line.implementation: line.state for line in toy.explain()}


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(registry.logger, "propagate", True)
    return caplog


def test_the_best_rank_that_can_run_wins(toy):
    assert op(toy.name)() == "fast"
    assert states(toy) == {"gizmo": State.UNAVAILABLE, "fast": State.CHOSEN, "reference": State.AVAILABLE}
    assert next(line.reason for line in toy.explain() if line.implementation == "gizmo") == "there is no gizmo"


def test_resolved_once(name):
    loads = []

    @implementation(name, name="counted")
    def counted():
        loads.append(1)
        return lambda: "counted"

    assert op(name) is op(name)
    assert loads == [1]


def test_an_implementation_added_later_is_considered(toy):
    assert op(toy.name)() == "fast"
    implementation(toy.name, name="faster", rank=30)(lambda: lambda: "faster")
    assert op(toy.name)() == "faster"


def test_the_variable_forces_one(toy, monkeypatch):
    monkeypatch.setenv(toy.variable, "reference")
    assert toy.variable == f"DS_OP_{toy.name.upper()}"
    assert op(toy.name)() == "reference"
    assert states(toy)["reference"] is State.CHOSEN
    assert states(toy)["fast"] is State.AVAILABLE


def test_an_empty_variable_forces_nothing(toy, monkeypatch):
    monkeypatch.setenv(toy.variable, "")
    assert op(toy.name)() == "fast"
    assert states(toy)["fast"] is State.CHOSEN


def test_forcing_an_unknown_one(toy, monkeypatch):
    monkeypatch.setenv(toy.variable, "warp")
    with pytest.raises(OpUnavailable, match=rf"{toy.variable}=warp: .* no such .* gizmo, fast, reference"):
        op(toy.name)
    assert State.CHOSEN not in states(toy).values()


def test_forcing_one_that_cannot_run(toy, monkeypatch):
    monkeypatch.setenv(toy.variable, "gizmo")
    with pytest.raises(OpUnavailable, match=rf"{toy.variable}=gizmo: .*there is no gizmo.*Unset"):
        op(toy.name)
    assert State.CHOSEN not in states(toy).values()


def test_forcing_one_that_does_not_load(name, monkeypatch):
    reference(name)(lambda: "reference")

    @implementation(name, name="built")
    def built():
        raise RuntimeError("compiler said no")

    monkeypatch.setenv(f"DS_OP_{name.upper()}", "built")
    with pytest.raises(OpUnavailable, match=r"built: .* could not be loaded: RuntimeError: compiler said no"):
        op(name)


def test_a_failing_load_warns_once_and_the_next_is_used(name, log):
    reference(name)(lambda: "reference")

    @implementation(name, name="built", rank=5)
    def built():
        raise ImportError("undefined symbol")

    assert [op(name)() for _ in range(3)] == ["reference"] * 3
    (message,) = warned(log)
    assert name in message
    assert "built" in message
    assert "undefined symbol" in message
    lines = {line.implementation: line for line in registry._OPS[name].explain()}
    assert lines["built"].state is State.FAILED
    assert "undefined symbol" in lines["built"].reason
    assert lines["reference"].state is State.CHOSEN


def test_a_mistake_in_a_loader_is_not_hidden(name):
    reference(name)(lambda: "reference")
    implementation(name, name="wrong")(lambda: None + 1)
    with pytest.raises(TypeError):
        op(name)


def test_nothing_can_run(name):
    implementation(name, name="gizmo", requires=absent)(lambda: print)
    with pytest.raises(OpUnavailable, match=f"{name}.*gizmo: there is no gizmo"):
        op(name)


def test_an_unknown_op_lists_the_known():
    with pytest.raises(OpUnavailable, match=r"no op 'matmul'; there are .*global_norm"):
        op("matmul")


def test_explaining_loads_nothing(name):
    def load():
        raise AssertionError("loaded")

    implementation(name, name="slow_to_build")(load)
    assert states(registry._OPS[name]) == {"slow_to_build": State.CHOSEN}


def test_a_name_is_taken_once(name):
    assert implements(name, name="blocked")(print) is print
    assert [each.name for each in registry._OPS[name].implementations] == ["blocked"]
    with pytest.raises(ValueError, match="already has an implementation called 'blocked'"):
        implements(name, name="blocked")(print)
    assert op(name) is print


def test_every_op_of_the_library_has_a_reference_that_always_runs():
    for each in operations().values():
        last = each.implementations[-1]
        assert (last.name, last.rank) == ("reference", 0)
        assert last.requires is always


def test_exactly_one_is_chosen_for_every_op():
    chosen = [line.op for line in explain() if line.state is State.CHOSEN]
    assert sorted(chosen) == sorted(operations())


def test_compatible_ops():
    assert deepspeed.ops.__compatible_ops__ is deepspeed.ops.__compatible_ops__
    assert set(deepspeed.ops.__all__) == {"__compatible_ops__", "__installed_ops__", "op"}
    with pytest.raises(AttributeError, match="nonsense"):
        deepspeed.ops.nonsense  # noqa: B018
