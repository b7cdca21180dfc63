"""A thread for one piece of work whose end others may wait for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any

__all__ = ["begun"]


def begun(act: Callable[[], Any], name: str) -> Future[None]:
    """Begin `act` in a thread that keeps nobody from ending; what it raises is told by the future."""
    made: Future[None] = Future()

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - told to who waits
            made.set_exception(error)
        else:
            made.set_result(None)

    Thread(target=run, name=name, daemon=True).start()
    return made
