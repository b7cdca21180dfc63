"""Describes the machine that was measured: what matters for speed, nothing that identifies it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

__all__ = ["cpu_model", "describe"]


def cpu_model() -> str:
    """The processor's name as the system gives it, or the architecture."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", information.read_text(errors="replace"), re.MULTILINE)
        if found:
            return found.group(1).strip()
    if shutil.which("lscpu"):
        # ARM kernels give numbers only; lscpu knows their names
        text = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
        found = re.search(r"^Model name:\s*(.+)$", text, re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def describe() -> dict[str, str | int | float]:
    """Cores, processor, memory, system, Python."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "cpu": cpu_model(),
        "architecture": platform.machine(),
        "memory_gib": round(memory, 1),
        "system": platform.system(),
        "python": platform.python_version(),
    }
