"""Where the hosts of an elastic job meet: a store that one process keeps, and torch's rendezvous over it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from deepspeed.errors import RendezvousError

__all__ = ["RUN_ID", "address_towards", "meet", "open_store"]

RUN_ID = "ELASTIC_RUN_ID"  # the variable that names a job, where several share one store
_DEFAULT_ID = "deepspeed"
_COMING = 600  # seconds until enough hosts must have come, and until the store must be there
_ANSWER = 60  # seconds for one question to the store
_LAST_CALL = 10  # seconds that further hosts get once there are enough
_BEATS = (5, 3)  # seconds between signs of life in the rendezvous, and how many may be missing

# torch would keep the address of the first round's rank 0 for good, though that host may leave; and a host that comes
# later would wait for an address which is told only in the first round. The agent tells its own in every round.
_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def open_store(address: str, port: int, *, keep: bool) -> TCPStore:
    """The store at an address, or kept by this process; other hosts may come before the one that keeps it."""
    patience = timedelta(seconds=_ANSWER if keep else _COMING)
    try:
        store = TCPStore(address, port, is_master=keep, wait_for_workers=False, timeout=patience)
    except (DistError, RuntimeError, ValueError) as error:
        what = "could not be opened there" if keep else f"was not found within {_COMING} s"
        raise RendezvousError(
            f"the hosts of an elastic job meet at {address}:{port}, but the store {what}: {error}. The host there must "
            "run, and be reached from this one"
        ) from error
    store.set_timeout(timedelta(seconds=_ANSWER))
    return store


def meet(store: TCPStore, *, nodes: tuple[int, int], address: str) -> RendezvousHandler:
    """torch's rendezvous of the fewest to the most `nodes`; `address` is where others find this host."""
    os.environ[_NO_SHARED_STORE] = "1"
    run_id = os.environ.get(RUN_ID) or _DEFAULT_ID
    parameters = RendezvousParameters(
        "c10d",
        "",  # the store is there already
        run_id,
        *nodes,
        local_addr=address,
        join_timeout=_COMING,
        last_call_timeout=_LAST_CALL,
        keep_alive_interval=_BEATS[0],
        keep_alive_max_attempt=_BEATS[1],
    )
    return create_handler(store, C10dRendezvousBackend(store, run_id), parameters)


def address_towards(address: str, port: int) -> str:
    """The address of this machine on the way to another, which is also where that one finds this machine."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousError(
            f"this machine knows no way to {address}: {error}; give an address that it reaches"
        ) from error
