"""A search of examples/autotune/train.py with real ranks: killed, started again, and then the job with the best."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from deepspeed.launcher import runner
from tests.distributed.launcher.launched import TIMEOUT, Launched
from tests.harness import ROOT, ranks
from tests.warm_python import Warm

CONFIG = {
    "train_micro_batch_size_per_gpu": [2, 4],
    "zero_optimization": {"stage": [0, 2]},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "autotuning": {"start_profile_step": 1, "end_profile_step": 2, "tuner_type": "gridsearch"},
}


def search(mode, folder, python):
    words = ["--autotuning", mode, "--num_gpus", "2", str(ROOT / "examples/autotune/train.py"), "--steps", "4"]
    return Launched([*words, "--deepspeed_config", "ds.json"], folder, main=runner.main, python=python)


@pytest.mark.slow
@ranks(1, init=False, timeout=900)
def test_a_search_that_was_killed_goes_on_and_its_best_config_runs(tmp_path):
    folder = Path(tmp_path)
    os.chdir(folder)
    Path("ds.json").write_text(json.dumps(CONFIG))
    results = folder / "autotuning_results"
    first = results / "z0_gas1_tmbspg2" / "result.json"
    with Warm() as python:
        with search("tune", folder, python) as tuner:
            until = time.monotonic() + TIMEOUT
            while not (first.exists() and (results / "z0_gas1_tmbspg4" / "cmd.txt").exists()):
                assert time.monotonic() < until, tuner.errors()
                time.sleep(0.05)
            tuner.send(signal.SIGKILL)
            tuner.wait()
        before = first.stat().st_ino
        with search("run", folder, python) as tuner:
            assert tuner.wait() == 0, tuner.errors()
            said = tuner.output()
    assert first.stat().st_ino == before
    found = {each.name: json.loads((each / "metrics.json").read_text()) for each in results.glob("z*_gas1_tmbspg*")}
    assert set(found) == {f"z{stage}_gas1_tmbspg{micro}" for stage in (0, 2) for micro in (2, 4)}
    best = max(found, key=lambda name: found[name]["throughput"])
    assert f"global       | 4               | {found[best]['throughput']:.6g}" in said
    assert "after 4 steps" in said
    config = json.loads((results / "ds_config_optimal.json").read_text())
    assert best == f"z{config['zero_optimization']['stage']}_gas1_tmbspg{config['train_micro_batch_size_per_gpu']}"
    assert "autotuning" not in config
    assert str(results / "ds_config_optimal.json") in (results / "cmd_optimal.txt").read_text()
    for metrics in found.values():
        assert metrics["steps"] == 2
        assert metrics["throughput"] == pytest.approx(metrics["train_batch_size"] / metrics["latency"] * 1e3)
        assert metrics["FLOPS_per_gpu"] > 0
        assert 0 < metrics["forward"] + metrics["backward"] + metrics["step"] < 1.5 * metrics["latency"]
    traces = json.loads((results / "forecast.json").read_text())["traces"]
    assert all("error" not in each for each in traces.values())
    assert (results / "report.html").read_text().count("<circle") == 4
