"""Errors of operations, with what a person needs to act: rank, group, operation, tensors, label, call site, history."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence

import torch
import torch.distributed as td

from deepspeed.comm.records import Entry, OperationRecord, read
from deepspeed.comm.watch.verdict import NO_VERDICT, HangVerdict
from deepspeed.comm.watch.watch import is_timeout
from deepspeed.errors import CommError

# What torch raises for a failed collective: the backend's errors are RuntimeErrors, misuse is one of the others.
FAILURES: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError)
_HISTORY = 6  # operations shown before the failed one


class _ArgumentError(CommError, ValueError):
    """Arguments that torch refused; also a ValueError, as torch raises it."""


class _ArgumentTypeError(CommError, TypeError):
    """An argument of the wrong type; also a TypeError, as torch raises it."""


class _BackendError(CommError, td.DistBackendError):
    """The backend failed; also the DistBackendError that fault-tolerant scripts catch."""


class _NetworkError(CommError, td.DistNetworkError):
    """The connection failed; also a DistNetworkError."""


_KINDS: tuple[tuple[type[Exception], type[CommError]], ...] = (
    (td.DistBackendError, _BackendError),
    (td.DistNetworkError, _NetworkError),
    (ValueError, _ArgumentError),
    (TypeError, _ArgumentTypeError),
)


def explain(
    entry: Entry,
    error: Exception,
    args: tuple[object, ...],
    history: Sequence[OperationRecord],
    found: HangVerdict = NO_VERDICT,
) -> Exception:
    """The error to raise instead of `error`; errors that already say enough come back unchanged.

    `found` is what the ranks together know about it, and comes first. Where it names ranks, advice and this rank's
    history are left out: they only serve to find them.
    """
    if isinstance(error, (CommError, torch.OutOfMemoryError)) or _came_by_signal(error):
        return error
    kind = next((ours for theirs, ours in _KINDS if isinstance(error, theirs)), CommError)
    clues = [] if found.ranks else _clues(entry, error, history)
    return kind("\n".join([*filter(None, [found.text]), *_message(entry, error, args), *clues]))


def _came_by_signal(error: Exception) -> bool:
    """True if a signal's handler raised it while the operation waited, as torch's does for a data loader's worker."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(code in handlers for code in frames)


def _message(entry: Entry, error: Exception, args: tuple[object, ...]) -> list[str]:
    record, group = read(entry), entry[2]
    number = f"{'point-to-point operation' if record.p2p else 'collective'} #{record.sequence}"
    members = f"group {group.name!r}, ranks {list(group.ranks)}, {group.backend}"
    lines = [
        f"{record.op} failed on rank {group.rank}: {number} of {members}: {str(error).strip() or type(error).__name__}",
        f"  tensors   : {_tensors(args) or record.what or 'none'}",
        f"  label     : {record.label or 'none'}",
        f"  called at : {record.file}:{record.line} in {record.function}",
    ]
    if record.peer is not None:
        lines.append(f"  peer/root : rank {record.peer}")
    return lines


def _clues(entry: Entry, error: Exception, history: Sequence[OperationRecord]) -> list[str]:
    record = read(entry)
    key, advice = _key(record), f"  {_advice(error, record)}"
    shown = [f"    {item}" for item in history if (item.sequence, item.p2p, item.group) != key][-_HISTORY:]
    compare = "compare them with other ranks': the first difference is where they went apart"
    head = f"  this rank's operations before it, latest last ({compare}):"
    return [advice, head, *shown] if shown else [advice]


def _tensors(args: tuple[object, ...]) -> str:
    """The shapes of all tensors among the arguments, as they stand in the call: outputs, then inputs."""
    lists = [arg if isinstance(arg, (list, tuple)) else [arg] for arg in args]
    shown = [
        " ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in items if isinstance(t, torch.Tensor))
        for items in lists
    ]
    return ", ".join(text for text in shown if text)


def _key(record: OperationRecord) -> tuple[int, bool, str]:
    return record.sequence, record.p2p, record.group


def _advice(error: Exception, record: OperationRecord) -> str:
    text = str(error).lower()
    others = list(record.ranks)
    if isinstance(error, (ValueError, TypeError)):
        return "torch refused this rank's own arguments before anything was sent; correct them here."
    if is_timeout(error):
        return f"At least one of ranks {others} did not make this call in time."
    if "connection" in text or "closed" in text or "peer" in text:
        return (
            f"One of ranks {others} ended or left. Its own error, printed earlier, is the cause. If it printed none, "
            "it finished before this rank did (has its loader fewer batches?), was killed, or called another "
            "operation or other sizes than this rank."
        )
    return f"Every one of ranks {others} must make the same call, in the same order, with matching sizes and dtypes."
