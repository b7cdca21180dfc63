"""The hostfile: one `<host> slots=<count>` per line, in the order of the nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.resources import MOST_SLOTS, count_of
from deepspeed.log import logger
from deepspeed.trust import read_regular

__all__ = ["fetch_hostfile", "parse_hostfile"]

_MOST_BYTES = 2**24
_LINE = re.compile(r"^(\S+)\s+slots=(\d+)", re.ASCII)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Host → slots as the file says; None, with a warning, where there is no such file."""
    path = Path(hostfile_path)
    if not path.is_file():
        logger.warning("there is no hostfile %s: only this machine is used", hostfile_path)
        return None
    try:
        lines = read_regular(path, _MOST_BYTES).decode("utf-8").splitlines()
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
                f"{name}, line {number}: {line!r:.200} does not name a host and its slots; "
                "write lines such as: worker-1 slots=8"
            )
        if match[1] in hosts:
            raise LaunchError(
                f"{name}, line {number}: host {match[1]!r:.200} is listed twice; give it one line with all its slots"
            )
        slots = count_of(match[2])
        if slots is None:
            raise LaunchError(
                f"{name}, line {number}: host {match[1]!r:.200} has slots={match[2]:.20}, more than a host can have "
                f"({MOST_SLOTS}); write how many ranks it runs"
            )
        hosts[match[1]] = slots
    if not hosts:
        raise LaunchError(f"{name} lists no host; write lines such as: worker-1 slots=8")
    return hosts
