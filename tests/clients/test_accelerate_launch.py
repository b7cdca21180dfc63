"""`accelerate launch` with a file as `accelerate config` writes it, in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.clients.server import environment
from tests.harness import ROOT

DEEPSPEED = """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: false
  zero3_save_16bit_model: true
  zero_stage: 3
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


def test_a_config_file(tmp_path):
    file, result = tmp_path / "config.yaml", tmp_path / "result.json"
    file.write_text(DEEPSPEED)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    ran = subprocess.run(
        [*launcher, "--config_file", str(file), "-m", "tests.clients.accelerate_script", str(result)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output
    told = json.loads(result.read_text())
    assert (told["type"], told["ranks"], told["stage"], told["clip"]) == ("DeepSpeedEngine", 2, 3, 1.0)
    assert (len(told["losses"]), told["steps"]) == (4, 2)
    assert told["losses"][-1] < told["losses"][0]
    assert "warn" not in output.lower(), output
    assert "deprecated" not in output, output
