"""When modules are born: outermost constructors only, also of classes that come later, and no trace afterwards."""

from __future__ import annotations

import inspect
from contextlib import contextmanager

import pytest
from torch import nn

from deepspeed.transformers.source import ParameterConstruction


class Log:
    def __init__(self):
        self.lines = []

    @contextmanager
    def around(self, module):
        self.lines.append(f"+{type(module).__name__}")
        yield
        self.lines.append(f"-{type(module).__name__}")


class Base(nn.Module):
    def __init__(self, width=2):
        super().__init__()
        self.layer = nn.Linear(width, width)


class Derived(Base):
    def __init__(self):
        super().__init__(3)
        self.norm = nn.LayerNorm(3)


class Plain:
    def __init__(self):
        super().__init__()
        self.made = True


class Mixed(Plain, nn.Module):
    """Its constructor is that of a class which is no module."""


class Stubborn(nn.Module):
    def __init_subclass__(cls):
        """Tells nobody."""

    def __init__(self):
        super().__init__()


def test_outermost_constructors_and_their_parts():
    log = Log()
    with ParameterConstruction(log.around).watch():
        Derived()
    assert log.lines == ["+Derived", "+Linear", "-Linear", "+LayerNorm", "-LayerNorm", "-Derived"]


def test_classes_are_as_before():
    before = [kind.__dict__.get("__init__") for kind in (nn.Linear, Base, Mixed)]
    signature = inspect.signature(Base.__init__)
    with pytest.raises(KeyError), ParameterConstruction(Log().around).watch():
        assert inspect.signature(Base.__init__) == signature
        raise KeyError
    assert [kind.__dict__.get("__init__") for kind in (nn.Linear, Base, Mixed)] == before
    assert "__init_subclass__" not in nn.Module.__dict__


def test_classes_that_are_defined_meanwhile():
    log = Log()
    with ParameterConstruction(log.around).watch():

        class Late(Base):
            def __init__(self):
                super().__init__()

        Late()
    Late()
    assert log.lines == ["+Late", "+Linear", "-Linear", "-Late"]


def test_a_constructor_from_elsewhere():
    log = Log()
    with ParameterConstruction(log.around).watch():
        assert Mixed().made
    assert log.lines == ["+Mixed", "-Mixed"]
    assert "__init__" not in Mixed.__dict__


def test_a_constructor_that_cannot_be_followed_is_not_taken_for_a_finished_one():
    log = Log()
    with ParameterConstruction(log.around).watch():

        class Hidden(Stubborn):
            def __init__(self):
                super().__init__()
                self.late = nn.Identity()

        Hidden()
    assert log.lines == ["+Identity", "-Identity"]


def test_the_innermost_watcher_is_told():
    outer, inner = Log(), Log()
    with ParameterConstruction(outer.around).watch():
        with ParameterConstruction(inner.around).watch():
            Base()
        nn.Identity()
    assert inner.lines == ["+Base", "+Linear", "-Linear", "-Base"]
    assert outer.lines == ["+Identity", "-Identity"]


def test_a_failed_constructor_is_forgotten():
    births = ParameterConstruction(Log().around)
    with births.watch():
        with pytest.raises(TypeError):
            nn.Linear("two", "three")
        assert births._under_way == []


def test_somebody_elses_patch_survives():
    original = Base.__init__

    def patched(self, *args):
        original(self, *args)

    with ParameterConstruction(Log().around).watch():
        Base.__init__ = patched
    try:
        assert Base.__init__ is patched
    finally:
        Base.__init__ = original
