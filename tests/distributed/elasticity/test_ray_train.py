"""The elastic example below Ray Train's TorchTrainer, with the real package: a worker dies, and the losses go on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile

import pytest

from tests.distributed.elasticity.test_elastic_example import STEPS, assert_goes_on, environment, undisturbed
from tests.harness import ROOT, ranks

PATIENCE = 400.0  # seconds, only ever reached by a test that fails


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install .[ray]")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="Ray starts two workers on two cores")
@ranks(1, init=False, timeout=600)
def test_ray_train(tmp_path):
    words = ["--workers=2", f"--checkpoints={tmp_path}/checkpoints", *STEPS, "--die_at=7"]
    with tempfile.TemporaryDirectory(prefix="ray") as own:  # names of sockets must be short
        told = {**environment(), "RAY_TMPDIR": own, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples/ray/train.py"), *words],
            env=told,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert_goes_on(done.stdout, undisturbed(tmp_path))
