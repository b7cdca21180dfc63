"""The hostfile: one `<host> slots=<count>` per line, in the order of the nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from deepspeed.launcher.errors import LaunchError
from deepspeed.log import logger

__all__ = ["fetch_hostfile", "parse_hostfile"]

_LINE = re.compile(r"^(\S+)\s+slots=(\d+)", re.ASCII)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Host → slots as the file says; None, with a warning, where there is no such file."""
    path = Path(hostfile_path)
    if not path.is_file():
        logger.warning("there is no hostfile %s: only this machine is used", hostfile_path)
        return None
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"the hostfile {hostfile_path} cannot be read: {error}") from error
    return parse_hostfile(lines, hostfile_path)


def parse_hostfile(lines: Iterable[str], name: str = "hostfile") -> dict[str, int]:
    """Host → slots; blank lines and lines that begin with # are skipped, text after the slots is ignored."""
    hosts: dict[str, int] = {}
    for number, text in enumerate(lines, 1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise LaunchError(
                f"{name}, line {number}: {line!r} does not name a host and its slots; "
                "write lines such as: worker-1 slots=8"
            )
        if match[1] in hosts:
            raise LaunchError(
                f"{name}, line {number}: host {match[1]!r} is listed twice; give each host one line with all its slots"
            )
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise LaunchError(f"{name} lists no host; write lines such as: worker-1 slots=8")
    return hosts
