"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

TRAINING, VALIDATION = "#3b76c4", "#d9622b"


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """The mean of each value and up to `reach` neighbours on either side; as many on both, so that nothing lags."""
    means = []
    for place in range(len(values)):
        there = min(reach, place, len(values) - 1 - place)
        means.append(fmean(values[place - there : place + there + 1]))
    return means


def draw(file: Path, training: Sequence[float], validation: Sequence[tuple[int, float]], title: str) -> None:
    """Write a PNG: the training loss of each step, its smoothed course, and the validation loss where it was taken."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(training) + 1)
    axes.plot(steps, training, color=TRAINING, alpha=0.3, linewidth=0.8, label="training, each step")
    axes.plot(steps, smoothed(training, len(training) // 40), color=TRAINING, linewidth=2, label="training, smoothed")
    if validation:
        places, losses = zip(*validation, strict=True)
        axes.plot(
            places, losses, "o-", color=VALIDATION, markersize=4.5, linewidth=1.4, label="validation, held-out files"
        )
        axes.annotate(
            f"{losses[-1]:.2f}",
            (places[-1], losses[-1]),
            xytext=(0, -16),
            textcoords="offset points",
            ha="center",
            color=VALIDATION,
            fontweight="bold",
        )
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=12)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlim(0, len(training) * 1.04)
    axes.set_ylim(bottom=0)
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file)
