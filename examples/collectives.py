"""Every collective between the ranks of this job, with its latency and bandwidth as the comms logger sees them.

python -m torch.distributed.run --standalone --nproc-per-node 2 examples/collectives.py
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

SIZES = (1024, 64 * 1024, 1024 * 1024)  # bytes of the message
WARM_UP, REPEATS = 3, 10


def operations(size: int) -> dict[str, Callable[[], object]]:
    """One call of each collective with a message of `size` bytes (a gather's message is one rank's shard)."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    device = dist.group_device()
    message = torch.ones(size // 4, device=device)
    shards = [torch.empty_like(message) for _ in range(ranks)]
    whole = torch.empty(ranks * message.numel(), device=device)
    parts = list(torch.ones(ranks * (message.numel() // ranks), device=device).chunk(ranks))
    blocks = torch.cat(parts)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks

    def ring() -> None:
        sent = dist.P2POp(dist.isend, message, after)
        received = dist.P2POp(dist.irecv, shards[0], before)
        for handle in dist.batch_isend_irecv([sent, received]):
            handle.wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(message),
        "reduce": lambda: dist.reduce(message, 0),
        "broadcast": lambda: dist.broadcast(message, 0),
        "all_gather": lambda: dist.all_gather(shards, message),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, message),
        "reduce_scatter": lambda: dist.reduce_scatter(message, shards),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(message, whole),
        "all_to_all": lambda: dist.all_to_all([torch.empty_like(part) for part in parts], parts),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(blocks), blocks),
        "gather": lambda: dist.gather(message, shards if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(message, shards if rank == 0 else None, 0),
    }
    if ranks > 1:  # a rank sends nothing to itself
        calls["batch_isend_irecv"] = ring
    return calls


def measure() -> None:
    """Run everything; the comms logger listens only after the warm-up, so that connections are not measured."""
    for size in SIZES:
        for run in operations(size).values():
            dist.configure(enabled=False)
            for _ in range(WARM_UP):
                run()
            dist.barrier()
            dist.configure(enabled=True)
            for _ in range(REPEATS):
                run()
    for _ in range(REPEATS):
        dist.barrier()
    dist.configure(enabled=False)


def show(console: Console) -> None:
    table = Table(title="mean of the calls without the fastest and the slowest tenth", header_style="bold")
    table.add_column("collective", no_wrap=True)
    for title in ("message", "latency ms", "alg. Gbit/s", "bus Gbit/s"):
        table.add_column(title, justify="right")
    for op in dist.get_logged_comm_ops():
        for index, row in enumerate(dist.comms_logger.get_operation_summary(op).values()):
            numbers = (row["avg_latency_ms"], row["tput_avg_gbps"], row["busbw_avg_gbps"])
            table.add_row(op if index == 0 else "", row["msg_size_str"], *(f"{number:.3f}" for number in numbers))
        table.add_section()
    console.print(table)


def join() -> None:
    """One device per rank and its own backend where there are enough of them; else the host's memory and gloo."""
    accelerator = get_accelerator()
    enough = accelerator.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if enough:
        accelerator.set_device(dist.get_local_rank())
    dist.init_distributed(None if enough else "gloo", verbose=False)


def main() -> None:
    join()
    console = Console(quiet=dist.get_rank() != 0)
    console.print(
        f"{dist.get_world_size()} ranks, backend {dist.get_backend()}: each collective of deepspeed.comm "
        f"{REPEATS} times with messages of {', '.join(f'{size // 1024} KB' for size in SIZES)}, "
        "measured by the comms logger on rank 0"
    )
    measure()
    show(console)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
