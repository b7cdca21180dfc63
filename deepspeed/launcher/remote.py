"""The far end of a start over ssh, `python -m deepspeed.launcher.remote`: the job comes through stdin.

So neither the environment nor the arguments of the job pass a shell, and nothing of them is seen in the list of
processes. What comes through stdin afterwards is read by `supervise`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

from deepspeed.launcher import launch
from deepspeed.launcher.errors import LaunchError, run_program
from deepspeed.launcher.protocol import framed, receive


def job(arguments: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """What is written to the far end: options of the per-node launcher, and variables to set."""
    return framed(json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode())


def main() -> None:
    """Read the job and run it; a status other than 0 ends the process with it."""
    run_program("deepspeed.launcher.remote", _run)


def _run() -> int:
    text = receive(sys.stdin.fileno())
    if not text:
        raise LaunchError("no job came through stdin; this program is started by the deepspeed command over ssh")
    wanted = json.loads(text)
    os.environ.update(wanted["environment"])
    return launch.run(launch.parse_args(wanted["arguments"]))


if __name__ == "__main__":
    main()
