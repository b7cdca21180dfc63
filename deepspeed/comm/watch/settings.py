"""How long operations may take, by the groups themselves or by the config; and what else the config says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from torch.distributed import distributed_c10d as c10d

_WARN = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class HangSettings:
    """The config's `hangs` section; times in seconds. `timeout` None leaves each group's own."""

    enabled: bool = True
    timeout: float | None = None
    warn_after: float | None = None
    patience: float = 3.0
    folder: Path | None = None

    def warns_after(self, timeout: float) -> float:
        """When a slow rank is reported, for an operation that may take so long."""
        return min(timeout / 2, _WARN) if self.warn_after is None else self.warn_after


def _backends(group: Any) -> list[Any]:
    return [group._get_backend(torch.device(device)) for device in group._device_types]


def timeout_of(group: Any) -> timedelta | None:
    """How long an operation of the group may take; None where its backend does not say."""
    try:
        found = [backend.options._timeout for backend in _backends(group)]
    except (AttributeError, RuntimeError):  # a backend without options, such as torch's fake one
        return None
    times = [time for time in found if isinstance(time, timedelta)]
    return max(times, default=None)


def limit_groups(seconds: float) -> None:
    """Let operations of every group of this process take so long from now on."""
    for group in tuple(c10d._world.pg_names):
        limit_group(group, seconds)


def limit_group(group: Any, seconds: float) -> None:
    """Let operations of a group take so long from now on."""
    if isinstance(group, td.ProcessGroup) and td.get_backend(group) != "fake":
        for backend in _backends(group):
            backend._set_default_timeout(timedelta(seconds=seconds))


def seconds_of(group: Any) -> float:
    """`timeout_of` as a number, without end where it is unknown."""
    found = timeout_of(group)
    return math.inf if found is None else found.total_seconds()
