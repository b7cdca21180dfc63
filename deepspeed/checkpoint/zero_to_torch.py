#!/usr/bin/env python
"""As zero_to_fp32.py, which must lie beside it, with the dtype as a required choice: `--dtype bf16`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

__all__ = ["run"]


def run() -> None:
    """The command line."""
    path = Path(__file__).with_name("zero_to_fp32.py")
    spec = importlib.util.spec_from_file_location("zero_to_fp32", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path} is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules["zero_to_fp32"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.main(choose_dtype=True)


if __name__ == "__main__":
    run()
