"""Habits that the whole package keeps."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import files, name, tree

SLOTS = {
    "deepspeed/accelerator/__init__.py": "the current accelerator",
    "deepspeed/parallel/current.py": "the current layout, for legacy calls without a handle",
    "deepspeed/runtime/rng.py": "the model-parallel random state tracker",
}


@pytest.mark.parametrize("path", files(), ids=name)
def test_no_global_statement(path):
    assert [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Global)] == []


@pytest.mark.parametrize("path", files(), ids=name)
def test_first_line_says_what_the_file_owns(path):
    text = ast.get_docstring(tree(path))
    assert text, "a module begins with a docstring"
    assert text.splitlines()[0].endswith((".", ":", "?")), "whose first line is a sentence"


@pytest.mark.parametrize("path", files(), ids=name)
def test_public_modules_name_what_is_public(path):
    if path.stem.startswith("_") or path.stem == "constants":
        return
    assigned = {
        target.id
        for node in tree(path).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert "__all__" in assigned


@pytest.mark.parametrize("path", files(), ids=name)
def test_no_bare_assert(path):
    assert [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Assert) and node.msg is None] == []


@pytest.mark.parametrize("path", files(), ids=name)
def test_no_unfinished_marks(path):
    text = path.read_text(encoding="utf-8")
    for mark in ("TODO", "FIXME", "XXX", "NotImplementedError"):
        assert mark not in text, f"{mark} in {name(path)}"
