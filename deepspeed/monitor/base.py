"""What every monitor is, and the wall between a backend that fails and the training that goes on."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import TracebackType
from typing import Any, ClassVar, NamedTuple

import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.log import get_dist_msg, logger
from deepspeed.trust import flaw_of_name

__all__ = ["Backend", "Entry", "Monitor", "folder_of", "writes_here"]


class Entry(NamedTuple):
    """One metric as a backend receives it: the value is a number, no longer a tensor."""

    label: str
    value: Any
    step: int


def writes_here() -> bool:
    """True on the one process that writes: rank 0 of the process group, else of the environment, else this one."""
    return get_dist_msg("") is not None


def folder_of(section: str, output_path: str, job_name: str) -> str:
    """`<output_path>/<job_name>`; a name that would lead out of `output_path` is an error on every rank."""
    flaw = flaw_of_name(job_name) if job_name else None
    if flaw is not None:
        raise DeepSpeedConfigError(
            f"{section}.job_name {job_name!r:.200} {flaw}; it names a folder inside {section}.output_path "
            f"({output_path or 'the working directory'}). Give the place itself as output_path.",
            path=f"{section}.job_name",
        )
    if "\0" in output_path:
        raise DeepSpeedConfigError(
            f"{section}.output_path {output_path!r:.200} has a NUL character in it; give the path of a folder",
            path=f"{section}.output_path",
        )
    return os.path.join(output_path, job_name)


class Monitor(ABC):
    """Takes metrics; users may write their own."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config

    @abstractmethod
    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """Write `(label, value, step)` metrics; a value is a number or a tensor of one element."""

    def close(self) -> None:
        """Finish what is being written; nothing is written afterwards."""
        return


class Backend(Monitor):
    """A monitor over a client library: opened on rank 0 only, told once when it fails, never in the way.

    A subclass implements `_open`, `_write` and `_close` as if nothing could go wrong.
    """

    key: ClassVar[str]
    """The config section."""
    package: ClassVar[str | None] = None
    """What pip installs; None if nothing is needed."""

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.enabled: bool = monitor_config.enabled
        self._is_open = False
        self._complained = False
        if self.enabled and writes_here():
            with _Wall(self, "could not be opened, its metrics are not written"):
                self._open()
                self._is_open = True

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        if not self._is_open:
            return
        with _Wall(self, "could not write metrics, some are lost"):
            self._write([Entry(label, _number(value), int(step)) for label, value, step in event_list])

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with _Wall(self, "could not be closed, its last metrics may be lost"):
                self._close()

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _write(self, entries: list[Entry]) -> None:
        """Write the metrics and flush them."""

    @abstractmethod
    def _close(self) -> None: ...

    def _secrets(self) -> tuple[str, ...]:
        """Texts that must not appear in a message."""
        return ()

    def _complain(self, what: str, error: Exception) -> None:
        """Warn, the first time; a disk may have room again later, so writing is still tried."""
        if self._complained:
            return
        self._complained = True
        reason = f"{type(error).__name__}: {error}"
        for secret in self._secrets():
            reason = reason.replace(secret, "***")
        cure = "Repair the cause"
        if isinstance(error, ImportError) and self.package is not None:
            cure = f"Install it with `pip install {self.package}`"
        logger.warning(
            '%s %s (%s). %s, or set "%s": {"enabled": false} in the config. Training goes on.',
            *(self.key, what, reason, cure, self.key),
        )


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


class _Wall:
    """A `with` block around a client library: whatever it raises is told and goes no further.

    The library is not ours, so neither are its exceptions: this is the one place that stops any of them. Ctrl-C
    and SystemExit pass.
    """

    __slots__ = ("_backend", "_what")

    def __init__(self, backend: Backend, what: str) -> None:
        self._backend = backend
        self._what = what

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._backend._complain(self._what, error)
        return True
