"""`python -m deepspeed.bench`: the same as the command `ds_bench`, and what its ranks run."""

from __future__ import annotations

import sys

from deepspeed.bench.ds_bench import main

if __name__ == "__main__":
    sys.exit(main())
