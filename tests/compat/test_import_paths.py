"""Old import paths: every row of the tables, and how the finder behaves where people lean on it."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import deepspeed
from deepspeed.published import finder
from deepspeed.published.old_paths import COMING, MOVED, REEXPORTED, REMOVED, SPLIT

ROOT = Path(__file__).resolve().parents[2]
NAMES = [(old, name) for old, names in SPLIT.items() for name in names]


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("old", MOVED)
def test_a_moved_module_is_its_home(old):
    module = importlib.import_module(old)
    home = importlib.import_module(MOVED[old])
    assert module is home is sys.modules[old]
    assert home.__name__ == home.__spec__.name == MOVED[old]


@pytest.mark.parametrize(("old", "name"), NAMES)
def test_a_split_name_is_the_one_at_its_home(old, name):
    home, _, new = SPLIT[old][name].partition(":")
    expected = getattr(importlib.import_module(home), new or name)
    assert getattr(importlib.import_module(old), name) is expected


def test_no_row_hides_a_file_or_points_to_an_old_path():
    homes = [*MOVED.values(), *(row.partition(":")[0] for names in SPLIT.values() for row in names.values())]
    assert not {*MOVED} & {*SPLIT}
    assert not {*homes} & {*MOVED, *SPLIT}
    for old in (*MOVED, *SPLIT):
        stem = ROOT.joinpath(*old.split("."))
        assert not stem.with_suffix(".py").exists()
        assert not (stem / "__init__.py").exists()
    for home in homes:
        stem = ROOT.joinpath(*home.split("."))
        assert stem.with_suffix(".py").exists() or (stem / "__init__.py").exists(), home


def test_the_tables_are_sorted():
    for names in (COMING, MOVED, REEXPORTED, REMOVED, SPLIT):
        assert list(names) == sorted(names)


def asked(row):
    """A name that a row of REMOVED is about."""
    return row.removesuffix("*") + "nope" if row.endswith("*") else row


@pytest.mark.parametrize("row", REMOVED)
def test_a_removed_path_names_its_replacement(row):
    module, _, name = asked(row).rpartition(".")
    text = re.escape(f"{asked(row)} is not part of this library: {REMOVED[row]}")
    for code in (f"from {module} import {name}", f"import {module}.{name}"):
        with pytest.raises(ImportError, match=f"^{text}$"):
            exec(code, {})
    assert not hasattr(importlib.import_module(module), name)
    assert asked(row) not in {*MOVED, *SPLIT, *sys.modules}


@pytest.mark.parametrize(
    "path", ["deepspeed.set_optimizer_flags", "deepspeed.runtime.utils.CheckOverflow", "deepspeed.utils.debug"]
)
def test_reading_a_removed_name_is_an_attribute_error_that_names_the_replacement(path):
    module, _, name = path.rpartition(".")
    with pytest.raises(AttributeError, match=rf"^{re.escape(path)} is not part of this library: "):
        getattr(importlib.import_module(module), name)


def test_names_that_stay_beside_removed_ones_are_found():
    from deepspeed.runtime.config import LAMB_OPTIMIZER
    from deepspeed.runtime.utils import see_memory_usage

    from deepspeed.runtime.lr_schedules import WarmupLR
    from deepspeed.sequence.layer import DistributedAttention

    assert LAMB_OPTIMIZER == "lamb"
    assert all(map(callable, (see_memory_usage, WarmupLR, DistributedAttention)))


def test_in_a_fresh_process_each_spelling_of_an_import_works():
    code = """
import deepspeed
import deepspeed.runtime.config
from deepspeed.runtime import precision_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
from deepspeed.runtime.zero.config import *
import deepspeed.runtime.pipe.topology as topology
print(deepspeed.runtime.config.DeepSpeedConfig is deepspeed.DeepSpeedConfig)
print(precision_config.DeepSpeedFP16Config.__module__, ZeroStageEnum.__module__, topology.__name__)
print(deepspeed.runtime.zero.offload_config.OffloadDeviceEnum.__module__)
print(DeepSpeedZeroOffloadParamConfig.__name__)
"""
    assert fresh(code).splitlines() == [
        "True",
        "deepspeed.config.precision deepspeed.config.zero deepspeed.parallel.topology",
        "deepspeed.config.zero",
        "DeepSpeedZeroOffloadParamConfig",
    ]


def test_made_up_packages_hold_only_old_paths():
    package = importlib.import_module("deepspeed.runtime.zenflow")
    assert package.__path__ == []
    assert package.zenflow_config is importlib.import_module("deepspeed.config.zero")
    assert package.__all__ == []


def test_a_real_package_is_not_replaced():
    assert importlib.import_module("deepspeed.utils").__file__.endswith("__init__.py")
    assert importlib.import_module("deepspeed.accelerator").__file__.endswith("__init__.py")


def test_patching_through_a_moved_path():
    home = importlib.import_module("deepspeed.parallel.topology")
    original = home.ProcessTopology
    with mock.patch("deepspeed.runtime.pipe.topology.ProcessTopology") as fake:
        assert home.ProcessTopology is fake
    assert home.ProcessTopology is original


def test_patching_through_a_split_path():
    home = importlib.import_module("deepspeed.config.zero")
    original = home.DeepSpeedZeroConfig
    with mock.patch("deepspeed.runtime.zero.config.DeepSpeedZeroConfig") as fake:
        assert home.DeepSpeedZeroConfig is fake
    assert home.DeepSpeedZeroConfig is original
    assert importlib.import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig is original


@pytest.mark.parametrize(
    ("old", "name", "home"),
    [
        ("deepspeed.runtime.pipe.topology", "ProcessTopology", "deepspeed.parallel.topology"),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum", "deepspeed.config.zero"),
    ],
)
def test_unpickling_by_an_old_path(old, name, home):
    text = f"c{old}\n{name}\n.".encode()  # protocol 0: "the object called `name` in module `old`"
    assert pickle.loads(text) is getattr(importlib.import_module(home), name)


def test_a_missing_name_is_an_ordinary_error_that_names_the_old_path():
    module = importlib.import_module("deepspeed.runtime.zero.config")
    with pytest.raises(AttributeError, match=r"module 'deepspeed\.runtime\.zero\.config' has no attribute 'nope'"):
        module.nope  # noqa: B018
    with pytest.raises(ImportError, match=r"cannot import name 'nope' from 'deepspeed\.runtime\.zero\.config'"):
        exec("from deepspeed.runtime.zero.config import nope")
    assert not hasattr(module, "__path__")


@pytest.mark.parametrize("path", ["deepspeed.runtime.nope", "deepspeed.nope", "deepspeed.runtime.pipe.topology.nope"])
def test_a_missing_module_is_an_ordinary_error_that_names_it(path):
    with pytest.raises(ModuleNotFoundError, match=path.replace(".", r"\.")) as caught:
        importlib.import_module(path)
    assert caught.value.name == path
    assert path not in sys.modules


def test_dir_lists_the_old_names():
    assert {*SPLIT["deepspeed.runtime.zero.config"]} <= {*dir(importlib.import_module("deepspeed.runtime.zero.config"))}
    assert importlib.import_module("deepspeed.runtime.zero.config").__all__ == sorted(
        SPLIT["deepspeed.runtime.zero.config"]
    )


def test_setting_another_attribute_stays_on_the_old_module():
    module = importlib.import_module("deepspeed.runtime.config")
    module.note = 1
    assert module.note == 1
    del module.note
    assert not hasattr(module, "note")


def test_modules_below_a_moved_package_are_not_loaded_twice(monkeypatch):
    monkeypatch.setitem(MOVED, "deepspeed.old_parallel", "deepspeed.parallel")
    try:
        assert importlib.import_module("deepspeed.old_parallel.topology") is importlib.import_module(
            "deepspeed.parallel.topology"
        )
        with pytest.raises(ModuleNotFoundError, match=r"deepspeed\.old_parallel\.nope"):
            importlib.import_module("deepspeed.old_parallel.nope")
    finally:
        for name in ("deepspeed.old_parallel", "deepspeed.old_parallel.topology"):
            sys.modules.pop(name, None)
        vars(deepspeed).pop("old_parallel", None)


def test_installing_twice_keeps_one_finder():
    finder.install()
    finder.install()
    assert [type(finder).__module__ for finder in sys.meta_path].count("deepspeed.published.finder") == 1


def test_the_finder_leaves_other_packages_alone():
    assert importlib.util.find_spec("accelerator") is None or "deepspeed" not in str(
        importlib.util.find_spec("accelerator").origin
    )
    assert importlib.util.find_spec("json").origin.endswith("__init__.py")


@pytest.mark.parametrize("times", [1, 2])
def test_a_patch_of_an_old_path_is_undone_at_the_home(times):
    """Also by tools that delete a name which a module does not have by itself."""
    import deepspeed.runtime.zero.config as old

    import deepspeed.config.zero as home

    before = home.ZeroStageEnum
    for _ in range(times):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(old, "ZeroStageEnum", "another")
            assert home.ZeroStageEnum == "another"
        assert home.ZeroStageEnum is before
    with mock.patch("deepspeed.runtime.zero.config.ZeroStageEnum", "third"):
        assert home.ZeroStageEnum == "third"
    assert home.ZeroStageEnum is before
