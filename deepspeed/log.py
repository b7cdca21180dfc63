"""The library's logger: quiet by default, one line format, messages once or on chosen ranks.

[Note: default level] By default the library logs warnings and the few lines about a whole run (its start, its end, a
checkpoint that was loaded), which are at `NOTICE`. An explicit `log_level` of "warning" or above silences these.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO

__all__ = [
    "NOTICE",
    "LoggerFactory",
    "get_current_level",
    "get_dist_msg",
    "get_log_level_from_string",
    "log_dist",
    "log_dist_once",
    "log_levels",
    "logger",
    "print_dist",
    "print_json_dist",
    "set_log_level_from_string",
    "warn_once",
]

NOTICE = 25  # between INFO and WARNING; [Note: default level]
logging.addLevelName(NOTICE, "NOTICE")

log_levels: dict[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


if TYPE_CHECKING:
    _Handler = logging.StreamHandler[TextIO]
else:
    _Handler = logging.StreamHandler  # Python 3.10 has no types of it


class _CurrentStderr(_Handler):
    """Writes to whatever `sys.stderr` is at that moment, so that redirection and capture work."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """The stream is looked up at each record; assignments by the base class are dropped."""


class LoggerFactory:
    """Makes loggers with the library's line format."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """A logger called `name` with one stderr handler; asking twice gives the same one."""
        if not name:
            raise ValueError("a logger needs a name")
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        if not any(isinstance(handler, _CurrentStderr) for handler in made.handlers):
            handler = _CurrentStderr()
            handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(name)s] %(message)s"))
            made.addHandler(handler)
        return made


logger = LoggerFactory.create_logger("deepspeed", NOTICE)


def _rank() -> int:
    """This process's rank as far as it is known: the process group, else the environment, else -1."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else -1


def _speaks(ranks: Iterable[int] | None) -> bool:
    rank = _rank()
    wanted = (0,) if ranks is None else tuple(ranks)
    return rank == -1 or -1 in wanted or rank in wanted


def get_dist_msg(message: str, ranks: Iterable[int] | None = None) -> str | None:
    """The message marked with this rank if this rank is to speak, else None; default rank 0, -1 means all."""
    return f"[Rank {_rank()}] {message}" if _speaks(ranks) else None


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks only; default rank 0, -1 means all."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        logger.log(level, text)


class _Once:
    """Calls a function once for the same arguments, also where several threads come with them at once."""

    def __init__(self, tell: Callable[..., None]) -> None:
        functools.update_wrapper(self, tell)
        self._tell = tell
        self._told: dict[tuple[object, ...], object] = {}

    def __call__(self, *said: object) -> None:
        mine = object()
        if self._told.setdefault(said, mine) is mine:
            self._tell(*said)

    def cache_clear(self) -> None:
        """Forget what was told."""
        self._told.clear()


@_Once
def _log_dist_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """As `log_dist`, but the same message is told only once by this process."""
    _log_dist_once(message, None if ranks is None else tuple(ranks), level)


@_Once
def warn_once(message: str) -> None:
    """Warn; the same message is told only once by this process."""
    logger.warning(message)


def print_dist(message: str, ranks: Iterable[int] | None = None) -> None:
    """Write the message to stdout on the given ranks only; default rank 0, -1 means all."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def print_json_dist(
    message: dict[str, Any], ranks: Iterable[int] | None = None, path: str | os.PathLike[str] | None = None
) -> None:
    """Write `message` with the rank added as JSON to `path`, or to stdout, on the given ranks only."""
    if not _speaks(ranks):
        return
    text = json.dumps({**message, "rank": _rank()})
    if path is None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        return
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def get_current_level() -> int:
    """The effective level of the library's logger."""
    return logger.getEffectiveLevel()


def get_log_level_from_string(log_level_str: str) -> int:
    """`"info"` → `logging.INFO`; an unknown name is a ValueError that lists the known ones."""
    level = log_levels.get(str(log_level_str).lower())
    if level is None:
        raise ValueError(f"log level {log_level_str!r} is unknown; use one of {', '.join(log_levels)}")
    return level


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of the library's logger (or of `custom_logger`) by name."""
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))
