"""The scripts of `examples/finetune`, as the documentation starts them, for two steps."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.clients.server import environment
from tests.harness import ROOT

FOLDER = "examples/finetune"
SCRIPTS = [
    (["plain.py", "--deepspeed_config", f"{FOLDER}/ds_config.json"], "pytorch_model.bin"),
    (["with_trainer.py", "--deepspeed", f"{FOLDER}/ds_auto.json"], "model.safetensors"),
]


@pytest.mark.parametrize(("script", "written"), SCRIPTS, ids=["plain", "trainer"])
def test_script(tmp_path, script, written):
    launch = ["deepspeed.launcher.runner", "--num_gpus", "2"]
    command = [*launch, f"{FOLDER}/{script[0]}", *script[1:]]
    ran = subprocess.run(
        [sys.executable, "-m", *command, "--steps", "2", "--output", str(tmp_path / "output")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "output" / written).exists()
