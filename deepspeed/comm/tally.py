"""`OperationTally`: bytes and counts of the operations of a while, by kind, group and link, for what watches a run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from deepspeed.comm.dispatch import DEFAULT, Dispatcher
from deepspeed.comm.records import CollectiveFinished, Entry, Several, link_bytes

CAPACITY = 1 << 16


class OperationTally:
    """Keeps the operations since the last `take`, the latest `CAPACITY` of them; adding them up is left to a reader.

    Times are only known while the comms logger is on, which waits for every operation.
    """

    def __init__(self, per_node: int, dispatcher: Dispatcher = DEFAULT) -> None:
        self._per_node = max(per_node, 1)
        self._entries: deque[Entry] = deque(maxlen=CAPACITY)
        self._seconds: dict[str, float] = {}
        self._end: Callable[[], None] | None = dispatcher.tell(self._entries.append)

    def close(self) -> None:
        """Keep no more."""
        if self._end is not None:
            self._end()
            self._end = None

    def time(self, event: CollectiveFinished) -> None:
        self._seconds[event.op] = self._seconds.get(event.op, 0.0) + event.duration

    def take(self) -> Callable[[], list[dict[str, Any]]]:
        """What adds up the operations until now, in any thread; they are not kept here any more."""
        kept = [self._entries.popleft() for _ in range(len(self._entries))]
        seconds, self._seconds = self._seconds, {}
        return lambda: self._summary(kept, seconds)

    def drop(self) -> None:
        """Forget the operations until now."""
        self._entries.clear()
        self._seconds.clear()

    def _summary(self, entries: Iterable[Entry], seconds: dict[str, float]) -> list[dict[str, Any]]:
        rows: dict[tuple[str, int], dict[str, Any]] = {}  # by operation and group
        alike = Counter((entry[1].name, id(entry[2]), _bytes(entry)) for entry in entries)
        groups = {id(entry[2]): entry[2] for entry in entries}
        for (op, key, size), count in alike.items():
            if not size:  # barriers, objects, new groups
                continue
            group = groups[key]
            if (op, key) not in rows:
                rows[op, key] = {
                    "op": op,
                    "group": group.title,
                    "ranks": len(group.ranks),
                    **dict.fromkeys(("count", "bytes", "within", "between"), 0),
                }
            sent, row = link_bytes(op, size, group.ranks, self._per_node), rows[op, key]
            row["count"] += count
            row["bytes"] += count * size
            row["within"] += count * round(sent.within)
            row["between"] += count * round(sent.between)
        for (op, _), row in rows.items():
            if op in seconds:  # of all groups, told once
                row["ms"] = round(seconds.pop(op) * 1e3, 4)
        return list(rows.values())


def _bytes(entry: Entry) -> int:
    """Of the message."""
    shape, dtype = entry[3], entry[4]
    if dtype is None:
        return 0
    return int(shape.numel if isinstance(shape, Several) else shape.numel()) * dtype.itemsize
