"""A batch of whole sequences → this rank's part of it, as a model of Transformers takes it, and the loss of all parts.

With ring attention a rank has two pieces, one from the front and its mirror image from the back ("zig-zag"): under a
causal mask early tokens look at little and late ones at much, so that every rank has the same work in every round.
The ranks of a Ulysses group cut what one ring position holds into parts side by side.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.transformers.attention import SequenceInfo, models_in


@dataclass(frozen=True)
class TokenOrder:
    """`ulysses` × `ring` ranks share a sequence; rank = ring position × ulysses + place among its neighbours."""

    ulysses: int
    ring: int

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.ulysses * self.ring

    @property
    def multiple(self) -> int:
        """What the length of a sequence must be a multiple of."""
        return self.size if self.ring == 1 else 2 * self.size

    def check(self, length: int) -> None:
        """Raise if a sequence of this length cannot be shared out."""
        if length % self.multiple or length == 0:
            pieces = "" if self.ring == 1 else ", in two pieces each for ring attention"
            raise UsageError(
                f"a sequence of {length} tokens cannot be shared out over {self.size} sequence-parallel ranks{pieces}: "
                f"the length must be a multiple of {self.multiple}. Pad it, for example with pad_to_multiple_of="
                f"{self.multiple} in the collator."
            )

    def on_ring(self, length: int, position: int) -> Tensor:
        """The indices of the tokens at a position of the ring, in rising order."""
        if self.ring == 1:
            return torch.arange(length)
        piece = length // (2 * self.ring)
        front, back = position * piece, (2 * self.ring - 1 - position) * piece
        return torch.cat([torch.arange(front, front + piece), torch.arange(back, back + piece)])

    def of_rank(self, length: int, rank: int) -> Tensor:
        """The indices of the tokens that a rank holds."""
        self.check(length)
        position, place = divmod(rank, self.ulysses)
        return self.on_ring(length, position).chunk(self.ulysses)[place]


IGNORED = -100


def shifted(labels: Tensor, none: int = IGNORED) -> Tensor:
    """For every token the label of the next one, [batch, length]; the last one has none."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=none)


def mean_over_tokens(loss: Tensor, labels: Tensor, group: ProcessGroup, worth: int) -> Tensor:
    """The mean over all labelled tokens of the group, of each rank's mean over its own; 0 where nobody has any.

    Its gradient is `worth` times that of the mean: the number of ranks if gradients are averaged over them afterwards.
    """
    count = (labels != IGNORED).sum()
    value = torch.where(count > 0, loss.detach(), 0.0).double() * count  # the mean over nothing is nan
    totals = torch.stack([value, count.double()])
    comm.all_reduce(totals, group=group)
    share = count * worth / totals[1].clamp(min=1)
    return _Instead.apply(loss, totals[0] / totals[1].clamp(min=1), share)  # type: ignore[no-any-return, no-untyped-call]


def sum_over_ranks(loss: Tensor, group: ProcessGroup, worth: int) -> Tensor:
    """The sum of the ranks' losses; its gradient is `worth` times that of each, as that of `mean_over_tokens`."""
    total = loss.detach().double()
    comm.all_reduce(total, group=group)
    share = torch.tensor(worth, device=loss.device)
    return _Instead.apply(loss, total, share)  # type: ignore[no-any-return, no-untyped-call]


class _Instead(torch.autograd.Function):
    """Another value, and a gradient that is a share of the original's."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share)
        return value.to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (share,) = ctx.saved_tensors
        return (grads[0] * share).to(grads[0].dtype), None, None


_PER_TOKEN = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "labels",
    "shift_labels",
)
_SHIFTS, _KEEPS = ("ForCausalLM", "LMHeadModel"), ("ForMaskedLM", "ForTokenClassification")


@dataclass(frozen=True, eq=False)
class SequencePart:
    """What one rank's model is called with."""

    arguments: dict[str, Any]
    whole: SequenceInfo
    labels: Tensor | None
    """The labels of this part's tokens, as the loss compares them with the outputs."""


class SequenceInputs:
    """Shares out the arguments of a model's forward."""

    def __init__(self, module: nn.Module, order: TokenOrder, rank: int) -> None:
        """`module` may be wrapped (PEFT); its forward then takes what the model inside takes."""
        self._outer = inspect.signature(module.forward)
        inner = _model_in(module)
        self._name = type(inner).__name__
        self._takes = inspect.signature(inner.forward).parameters
        self._any = any(each.kind is each.VAR_KEYWORD for each in self._takes.values())
        self._order, self._rank = order, rank
        self._counts_by = _counts_positions_by(inner)
        if "position_ids" not in self._takes:
            raise UsageError(
                f"{self._name}.forward takes no position_ids, so that a rank cannot tell it which part of a sequence "
                "it has. Leave sequence_parallel.attention out and share sequences out in the model."
            )

    def part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SequencePart:
        """This rank's part of a call."""
        given = self._named(args, kwargs)
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise UsageError(
                f"{self._name} is called without input_ids or inputs_embeds of shape [batch, length]; found "
                f"{sorted(given)}. Pass whole sequences, the same on all ranks that share them."
            )
        rows, length = tokens.shape[:2]
        mine = self._order.of_rank(length, self._rank).to(tokens.device)
        positions, labels = given.get("position_ids"), given.pop("labels", None)
        if positions is None:
            self._require_plain_positions(given.get("attention_mask"))
            positions = torch.arange(length, device=tokens.device)[None]
        given["position_ids"] = positions
        shift = given.pop("shift_labels", None)
        if labels is not None or shift is not None:
            labels = self._label(given, labels, shift)
        mask = given.get("attention_mask")
        told = positions.expand(rows, length) if positions.dim() == 2 else positions
        whole = SequenceInfo.of(length, told, None if mask is None else mask.bool())
        if "use_cache" in self._takes:
            given["use_cache"] = False
        cut = {name: self._cut(name, value, length, mine) for name, value in given.items()}
        return SequencePart(cut, whole, None if labels is None else labels[:, mine])

    def part_of_labels(self, labels: Tensor) -> Tensor:
        """For every token of this rank's part the label of the token after it, of whole [batch, length]."""
        mine = self._order.of_rank(labels.shape[1], self._rank).to(labels.device)
        return shifted(labels).index_select(1, mine)

    def _require_plain_positions(self, mask: Tensor | None) -> None:
        """Raise if the model, left to itself, would not count positions from 0 on."""
        if self._counts_by == "tokens" or (self._counts_by == "mask" and mask is not None and not bool(mask.all())):
            raise UsageError(
                f"{self._name} counts the positions of a sequence by its {self._counts_by}, of which a rank has a part "
                "only. Pass the position_ids of whole sequences with the batch."
            )

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._outer.bind_partial(*args, **kwargs).arguments
        given: dict[str, Any] = {}
        for name, value in bound.items():
            kind = self._outer.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                given.update(zip(self._takes, value, strict=False))
            elif kind is inspect.Parameter.VAR_KEYWORD:
                given.update(value)
            else:
                given[name] = value
        return {name: value for name, value in given.items() if value is not None}

    def _label(self, given: dict[str, Any], labels: Tensor | None, shift: Tensor | None) -> Tensor:
        """The whole labels as the loss takes them; they are put into the arguments in their place."""
        if shift is None and labels is not None and self._name.endswith(_SHIFTS):
            shift = shifted(labels)
        if shift is not None:
            if not self._any and "shift_labels" not in self._takes:
                raise UsageError(
                    f"{self._name}.forward takes no shift_labels, which a shared out sequence needs: the label of a "
                    "part's last token is in the next part. Compute the loss outside of the model."
                )
            given["labels"] = given["shift_labels"] = shift
            return shift
        assert labels is not None, "one of them was given"
        if not self._name.endswith(_KEEPS):
            raise UsageError(
                f"the labels of {self._name} are not known to be one per token, so that they cannot be shared out. "
                f"Models that end with {', '.join((*_SHIFTS, *_KEEPS))} have such labels."
            )
        given["labels"] = labels
        return labels

    def _cut(self, name: str, value: Any, length: int, mine: Tensor) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if (
            name not in _PER_TOKEN
            or value.dim() < 2
            or value.shape[1] != length
            or (name[-4:] == "mask" and value.dim() > 2)
        ):
            raise UsageError(
                f"{self._name} is called with {name} of shape {tuple(value.shape)}, which cannot be shared out over "
                f"sequence-parallel ranks: expected {', '.join(_PER_TOKEN)}, each [batch, {length}, …], the mask "
                "without further dims."
            )
        return value.index_select(1, mine)


def _counts_positions_by(model: nn.Module) -> str:
    """What positions follow from where none are given: padding among the "tokens", the "mask", or nothing."""
    for module in model.modules():
        kind = type(module)
        names = {*dir(kind), *vars(sys.modules.get(kind.__module__, object))}
        if "create_position_ids_from_input_ids" in names:
            return "tokens"
        if "position" in kind.__name__.lower() and "attention_mask" in inspect.signature(module.forward).parameters:
            return "mask"
    return ""


def _model_in(module: nn.Module) -> Any:
    """The model of Transformers: the module itself, or what it wraps."""
    for inner in models_in(module):
        return inner
    raise UsageError(
        f"sequence_parallel.attention needs a model of Transformers; {type(module).__name__} is none and has none in "
        "it. Leave it out and use deepspeed.sequence.layer.DistributedAttention in the model."
    )
