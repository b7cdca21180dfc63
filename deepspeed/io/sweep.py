"""What `ds_nvme_tune` tries: combinations of settings, their speeds, and the best of them as an `aio` section."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.errors import UsageError
from deepspeed.io.sizes import parse_size

__all__ = ["SWEEP", "Outcome", "best", "combinations", "read_sweep"]

SWEEP: dict[str, list[Any]] = {
    "block_size": ["1M", "8M"],
    "queue_depth": [32, 128],
    "sequential_requests": [True, False],
    "single_submit": [False, True],
    "io_parallel": [1, 2, 4, 8],
}


@dataclass(frozen=True)
class Outcome:
    """One combination and what it reached in GB/s; None for what was not measured."""

    settings: Mapping[str, Any]
    read: float | None
    write: float | None

    @property
    def seconds(self) -> float:
        """Of moving a gigabyte in every direction that was measured: states are read and written once per step."""
        return sum(1 / speed for speed in (self.read, self.write) if speed)

    @property
    def section(self) -> dict[str, Any]:
        """The config's `aio` section with these settings."""
        return {
            "block_size": self.settings["block_size"],
            "queue_depth": self.settings["queue_depth"],
            "intra_op_parallelism": self.settings["io_parallel"],
            "single_submit": self.settings["single_submit"],
            "overlap_events": not self.settings["sequential_requests"],
        }


def best(outcomes: Iterable[Outcome]) -> Outcome:
    """The one that moves a gigabyte there and back in the least time."""
    return min(outcomes, key=lambda each: each.seconds)


def read_sweep(path: str) -> dict[str, list[Any]]:
    """The lists of a JSON file, for all or some of the keys of `SWEEP`; a UsageError says what is wrong with one."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"--sweep_config: {path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"--sweep_config: {path} holds {type(found).__name__}; expected an object of lists")
    for key, values in found.items():
        if key not in SWEEP:
            raise UsageError(f"--sweep_config: {path} has the key {key!r}; expected some of {', '.join(SWEEP)}")
        if not isinstance(values, list) or not values:
            raise UsageError(f"--sweep_config: {key} of {path} is {values!r}; expected a list of values to try")
    return {**SWEEP, **found}


def combinations(sweep: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination, as settings of a trial; a UsageError names a value that is none."""
    rows = [list(dict.fromkeys(_value(key, value) for value in sweep[key])) for key in SWEEP]
    return [dict(zip(SWEEP, row, strict=True)) for row in itertools.product(*rows)]


def _value(key: str, value: Any) -> Any:
    default = SWEEP[key][0]
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        raise UsageError(f"{key}: found {value!r}, expected true or false")
    if key == "block_size":
        try:
            return parse_size(value)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{key}: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{key}: found {value!r}, expected a whole number from 1 up")
    return value
