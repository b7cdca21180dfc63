"""The last projection of a causal language model and its loss, computed together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.errors import UsageError
from deepspeed.fusion.lazy_logits import LazyLogits, put_off
from deepspeed.fusion.likeness import alike
from deepspeed.fusion.swap import TOKENS, Refused, Swap, Undo
from deepspeed.ops.model.linear_loss import linear_loss
from deepspeed.ops.rehearsal import forth_and_back

__all__ = ["find_head"]


def find_head(model: nn.Module) -> tuple[str, Swap | Refused] | None:
    """(name of the head, how it and the loss are replaced) of a causal language model of Transformers."""
    if not hasattr(type(model), "loss_function"):  # a wrapper hands out what the model inside it has
        return None
    loss, embeddings = getattr(model, "loss_function", None), getattr(model, "get_output_embeddings", None)
    head = embeddings() if callable(embeddings) else None
    if head is None or not callable(loss):
        return None
    name = next((name for name, module in model.named_modules() if module is head), "")
    if type(head) is not nn.Linear:
        return name, Refused(f"the head is a {type(head).__name__}, not a plain torch.nn.Linear")
    if not _is_causal(loss):
        return name, Refused("the model's loss is not the cross-entropy of the next token")
    cap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
    scene = partial(_scene, head.in_features, head.out_features, cap)
    return name, Swap("linear_loss", lambda: _put(model, head, loss), scene)


def _scene(width: int, classes: int, cap: float | None, *, dtype: torch.dtype) -> None:
    labels = torch.empty(TOKENS, dtype=torch.int64, device="meta")

    def total(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_loss(hidden, weight, None, labels, cap=cap)

    forth_and_back(total, (TOKENS, width), (classes, width), dtype=dtype)


def _is_causal(loss: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator)
    labels = torch.tensor([[1, 2, -100, 4, 5], [6, 0, 1, -100, 3]])
    expected = functional.cross_entropy(logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1))
    return alike(lambda: loss(logits=logits, labels=labels, vocab_size=7), expected)


class _Head(nn.Linear):
    """A head that puts its work off; with labels it gives the sum of their losses instead of logits.

    Whoever calls it for logits gets lazy ones at once. Everything else is a call of the module, for which a sharded
    weight is gathered.
    """

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().__call__(input, *args, **kwargs)
        dtype = torch.get_autocast_dtype(input.device.type) if torch.is_autocast_enabled(input.device.type) else None
        return put_off(self._whole, input, self.out_features, dtype or input.dtype)

    def _whole(self, hidden: Tensor) -> Tensor:
        result: Tensor = super().__call__(hidden)
        return result

    def forward(
        self,
        input: Tensor,
        labels: Tensor | None = None,
        ignored: int = -100,
        cap: float | None = None,
    ) -> Tensor:
        if labels is None:
            return functional.linear(input, self.weight, self.bias)
        hidden = input.reshape(-1, input.shape[-1])
        if labels.numel() != hidden.shape[0]:
            raise UsageError(
                f"there are {labels.numel()} labels for logits of {hidden.shape[0]} tokens. Give as many, with "
                f"{ignored} for those that do not count; with logits_to_keep, as shift_labels."
            )
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        weight = self.weight if self.weight.dtype == hidden.dtype else self.weight.to(hidden.dtype)
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return linear_loss(hidden, weight, bias, labels.reshape(-1).to(hidden.device), ignored=ignored, cap=cap)


def _put(model: nn.Module, head: nn.Linear, loss: Callable[..., Any]) -> Undo:
    names = ("_loss_function", "loss_function")  # where a property keeps it, and what replaces a method
    before = {name: model.__dict__[name] for name in names if name in model.__dict__}
    setattr(model, "loss_function", _Loss(head, loss))  # noqa: B010
    head.__class__ = _Head

    def undo() -> None:
        head.__class__ = nn.Linear
        for name in names:
            model.__dict__.pop(name, None)
        model.__dict__.update(before)

    return undo


class _Loss:
    """A model's loss, by its head where nobody has looked at the logits.

    An object of the model, that is copied and pickled with its head.
    """

    def __init__(self, head: nn.Linear, loss: Callable[..., Any]) -> None:
        self.head, self.loss = head, loss

    def __call__(self, logits: Any, labels: Tensor, vocab_size: int, **kwargs: Any) -> Any:
        lazy = isinstance(logits, LazyLogits) and not logits.computed and logits.plain
        if (
            not lazy
            or vocab_size != self.head.out_features
            or set(kwargs) - {"num_items_in_batch", "ignore_index", "shift_labels"}
        ):
            return self.loss(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
        return _loss(self.head, logits, labels, **kwargs)


def _loss(
    head: nn.Module,
    logits: LazyLogits,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """The mean over labels that count, or over the number given, as Transformers defines it."""
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    total: Tensor = head(logits.source(), labels=shift_labels, ignored=ignore_index, cap=logits.cap)
    if num_items_in_batch is None:
        count = (shift_labels != ignore_index).sum().to(total.device)
        # of no labels it is NaN, and the gradients are zero nevertheless
        return torch.where(count > 0, total / count.clamp(min=1), torch.nan)
    return total / (
        num_items_in_batch.to(total.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
    )
