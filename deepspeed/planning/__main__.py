"""`python -m deepspeed.planning`: the same as the command `ds_plan`."""

from __future__ import annotations

import sys

from deepspeed.planning.command import main

if __name__ == "__main__":
    sys.exit(main())
