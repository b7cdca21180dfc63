"""The process's watch, as a config wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.comm.dispatch import DEFAULT
from deepspeed.comm.watch.settings import Settings

if TYPE_CHECKING:
    from deepspeed.config.hangs import HangsConfig

__all__ = ["watch_hangs"]


def watch_hangs(config: HangsConfig | Settings) -> None:
    """Watch for collectives that do not complete as the `hangs` section says; for the process, until told otherwise."""
    assert DEFAULT.watch is not None, "the process's dispatcher is watched"
    DEFAULT.watch.configure(Settings(config.enabled, config.timeout, config.warn_after, config.patience, config.folder))
