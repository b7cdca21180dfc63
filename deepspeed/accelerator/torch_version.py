"""Which PyTorch is installed."""

from __future__ import annotations

import re

import torch

__all__ = ["required_torch_version"]


def _release(version: str | float) -> tuple[int, ...]:
    """The numbers in front without zeros at the end, "2.6.0a0+git1" → (2, 6): a nightly build counts as its release."""
    match = re.match(r"\d+(\.\d+)*", str(version))
    if match is None:
        raise ValueError(f"{version!r} is not a version; expected numbers such as '2.6'")
    numbers = [int(part) for part in match[0].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """True if PyTorch is at least `min_version` and at most `max_version`; give strings, as 2.10 is 2.1."""
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version needs a min_version, a max_version, or both")
    installed = _release(torch.__version__)
    enough = min_version is None or installed >= _release(min_version)
    return enough and (max_version is None or installed <= _release(max_version))
