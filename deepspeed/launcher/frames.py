"""A text with its length before it, as the launcher hands plans to the processes it starts."""

from __future__ import annotations

import os

__all__ = ["framed", "receive"]


def framed(text: str) -> bytes:
    """ASCII text as bytes that `receive` reads."""
    data = text.encode("ascii")
    return len(data).to_bytes(8, "big") + data


def receive(descriptor: int) -> bytes:
    """What was framed, and not a byte more; nothing if the other end is closed before."""
    return _exactly(descriptor, int.from_bytes(_exactly(descriptor, 8), "big"))


def _exactly(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = os.read(descriptor, min(count - len(data), 2**20))
        if not more:
            return b""
        data += more
    return data
