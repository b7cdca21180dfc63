"""Gated feed-forward layers: the activation and the product with the other half in one kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed.fusion.equivalence import overridden, same, stand_in
from deepspeed.fusion.recompute import recomputed_input
from deepspeed.ops.model.gated import ACTIVATIONS, gated, gated_reference, halves
from deepspeed.ops.precompile import forward_and_backward
from deepspeed.transformers.replacement import TOKENS, Refused, Swap, put_forward

_WIDTH, _INNER = 8, 6
APART = ("gate_proj", "up_proj", "down_proj")
_TOGETHER = ("gate_up_proj", "down_proj")


def find_feed_forward(module: nn.Module) -> Swap | Refused | None:
    """How a gated feed-forward layer is replaced; None for any other module."""
    names = _names(module)
    if names is None:
        return None
    if reason := overridden(module):
        return Refused(reason)
    others = [
        name for name, child in module.named_children() if name not in names and any(True for _ in child.parameters())
    ]
    if others or any(True for _ in module.parameters(recurse=False)):
        return Refused(f"it has other parts with parameters: {', '.join(others) or 'its own'}")
    kind = _kind(module, names)
    if kind is None:
        return Refused(f"{type(module).__name__} computes something else than one of {', '.join(ACTIVATIONS)} times up")
    run = FeedForward(kind)
    together, last = names is _TOGETHER, module._modules["down_proj"]
    width = getattr(last, "in_features", None)
    scene = partial(_scene, kind, width, together) if isinstance(width, int) else None
    return Swap(f"gated {kind}", partial(put_forward, module, run.together if together else run.apart), scene)


def _scene(kind: str, width: int, together: bool, *, dtype: torch.dtype) -> None:
    if together:
        forward_and_backward(lambda both: halves(both, kind), (TOKENS, 2 * width), dtype=dtype)
    else:
        forward_and_backward(lambda gate, up: gated(gate, up, kind), (TOKENS, width), (TOKENS, width), dtype=dtype)


def is_gated(module: nn.Module) -> bool:
    """Whether a module has the parts of a gated feed-forward layer."""
    return _names(module) is not None


def _names(module: nn.Module) -> tuple[str, ...] | None:
    return next((names for names in (APART, _TOGETHER) if all(_is_layer(module, name) for name in names)), None)


def _is_layer(module: nn.Module, name: str) -> bool:
    child = module._modules.get(name)
    return child is not None and callable(getattr(child, "forward", None))


def _kind(module: nn.Module, names: tuple[str, ...]) -> str | None:
    """The activation, found by trying."""
    generator = torch.Generator().manual_seed(0)

    def layer(rows: int, columns: int) -> nn.Linear:
        made = nn.Linear(columns, rows, bias=False, device="cpu", dtype=torch.float32)
        made.weight.data = torch.randn(rows, columns, generator=generator)
        return made

    down, gate, up = layer(_WIDTH, _INNER), layer(_INNER, _WIDTH), layer(_INNER, _WIDTH)
    if names is APART:
        children: dict[str, nn.Module] = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    else:
        both = layer(2 * _INNER, _WIDTH)
        both.weight.data = torch.cat((gate.weight.data, up.weight.data))
        children = {"gate_up_proj": both, "down_proj": down}
    twin, x = stand_in(module, {}, children), torch.randn(2, 3, _WIDTH, generator=generator)
    for kind in ACTIVATIONS:
        with torch.no_grad():
            expected = down(gated_reference(gate(x), up(x), kind))
        if same(type(module).forward, twin, x, expected):
            return kind
    return None


class FeedForward:
    """The activation of one layer."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def apart(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:  # only what a layer computes of its input was tried
            return type(module).forward(module, *args, **kwargs)
        (x,) = args
        with recomputed_input(x, module):
            gate, up = module.gate_proj(x), module.up_proj(x)
        return module.down_proj(gated(gate, up, self.kind))

    def together(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(module).forward(module, *args, **kwargs)
        (x,) = args
        with recomputed_input(x, module):
            both = module.gate_up_proj(x)
        return module.down_proj(halves(both, self.kind))
