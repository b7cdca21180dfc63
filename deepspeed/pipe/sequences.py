"""A model that was cut, over sequences that ranks share: parts of a batch, masks of the whole, the loss of all parts.

What attention must know of a whole sequence goes from stage to stage among the model's inputs: a layer that runs again
in backward, after other micro-batches, finds it there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from deepspeed.config.schema import Schema
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.parallel import ParallelLayout
from deepspeed.pipe.module import PipelineModule
from deepspeed.sequence.build import Sharing, require_same, sharing_of
from deepspeed.sequence.labels import mean_over_tokens
from deepspeed.sequence.whole import Whole
from deepspeed.tensor_parallel.draws import numbers_of_its_own
from deepspeed.zero.agreement import Hosts

__all__ = ["StageSequences", "share_stage_sequences"]

_WHOLE = "whole sequences"
"""Among the inputs of a model: rows, length, positions and padding before they were shared out."""


class StageSequences:
    """The sequences that a stage of this rank shares with others."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._compared: set[str] = set()

    def part(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of the arguments of a model, with what it must know of the whole."""
        self._compare("inputs", *inputs.values())
        part = self._sharing.inputs.part((), inputs)
        arguments = {name: value for name, value in part.arguments.items() if name != "use_cache"}
        tokens = arguments.get("input_ids", arguments.get("inputs_embeds"))
        assert tokens is not None, "a part has tokens"
        whole = (len(tokens), part.whole.length, inputs.get("position_ids"), inputs.get("attention_mask"))
        return {**arguments, _WHOLE: whole}

    @contextmanager
    def arguments(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What a model is called with; masks that it makes inside are those of whole sequences."""
        rows, length, positions, mask = inputs[_WHOLE]
        told = positions.expand(rows, length) if positions is not None and positions.dim() == 2 else positions
        attention = self._sharing.attention
        attention.current = Whole.of(length, told, None if mask is None else mask.bool())
        try:
            yield {name: value for name, value in inputs.items() if name != _WHOLE}
        finally:
            attention.current = None

    def numbers(self, layer: nn.Module) -> AbstractContextManager[None]:
        """A layer runs inside: tokens and heads of ranks are different ones, so that what it drops must be, too."""
        return numbers_of_its_own(self._sharing.axis) if layer.training else nullcontext()

    @contextmanager
    def block(self, block: nn.Module) -> Iterator[None]:
        """A block runs inside, which must see the parts of other ranks."""
        before = self._sharing.attention.calls
        with self.numbers(block):
            yield
        if self._sharing.attention.calls == before:
            raise UsageError(
                f"{type(block).__name__} computed no attention over the sequence-parallel ranks, so that their parts "
                "of a sequence do not see each other. Train this model without sequence_parallel_size."
            )

    def loss(self, function: Callable[..., Tensor], logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the labels of all ranks, however these lie."""
        self._compare("labels", labels)
        mine = self._sharing.inputs.part_of_labels(labels)
        own = function(logits=logits, labels=mine, shift_labels=mine)
        return mean_over_tokens(own, mine, self._sharing.axis.group, self._sharing.worth)

    def _compare(self, what: str, *values: Any) -> None:
        """Once: the host waits for it."""
        if what not in self._compared:
            require_same(values, self._sharing.axis)
            self._compared.add(what)


def share_stage_sequences(
    schema: Schema, module: PipelineModule, layout: ParallelLayout, stack: ExitStack, heads: tuple[int, int] | None
) -> None:
    """Let the stages of a model of Transformers share sequences; a row of layers is left to its own attention."""
    cut, asked, size = module.cut, schema.sequence_parallel.attention, layout["sp"].size
    if cut is None and asked is not None and size > 1:
        raise DeepSpeedConfigError(
            f"sequence_parallel.attention is {asked!r}, and the PipelineModule is made of layers of its own, whose "
            "attention is not known. Remove the key, and let the layers use "
            "deepspeed.sequence.layer.DistributedAttention over parts of sequences.",
            path="sequence_parallel.attention",
        )
    if cut is None or size == 1:
        return
    if asked is None or schema.sequence_parallel_size is None:
        raise DeepSpeedConfigError(
            f"{size} ranks share sequences, and the PipelineModule is a model of Transformers, whose attention must do "
            'so. Set sequence_parallel_size, and sequence_parallel.attention to "ulysses", "ring" or "auto".',
            path="sequence_parallel.attention",
        )
    if module.loss_fn != cut.loss:
        raise UsageError(
            "PipelineModule(..., loss_fn=...) sees a part of a sequence where ranks share it, and which label a part's "
            f"last token has is not known. Leave loss_fn out, so that the loss is the model's own, or remove "
            f"sequence_parallel_size {size}."
        )
    sharing = sharing_of(schema, cut.model, layout, stack, _agreed(heads, layout))
    cut.sequences = None if sharing is None else StageSequences(sharing)


def _agreed(heads: tuple[int, int] | None, layout: ParallelLayout) -> tuple[int, int] | None:
    """The heads of a rank on the stages that have attention, for those that have none."""
    if layout["tp"].size == 1:
        return heads
    said = Hosts(layout.world).exchange(list(heads or (0, 0)), "heads of the stages").tolist()
    return min(((int(queries), int(keys)) for queries, keys in said if queries), default=None)
