"""`python -m deepspeed.env_report`: the same as the command `ds_report`."""

from __future__ import annotations

import sys

from deepspeed.launcher.report import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
