"""Versions: what ranks exchange and save must mean the same to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed.launcher.facts import versions
from deepspeed.preflight.check import Check, Here
from deepspeed.preflight.finding import Finding, Level, Told, among, odd_ones, who

__all__ = ["VersionFact", "Versions"]

_MUST_AGREE = ("deepspeed", "torch", "torch built for CUDA", "torch built for ROCm", "nccl")
_SHOWN = ("python", "torch", "deepspeed", "nccl", "NVIDIA driver")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class VersionFact:
    """Name → version."""

    versions: dict[str, str | None]


class Versions(Check[VersionFact]):
    """Python, torch, this package, NCCL and the driver are the same everywhere."""

    name = "versions"
    about = "python, torch, deepspeed, NCCL, driver and libraries are equal"
    fact = VersionFact

    def gather(self, here: Here) -> VersionFact:
        return VersionFact({**versions(), "NVIDIA driver": driver_version(_DRIVER)})

    def judge(self, told: Sequence[Told[VersionFact]]) -> list[Finding]:
        found = []
        for name in dict.fromkeys(name for each in told for name in each.fact.versions):
            usual, others = odd_ones({each.rank: each.fact.versions.get(name) for each in told})
            for value, ranks in others.items():
                place = who(among(told, ranks))
                level = Level.PROBLEM if name in _MUST_AGREE else Level.WARNING
                what = f"{name} is {value or 'absent'} for {place}, and {usual or 'absent'} for the others"
                advice = f"install {name} {usual} there" if usual else f"remove {name} there, or install it everywhere"
                found.append(Finding(level, what, tuple(ranks), advice))
        if found:
            return found
        first = told[0].fact.versions
        shown = ", ".join(f"{name} {first[name]}" for name in _SHOWN if first.get(name))
        return [Finding(Level.OK, shown)]


def driver_version(file: Path) -> str | None:
    """The version that NVIDIA's kernel module tells of itself."""
    try:
        first = file.read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return None
    return next((word for word in first.split() if word[0].isdigit() and "." in word), None)
