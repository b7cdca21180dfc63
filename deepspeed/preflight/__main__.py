"""`python -m deepspeed.preflight`: what the ranks of `deepspeed --preflight` run; any launcher may start it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from deepspeed.errors import DeepSpeedError
from deepspeed.launcher.console import emit
from deepspeed.preflight.arguments import parse
from deepspeed.preflight.checks import CHECKS
from deepspeed.preflight.run import PreflightResult, run

_MISTAKE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Check, and return 0 if nothing is wrong, 1 if something is, 2 if the ranks could not meet."""
    options, program = parse(argv, [check.name for check in CHECKS])

    def report(verdict: PreflightResult) -> None:
        emit(json.dumps(verdict.as_json(), indent=2) + "\n" if options.json else verdict.draw)
        if verdict.status:
            sys.stderr.write(f"preflight: {verdict.line}\n")  # which a launcher repeats, instead of the whole table

    try:
        return run(options, program, CHECKS, report)
    except DeepSpeedError as error:
        sys.stderr.write(f"preflight: error: {error}\n")
        return _MISTAKE


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a process group in which a rank is missing would be waited for at an ordinary end
