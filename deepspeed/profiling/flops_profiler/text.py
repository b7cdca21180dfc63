"""Numbers as people read them: 1.23 M, 4.5 GMACs, 12 ms."""

from __future__ import annotations

__all__ = [
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]

_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """The number with a prefix: the one given, or the largest that leaves at least 1 before the point."""
    if units is None:
        units = next((unit for unit, size in _UNITS.items() if num >= size), "u") if num > 0 else ""
    return f"{round(num / _UNITS.get(units, 1.0), precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Operations per second."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Multiplications with an addition."""
    return f"{number_to_string(macs, units, precision)}MACs"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """Bytes, in powers of a thousand."""
    return f"{number_to_string(b, units, precision)}B"


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds."""
    return f"{number_to_string(duration, units, precision)}s"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Parameters, a billion of which are 1 B."""
    wanted = None if units is None else units.replace("B", "G")
    return number_to_string(params_num, wanted, precision).replace("G", "B").strip()
