"""From a config and a model of Transformers to a forward over sequences that ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.log import log_dist
from deepspeed.parallel import AxisGroup, ParallelLayout
from deepspeed.parallel.rng import rank_generator
from deepspeed.sequence.attention import SequenceAttention, SequenceGroups
from deepspeed.sequence.exchange import head_plan
from deepspeed.sequence.inputs import SequenceInputs, TokenOrder, mean_over_tokens, sum_over_ranks
from deepspeed.transformers.attention import models_in, require_functions

if TYPE_CHECKING:
    from deepspeed.config.schema import Schema

Forward = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class SequenceSharing:
    """How the ranks of one engine share the sequences of a model."""

    inputs: SequenceInputs
    attention: SequenceAttention
    axis: AxisGroup
    worth: int
    """What gradients are divided by afterwards, of those that ranks of the axis bring."""


def share_sequences(
    schema: Schema,
    module: nn.Module,
    layout: ParallelLayout,
    stack: ExitStack,
    forward: Forward,
    heads: tuple[int, int] | None = None,
) -> Forward:
    """`forward` with whole sequences as arguments, of which each rank computes a part; itself where none is asked."""
    sharing = sharing_of(schema, module, layout, stack, heads)
    return forward if sharing is None else _SharedForward(forward, sharing, module)


def sharing_of(
    schema: Schema, module: nn.Module, layout: ParallelLayout, stack: ExitStack, heads: tuple[int, int] | None
) -> SequenceSharing | None:
    """Let a model compute attention over the ranks that the config names; None where it asks for none.

    `heads` are the query and key/value heads that a rank computes at least, where not each computes all of them.
    """
    axis, size = layout.sequence, schema.sequence_parallel_size or 1
    asked, ulysses = schema.sequence_parallel.attention, schema.sequence_parallel.ulysses_size
    if asked is None or size == 1:
        return None
    if axis.size != size:
        raise DeepSpeedConfigError(
            f"sequence_parallel_size is {size}, but the mpu or the mesh has {axis.size} sequence-parallel ranks. Let "
            "them agree, or leave one of them out.",
            path="sequence_parallel_size",
        )
    for model in models_in(module):
        require_functions(type(model), "Remove sequence_parallel_size and sequence_parallel.attention for this model.")
    queries, keys = _heads(module) if heads is None else heads
    order = choose_order(asked, ulysses, size, queries, keys)
    ways = _ways(axis, order)
    inputs = SequenceInputs(module, order, axis.rank)
    attention = SequenceAttention.install(module, ways, stack)
    log_dist(f"sequence parallelism: {_words(order, queries, keys)}", ranks=[0])
    return SequenceSharing(inputs, attention, axis, 1 if schema.gradient_allreduce_op == "sum" else size)


def choose_order(asked: str, ulysses: int | None, size: int, queries: int, keys: int) -> TokenOrder:
    """How many ranks exchange heads and how many pass keys on, of `size` in all.

    `auto` exchanges heads over as many ranks as share key/value heads out evenly, and passes keys on between these.
    """
    if ulysses is None:
        fits = [each for each in range(1, size + 1) if size % each == 0 and keys % each == 0]
        ulysses = {"ulysses": size, "ring": 1}.get(asked, max(fits))
    elif {"ulysses": ulysses != size, "ring": ulysses != 1}.get(asked, size % ulysses != 0):
        raise DeepSpeedConfigError(
            f"sequence_parallel.ulysses_size is {ulysses}, with sequence_parallel.attention {asked} over {size} ranks; "
            f"it must divide {size}, and anything but 'auto' decides it by itself. Correct it or leave it out.",
            path="sequence_parallel.ulysses_size",
        )
    head_plan(queries, keys, ulysses)
    return TokenOrder(ulysses, size // ulysses)


def _ways(axis: AxisGroup, order: TokenOrder) -> SequenceGroups:
    if order.ring == 1:
        return SequenceGroups(order, axis.group)
    if order.ulysses == 1:
        return SequenceGroups(order, None, axis)
    across, near = axis.split(size=order.ulysses)
    for each in (near, across):
        _ = each.group  # made now, by all ranks together
    return SequenceGroups(order, near.group, across)


def _words(order: TokenOrder, queries: int, keys: int) -> str:
    heads = f"{queries} query and {keys} key/value heads"
    if order.ring == 1:
        return f"Ulysses over {order.ulysses} ranks, {heads}"
    ulysses = f"Ulysses over {order.ulysses} × " if order.ulysses > 1 else ""
    return f"{ulysses}ring attention over {order.ring} ranks in zig-zag order, {heads}"


def _heads(module: nn.Module) -> tuple[int, int]:
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    queries = getattr(text, "num_attention_heads", None)
    if queries is None:
        raise UsageError(
            f"sequence_parallel.attention needs a model of Transformers; {type(module).__name__} has no config that "
            "tells its attention heads. Leave it out and use deepspeed.sequence.layer.DistributedAttention."
        )
    if getattr(text, "multi_query", False):
        return queries, 1
    return queries, getattr(text, "num_key_value_heads", None) or queries


class _SharedForward:
    """Calls the model with this rank's part, and makes the loss that of all parts."""

    def __init__(self, forward: Forward, sharing: SequenceSharing, module: nn.Module) -> None:
        self._forward, self._inputs, self._attention = forward, sharing.inputs, sharing.attention
        self._module = module
        self._axis, self._worth = sharing.axis, sharing.worth
        self._compared = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._compared:
            require_same((*args, *kwargs.values()), self._axis)  # once: the host waits for it
            self._compared = True
        part = self._inputs.part(args, kwargs)
        self._attention.current = part.whole
        self._attention.used = False
        try:
            # Tokens and heads of ranks are different ones: what is dropped of them must be, too.
            with rank_generator(self._axis) if self._module.training else nullcontext():
                outputs = self._forward(**part.arguments)
        finally:
            self._attention.current = None
        if not self._attention.used:
            raise UsageError(
                "the model's forward computed no attention over the sequence-parallel ranks, so that its parts of a "
                "sequence do not see each other. Leave sequence_parallel.attention out for this model."
            )
        if part.labels is None:
            return outputs
        return self._with_loss(outputs, part.labels, kwargs.get("num_items_in_batch"))

    def _with_loss(self, outputs: Any, labels: Tensor, items: Any) -> Any:
        loss = outputs[0] if isinstance(outputs, tuple) else outputs["loss"]
        group = self._axis.group
        if items is None:
            total = mean_over_tokens(loss, labels, group, self._worth)
        else:
            total = sum_over_ranks(loss, group, self._worth)
        if isinstance(outputs, tuple):
            return (total, *outputs[1:])
        outputs["loss"] = total
        return outputs


def require_same(values: Iterable[Any], axis: AxisGroup) -> None:
    """Raise unless all who share sequences have got the same ones; nothing would make sense otherwise."""
    tensors = [each for each in values if isinstance(each, Tensor) and not each.is_floating_point()]
    facts = [float(number) for each in tensors for number in (*each.shape, each.double().sum().item())]
    mine = torch.tensor([len(facts), sum(fact * (at + 1) for at, fact in enumerate(facts))], dtype=torch.float64)
    mine = mine.to(comm.group_device())
    both = torch.stack([mine, -mine])
    comm.all_reduce(both, comm.ReduceOp.MAX, group=axis.group)
    if not torch.equal(both[0], -both[1]):
        raise UsageError(
            f"rank {comm.get_rank()}: the ranks {list(axis.ranks)} share each sequence but were called with "
            "different ones. Give them the same samples: let the loader know the data-parallel rank and size "
            "(engine.deepspeed_io does), or cut the batches before (UlyssesSPDataLoaderAdapter)."
        )
