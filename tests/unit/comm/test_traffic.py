"""Bytes over links, held against messages that are sent one by one between pretended ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from deepspeed.comm.operations import OPERATIONS
from deepspeed.comm.records import LinkBytes, link_bytes

S = 720  # bytes, divisible by every number of ranks below
GROUPS: tuple[tuple[Sequence[int], int], ...] = (
    (range(8), 8),
    (range(8), 4),
    (range(8), 2),
    (range(8), 1),
    ((0, 4), 4),
    ((3, 4, 5), 4),
    (range(1, 16, 2), 4),
)

Hops = Iterator[tuple[int, int, float]]


def ring(n: int, rounds: int, size: float) -> Hops:
    for _ in range(rounds):
        for place in range(n):
            yield place, (place + 1) % n, size


def messages(operation: str, n: int) -> Hops:
    """(from, to, bytes) of the algorithm, between places in the group."""
    if operation in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        yield from ring(n, n - 1, S)
    elif operation == "reduce_scatter_coalesced":
        yield from ring(n, n - 1, S / n)
    elif operation == "all_reduce":
        yield from ring(n, 2 * (n - 1), S / n)
    elif operation == "broadcast":
        yield from ((place, place + 1, S) for place in range(n - 1))
    else:
        size = S / n if operation == "all_to_all_single" else S
        yield from ((one, other, size) for one in range(n) for other in range(n) if one != other)


@pytest.mark.parametrize(
    "operation",
    [
        *("all_gather_into_tensor", "reduce_scatter_tensor", "reduce_scatter_coalesced"),
        *("all_reduce", "broadcast", "all_to_all_single", "gather_parts"),
    ],
)
def test_is_what_the_algorithm_sends(operation):
    for ranks, per_node in GROUPS:
        sums = {True: 0.0, False: 0.0}
        for sender, receiver, size in messages(operation, len(ranks)):
            sums[ranks[sender] // per_node == ranks[receiver] // per_node] += size
        found = link_bytes(operation, S, ranks, per_node)
        assert found == pytest.approx((sums[True] / len(ranks), sums[False] / len(ranks))), (ranks, per_node)


def test_one_root_is_the_mean_over_roots():
    for operation in ("gather", "scatter"):
        assert link_bytes(operation, S, range(8), 4) == pytest.approx((3 * S / 8, 4 * S / 8))


def test_messages_count_half_on_each_side():
    for operation in ("send", "recv", "isend", "irecv"):
        assert link_bytes(operation, S, (3, 4), 8) == LinkBytes(S / 2, 0)
        assert link_bytes(operation, S, (3, 4), 4) == LinkBytes(0, S / 2)
    assert link_bytes("batch_isend_irecv", S, range(4), 2) == LinkBytes(S / 4, S / 4)


def test_every_operation_with_a_size_counts():
    silent = {"barrier", "monitored_barrier", "broadcast_object_list", "all_gather_object"}
    for operation in OPERATIONS:
        assert (link_bytes(operation, S, range(4), 2).total == 0) == (operation in silent), operation
        assert link_bytes(operation, S, (2,), 2) == LinkBytes()
