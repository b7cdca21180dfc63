"""Helpers that scripts and clients reach as `deepspeed.utils.<name>`; resolved on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import lazy
from deepspeed.utils import logging
from deepspeed.utils.logging import log_dist, logger, set_log_level_from_string

if TYPE_CHECKING:
    from deepspeed.comm import is_initialized
    from deepspeed.runtime.dataloader import RepeatingLoader
    from deepspeed.utils import groups
    from deepspeed.utils.nvtx import instrument_w_nvtx

_LAZY = {
    "RepeatingLoader": "deepspeed.runtime.dataloader:RepeatingLoader",
    "groups": "deepspeed.utils.groups",
    "instrument_w_nvtx": "deepspeed.utils.nvtx:instrument_w_nvtx",
    "is_initialized": "deepspeed.comm:is_initialized",
}

__all__ = [
    "RepeatingLoader",
    "groups",
    "instrument_w_nvtx",
    "is_initialized",
    "log_dist",
    "logger",
    "logging",
    "set_log_level_from_string",
]


__getattr__ = lazy(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted(__all__)
