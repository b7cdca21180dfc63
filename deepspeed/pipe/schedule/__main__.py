"""`python -m deepspeed.pipe.schedule NAME`: validate a schedule, simulate it, print or draw its timeline."""

from __future__ import annotations

import argparse
import math
import sys

from deepspeed.errors import DeepSpeedError, OpUnavailable, UsageError
from deepspeed.pipe.schedule.actions import PassKind
from deepspeed.pipe.schedule.generators import SCHEDULES, make
from deepspeed.pipe.schedule.simulate import Costs, Timeline, simulate

_COLOURS = {
    PassKind.FORWARD: "#4c78a8",
    PassKind.BACKWARD: "#f58518",
    PassKind.INPUT: "#f58518",
    PassKind.WEIGHT: "#54a24b",
}
_MOST_COLUMNS = 2000
_WIDEST = 100.0  # inches


def summary(timeline: Timeline) -> str:
    schedule = timeline.schedule
    peaks = " ".join(f"{peak / schedule.chunks:g}" for peak in timeline.peaks)
    return (
        f"{schedule.name}: {len(schedule.ranks)} ranks, {schedule.micro_batches} micro-batches, time "
        f"{timeline.length:g}, bubble {100 * timeline.bubble:.1f} %, activations of at most {peaks} micro-batches"
    )


def text(timeline: Timeline) -> str:
    """A row for each rank; a column is the shortest computation, or what makes so many of them, dots are waiting."""
    shortest = min((end - begin for row in timeline.spans for _, begin, end in row if end > begin), default=1.0)
    unit = max(shortest, timeline.length / _MOST_COLUMNS)
    label = timeline.schedule.label
    width = max(len(label(action)) for row in timeline.spans for action, _, _ in row) + 1
    lines = []
    for rank, row in enumerate(timeline.spans):
        columns = [".".ljust(width)] * math.ceil(timeline.length / unit - 1e-9)
        for action, begin, end in row:
            first, last = round(begin / unit), max(round(end / unit), round(begin / unit) + 1)
            columns[first:last] = [label(action).ljust(width)] + ["-".ljust(width)] * (last - first - 1)
        lines.append(f"rank {rank:<2} |{''.join(columns).rstrip()}")
    return "\n".join(lines)


def draw(timeline: Timeline, path: str) -> None:
    """A picture of the timeline, of the kind that the path's ending names."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OpUnavailable("a picture of a timeline needs matplotlib, which is not installed: use the text") from error
    count = len(timeline.spans)
    figure = Figure(figsize=(min(max(8.0, timeline.length / 4), _WIDEST), 1.0 + 0.5 * count))
    axes = figure.subplots()
    for rank, row in enumerate(timeline.spans):
        for action, begin, end in row:
            shade = 1.0 if action.stage < count else 0.6
            axes.barh(rank, end - begin, left=begin, color=_COLOURS[action.op], alpha=shade, edgecolor="white")
            axes.text((begin + end) / 2, rank, str(action.micro_batch), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(count), [f"rank {rank}" for rank in range(count)])
    axes.invert_yaxis()
    axes.set_title(summary(timeline), fontsize=9)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except ValueError as error:  # no such kind of picture, or one that is too large
        raise UsageError(f"no picture can be drawn into {path!r}: {error}") from error


def main(arguments: list[str] | None = None) -> int:
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
