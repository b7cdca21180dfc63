"""The last projection of a causal language model and its loss, computed together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from deepspeed.errors import UsageError
from deepspeed.fusion.equivalence import alike
from deepspeed.ops.model.linear_loss import linear_loss
from deepspeed.ops.precompile import forward_and_backward
from deepspeed.transformers.replacement import TOKENS, Refused, Swap, Undo

Steps = tuple[tuple[str, float], ...]

_ADVICE = 'Call .clone() on the logits first, or set "fused_kernels": {"loss": false}.'
_FACTS = {"size", "dim", "numel", "is_floating_point", "is_complex", "__len__", "element_size"}
_PROPERTIES = {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "requires_grad"}
_STEPS = {
    **dict.fromkeys(("div", "true_divide", "__truediv__"), "div"),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), "mul"),
    "tanh": "tanh",
}


class LazyLogits(Tensor):
    """Shape, dtype and device of logits; any other operation computes them, once, with their gradients.

    A loss that is given them may take what they would be computed from instead. Division and multiplication by numbers
    and tanh, by which some models bend their logits, are put off as well.
    """

    head: Callable[[Tensor], Tensor]
    hidden: Tensor
    steps: Steps
    _whole: Tensor | None

    @staticmethod
    def __new__(
        cls: Any, head: Callable[[Tensor], Tensor], hidden: Tensor, classes: int, dtype: torch.dtype, steps: Steps = ()
    ) -> LazyLogits:
        shape = (*hidden.shape[:-1], classes)
        made: LazyLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        made.head, made.hidden, made.steps, made._whole = head, hidden, steps, None
        return made

    @property
    def computed(self) -> bool:
        """True if somebody looked."""
        return self._whole is not None

    def source(self) -> Tensor:
        """What the head is applied to; an error if an autograd function of somebody else took the logits in between."""
        with torch._C.DisableTorchFunctionSubclass():
            owner = self.grad_fn
        if owner is not None and getattr(owner, "_forward_cls", None) is not _PutOff:
            raise UsageError(f"{owner} was applied to logits that have not been computed. {_ADVICE}")
        return self.hidden

    @property
    def cap(self) -> float | None:
        """c, if the steps are c · tanh(x / c); None if there are none."""
        return self.steps[0][1] if self.steps else None

    @property
    def plain(self) -> bool:
        """True if the steps are none, or those of `cap`."""
        kinds, numbers = [kind for kind, _ in self.steps], [number for _, number in self.steps]
        return not self.steps or (kinds == ["div", "tanh", "mul"] and numbers[0] == numbers[2])

    def whole(self) -> Tensor:
        if self._whole is None:
            found = self.head(self.source())
            for kind, number in self.steps:
                found = torch.tanh(found) if kind == "tanh" else found / number if kind == "div" else found * number
            self._whole = found
        return self._whole

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyLogits({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if name in _FACTS or (name == "__get__" and getattr(func.__self__, "__name__", "") in _PROPERTIES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if isinstance(first, LazyLogits) and not kwargs and not first.computed:
            if name == "contiguous" and len(args) == 1:
                return first
            numbers = args[1:]
            if (
                name in _STEPS
                and len(numbers) == (name != "tanh")
                and all(isinstance(n, (int, float)) for n in numbers)
            ):
                step = (_STEPS[name], float(numbers[0]) if numbers else 0.0)
                return put_off(first.head, first.hidden, first.shape[-1], first.dtype, (*first.steps, step))
        computed = tree_map(lambda x: x.whole() if isinstance(x, LazyLogits) else x, (args, kwargs or {}))
        return func(*computed[0], **computed[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UsageError(
            f"{func} was called on logits that have not been computed, in a way that does not compute them. {_ADVICE}"
        )


class _PutOff(torch.autograd.Function):
    """Lazy logits on the way of gradients: one that comes back to them was meant for logits nobody computed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *rest: Any) -> LazyLogits:
        head, classes, dtype, steps, inner = rest
        return LazyLogits(head, inner[0], classes, dtype, steps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise UsageError(f"a gradient came back to logits that have not been computed, where it is lost. {_ADVICE}")


def put_off(
    head: Callable[[Tensor], Tensor], hidden: Tensor, classes: int, dtype: torch.dtype, steps: Steps = ()
) -> LazyLogits:
    """Logits of `head(hidden)`, followed by `steps`."""
    made: LazyLogits = _PutOff.apply(hidden, head, classes, dtype, steps, [hidden])  # type: ignore[no-untyped-call]
    return made


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
    return name, Swap("linear_loss", lambda: _put(model, head, loss), scene, serves="train")


def _scene(width: int, classes: int, cap: float | None, *, dtype: torch.dtype) -> None:
    labels = torch.empty(TOKENS, dtype=torch.int64, device="meta")

    def total(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_loss(hidden, weight, None, labels, cap=cap)

    forward_and_backward(total, (TOKENS, width), (classes, width), dtype=dtype)


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
