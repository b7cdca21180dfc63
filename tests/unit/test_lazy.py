"""Names and modules that are imported when first asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import deepspeed
from deepspeed._package import submodule

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_modules_below_a_package_are_attributes_after_a_plain_import():
    code = """
import deepspeed
print(deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES[0], deepspeed.ops.adam.FusedAdam.__name__,
      deepspeed.utils.zero_to_fp32.__name__, deepspeed.runtime.zero.config.ZeroStageEnum.__name__,
      deepspeed.checkpointing.configure.__name__)
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [
        "LRRangeTest",
        "FusedAdam",
        "deepspeed.utils.zero_to_fp32",
        "ZeroStageEnum",
        "configure",
    ]


@pytest.mark.parametrize("package", [deepspeed, deepspeed.runtime, deepspeed.ops, deepspeed.utils, deepspeed.zero])
def test_what_does_not_exist_is_an_ordinary_attribute_error(package):
    assert not hasattr(package, "no_such_module")


def test_private_modules_are_not_offered():
    with pytest.raises(AttributeError, match="_api"):
        submodule("deepspeed", "_api")


def test_a_module_that_is_no_package_has_nothing_below_it():
    from deepspeed.runtime import base_optimizer

    assert not hasattr(base_optimizer, "no_such_name")
