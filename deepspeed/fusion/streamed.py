"""Linear layers of few rows, as generation has them: their weights are streamed, those of one input in one launch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.fusion.equivalence import FORWARD, is_plain
from deepspeed.fusion.feed_forward import FeedForward
from deepspeed.fusion.shared_input import input_groups
from deepspeed.ops.generate.streaming import MOST_ROWS, streamed_gated, streamed_linear
from deepspeed.transformers.replacement import Swap, Undo, put_forward, replacement


def find_streams(model: nn.Module) -> Iterator[tuple[str, nn.Module, Swap]]:
    """(name, module, how it is replaced) for each module whose layers can be streamed; serves generation only.

    Comes after the other kinds: gated feed-forward layers are those that were replaced already.
    """
    taken: set[int] = set()
    known: dict[type, list[tuple[str, ...]]] = {}
    for name, module in model.named_modules():
        gate = _gated(module)
        if gate is not None:
            taken.update(id(module._modules[part]) for part in ("gate_proj", "up_proj"))
            yield (
                name,
                module,
                Swap("weights of gate and up streamed", partial(_put_gated, module, gate), serves="infer"),
            )
            continue
        children = {key: child for key, child in module.named_children() if is_plain(child)}
        if len(children) > 1:
            if type(module) not in known:
                known[type(module)] = list(input_groups(type(module)))
            groups = (tuple(key for key in names if key in children) for names in known[type(module)])
            names = max(groups, key=len, default=())
            if len(names) > 1:
                layers = [children[key] for key in names]
                taken.update(map(id, layers))
                yield (
                    name,
                    module,
                    Swap(f"{', '.join(names)} streamed together", partial(_put_all, layers), serves="infer"),
                )
    for name, module in model.named_modules():
        if is_plain(module) and id(module) not in taken:
            yield name, module, Swap("weight streamed", partial(_put_all, [module]), serves="infer")


def _gated(module: nn.Module) -> FeedForward | None:
    """The activation of a gated layer that was replaced, if its parts are plain."""
    found = getattr(replacement(module), "__self__", None)
    parts = [module._modules.get(part) for part in ("gate_proj", "up_proj")]
    plain = all(part is not None and is_plain(part) and part.bias is None for part in parts)
    return found if isinstance(found, FeedForward) and plain else None


def _put_gated(module: nn.Module, gate: FeedForward) -> Undo:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or torch.is_grad_enabled() or _rows(args[0]) > MOST_ROWS:
            return gate.apart(self, *args, **kwargs)
        return self.down_proj(streamed_gated(args[0], self.gate_proj.weight, self.up_proj.weight, gate.kind))

    before = module.__dict__["forward"]
    put_forward(module, run)

    def undo() -> None:
        module.__dict__["forward"] = before

    return undo


def _put_all(layers: Sequence[nn.Module]) -> Undo:
    together = _Together(layers)  # type: ignore[arg-type]
    undone = [put_forward(layer, together.forward_of(at)) for at, layer in enumerate(layers)]

    def undo() -> None:
        for each in undone:
            each()

    return undo


class _Together:
    """What layers compute of one input: all of it when the first of them is called."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        self._source: weakref.ref[Tensor] | None = None
        self._left: dict[int, Tensor] = {}

    def forward_of(self, at: int) -> Callable[..., Tensor]:
        def run(layer: nn.Linear, input: Tensor) -> Tensor:
            if torch.is_grad_enabled() or _rows(input) > MOST_ROWS:
                return FORWARD(layer, input)
            if self._source is not None and self._source() is input and at in self._left:
                return self._left.pop(at)
            found = streamed_linear(input, [each.weight for each in self._layers], [each.bias for each in self._layers])
            self._left = dict(enumerate(found))
            self._source = weakref.ref(input)
            return self._left.pop(at)

        return run


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1] if x.shape[-1] else 0
