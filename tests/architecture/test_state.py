"""State of the process: the table in docs/architecture.md names every module-level object that changes, and no other.

Found by looking at the modules: objects of ours that are not frozen, known mutable kinds of the standard library, and
containers that some function changes. What a cached function remembers is listed here.
"""

from __future__ import annotations

import ast
import collections
import contextvars
import dataclasses
import importlib
import itertools
import logging
import re
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT, files, tree

FOREIGN = (
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, collections.deque, logging.Logger),
    *(collections.defaultdict, collections.Counter, contextvars.ContextVar, threading.local, itertools.count),
    *(type(threading.Lock()), type(threading.RLock())),
)
CHANGES = set("append add update pop clear setdefault extend remove discard insert popitem appendleft popleft".split())
PROGRAMS = ("__main__",)  # importing one runs it

# folder::function → what is remembered for the rest of the process
MEMOS = {
    "accelerator::keep_heap": "that malloc was shown a large block",
    "checkpoint::_parsed": "how a pattern of a universal checkpoint is matched",
    "checkpoint::works": "whether this torch hands over memory as it is",
    "comm::parts_bytes": "how long messages of some parts are",
    "comm::places": "where the parts of messages lie",
    "config::_defaults": "the value of every key that is not given",
    "config::keys_of": "the keys of a section's class",
    "config::places_of": "where each key may stand",
    "config::_readers": "the modules that read each key, by the package's sources",
    "log::_log_dist_once": "what was told",
    "log::warn_once": "what was told",
    "profiling::_is_made_of_others": "which operations torch takes apart",
    "profiling::_is_pointwise": "which operations compute element by element",
    "profiling::_plain": "what an operation is called that does not work in place",
    "zero::_late": "the class of a parameter whose update is on its way",
    "ops::load_triton": "that Triton's compiler is being loaded, or is",
    "ops::builder_class": "the classes of builders, by their published names",
    "ops::all_ops": "a builder of each op",
    "ops::_compiled": "flex attention as it was compiled",
    "ops::_cpu_flags": "what this processor can do",
    "ops::_outcome": "the compiled libraries, or why there are none",
    "ops::_programs": "which program of a kernel updates what",
    "ops::_processor": "which instructions compilers choose on this machine",
    "ops::counters": "zeros in which programs of a kernel count, by device",
    "ops::parts_of": "how many programs share a tile of a product, by its sizes",
    "ops::processors": "the multiprocessors of a device",
    "ops::_table": "where programs of a kernel begin in messages of some parts",
    "ops::_version": "what a compiler says of itself",
    "ops::_load_families": "that the modules of all operations are imported",
    "tensor_parallel::_in_source": "rates of dropout in the source of a class",
    "transformers::_made": "the class that a module gets before its own, for each class of modules",
    "zero::_noticing": "the class of a whole parameter that notices writes, for each class of parameters",
}


def is_state(value: object) -> bool:
    """Whether an object may change: frozen ones, classes, functions and objects without attributes cannot."""
    kind = type(value)
    if isinstance(value, FOREIGN):
        return True
    if isinstance(value, (type, types.FunctionType)) or not kind.__module__.startswith("deepspeed"):
        return False
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:
        return False
    return bool(getattr(value, "__dict__", None)) or any(getattr(base, "__slots__", ()) for base in kind.__mro__)


def assigned(module: ast.Module) -> set[str]:
    """Names that the module binds at its top level."""
    nodes = [node for node in module.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    targets = [target for node in nodes for target in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def changed(module: ast.Module) -> Iterator[str]:
    """Names whose objects some function changes: by a method of containers, an item or an attribute."""
    for function in ast.walk(module):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                yield from named(node.func.value)
            elif isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
                yield from named(node.value)


def named(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def place(path: Path, what: str) -> str:
    """Where something is: the folder of the package, or the module in none, and the name."""
    return f"{path.relative_to(PACKAGE).parts[0].removesuffix('.py')}::{what}"


def state_of(path: Path) -> Iterator[str]:
    names = assigned(tree(path))
    found = names & set(changed(tree(path)))
    if path.stem not in PROGRAMS:
        there = vars(importlib.import_module(module_of(path)))
        found |= {each for each in names if each in there and is_state(there[each])}
    return (place(path, each) for each in sorted(found))


def memos_of(path: Path) -> Iterator[str]:
    """Functions whose results are kept; a property that an object caches is that object's."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef) and any(
            re.search(r"\b((lru_)?cache|_Once)\b", ast.unparse(decorator)) for decorator in node.decorator_list
        ):
            yield place(path, node.name)


def test_the_documented_state_is_all_there_is():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## State of the process", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\|(.*?)\|", section, re.MULTILINE)
    documented = {place for row in rows for place in re.findall(r"`(\w+::\w+)`", row)}
    assert {place for path in files() for place in state_of(path)} == documented


def test_the_listed_memos_are_all_there_are():
    assert {place for path in files() for place in memos_of(path)} == set(MEMOS)


@pytest.mark.parametrize(
    "line",
    [
        "made = {}\ndef f(): made['a'] = 1",
        "made = []\ndef f(): made.append(1)",
        "made = lambda: 0\ndef f(): made.x = 1",
        "made = []\ndef f(): del made[0]",
        "made = {}\nf = lambda: made.update(a=1)",
    ],
)
def test_what_a_function_changes_is_found(line):
    assert set(changed(ast.parse(line))) & assigned(ast.parse(line)) == {"made"}


def test_what_may_change_is_told_from_what_cannot():
    class Ours:
        __module__ = "deepspeed.x"

    full = Ours()
    full.value = 1
    assert is_state(full)
    assert is_state(threading.Lock())
    assert is_state(weakref.WeakKeyDictionary())
    for constant in (1, "a", (), {}, Ours, Ours(), re.compile("a"), Path()):
        assert not is_state(constant)
