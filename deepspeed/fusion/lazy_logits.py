"""`LazyLogits`: what a language model's head returns, computed only if somebody looks at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from deepspeed.errors import UsageError

__all__ = ["LazyLogits", "put_off"]

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
        """The logits."""
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
