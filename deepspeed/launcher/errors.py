"""What the launcher raises when a job cannot be started as asked, and how its programs end then."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable

from deepspeed.errors import DeepSpeedError, printable

MISTAKE = 2  # exit status: the job was never started, as with a wrong option


class LaunchError(DeepSpeedError, ValueError):
    """The command line, the hostfile or this machine does not allow the job that was asked for.

    Its message quotes names of hosts, so no character of it reaches a terminal that the terminal would obey.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(message))


def option_words(option: str, text: str) -> list[str]:
    """The words that an option holds for another program, taken apart as a shell does."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"--{option} {text!r} are not words: {error}") from error


def run_program(program: str, body: Callable[[], int]) -> None:
    """Run a command line program: a status other than 0 ends the process, an error of ours ends it readably."""
    try:
        status = body()
    except DeepSpeedError as error:
        sys.stdout.flush()
        sys.stderr.write(f"{program}: error: {error}\n")
        sys.exit(MISTAKE)
    except KeyboardInterrupt:  # before the ranks were started; afterwards it is passed on to them
        sys.exit(128 + signal.SIGINT)
    if status:
        sys.exit(status)
