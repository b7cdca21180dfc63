"""The benchmark of the largest model: its plan, and a config that the library takes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.gpu_largest import DEFAULT, budgets, config_of, main
from deepspeed.config import DeepSpeedConfig


@pytest.mark.parametrize(("shape", "bits", "disk"), [("20b", 32, "65.63 GB"), ("32b", 8, "62.75 GB")])
def test_the_plan_of_each_fits_its_budgets(shape, bits, disk, capsys):
    assert main(["--shape", shape, "--moment-bits", str(bits), "--plan"]) == 0
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if line.startswith("disk    all") and disk in line], told


def test_budgets_are_three_sizes():
    assert budgets("1GB,2GB,3GB", Path("/x")) == {"device": "1GB", "host": "2GB", "disk": "3GB", "path": "/x"}
    for text in ("1GB", "1GB,2GB", "1GB,,3GB"):
        with pytest.raises(SystemExit, match="expected three sizes"):
            budgets(text, Path("/x"))


@pytest.mark.parametrize("bits", [32, 8])
def test_the_config_is_one(bits, tmp_path):
    options = argparse.Namespace(
        moment_bits=bits, micro_batch=1, device="cuda", budgets=DEFAULT, path=tmp_path, tile=None
    )
    config = DeepSpeedConfig(config_of(options))
    assert config.schema.memory.device == 138_000_000_000
    assert config.schema.optimizer.params.get("moment_bits", 32) == bits
