"""`ds_elastic`: what an elasticity section leads to."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from deepspeed._package import __version__
from deepspeed.config.read import read
from deepspeed.elasticity.elasticity import compute_elastic_config
from deepspeed.errors import DeepSpeedError


def main(argv: Sequence[str] | None = None) -> int:
    """Print the section, the batch size and where it runs; 1 if there is no such plan."""
    parser = argparse.ArgumentParser(
        prog="ds_elastic", description="The batch size of an elastic job, and the numbers of GPUs that it runs on."
    )
    parser.add_argument("-c", "--config", required=True, help="a config file with an elasticity section")
    parser.add_argument("-w", "--world-size", type=int, default=0, help="also the micro-batch size on so many GPUs")
    args = parser.parse_args(argv)
    try:
        config, _ = read(args.config)
        batch, valid, *micro = compute_elastic_config(config, __version__, args.world_size)
    except DeepSpeedError as error:
        sys.stderr.write(f"ds_elastic: error: {error}\n")
        return 1
    lines = [
        f"elasticity: {json.dumps(config['elasticity'], indent=4)}",
        f"final_batch_size .... {batch}",
        f"valid_gpus .......... {', '.join(map(str, valid))}",
        *(f"micro_batch_size .... {size}" for size in micro),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
