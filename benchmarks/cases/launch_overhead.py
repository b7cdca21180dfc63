"""From the command to the first line of the script on every rank: the launcher alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="launch_overhead",
    title="launching 8 local ranks of a script that imports nothing",
    file=__file__,
    measures=(
        Measure(
            "first_s",
            "from the command to the first line of the last rank",
            "s",
            targets=(Target(1.0, than="torch"), Target(1.0, than="deepspeed")),
        ),
        Measure("end_s", "from the command to its end", "s"),
    ),
    parameters=({"processes": 8},),
    rounds=7,
)

# The clock is that of the machine, so that processes may compare what they read.
_SCRIPT = """
import time
now = time.monotonic()
import os
with open(os.path.join(os.environ["LAUNCH_FOLDER"], "first." + os.environ["RANK"]), "w") as file:
    file.write(repr(now))
"""

# What the console scripts `deepspeed` and `torchrun` do.
_OURS = "import sys; from deepspeed.launcher.runner import main; sys.exit(main())"
_TORCH = "import sys; from torch.distributed.run import main; sys.exit(main())"
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def measure(job: Job) -> dict[str, float]:
    """Seconds of one launch, by the clock of the ranks themselves."""
    folder = Path(job.folder)
    script = folder / "script.py"
    script.write_text(_SCRIPT)
    count = job.parameters["processes"]
    program, option = (_TORCH, "--nproc-per-node") if job.contender == "torch" else (_OURS, "--num_gpus")
    environment = {name: value for name, value in os.environ.items() if name not in _PLACE}
    command = [sys.executable, "-c", program, option, str(count), str(script)]
    start = time.monotonic()
    done = subprocess.run(
        command,
        env={**environment, "LAUNCH_FOLDER": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    end = time.monotonic()
    if done.returncode != 0:
        raise RuntimeError(f"{job.contender} ended with {done.returncode}: {done.stdout[-2000:]}")
    firsts = [float((folder / f"first.{rank}").read_text()) for rank in range(count)]
    return {"first_s": max(firsts) - start, "end_s": end - start}
