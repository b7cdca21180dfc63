"""`accelerate launch` with a file as `accelerate config` writes it, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.clients.server import environment
from tests.distributed.launcher.launched import Launched
from tests.harness import ROOT, ranks
from tests.warm_python import Warm

PATIENCE = 180.0  # seconds, only ever reached by a test that fails

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


def launch(words):
    """The `accelerate` command."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    os.chdir(ROOT)
    launch_command(launch_command_parser().parse_args(words))


@ranks(1, init=False, timeout=300)
def test_a_config_file(tmp_path):
    file, result = tmp_path / "config.yaml", tmp_path / "result.json"
    file.write_text(DEEPSPEED)
    words = ["--main_process_port", "0", "--config_file", file, "-m", "tests.clients.accelerate_script", result]
    with Warm() as python, Launched(words, tmp_path, main=launch, environ=environment(), python=python) as job:
        code = job.wait(PATIENCE)
    output = job.output() + job.errors()
    assert code == 0, output
    told = json.loads(result.read_text())
    assert (told["type"], told["ranks"], told["stage"], told["clip"]) == ("DeepSpeedEngine", 2, 3, 1.0)
    assert (len(told["losses"]), told["steps"]) == (4, 2)
    assert told["losses"][-1] < told["losses"][0]
    assert_quiet(output)


def assert_quiet(output):
    assert "warn" not in output.lower(), output
    assert "deprecated" not in output, output


def test_what_such_a_job_imports_is_quiet():
    """In an interpreter that has nothing loaded yet, as the processes of the test above have."""
    code = "import accelerate.commands.launch, accelerate.utils.deepspeed, deepspeed; deepspeed.initialize"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert_quiet(ran.stdout + ran.stderr)
