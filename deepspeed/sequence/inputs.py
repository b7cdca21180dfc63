"""A batch of whole sequences → this rank's part of it, as a model of Transformers takes it."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.sequence.labels import shifted
from deepspeed.sequence.order import TokenOrder
from deepspeed.sequence.own_attention import knows
from deepspeed.sequence.transformers_hooks import models_in
from deepspeed.sequence.whole import Whole

__all__ = ["Inputs", "Part"]

_PER_TOKEN = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "labels",
    "shift_labels",
)
_OF_TARGET = ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask", "labels")
_SHIFTS, _KEEPS = ("ForCausalLM", "LMHeadModel"), ("ForMaskedLM", "ForTokenClassification")


@dataclass(frozen=True, eq=False)
class Part:
    """What one rank's model is called with."""

    arguments: dict[str, Any]
    whole: Whole
    labels: Tensor | None
    """The labels of this part's tokens, as the loss compares them with the outputs."""


class Inputs:
    """Shares out the arguments of a model's forward."""

    def __init__(self, module: nn.Module, order: TokenOrder, rank: int) -> None:
        """`module` may be wrapped (PEFT); its forward then takes what the model inside takes."""
        self._outer = inspect.signature(module.forward)
        inner = _model_in(module)
        self._name = type(inner).__name__
        self._takes = inspect.signature(inner.forward).parameters
        self._any = any(each.kind is each.VAR_KEYWORD for each in self._takes.values())
        self._order, self._rank = order, rank
        self._model = inner if knows(inner.config) and inner.config.is_encoder_decoder else None
        """Of an encoder and a decoder."""
        self._counts_by = _counts_positions_by(inner)
        self._by_bias = "position_ids" not in self._takes and knows(inner.config)
        """Positions are biases of attention, which sees whole sequences."""
        self._per_token = _PER_TOKEN if self._model is None else (*_PER_TOKEN[:3], *_OF_TARGET)
        if "position_ids" not in self._takes and not self._by_bias:
            raise UsageError(
                f"{self._name}.forward takes no position_ids, so that a rank cannot tell it which part of a sequence "
                "it has. Leave sequence_parallel.attention out and share sequences out in the model."
            )

    def part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Part:
        """This rank's part of a call."""
        given = self._named(args, kwargs)
        if self._model is not None:
            return self._part_of_both(given)
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
        if not self._by_bias:
            given["position_ids"] = positions
        shift = given.pop("shift_labels", None)
        if labels is not None or shift is not None:
            labels = self._label(given, labels, shift)
        mask = given.get("attention_mask")
        told = positions.expand(rows, length) if positions.dim() == 2 else positions
        whole = Whole.of(length, told, None if mask is None else mask.bool())
        if self._by_bias and whole.documents is not None:
            raise UsageError(
                f"{self._name} is called with position_ids that begin again, but takes none: packed sequences would "
                "see each other without sequence parallelism. Leave position_ids out, or give each sequence a row."
            )
        if "use_cache" in self._takes:
            given["use_cache"] = False
        cut = {name: self._cut(name, value, length, mine) for name, value in given.items()}
        return Part(cut, whole, None if labels is None else labels[:, mine])

    @property
    def averages(self) -> bool:
        """Whether the model's loss is a mean over its labels whatever it is told of their number."""
        return self._model is not None

    def _part_of_both(self, given: dict[str, Any]) -> Part:
        """This rank's part of what an encoder reads, and of what a decoder writes."""
        assert self._model is not None, "asked for where there are both"
        labels = given.get("labels")
        if labels is not None and not any(name in given for name in _OF_TARGET[:2]):
            given["decoder_input_ids"] = self._model.prepare_decoder_input_ids_from_labels(labels)
        source = given.get("input_ids", given.get("inputs_embeds"))
        target = given.get("decoder_input_ids", given.get("decoder_inputs_embeds"))
        if not isinstance(source, Tensor) or not isinstance(target, Tensor) or "encoder_outputs" in given:
            raise UsageError(
                f"{self._name} is called with {sorted(given)}; sequences that ranks share need input_ids, and labels "
                "or decoder_input_ids, each [batch, length] and the same on all ranks, without encoder_outputs."
            )
        given["use_cache"] = False
        lengths = source.shape[1], target.shape[1]
        mine = [self._order.of_rank(length, self._rank).to(source.device) for length in lengths]
        cut = {}
        for name, value in given.items():
            side = int(name in _OF_TARGET)
            cut[name] = self._cut(name, value, lengths[side], mine[side])
        masks = [given.get(name) for name in ("attention_mask", "decoder_attention_mask")]
        wholes = [
            Whole.of(length, None, None if mask is None else mask.bool())
            for length, mask in zip(lengths, masks, strict=True)
        ]
        return Part(cut, replace(wholes[0], target=wholes[1]), cut.get("labels"))

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
            name not in self._per_token
            or value.dim() < 2
            or value.shape[1] != length
            or (name[-4:] == "mask" and value.dim() > 2)
        ):
            raise UsageError(
                f"{self._name} is called with {name} of shape {tuple(value.shape)}, which cannot be shared out over "
                f"sequence-parallel ranks: expected {', '.join(self._per_token)}, each [batch, {length}, …], the mask "
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
