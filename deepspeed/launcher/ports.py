"""The port at which rank 0 waits for the others: is it free here, and if not, one that is."""

from __future__ import annotations

import errno
import socket

from deepspeed.launcher.errors import LaunchError

__all__ = ["check_port", "free_port", "is_free"]


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
                raise LaunchError(
                    f"--master_port {port}: this user may not listen there; use a port above 1023"
                ) from error
            # Otherwise this machine does not speak that protocol, which is no obstacle.
    return True


def free_port() -> int:
    """A port that nobody listens at now."""
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
        if is_free(port):
            return port


def check_port(port: int) -> None:
    """An error if rank 0 could not listen at this port."""
    if not 0 < port < 2**16:
        raise LaunchError(f"--master_port {port} is not a port; use one from 1 to 65535")
    if not is_free(port):
        raise LaunchError(
            f"--master_port {port} is in use on this machine, perhaps by another job. Give a port that is free, such "
            f"as --master_port {free_port()}, or on a single node leave the option out: a free one is then chosen."
        )
