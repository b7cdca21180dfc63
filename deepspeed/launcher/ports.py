"""The port at which rank 0 waits for the others, held by one launcher at a time from its choice to the job's end.

[Note: the claim] A launcher holds the UDP port of the same number on the loopback address: the kernel gives it to one
process, whichever user it belongs to, and takes it back however the process ends. Rank 0's own TCP port is free of it.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from deepspeed.launcher.errors import LaunchError

DEFAULT_PORT = 29500
# Systems give higher ones to outgoing connections, any of which could take the port before rank 0 does.
_LAST_PORT = 32767


@contextmanager
def claim_port(port: int) -> Iterator[int]:
    """The port, or the first free one from 29500 on if it is 0; no other launcher gets it while this is open."""
    if not 0 <= port < 2**16:
        raise LaunchError(f"--master_port {port} is not a port; use one from 1 to 65535, or 0 for one that is free")
    for candidate in (port,) if port else range(DEFAULT_PORT, _LAST_PORT + 1):
        holder = _claim(candidate)
        if holder is not None:
            with holder:
                yield candidate
            return
    if port == 0:
        raise LaunchError(f"every port from {DEFAULT_PORT} to {_LAST_PORT} is in use; choose one with --master_port")
    raise LaunchError(
        f"--master_port {port} is in use on this machine, perhaps by another job. Give a port that is free, such "
        f"as --master_port {free_port()}, or on a single node leave the option out: a free one is then chosen."
    )


def _claim(port: int) -> socket.socket | None:
    """What holds the port for this process; None if another launcher holds it or somebody listens there."""
    with ExitStack() as stack:
        holder = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        try:
            holder.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno == errno.EACCES:
                raise _forbidden(port) from error
            return None
        if not is_free(port):
            return None
        stack.pop_all()
        return holder


def is_free(port: int) -> bool:
    """True if a server could listen at this port on all addresses of this machine."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # As the store of torch does: connections of a finished job that still linger do not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            if error.errno == errno.EACCES:
                raise _forbidden(port) from error
            # Otherwise this machine does not speak that protocol, which is no obstacle.
    return True


def free_port() -> int:
    """A port that nobody listens at now; another process may take it before it is used."""
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
        if is_free(port):
            return port


def _forbidden(port: int) -> LaunchError:
    return LaunchError(f"--master_port {port}: this user may not listen there; use a port above 1023")
