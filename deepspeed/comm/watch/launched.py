"""Collectives that hosts only launch, as NCCL's: nobody waits inside of them, so that progress is what is looked at.

A host that launched a collective goes on and waits somewhere else, or never. What is known without asking the device is
that it has launched nothing since, and that others have not come that far: whoever is behind keeps the rest waiting.
Devices are not asked, because a question from another thread can spoil the capture of a graph.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as td
from torch.distributed import distributed_c10d as c10d

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.records import Entry
from deepspeed.comm.watch.look import Inside, main_place
from deepspeed.comm.watch.report import call_of
from deepspeed.errors import CommError

__all__ = ["interrupt", "is_launched", "last_launched"]


def is_launched(backend: str) -> bool:
    """Whether operations of this backend run on a device, and calls return before they are done."""
    device = get_accelerator().communication_backend_name()
    return bool(device) and device != "gloo" and device in backend


def last_launched(entries: Sequence[Entry]) -> list[Inside]:
    """The newest collective of each group whose operations are launched."""
    newest = {id(entry[2]): entry for entry in entries if not entry[1].p2p}
    found = [entry for entry in newest.values() if len(entry[2].ranks) > 1 and is_launched(entry[2].backend)]
    place = main_place() if found else ""
    return [
        Inside(("launched", id(e)), replace(call_of(e), launched=True), e[2].ranks, e[2].backend, place, e)
        for e in found
    ]


def interrupt(text: str) -> None:
    """Raise an error in the main thread, and make devices give up what they wait for, so that it gets there."""
    main = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main or 0), ctypes.py_object(_carrying(text)))
    groups: Any = c10d._world.pg_names
    for group in tuple(groups):
        if is_launched(td.get_backend(group)) and hasattr(group, "abort"):
            group.abort()


def _carrying(text: str) -> type[CommError]:
    """An error class that knows its message: Python raises classes in other threads, not errors."""

    class Hang(CommError):
        def __init__(self) -> None:
            super().__init__(text)

    Hang.__name__ = Hang.__qualname__ = CommError.__name__
    Hang.__module__ = CommError.__module__
    return Hang
