"""`python -m deepspeed.moe.show FOLDER`: what routers did, of the files of `csv_monitor`, as a table or a picture."""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed.errors import DeepSpeedError, FileError, OpUnavailable, printable

_FILE = re.compile(r"Train_Experts_(?P<layer>.+)_(?P<what>entropy|dropped|load_(?P<expert>\d{1,6}))\.csv")
_MOST_BYTES = 2**30


@dataclass
class History:
    """One layer: for each metric the values by samples, in order."""

    entropy: dict[int, float] = field(default_factory=dict)  # of the load, 1 where all experts have as many tokens
    dropped: dict[int, float] = field(default_factory=dict)  # the share of assignments that no expert took
    loads: dict[int, dict[int, float]] = field(default_factory=dict)
    """By expert: tokens as a multiple of an equal share."""

    def last_loads(self) -> list[float]:
        return [list(self.loads[number].values())[-1] for number in sorted(self.loads) if self.loads[number]]


def read(folder: Path) -> dict[str, History]:
    """Every layer, by its path, of a folder that `csv_monitor` wrote."""
    found: dict[str, History] = {}
    for path in sorted(folder.iterdir(), key=_natural):
        match = _FILE.fullmatch(path.name)
        if match is None:
            continue
        history = found.setdefault(match["layer"], History())
        if match["expert"] is not None:
            history.loads[int(match["expert"])] = _values(path)
        elif match["what"] == "entropy":
            history.entropy = _values(path)
        else:
            history.dropped = _values(path)
    if not found:
        raise FileError(
            2, "no files Train_Experts_*.csv here: train a model with experts and csv_monitor enabled", str(folder)
        )
    return found


def table(layers: Mapping[str, History]) -> str:
    """The last state of each layer, a line each."""
    width = max(len(layer) for layer in layers)
    lines = [f"{'layer':<{width}}  experts  entropy  busiest  idlest  dropped"]
    for layer, history in layers.items():
        loads = history.last_loads() or [float("nan")]
        last = [list(each.values())[-1] if each else float("nan") for each in (history.entropy, history.dropped)]
        lines.append(
            f"{printable(layer):<{width}}  {len(history.loads):>7}  {last[0]:>7.3f}  {max(loads):>7.2f}  "
            f"{min(loads):>6.2f}  {100 * last[1]:>5.1f} %"
        )
    return "\n".join(lines)


def draw(layers: Mapping[str, History], path: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OpUnavailable("a picture of routers needs matplotlib, which is not installed: use the table") from error
    figure = Figure(figsize=(9.0, 5.0 + 0.2 * len(layers)))
    loads, entropy, dropped = figure.subplots(3, 1, height_ratios=(max(1.0, len(layers) / 6), 1.0, 1.0))
    most = max(len(history.loads) for history in layers.values())
    rows = [[*each.last_loads(), *[float("nan")] * (most - len(each.loads))] for each in layers.values()]
    shown = loads.imshow(rows, aspect="auto", vmin=0.0, vmax=2.0, cmap="coolwarm", interpolation="nearest")
    figure.colorbar(shown, ax=loads, label="load ÷ equal share")
    loads.set_yticks(range(len(layers)), list(layers), fontsize=6)
    loads.set_xlabel("expert")
    for axes, name in ((entropy, "entropy"), (dropped, "dropped")):
        for layer, history in layers.items():
            values: dict[int, float] = getattr(history, name)
            axes.plot(list(values), list(values.values()), label=layer, linewidth=1)
        axes.set_ylabel(name)
    dropped.set_xlabel("samples")
    if len(layers) <= 8:
        entropy.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deepspeed.moe.show", description=__doc__)
    parser.add_argument("folder", type=Path, help="<output_path>/<job_name> of csv_monitor")
    parser.add_argument("--plot", metavar="FILE", help="draw into this file (png, svg or pdf)")
    given = parser.parse_args(arguments)
    try:
        layers = read(given.folder)
        sys.stdout.write(table(layers) + "\n")
        if given.plot:
            draw(layers, given.plot)
    except (DeepSpeedError, OSError, ValueError) as error:
        sys.stderr.write(f"error: {printable(error)}\n")
        return 1
    return 0


def _natural(path: Path) -> list[tuple[int, str]]:
    """Layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _values(path: Path) -> dict[int, float]:
    if path.stat().st_size > _MOST_BYTES:
        raise FileError(27, "more than 1 GiB of numbers, which no monitor writes", str(path))
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    return {int(step): float(value) for step, value in rows}


if __name__ == "__main__":
    sys.exit(main())
