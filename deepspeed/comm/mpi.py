"""Asking the MPI library itself (mpi4py) for what its launcher's variables do not tell."""

from __future__ import annotations

import socket
from typing import Any

from deepspeed.comm.discover import LOOPBACK, RankFacts
from deepspeed.errors import RendezvousError

__all__ = ["ask_mpi", "facts_of"]


def ask_mpi(port: int) -> RankFacts:
    """The facts that MPI knows; a collective of all its ranks. Needs mpi4py."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RendezvousError(
            "this is an MPI job whose variables do not tell where rank 0 runs, or this process's local rank, and "
            "mpi4py, which could ask, is not installed. Install mpi4py, or set MASTER_ADDR to the host of rank 0 "
            "and LOCAL_RANK on every rank (mpirun -x MASTER_ADDR=…)."
        ) from error
    return facts_of(MPI.COMM_WORLD, MPI.COMM_TYPE_SHARED, port)


def facts_of(world: Any, shared: int, port: int) -> RankFacts:
    """Rank and size of an MPI communicator; local ones among those that share memory; address told by rank 0."""
    rank, size = world.Get_rank(), world.Get_size()
    node = world.Split_type(shared)
    local_rank, local_size = node.Get_rank(), node.Get_size()
    node.Free()
    address = world.bcast(own_address() if rank == 0 and size > local_size else LOOPBACK, root=0)
    return RankFacts(rank, size, local_rank, local_size, address, port, "mpi4py")


def own_address() -> str:
    """This machine's address as others see it; connecting a datagram socket picks it and sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return str(probe.getsockname()[0])
        except OSError:  # no route: the name is all there is
            return socket.gethostname()
