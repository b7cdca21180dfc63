"""The real example script for a few small steps: one process, and two through the launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.harness import ROOT

pytestmark = pytest.mark.slow

SCRIPT = "examples/gpt/train.py"
CONFIG = "examples/gpt/ds_config.json"
TINY = "--layers 1 --heads 2 --width 16 --context 16 --evaluations 1 --validation_windows 8 --sample 20".split()
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(*command):
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, *command, "--deepspeed_config", CONFIG, *TINY],
        cwd=ROOT,
        env={**environment, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output):
    return [float(number) for number in re.findall(r"^training step \d+/\d+ \| loss ([\d.]+)", output, re.MULTILINE)]


def test_two_ranks_train_like_one(tmp_path):
    pytest.importorskip("matplotlib")
    launcher = ("-m", "deepspeed.launcher.runner", "--num_gpus", "2")
    two = run(*launcher, SCRIPT, "--steps", "4", "--output", str(tmp_path / "two"))
    one = run(SCRIPT, "--steps", "4", "--output", str(tmp_path / "one"))
    assert "(2 ranks x 2 micro steps x 4)" in two
    assert "(1 rank x 2 micro steps x 8)" in one
    assert len(losses(two)) == 4
    assert losses(two) == pytest.approx(losses(one), abs=2e-3)
    for output, folder in ((two, "two"), (one, "one")):
        assert (tmp_path / folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert re.search(r"^training loss +first \d\.\d+, final \d\.\d+", output, re.MULTILINE)
        found = re.search(r"^validation loss +first ([\d.]+), final ([\d.]+)", output, re.MULTILINE)
        assert found is not None
        assert float(found[2]) < float(found[1])
        assert re.search(r"^time +.* tokens/s$", output, re.MULTILINE)
        assert output.count("a sample, beginning with") == 1
