"""This process seen by its own watcher: which threads wait in which operation, where the main thread is, all stacks.

Threads are sampled (`sys._current_frames`), so that nothing is done on the way of an operation: a thread that waits in
the backend has let go of the interpreter, and its frames say which operation it is in.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as td
from torch.distributed import distributed_c10d as c10d

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.records import Entry, shown_path
from deepspeed.comm.watch.report import CollectiveCall, call_of
from deepspeed.errors import CommError

_OURS = str(Path(__file__).parents[2]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = tuple(
    {f"{path}{os.sep}" for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")) if path}
)
_C10D = c10d.__file__
# Calls of torch.distributed that all ranks of a group make; messages between two are not counted by the backends.
_COLLECTIVES = {
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "scatter", "scatter_object_list"),
    *("new_group", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
}
_UNCOUNTED = {"monitored_barrier", "new_group"}  # of these, those that backends do not count
_TENSORS = ("tensor", "input_tensor", "input", "output_tensor", "output")

Lines = list[tuple[str, int]]
"""Files and lines, innermost first."""
Finder = Callable[[FrameType], "Entry | None"]


@dataclass(frozen=True, slots=True)
class ActiveCall:
    """A thread is inside this call. `key` changes whenever the thread does something else."""

    key: tuple[Any, ...]
    call: CollectiveCall
    ranks: tuple[int, ...]
    backend: str
    place: str
    entry: Entry | None


def positions() -> dict[str, int]:
    """How many collectives this rank has begun, by process group, as the backends count."""
    found: dict[str, int] = {}
    groups: Any = c10d._world.pg_names  # torch has no public list of them
    for group, name in tuple(groups.items()):
        try:
            found[name] = group._get_sequence_number_for_group()
        except RuntimeError:  # a backend that does not count
            continue
    return found


def active_calls(finders: Mapping[CodeType, Finder]) -> list[ActiveCall]:
    """What each thread of this process is inside of, the main thread's first; `finders` know frames of ours."""
    # Source files are read once the frames are let go of: whoever holds a frame keeps alive what was in it.
    return [_placed(one, lines) for one, lines in _looked(finders)]


def _looked(finders: Mapping[CodeType, Finder]) -> list[tuple[ActiveCall, Lines]]:
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    found = [
        (_inside(ident, frame, finders), _lines_of(frame)) for ident, frame in frames if ident != threading.get_ident()
    ]
    return [(one, lines) for one, lines in found if one is not None]


def _placed(one: ActiveCall, lines: Lines) -> ActiveCall:
    place = place_in(lines)
    return replace(one, place=place, call=replace(one.call, place=place) if one.entry is None else one.call)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _inside(ident: int, top: FrameType, finders: Mapping[CodeType, Finder]) -> ActiveCall | None:
    raw: FrameType | None = None
    for frame in _outwards(top):
        finder = finders.get(frame.f_code)
        if finder is not None:
            entry = finder(frame)
            if entry is None:
                return None
            group = entry[2]
            return ActiveCall((ident, id(entry)), call_of(entry), group.ranks, group.backend, "", entry)
        if frame.f_code.co_filename == _C10D and frame.f_code.co_name in _COLLECTIVES:
            raw = frame  # the outermost one is what the user called
    return None if raw is None else _raw(ident, raw)


def _raw(ident: int, frame: FrameType) -> ActiveCall | None:
    """A call of torch.distributed itself; its number is the backend's."""
    names = frame.f_locals
    world = td.GroupMember.WORLD
    group = names.get("group")
    group = world if group is None or not isinstance(group, td.ProcessGroup) else group
    if world is None or group is None:
        return None
    name = group.group_name
    count = positions().get(name, 0)
    tensor = next((names[one] for one in _TENSORS if isinstance(names.get(one), torch.Tensor)), None)
    call = CollectiveCall(
        group="world" if group is world else name,
        title="world" if group is world else title_of(group),
        sequence=count + (frame.f_code.co_name in _UNCOUNTED),
        op=f"torch.distributed.{frame.f_code.co_name}",
        counted="backend",
        shape="" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}",
        numel=0 if tensor is None else tensor.numel(),
        dtype=None if tensor is None else str(tensor.dtype).removeprefix("torch."),
    )
    ranks = tuple(td.get_process_group_ranks(group))
    key = (ident, id(frame), frame.f_lasti, count)
    return ActiveCall(key, call, ranks, td.get_backend(group), "", None)


def failed_call(error: BaseException, finders: Mapping[CodeType, Finder]) -> ActiveCall | None:
    """The call of torch.distributed that raised this; None if there is none, or if it was made by an operation of ours.

    For the thread that caught it, in which the frames of the error still are."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raw = next((one for one in frames if one.f_code.co_filename == _C10D and one.f_code.co_name in _COLLECTIVES), None)
    if raw is None or any(frame.f_code in finders for frame in _outwards(raw)):
        return None
    found = _raw(threading.get_ident(), raw)
    return None if found is None else _placed(found, _lines_of(raw))


def title_of(group: Any) -> str:
    """A group's name for people: what whoever made it called it, or torch's number."""
    described = str(getattr(group, "group_desc", "") or "")
    return group.group_name if described in ("", "undefined") else described


def is_users(file: str) -> bool:
    """Whether a file is neither torch's, nor Python's, nor ours."""
    library = file.startswith(_LIBRARY) and "site-packages" not in file
    return not (file.startswith((_OURS, _TORCH, "<")) or library)


def _lines_of(top: FrameType | None) -> Lines:
    return [(frame.f_code.co_filename, frame.f_lineno or 0) for frame in _outwards(top)]


def place_in(frames: Iterable[tuple[str, int]]) -> str:
    """``train.py:88 `next(loader)` ``: the innermost line that is neither torch's, nor Python's, nor ours.

    `frames` are files and lines, innermost first; without one of the user's it is the first.
    """
    known = list(frames)
    found = next((frame for frame in known if is_users(frame[0])), known[0] if known else None)
    if found is None:
        return ""
    file, line = found
    source = linecache.getline(file, line).strip()
    return f"{shown_path(file)}:{line}" + (f" `{source[:100]}`" if source else "")


def here() -> str:
    """The user's line that the calling thread is in."""
    return place_in(_lines_of(sys._getframe(1)))


def main_place() -> str:
    """The user's line that the main thread is in."""
    return place_in(_lines_of(sys._current_frames().get(threading.main_thread().ident or 0)))


def place_of_error(error: BaseException) -> str:
    """The user's line in which an error was raised."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return place_in(reversed(frames))


def all_stacks() -> str:
    """The stacks of all threads but the one that asks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = "".join(traceback.format_stack(frame))
            parts.append(f"thread {names.get(ident, ident)}, innermost call last:\n{stack}")
    return "\n".join(parts)


def is_launched(backend: str) -> bool:
    """Whether operations of this backend run on a device, and calls return before they are done."""
    device = get_accelerator().communication_backend_name()
    return bool(device) and device != "gloo" and device in backend


def last_launched(entries: Sequence[Entry]) -> list[ActiveCall]:
    """The newest collective of each group whose operations are launched."""
    newest = {id(entry[2]): entry for entry in entries if not entry[1].p2p}
    found = [entry for entry in newest.values() if len(entry[2].ranks) > 1 and is_launched(entry[2].backend)]
    place = main_place() if found else ""
    return [
        ActiveCall(("launched", id(e)), replace(call_of(e), launched=True), e[2].ranks, e[2].backend, place, e)
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
