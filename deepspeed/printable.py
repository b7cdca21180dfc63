"""Text that came from elsewhere as text that a terminal or a log shows, and does not obey."""

from __future__ import annotations

__all__ = ["printable"]

_SHOWN = "\n\t"


def printable(text: object, limit: int = 10_000) -> str:
    """The text with every character that is not a visible one spelled out, such as `\\x1b`; cut after `limit`.

    Escape sequences, carriage returns, characters that turn the direction of writing and halves of surrogate pairs
    come from names in files. Line ends and tabs stay.
    """
    found = str(text)
    cut = "" if len(found) <= limit else f"... ({len(found)} characters)"
    found = found[:limit]
    if found.isascii() and found.isprintable():
        return found + cut
    return "".join(c if c.isprintable() or c in _SHOWN else _spelled(c) for c in found) + cut


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
