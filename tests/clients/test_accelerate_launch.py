"""`accelerate launch` with a file as `accelerate config` writes it, in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.clients.server import environment
from tests.harness import ROOT

DEEPSPEED = """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  gradient_accumulation_steps: {accumulation}
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: false
  zero3_save_16bit_model: true
  zero_stage: {stage}
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""


ACCELERATE = ["accelerate.commands.launch", "--main_process_port", "0"]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def launch(folder, launcher, **variables):
    """Run the script under a launcher; what its first rank wrote, and all that was printed."""
    result = folder / "result.json"
    ran = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "tests.clients.launched", str(result)],
        cwd=ROOT,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(result.read_text()), ran.stdout + ran.stderr


@pytest.mark.parametrize(("stage", "accumulation"), [(3, 1), (2, 2)])
def test_a_config_file(tmp_path, stage, accumulation):
    file = tmp_path / "config.yaml"
    file.write_text(DEEPSPEED.format(stage=stage, accumulation=accumulation))
    told, output = launch(tmp_path, [*ACCELERATE, "--config_file", str(file)])
    assert told["type"] == "DeepSpeedEngine"
    assert (told["ranks"], told["stage"], told["clip"]) == (2, stage, 1.0)
    assert told["steps"] == 4 // accumulation
    assert "warn" not in output.lower(), output
    assert "deprecated" not in output, output
    if accumulation == 1:
        plain, _ = launch(tmp_path, TORCHRUN, ACCELERATE_USE_CPU="true")
        assert plain["type"] == "DistributedDataParallel"
        assert told["losses"] == pytest.approx(plain["losses"], abs=1e-5)
