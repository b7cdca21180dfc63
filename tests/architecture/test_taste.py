"""Habits that the whole package keeps: each test lists every place that does not."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepspeed.published.old_paths import MOVED
from tests.architecture.source import files, name, tree

PUBLISHED = {*MOVED.values(), "deepspeed.errors", "deepspeed.log"} - {"deepspeed.runtime.constants"}
MARKS = ("TODO", "FIXME", "XXX", "NotImplementedError")


def global_statements(path: Path) -> Iterator[str]:
    """State belongs to objects."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Global):
            yield f"{node.lineno}: global {', '.join(node.names)}"


def first_lines(path: Path) -> Iterator[str]:
    """A module begins with a docstring whose first line is a sentence that says what the file owns."""
    text = ast.get_docstring(tree(path))
    if not text:
        yield "1: no docstring"
    elif not text.splitlines()[0].endswith((".", ":", "?")):
        yield "1: its first line is not a sentence"


def public_names(path: Path) -> Iterator[str]:
    """A module that scripts import has `__all__`: a package that has names, and what an old path leads to."""
    module = name(path).removesuffix(".py").replace("/", ".")
    if module not in PUBLISHED and not (path.stem == "__init__" and tree(path).body[1:]):
        return
    assigned = [node.targets for node in tree(path).body if isinstance(node, ast.Assign)]
    assigned += [[node.target] for node in tree(path).body if isinstance(node, ast.AnnAssign)]
    if not any(isinstance(to, ast.Name) and to.id == "__all__" for each in assigned for to in each):
        yield "no __all__"


def bare_asserts(path: Path) -> Iterator[str]:
    """An assertion says what it relies on."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Assert) and node.msg is None:
            yield f"{node.lineno}: assert without a message"


def unfinished_marks(path: Path) -> Iterator[str]:
    """Nothing is left for later."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        yield from (f"{number}: {mark}" for mark in MARKS if mark in line)


HABITS = [global_statements, first_lines, public_names, bare_asserts, unfinished_marks]


def offenders(habit: Callable[[Path], Iterator[str]], paths: tuple[Path, ...]) -> list[str]:
    return [f"{name(path)}:{what}" for path in paths for what in habit(path)]


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_habit(habit):
    assert offenders(habit, files()) == []


def test_every_habit_can_be_broken(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.architecture.source.ROOT", tmp_path)
    monkeypatch.setattr("tests.architecture.test_taste.PUBLISHED", {"bad"})
    bad = tmp_path / "bad.py"
    bad.write_text("x = 1\ndef f():\n    global x\n    assert x\n    # TODO\n")
    assert {habit.__name__: offenders(habit, (bad,)) for habit in HABITS} == {
        "global_statements": ["bad.py:3: global x"],
        "first_lines": ["bad.py:1: no docstring"],
        "public_names": ["bad.py:no __all__"],
        "bare_asserts": ["bad.py:4: assert without a message"],
        "unfinished_marks": ["bad.py:5: TODO"],
    }
