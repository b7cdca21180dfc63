"""`link_bytes`: what an operation sends over links within nodes and between them, by the ranks of its group.

A collective is taken for a ring that visits one node after the other, as backends build it; an exchange sends each
message straight to its rank. So n ranks on N nodes have N links of a ring between nodes, none if N is 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple


class LinkBytes(NamedTuple):
    """Bytes that one rank of a group sends, the mean over its ranks; as many come to it."""

    within: float = 0.0
    """To ranks of the same node."""
    between: float = 0.0
    """To ranks of other nodes; times the ranks of a node: into the node from outside."""

    @property
    def total(self) -> float:
        """To any rank."""
        return self.within + self.between


_SHARDS = (  # the message is the shard of one rank
    *("all_gather", "all_gather_into_tensor", "all_gather_coalesced"),
    *("reduce_scatter", "reduce_scatter_tensor"),
)
_CUT = ("reduce_scatter_coalesced",)  # the message is cut into shards
_REDUCTIONS = ("all_reduce", "all_reduce_coalesced", "inference_all_reduce")
_CHAINS = ("broadcast", "broadcast_coalesced", "reduce")
_PARTS = ("all_to_all", "all_to_all_single", "gather", "scatter")  # of one rank or each for the others
_WHOLE = ("gather_parts",)  # of each for each
_MESSAGES = ("send", "recv", "isend", "irecv")


def link_bytes(operation: str, size: int, ranks: Sequence[int], per_node: int) -> LinkBytes:
    """Of an operation with a message of `size` bytes, as the dispatcher records it, among `ranks` of the world.

    The ranks of a node are consecutive, `per_node` of them. For n ranks and a message of S bytes each link of the ring
    carries (n − 1) S in a gather or reduce-scatter whose message is a shard, (n − 1)/n S if the message is cut, and
    twice that in an all-reduce. A broadcast or reduce is the ring without its last link, with S on each. In an
    all-to-all each pair of ranks exchanges S/n. Of a message both ranks count a half, and a batch of them is a ring
    that sends half of it. What has no size that is known before, such as objects, counts nothing.
    """
    n = len(ranks)
    if n < 2:
        return LinkBytes()
    # Without a call of Python for each rank, of which there may be thousands.
    nodes = Counter(map(per_node.__rfloordiv__, ranks))
    near = sum(map(mul, nodes.values(), nodes.values())) - n
    crossing = len(nodes) if len(nodes) > 1 else 0
    if operation in _PARTS or operation in _WHOLE:
        each = size / n if operation in _PARTS else size
        return LinkBytes(near * each / n, (n * (n - 1) - near) * each / n)
    if operation in _CHAINS:
        return LinkBytes((n - len(nodes)) * size / n, (len(nodes) - 1) * size / n)
    if operation in _SHARDS:
        carried: float = (n - 1) * size
    elif operation in _CUT:
        carried = (n - 1) * size / n
    elif operation in _REDUCTIONS:
        carried = 2 * (n - 1) * size / n
    elif operation in _MESSAGES or operation == "batch_isend_irecv":
        carried = size / 2
    else:
        return LinkBytes()
    return LinkBytes((n - crossing) * carried / n, crossing * carried / n)
