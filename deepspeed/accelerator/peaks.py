"""What devices are said to be able to do: dense products of 16-bit numbers, without sparsity."""

from __future__ import annotations

# Part of the device's name → operations per second, as its maker states them; the first that fits counts.
_PEAKS = {
    "B200": 2250e12,
    "GB200": 2500e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


def peak_flops(name: str) -> float | None:
    """Operations per second of a device with such a name; None if it is not known."""
    words = name.replace("-", " ")
    return next((peak for part, peak in _PEAKS.items() if f" {part} " in f" {words} "), None)
