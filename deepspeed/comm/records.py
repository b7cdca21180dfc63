"""What is kept of an operation: the raw ring entry, its readable record, and the event for listeners.

[Note: bytes over links] A collective is taken for a ring that visits one node after the other, as backends build it; an
exchange sends each message straight to its rank. So n ranks on N nodes have N links of a ring between nodes, none if N
is 1.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch

from deepspeed.comm.operations import CommOperation

SHOWN = 8  # shapes kept of a list of tensors


class GroupRecord:
    """What the dispatcher knows of one process group; it never holds the group itself."""

    __slots__ = ("backend", "name", "next", "next_p2p", "off", "rank", "ranks", "returned", "returned_p2p", "title")

    def __init__(
        self, name: str, ranks: tuple[int, ...], rank: int, backend: str, off: dict[str, str], title: str = ""
    ) -> None:
        self.name = name
        self.title = title or name
        self.ranks = ranks
        self.rank = rank
        self.backend = backend
        self.off = off
        # itertools.count steps atomically, and collectives may come from the autograd threads as well.
        self.next: Callable[[], int] = itertools.count(1).__next__
        self.next_p2p: Callable[[], int] = itertools.count(1).__next__
        self.returned = 0
        self.returned_p2p = 0


@dataclass(frozen=True, slots=True)
class Several:
    """The outline of a list of tensors: the first shapes, how many there are, and all their elements."""

    shapes: tuple[torch.Size, ...]
    count: int
    numel: int


# [Note: ring entries] An entry is a plain tuple because building one costs a fifth of building any object with
# named fields, and every collective builds one. It holds shapes and a code object, never a tensor, a frame or a
# group, so that the ring keeps nothing of the user's alive. The fields, in order:
#   sequence, operation, group, shape or Several or type name, dtype, label, code of the caller, its instruction, peer
Entry = tuple[int, CommOperation, GroupRecord, Any, "torch.dtype | None", "str | None", CodeType, int, Any]


@dataclass(frozen=True, slots=True)
class CollectiveFinished:
    """One operation is done; emitted only while there is a listener. `bytes` is the message, `duration` is seconds."""

    op: str
    log_name: str
    bytes: int
    group_size: int
    duration: float
    label: str | None
    sequence: int
    caller: str
    prof: bool
    links: LinkBytes
    """What a rank of the group sends within its node and to others."""
    codec: str | None
    """What the message is encoded in."""


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """One operation of the ring buffer, readable. `returned` says the call gave control back to its caller."""

    sequence: int
    op: str
    p2p: bool
    group: str
    ranks: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    tensors: int
    dtype: str | None
    bytes: int
    peer: int | None
    label: str | None
    file: str
    line: int
    function: str
    returned: bool

    @property
    def what(self) -> str:
        """`float32[4, 8] (128 B)`, or how many tensors there are; empty where there is none."""
        if not self.tensors:
            return ""
        shapes = " ".join(str(list(shape)) for shape in self.shapes)
        more = f" … {self.tensors} tensors" if self.tensors > len(self.shapes) else ""
        return f"{self.dtype}{shapes}{more} ({self.bytes} B)"

    def __str__(self) -> str:
        peer = "" if self.peer is None else f" peer {self.peer}"
        label = "" if self.label is None else f" {self.label!r}"
        state = "" if self.returned else " (not returned)"
        kind = "p2p " if self.p2p else ""
        what = f" {self.what}" if self.what else ""
        where = f"{self.file}:{self.line} in {self.function}"
        return f"{kind}#{self.sequence} {self.op}{what}{peer}{label} group {list(self.ranks)} at {where}{state}"


def outline(message: object) -> tuple[Any, torch.dtype | None]:
    """Shape and dtype of what is not one tensor: a list of them, nothing, or something wrong."""
    if message is None:
        return None, None
    if isinstance(message, Sequence):
        try:
            numel = sum(map(torch.Tensor.numel, message))
        except TypeError:  # something in it is no tensor
            return type(message).__name__, None
        shapes = tuple([tensor.shape for tensor in message[:SHOWN]])
        return Several(shapes, len(message), numel), message[0].dtype if message else None
    return type(message).__name__, None


def size_of(message: object) -> int:
    """Bytes of a tensor or of a list of them; 0 for what has no size that is known before it is sent."""
    if isinstance(message, torch.Tensor):
        return message.numel() * message.element_size()
    if isinstance(message, (list, tuple)):
        return sum(size_of(item) for item in message)
    return 0


def shown_path(file: str) -> str:
    """A source file as people know it: relative where it lies below the current folder."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def line_of(code: CodeType, instruction: int) -> int:
    """The source line of an instruction; looked up late because finding it walks the code's line table."""
    for start, stop, line in code.co_lines():
        if start <= instruction < stop and line is not None:
            return line
    return code.co_firstlineno


def read(entry: Entry) -> OperationRecord:
    """The readable record of a raw entry."""
    sequence, operation, group, shape, dtype, label, code, instruction, peer = entry
    shapes: tuple[tuple[int, ...], ...] = ()
    tensors = numel = 0
    if isinstance(shape, Several):
        shapes, tensors, numel = tuple(map(tuple, shape.shapes)), shape.count, shape.numel
    elif isinstance(shape, torch.Size):
        shapes, tensors, numel = (tuple(shape),), 1, shape.numel()
    return OperationRecord(
        sequence=sequence,
        op=operation.name,
        p2p=operation.p2p,
        group=group.name,
        ranks=group.ranks,
        shapes=shapes,
        tensors=tensors,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        bytes=0 if dtype is None else numel * dtype.itemsize,
        peer=peer if isinstance(peer, int) else None,
        label=label,
        file=code.co_filename,
        line=line_of(code, instruction),
        function=code.co_name,
        returned=sequence <= (group.returned_p2p if operation.p2p else group.returned),
    )


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


SHARDS = (  # the message is the shard of one rank
    *("all_gather", "all_gather_into_tensor", "all_gather_coalesced"),
    *("reduce_scatter", "reduce_scatter_tensor"),
)
_CUT = ("reduce_scatter_coalesced",)  # the message is cut into shards
REDUCTIONS = ("all_reduce", "all_reduce_coalesced", "inference_all_reduce")
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
    if operation in SHARDS:
        carried: float = (n - 1) * size
    elif operation in _CUT:
        carried = (n - 1) * size / n
    elif operation in REDUCTIONS:
        carried = 2 * (n - 1) * size / n
    elif operation in _MESSAGES or operation == "batch_isend_irecv":
        carried = size / 2
    else:
        return LinkBytes()
    return LinkBytes((n - crossing) * carried / n, crossing * carried / n)
