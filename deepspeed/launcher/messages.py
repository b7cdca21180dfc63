"""What the ranks' side of a job tells the launcher on another host: messages between lines of ordinary output.

[Note: messages] ssh, pdsh, mpirun and srun all carry stderr line by line and little else in common. So a message is
lines that begin with a separator that nobody prints and the job's token, and the launcher takes them out again. They
are short, since Slurm and MPI may cut long lines and mix their parts with those of other ranks.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["VARIABLE", "Reader", "Relayed", "encode", "labels_only", "new_token"]

VARIABLE = "DEEPSPEED_RELAY"  # in the environment of what starts ranks: that a launcher elsewhere reads along
_MARK = b"\x1e"
_PIECE = 600


class Relayed:
    """The token of a job whose output is read by a launcher elsewhere, and whether lines tell their rank.

    Without a token nothing is told between the lines: whoever starts the ranks speaks for itself.
    """

    def __init__(self, token: str, labels: bool) -> None:
        self.token = token
        self.labels = labels

    def __str__(self) -> str:
        return f"{self.token}:{'rank' if self.labels else 'plain'}"

    @classmethod
    def parse(cls, value: str) -> Relayed | None:
        """From the variable; None without one."""
        token, _, style = value.partition(":")
        return cls(token, style == "rank") if value else None


def labels_only(value: str) -> str:
    """The variable's value for ranks that get labels as it says, and of which no launcher elsewhere is told."""
    relayed = Relayed.parse(value)
    return str(Relayed("", labels=True)) if relayed is not None and relayed.labels else ""


def new_token() -> str:
    """A word that output of this job does not contain by chance."""
    return secrets.token_hex(8)


def encode(token: str, sender: int, message: Mapping[str, Any]) -> bytes:
    """The lines of one message; `sender` is unique among those who may write at the same time."""
    text = base64.b64encode(json.dumps(message).encode())
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    head = f"{token} {sender} {len(pieces)}"
    return b"".join(_MARK + f"{head} {at} ".encode() + piece + b"\n" for at, piece in enumerate(pieces))


class Reader:
    """Takes messages out of lines; one reader for all streams, since parts of a message never change streams."""

    def __init__(self, token: str) -> None:
        self._mark = _MARK + token.encode() + b" "
        self._parts: dict[tuple[bytes, bytes], dict[int, bytes]] = {}

    def split(self, data: bytes) -> tuple[bytes, list[dict[str, Any]]]:
        """Whole lines → those that are output, and the messages that became complete."""
        if self._mark not in data:
            return data, []
        kept: list[bytes] = []
        messages: list[dict[str, Any]] = []
        for line in data.splitlines(keepends=True):
            before, mark, rest = line.partition(self._mark)
            if mark:
                messages += self._take(rest)
                before = before if before.strip() and not before.endswith(b": ") else b""  # pdsh's name of a host
                kept.append(before + b"\n" if before else b"")
            else:
                kept.append(line)
        return b"".join(kept), messages

    def _take(self, rest: bytes) -> Iterator[dict[str, Any]]:
        try:
            sender, count, at, piece = rest.split()
            parts = self._parts.setdefault((sender, count), {})
            parts[int(at)] = piece
            if len(parts) == int(count):
                del self._parts[sender, count]
                message = json.loads(base64.b64decode(b"".join(parts[number] for number in range(int(count)))))
                if isinstance(message, dict):
                    yield message
        except (ValueError, KeyError):
            return  # not what `encode` writes: a program that printed the token of this job
