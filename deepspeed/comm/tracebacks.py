"""Tracebacks that end a program, cut down to the user's lines: a job has many ranks, and each prints one.

[Note: tracebacks] Frames of this library, of torch and of Python that lie between the user's lines are left out. Those
below the user's last line are left out for errors of this library, whose message says all there is to know; for any
other error they are where it comes from, and stay. `DEEPSPEED_FULL_TRACEBACK=1` leaves out nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType

from deepspeed.comm.watch.threads import is_users
from deepspeed.errors import DeepSpeedError

VARIABLE = "DEEPSPEED_FULL_TRACEBACK"

_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


class _Shortening:
    """Shortens an error on its way to the hook that prints it."""

    def __init__(self, hook: _Hook) -> None:
        self._hook = hook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.environ.get(VARIABLE, "") in ("", "0"):
            shorten(error)
            trace = error.__traceback__
        self._hook(kind, error, trace)


def shorten_uncaught() -> None:
    """From now on, errors that end this program are printed short, by whatever prints them now."""
    if not isinstance(sys.excepthook, _Shortening):
        sys.excepthook = _Shortening(sys.excepthook)


def shorten(error: BaseException) -> None:
    """Leave frames out of an error and of those that led to it, and say how many; for one that is only printed."""
    one: BaseException | None = error
    left_out, seen = 0, set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        left_out += _cut(one)
        cause = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        if cause is not None and isinstance(one, DeepSpeedError) and str(cause).strip() in str(one):
            one.__cause__, one.__suppress_context__, cause = None, True, None  # it quotes what led to it
        one = cause
    if left_out and sys.version_info >= (3, 11):
        error.add_note(f"({left_out} frames inside libraries are left out; {VARIABLE}=1 shows them)")


def _cut(error: BaseException) -> int:
    """Shorten one traceback; how many frames are gone."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    users = [at for at, one in enumerate(frames) if is_users(one.tb_frame.f_code.co_filename)]
    if not users:
        return 0
    below = () if isinstance(error, DeepSpeedError) else range(users[-1] + 1, len(frames))
    kept: TracebackType | None = None
    for at in reversed((*users, *below)):
        kept = TracebackType(kept, frames[at].tb_frame, frames[at].tb_lasti, frames[at].tb_lineno)
    error.__traceback__ = kept
    return len(frames) - len(users) - len(below)
