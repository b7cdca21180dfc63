"""Memory of a host as a process may use it: what the machine has free, within the limits of its container."""

from __future__ import annotations

from pathlib import Path

from deepspeed.accelerator.host import HostMemory

__all__ = ["available_memory", "container_room"]

_TREES = (
    # the tree, the file of the limit, the file of the use: version 2 and version 1
    ("", "memory.max", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def available_memory() -> int:
    """Bytes that can be allocated on this host without swapping, and without the end of the container."""
    free = HostMemory().available()
    room = container_room()
    return free if room is None else min(free, room)


def container_room(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes until the nearest limit of this process's control groups; None without any."""
    rooms = []
    for folder, limit_name, use_name in _TREES:
        tree = root / folder
        place = tree / _own_group(own, folder).lstrip("/")
        for level in (place, *place.parents):
            if level != tree and tree not in level.parents:
                break
            limit, use = _number(level / limit_name), _number(level / use_name)
            if limit is not None and use is not None and limit < 2**60:  # version 1 writes a huge number for no limit
                rooms.append(max(0, limit - use))
    return min(rooms, default=None)


def _own_group(file: Path, controller: str) -> str:
    """The path of this process in a tree, `/` where it is not told or belongs to another view of the tree."""
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return "/"
    for line in lines:
        _, names, path = [*line.split(":", 2), "", "", ""][:3]
        if (names == "" and not controller) or (controller and controller in names.split(",")):
            return "/" if ".." in path.split("/") else path
    return "/"


def _number(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return None
    return int(text) if text.isdigit() else None
