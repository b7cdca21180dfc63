"""The `memory` section: how many bytes of model states each tier may hold; and sizes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from .model import Section
from .values import Folder

__all__ = ["Bytes", "MemoryConfig", "read_size", "size_text"]

_PREFIXES = "KMGTP"
_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate(_PREFIXES, 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate(_PREFIXES, 1)},
}
_TEXT = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]+)", re.ASCII)
_EXPECTED = 'bytes as a whole number, or a size with its unit such as "70GB" or "64GiB"'


def read_size(value: Any) -> int:
    """Bytes, from a whole number of them or from text: KB, MB, GB, TB and PB count by 1000, KiB to PiB by 1024."""
    if isinstance(value, str):
        found = _TEXT.fullmatch(value.strip())
        unit = _UNITS.get(found[2].upper()) if found else None
        if found is None or unit is None:
            raise ValueError(f"expected {_EXPECTED}, found {value!r}")
        return int(Decimal(found[1]) * unit)
    whole = not isinstance(value, bool) and isinstance(value, (int, float)) and value == value // 1
    if not whole or value < 0:
        raise ValueError(f"expected {_EXPECTED}, found {value!r}")
    return int(value)


def size_text(nbytes: int) -> str:
    """A size for a reader, in units of 1000."""
    power = min((len(str(nbytes)) - 1) // 3, len(_PREFIXES))
    return f"{nbytes / 1000**power:.2f} {_PREFIXES[power - 1]}B" if power else f"{nbytes} B"


Bytes = Annotated[
    int,
    BeforeValidator(read_size),
    Ge(0),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^\s*[0-9]"}]}),
]
"""A number of bytes, or text that says one."""


class MemoryConfig(Section):
    """Budgets of the tiers that hold masters, moments, gradients and sharded parameters: the fastest is filled first.

    A size is a whole number of bytes or text such as "70GB" (1000³) or "64GiB" (1024³).
    """

    device: Bytes | None = Field(
        None, description="Bytes of every rank's device that model states may take; null is no limit."
    )
    host: Bytes | None = Field(
        None, description="Bytes of a machine's memory for them, which its ranks share equally; null is no limit."
    )
    disk: Bytes | None = Field(
        None, description="Bytes of a machine's disk for them, shared likewise; null is no disk. It needs path."
    )
    path: Folder = Field(None, description="Folder on a local disk for what disk holds; needed with disk.")

    @model_validator(mode="after")
    def _disk_has_a_path(self) -> MemoryConfig:
        if self.disk and self.path is None:
            raise ValueError(
                f"disk is {size_text(self.disk)} but path is not given or empty; set path to a folder on that disk"
            )
        if self.path is not None and self.disk is None:
            raise ValueError(f"path is {str(self.path)!r} but disk is not given; set disk to what may be used there")
        return self
