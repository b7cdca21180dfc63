"""Python's collector at rest while torch is imported, which makes objects by the hundred thousand and no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["resting"]


@contextmanager
def resting() -> Iterator[None]:
    """While open nothing is collected; afterwards it is as it was."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
