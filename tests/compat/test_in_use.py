"""Every name that known projects import, call or read is here, or comes with the feature that `in_use.md` names."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import deepspeed

TEXT = Path(__file__).with_name("in_use.md").read_text(encoding="utf-8")
_ROW = re.compile(r"\| `(deepspeed[\w.]*)`(?: \[(\w+)\])? \| (.*) \|")
_NAME = re.compile(r"\**([\w.]+)\** \d+(?: \[(\w+)\])?")


def part(start: str, end: str) -> str:
    return TEXT.split(start)[1].split(end)[0]


def imported() -> Iterator[tuple[str, str | None, str | None]]:
    """(module, name or None for the module itself, feature that brings it)."""
    for line in part("## Imported", "## Called").splitlines():
        if row := _ROW.fullmatch(line.strip()):
            for entry in row[3].split(", "):
                if entry.startswith("(the module)"):
                    yield row[1], None, row[2]
                elif found := _NAME.fullmatch(entry):
                    yield row[1], found[1], found[2] or row[2]


def read() -> Iterator[tuple[str, str | None]]:
    """(path below the package, feature that brings it)."""
    for entry in part("stands before each.", "## Attributes").replace("\n", " ").split(","):
        if found := _NAME.fullmatch(entry.strip()):
            yield found[1], found[2]


def take(module: str, name: str | None) -> object:
    found = importlib.import_module(module)
    if name is None:
        return found
    scope: dict[str, object] = {}
    exec(f"from {module} import {name} as found", scope)
    return scope["found"]


def reach(path: str) -> object:
    """As a script does after `import deepspeed`, which imported the modules on the way somewhere."""
    found: object = deepspeed
    for name in path.split("."):
        found = getattr(found, name)
    return found


IMPORTED, READ = list(imported()), list(read())


def test_the_lists_are_whole():
    assert len(IMPORTED) > 220
    assert len(READ) > 150


@pytest.mark.parametrize(("module", "name", "feature"), IMPORTED, ids=[f"{m}:{n}" for m, n, _ in IMPORTED])
def test_a_name_is_imported(module, name, feature):
    if feature is None:
        take(module, name)
        return
    with pytest.raises(ImportError, match="is not part of this version yet; until then"):
        take(module, name)


@pytest.mark.parametrize(("path", "feature"), READ, ids=[path for path, _ in READ])
def test_a_name_is_read(path, feature):
    if feature is None:
        reach(path)
        return
    with pytest.raises((AttributeError, ImportError), match="is not part of this version yet; until then"):
        reach(path)


FRESH = """
import os, sys
from tests.compat.test_in_use import READ, reach

def is_reached(path):
    pid = os.fork()
    if pid == 0:
        try:
            reach(path)
        except (AttributeError, ImportError):
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0

one_of_each = {path.rpartition(".")[0]: path for path, feature in READ if feature is None}
print([path for path in one_of_each.values() if not is_reached(path)])
"""


def test_every_name_is_reached_after_a_plain_import():
    """One of each module, each in a process of its own: what one of them imports must not help another."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", FRESH], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
