"""Processes of this host as other processes see them: Linux's /proc."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path


def supported() -> bool:
    """Whether this system has memory files and tells about processes: Linux."""
    return hasattr(os, "memfd_create") and Path("/proc/self/stat").exists()


def host_name() -> str:
    """This host for people."""
    return socket.gethostname()


def host_key() -> str:
    """What processes share that can see each other: kernel, processes and network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    spaces = "-".join(re.sub(r"\D", "", os.readlink(f"/proc/self/ns/{kind}")) for kind in ("pid", "net"))
    return f"{host_name()}-{boot}-{spaces}"


def process_state(pid: int) -> tuple[str, str] | None:
    """State letter and start time of a process; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


def has_ended(pid: int, started: str) -> bool:
    """Whether the process that began then is gone, or only its exit status is left."""
    found = process_state(pid)
    return found is None or found[1] != started or found[0] in "ZX"
