"""The functions a training script calls: they sort out arguments and hand over."""

from __future__ import annotations

import argparse

__all__ = ["add_config_arguments"]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` (and their former names) to a script's own arguments."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed", action="store_true", help="say that this run uses DeepSpeed; for the script's own use"
    )
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the DeepSpeed JSON config")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser
