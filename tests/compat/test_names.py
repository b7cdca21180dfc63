"""Every published name: here, with the published parameters, or named with what brings it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from functools import cache

import pytest
from torch import nn

import deepspeed
from deepspeed.published.old_paths import MOVED, SPLIT
from tests.compat.names import FEATURES, Row, read

MODULES = read()

# Objects that the library makes: their constructors are its own.
MADE_HERE = {
    "deepspeed.runtime.engine.DeepSpeedEngine",
    "deepspeed.runtime.hybrid_engine.DeepSpeedHybridEngine",
    "deepspeed.runtime.pipe.dualpipev.DualPipeVEngine",
    "deepspeed.runtime.pipe.engine.PipelineEngine",
}


@cache
def engine():
    """The engine answers questions about its config by names that its class does not have."""
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}}
    made = deepspeed.initialize(model=nn.Linear(1, 1), config=config)[0]
    deepspeed.comm.destroy_process_group()
    return made


def holder(path, found):
    return engine() if path == "deepspeed.runtime.engine.DeepSpeedEngine" else found


def present() -> Iterator[tuple[str, Row, object]]:
    """Every row without a feature: its path, itself, and the module or class that must have it."""
    for module in MODULES:
        if module.feature is not None:
            continue
        found = importlib.import_module(module.name)
        for row in module.members:
            path = f"{module.name}.{row.name}"
            if row.feature is not None:
                continue
            yield path, row, found
            for member in row.members:
                if member.feature is None and hasattr(found, row.name):
                    yield f"{path}.{member.name}", member, holder(path, getattr(found, row.name))


def absent() -> Iterator[tuple[str, object | None]]:
    """Every row with a feature: its path, and the module or class that must not have it (None for a module)."""
    for module in MODULES:
        if module.feature is not None:
            yield module.name, None
            continue
        found = importlib.import_module(module.name)
        for row in module.members:
            path = f"{module.name}.{row.name}"
            if row.feature is not None:
                yield path, found
                continue
            for member in row.members:
                if member.feature is not None:
                    yield f"{path}.{member.name}", holder(path, getattr(found, row.name))


def test_what_is_listed_as_present_is_there():
    assert [path for path, _, home in present() if not is_there(path, home)] == []


def is_there(path, home):
    if home is not None and hasattr(home, path.rpartition(".")[2]):
        return True
    if home is not None and not inspect.ismodule(home):
        return False
    try:
        importlib.import_module(path)
    except ImportError:
        return False
    return True


def test_what_is_listed_as_absent_is_not_there():
    assert [path for path, home in absent() if is_there(path, home)] == []


def test_every_feature_is_known_and_used():
    rows = [row for module in MODULES for row in (module, *module.members)]
    rows += [member for row in rows for member in row.members]
    assert {row.feature for row in rows} - {None} == set(FEATURES)


def problem(path, row, value):
    """Why a call by the published signature would fail; None if it would not."""
    if row.parameters is None or path in MADE_HERE or not callable(value):
        return None
    try:
        ours = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):  # of C, or an enum
        return None
    ours = [each for each in ours if each.name != "self"]
    kinds = {each.kind for each in ours}
    takes_any = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    wanted = [name for name in row.parameters if name != "self" and not name.startswith("*")]
    if takes_any or (not wanted and row.parameters):
        return None
    named = [each.name for each in ours if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if named[: len(wanted)] != wanted:
        return f"{path}({', '.join(named)}) instead of ({', '.join(wanted)})"
    needed = [each.name for each in ours if each.name in named[len(wanted) :] and each.default is each.empty]
    return f"{path} also needs {', '.join(needed)}" if needed else None


def test_published_parameters_are_taken_in_their_order():
    found = [problem(path, row, getattr(home, row.name)) for path, row, home in present() if hasattr(home, row.name)]
    assert [each for each in found if each is not None] == []


def test_fields_of_configs_and_members_of_enums():
    missing = []
    for path, row, home in present():
        value = getattr(home, row.name, None)
        known = {*getattr(value, "model_fields", ()), *getattr(value, "__members__", ())}
        missing += [f"{path}.{name}" for name in row.fields if name not in known]
    assert missing == []


def test_every_old_path_is_listed():
    listed = {module.name for module in MODULES}
    vendors = {f"deepspeed.accelerator.{kind}_accelerator" for kind in ("hpu", "mlu", "mps", "npu", "sdaa", "xpu")}
    assert {*MOVED, *SPLIT} - vendors <= listed


def test_rows_are_sorted_and_unique():
    names = [module.name for module in MODULES]
    assert names == sorted(set(names))
    for module in MODULES:
        rows = [row.name for row in module.members]
        assert rows == sorted(set(rows)), module.name


@pytest.mark.parametrize("module", [row for row in MODULES if row.feature is None], ids=lambda row: row.name)
def test_from_import(module):
    names = [row.name for row in module.members if row.feature is None]
    if names:
        exec(f"from {module.name} import {', '.join(names)}", {})
