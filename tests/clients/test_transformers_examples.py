"""The scripts of `examples/finetune`, as the documentation starts them, for two steps."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.clients.server import environment
from tests.harness import ROOT

FOLDER = "examples/finetune"
LAUNCH = ["deepspeed.launcher.runner", "--num_gpus", "2"]
SCRIPTS = {
    "plain.py": [*LAUNCH, f"{FOLDER}/plain.py", "--deepspeed_config", f"{FOLDER}/ds_config.json"],
    "with_trainer.py": [*LAUNCH, f"{FOLDER}/with_trainer.py", "--deepspeed", f"{FOLDER}/ds_auto.json"],
}


@pytest.mark.parametrize(("script", "written"), [("plain.py", "latest"), ("with_trainer.py", "model.safetensors")])
def test_script(tmp_path, script, written):
    ran = subprocess.run(
        [sys.executable, "-m", *SCRIPTS[script], "--steps", "2", "--output", str(tmp_path / "output")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "output" / written).exists()
