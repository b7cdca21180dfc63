"""Assignments that tensor-parallel ranks have alike, dealt to these: each sends its part, and sums make it whole.

Gradients are means over the ranks, as those of data-parallel ones are: backward of `restore_combined` hands every rank
as many times the gradient as there are ranks, `average_gradient_over_tp` makes what went in whole again, and experts
whose gradients are averaged over these ranks have the right ones.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed import comm
from deepspeed.errors import CommError, UsageError
from deepspeed.fragments import deal
from deepspeed.moe.routing import places_within
from deepspeed.parallel.regions import Members, enter, leave, summed

__all__ = [
    "RestoreContext",
    "RoutedAssignmentPayload",
    "assert_tp_payload_consistent",
    "assignment_ordinals_by_expert",
    "average_gradient_over_tp",
    "dispatch_counters",
    "partition_assignments",
    "restore_combined",
]


@dataclass
class RoutedAssignmentPayload:
    """Assignments in the order in which they are sent; tensors are [assignments]."""

    token_indices: Tensor
    expert_indices: Tensor
    assignment_indices: Tensor
    capacity_slots: Tensor
    combine_weights: Tensor
    drop_mask: Tensor
    pad_mask: Tensor
    input_splits: list[int]
    """How many go to each rank of the experts, one behind the other."""
    output_splits: list[int]
    """How many come from each."""
    num_tokens: int | None = None
    """None: as many as the largest index tells."""


@dataclass
class RestoreContext:
    """What a rank's part was taken from."""

    original_payload: RoutedAssignmentPayload
    local_indices: Tensor
    """Which assignments of the whole this rank has."""
    tp_rank: int
    tp_size: int
    num_tokens: int
    counters: dict[str, int]


def assignment_ordinals_by_expert(expert_indices: Tensor) -> Tensor:
    """The place of each assignment among those of its expert: [2, 0, 2] → [0, 0, 1]."""
    _, numbers = expert_indices.reshape(-1).unique(return_inverse=True)
    return places_within(numbers, max(len(numbers), 1)).view_as(expert_indices)


def partition_assignments(
    payload: RoutedAssignmentPayload, *, tp_group: ProcessGroup | None, tp_rank: int, tp_size: int
) -> tuple[RoutedAssignmentPayload, RestoreContext]:
    """This rank's part, and what makes results whole.

    Of what goes to each rank of the experts every tensor-parallel rank takes a part, so that each knows how many come.
    """
    total = len(payload.token_indices)
    if sum(payload.input_splits) != total:
        raise UsageError(
            f"input_splits {payload.input_splits} sum to {sum(payload.input_splits)}, but there are {total} assignments"
        )
    if not 0 <= tp_rank < tp_size or (tp_group is not None and tp_group.size() != tp_size):
        known = "" if tp_group is None else f" of a group of {tp_group.size()}"
        raise UsageError(
            f"tp_rank is {tp_rank} and tp_size is {tp_size}{known}: ranks count from 0, in a group of as many"
        )
    device = payload.token_indices.device
    pieces, at = [], 0
    for size in payload.input_splits:
        start, stop = deal(size, tp_size)[tp_rank]
        pieces.append(torch.arange(at + start, at + stop, device=device))
        at += size
    local = torch.cat(pieces) if pieces else torch.arange(0, device=device)
    taken = {name: value[local] for name, value in _tensors(payload).items()}
    part = RoutedAssignmentPayload(
        **taken,
        input_splits=[len(piece) for piece in pieces],
        output_splits=[_share(size, tp_rank, tp_size) for size in payload.output_splits],
        num_tokens=payload.num_tokens,
    )
    counters = {"assignments": total, "local_assignments": len(local), "tp_size": tp_size}
    tokens = payload.num_tokens
    if tokens is None:
        tokens = int(payload.token_indices.max()) + 1 if total else 0
    return part, RestoreContext(payload, local, tp_rank, tp_size, tokens, counters)


def restore_combined(
    local_combined: Tensor, ctx: RestoreContext, *, tp_group: ProcessGroup | None, validate_coverage: bool = False
) -> Tensor:
    """[tokens, …]: what each rank combined of its assignments, summed over ranks.

    `validate_coverage` asks all ranks whether every assignment was somebody's, exactly once.
    """
    if ctx.tp_size == 1 or tp_group is None:
        return local_combined
    ranks = Members(tp_group)
    if validate_coverage:
        seen = torch.zeros(len(ctx.original_payload.token_indices), dtype=torch.int64, device=ctx.local_indices.device)
        seen[ctx.local_indices] = 1
        times = summed(seen, ranks)
        wrong = (times != 1).nonzero().view(-1)
        if len(wrong):
            place = int(wrong[0])
            raise CommError(
                f"{len(wrong)} of {len(seen)} assignments are not computed once: number {place} by {int(times[place])} "
                "ranks. All tensor-parallel ranks must partition the same assignments"
            )
    return enter(leave(local_combined, ranks), ranks)


def average_gradient_over_tp(tensor: Tensor, tp_group: ProcessGroup | None, tp_size: int) -> Tensor:
    """The tensor as it is; its gradient is the mean over tensor-parallel ranks."""
    if tp_size == 1 or tp_group is None:
        return tensor
    entered = enter(tensor, Members(tp_group))  # its gradient is the sum
    if entered.requires_grad:
        entered.register_hook(lambda grad: grad / tp_size)
    return entered


def dispatch_counters(ctx: RestoreContext) -> dict[str, int]:
    """How many assignments there are, and how many of them this rank has."""
    return dict(ctx.counters)


def assert_tp_payload_consistent(
    payload: RoutedAssignmentPayload, *, tp_group: ProcessGroup | None, tp_size: int
) -> None:
    """An error on every rank, with what differs, unless all ranks have the same assignments; hosts wait for it."""
    if tp_size == 1 or tp_group is None:
        return
    told: list[Any] = [None] * tp_size
    own = {name: _digest(value) for name, value in _tensors(payload).items()}
    comm.all_gather_object(told, {**own, "splits": f"{payload.input_splits} {payload.output_splits}"}, group=tp_group)
    for rank, other in enumerate(told):
        differ = [name for name, value in told[0].items() if other[name] != value]
        if differ:
            raise CommError(
                f"tensor-parallel rank {rank} has other assignments than rank 0: {', '.join(differ)} differ. Ranks "
                "that share layers must see the same tokens and draw the same numbers"
            )


def _tensors(payload: RoutedAssignmentPayload) -> dict[str, Tensor]:
    found = {field.name: getattr(payload, field.name) for field in fields(payload)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _share(size: int, rank: int, ranks: int) -> int:
    start, stop = deal(size, ranks)[rank]
    return stop - start


def _digest(values: Tensor) -> str:
    plain = values.detach().cpu().contiguous()
    content = hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{tuple(plain.shape)} {plain.dtype} {content}"
