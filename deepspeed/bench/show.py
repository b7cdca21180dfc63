"""What was measured, as tables for people, as a picture, and as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from deepspeed.bench.measure import Sample
from deepspeed.io.sizes import show_size
from deepspeed.launcher.console import plain_table

__all__ = ["Setting", "as_json", "draw_picture", "draw_table"]

_BAR = 24
_COLOURS = ("#3b76c4", "#d9622b", "#4c9a52", "#8d5bb5", "#b3923b", "#4aa5a8", "#c25a7c")
_MARKERS = "osD^vPX"


@dataclass(frozen=True, slots=True)
class Setting:
    """What all measurements of a run have in common."""

    ranks: int
    hosts: int
    backend: str
    device: str
    dtype: str
    trials: int
    unit: str

    def rate(self, bytes_per_second: float) -> float:
        """In the unit that was asked for."""
        return bytes_per_second * (8 if self.unit == "Gbps" else 1) / 1e9

    @property
    def label(self) -> str:
        """The unit as people write it."""
        return {"GBps": "GB/s", "Gbps": "Gb/s"}[self.unit]

    @property
    def title(self) -> str:
        """One line about the run."""
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        return f"{self.ranks} ranks on {hosts}, {self.backend} on {self.device}, {self.dtype}"


def draw_table(console: Console, operation: str, samples: Sequence[Sample], setting: Setting) -> None:
    """The sizes of one operation; the bar is the bus bandwidth, the longest that of the fastest size."""
    table = plain_table("bytes", "time", f"algorithm {setting.label}", f"bus {setting.label}", "")
    for column in table.columns[:4]:
        column.justify, column.min_width = "right", 9  # tables of several operations stand below each other
    best = max(sample.bus for sample in samples)
    for sample in samples:
        length = round(_BAR * sample.bus / best)
        rates = (f"{setting.rate(value):.3g}" for value in (sample.algorithm, sample.bus))
        table.add_row(show_size(sample.nbytes), _time(sample.seconds), *rates, Text("#" * length, style="cyan"))
    console.print(Text(operation, style="bold cyan"))
    console.print(table, highlight=False)
    console.print()


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def draw_picture(file: Path, samples: Sequence[Sample], setting: Setting) -> None:
    """Bus bandwidth and time of every operation over the size, side by side."""
    from matplotlib.figure import Figure  # optional, and slow to import
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, name in enumerate(dict.fromkeys(sample.operation for sample in samples)):
        own = [sample for sample in samples if sample.operation == name]
        sizes = [sample.nbytes for sample in own]
        style: dict[str, Any] = {"color": _COLOURS[place], "marker": _MARKERS[place], "markersize": 4.5, "label": name}
        left.plot(sizes, [setting.rate(sample.bus) for sample in own], **style)
        right.plot(sizes, [sample.seconds * 1e6 for sample in own], **style)
    for axes, label in ((left, f"bus bandwidth ({setting.label})"), (right, "time (µs)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: show_size(round(size))))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("bytes")
        axes.set_ylabel(label)
        axes.grid(color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    figure.suptitle(f"ds_bench: {setting.title}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.savefig(file)


def as_json(samples: Sequence[Sample], absent: Mapping[str, str], setting: Setting) -> dict[str, Any]:
    """Everything; bandwidths are in bytes per second whatever the unit of the tables."""
    return {
        "setting": {name: value for name, value in asdict(setting).items() if name != "unit"},
        "results": [asdict(sample) for sample in samples],
        "unavailable": dict(absent),
    }
