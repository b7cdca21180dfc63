"""Numbers of bytes as people write them: `64K`, `1M`, `1.5G`."""

from __future__ import annotations

import argparse
import re

__all__ = ["parse_size", "show_size"]

_UNITS = "KMGT"


def parse_size(text: str | int) -> int:
    """The number of bytes; K, M, G and T are powers of 1024. Any other text is an error of argparse that says why."""
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*([{_UNITS}]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    if found is None or isinstance(text, bool):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of bytes such as 4096, 64K, 1M or 1.5G")
    size = float(found[1]) * 1024 ** (_UNITS.find(found[2].upper()) + 1 if found[2] else 0)
    if size < 1 or size != int(size):
        raise argparse.ArgumentTypeError(f"{text!r} is {size:g} bytes; expected a whole number from 1 up")
    return int(size)


def show_size(size: int) -> str:
    """The shortest text that `parse_size` reads as this number."""
    for power in range(len(_UNITS), 0, -1):
        if size % 1024**power == 0:
            return f"{size // 1024**power}{_UNITS[power - 1]}"
    return str(size)
