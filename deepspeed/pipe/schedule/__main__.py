"""`python -m deepspeed.pipe.schedule NAME`: validate a schedule, simulate it, print or draw its timeline."""

from __future__ import annotations

import argparse
import sys

from deepspeed.errors import DeepSpeedError
from deepspeed.pipe.schedule.names import SCHEDULES, make
from deepspeed.pipe.schedule.show import draw, summary, text
from deepspeed.pipe.schedule.simulate import Costs, simulate

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    given = _parser().parse_args(arguments)
    try:
        schedule = make(given.name, given.stages, given.micro_batches, given.chunks)
        costs = Costs(given.forward, given.input, given.weight, given.message)
        timeline = simulate(schedule, costs)
        shown = [text(timeline), summary(timeline), *([str(schedule)] if given.instructions else [])]
        sys.stdout.write("\n".join(shown) + "\n")
        if given.plot:
            draw(timeline, given.plot)
    except (DeepSpeedError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deepspeed.pipe.schedule", description=__doc__)
    parser.add_argument("name", choices=SCHEDULES, metavar="NAME", help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("--stages", type=int, default=4, help="pipeline ranks (default 4)")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a batch (default 8)")
    parser.add_argument("--chunks", type=int, default=None, help="stages on each rank, for interleaved (default 2)")
    parser.add_argument("--forward", type=float, default=1.0, help="time of a rank's forward (default 1)")
    parser.add_argument("--input", type=float, default=1.0, help="time of its inputs' gradients (default 1)")
    parser.add_argument("--weight", type=float, default=1.0, help="time of its weights' gradients (default 1)")
    parser.add_argument("--message", type=float, default=0.0, help="time of a message between ranks (default 0)")
    parser.add_argument("--instructions", action="store_true", help="print every rank's computations, too")
    parser.add_argument("--plot", metavar="FILE", help="draw the timeline into this file (png, svg or pdf)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
