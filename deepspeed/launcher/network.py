"""The network interfaces of this machine, read from the kernel; empty answers where it does not tell."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Interface", "interfaces", "suggested"]

_SIOCGIFADDR = 0x8915
_IFF_UP = 0x1
_IFF_LOOPBACK = 0x8
_DOWN = ("down", "lowerlayerdown", "notpresent", "dormant")
# Made by container engines and hypervisors: ranks on other machines are not reached through them.
_VIRTUAL = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "ifb", "dummy", "tunl", "podman")


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface; `up` is None where the system does not say."""

    name: str
    up: bool | None
    loopback: bool
    addresses: tuple[str, ...]
    speed_mbit: int | None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # many of these files answer EINVAL while the interface is down
        return ""


def _names() -> list[str]:
    try:
        return [name for _, name in socket.if_nameindex()]
    except OSError:
        return []


def ipv4_address(name: str) -> str | None:
    """The main IPv4 address of an interface, asked from the kernel (Linux only)."""
    if sys.platform != "linux":
        return None
    import fcntl  # not on every system

    request = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_addresses(table: Path) -> dict[str, list[str]]:
    """Interface name → IPv6 addresses, from lines of: 32 hex digits, index, prefix, scope, flags, name."""
    found: dict[str, list[str]] = {}
    for line in _read(table).splitlines():
        words = line.split()
        if len(words) == 6 and len(words[0]) == 32:
            found.setdefault(words[5], []).append(str(ipaddress.IPv6Address(int(words[0], 16))))
    return found


def interfaces(
    names: Iterable[str] | None = None,
    root: Path = Path("/sys/class/net"),
    inet6: Path = Path("/proc/net/if_inet6"),
    ipv4: Callable[[str], str | None] = ipv4_address,
) -> tuple[Interface, ...]:
    """Every interface in the kernel's order; the arguments replace the kernel's answers."""
    v6 = _ipv6_addresses(inet6)
    found = []
    for name in _names() if names is None else names:
        flags = _read(root / name / "flags")
        bits = int(flags, 16) if flags.startswith("0x") else None
        state = _read(root / name / "operstate")
        up = None if bits is None else bool(bits & _IFF_UP) and state not in _DOWN
        speed = _read(root / name / "speed")
        v4 = ipv4(name)
        addresses = (*([v4] if v4 else []), *v6.get(name, ()))
        found.append(
            Interface(
                name=name,
                up=up,
                loopback=bool(bits & _IFF_LOOPBACK) if bits is not None else name.startswith("lo"),
                addresses=addresses,
                speed_mbit=int(speed) if speed.isdigit() and int(speed) > 0 else None,
            )
        )
    return tuple(found)


def suggested(found: Iterable[Interface]) -> str | None:
    """The interface that other machines most likely reach: the fastest that is up and has an address."""
    usable = [
        each
        for each in found
        if each.up and not each.loopback and each.addresses and not each.name.startswith(_VIRTUAL)
    ]
    best = max(usable, key=lambda each: each.speed_mbit or 0, default=None)
    return best.name if best else None
