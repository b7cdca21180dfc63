"""LoRA adapters added into the weights they belong to, and taken out again to the same bits.

Layers of PEFT, and layers of the shape that DeepSpeed-Chat has: a `weight`, `lora_right_weight` [in, r],
`lora_left_weight` [r, out], `lora_scaling`, and `fuse_lora`, which its forward heeds. Adapters of other kinds compute
beside their layer as they did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed.memory.host import host_empty


class LoraPair(NamedTuple):
    """A weight, and what its adapters add to it."""

    weight: nn.Parameter
    delta: Callable[[], Tensor]
    mark: Callable[[bool], None]
    """Says to the layer whether its weight holds the adapters."""
    adapters: tuple[nn.Parameter, ...]
    """What the delta is computed from."""


def lora_pairs(model: nn.Module) -> Iterator[LoraPair]:
    """The weights of a model that have active adapters, which are not fused now."""
    peft = getattr(sys.modules.get("peft"), "tuners", None)
    kinds = () if peft is None else (peft.lora.Linear, peft.lora.Embedding)
    for module in model.modules():
        if isinstance(module, kinds):
            yield from _of_peft(module)
        elif all(hasattr(module, name) for name in _CHAT) and not module.fuse_lora:
            yield _of_chat(module)


_CHAT = ("weight", "lora_right_weight", "lora_left_weight", "lora_scaling", "fuse_lora")


def _of_peft(layer: Any) -> Iterator[LoraPair]:
    weight = layer.get_base_layer().weight
    names = [name for name in layer.active_adapters if name in layer.scaling]
    special = getattr(layer, "lora_variant", None) or any(getattr(layer, "lora_bias", {}).values())
    if layer.merged or layer.disable_adapters or special or not names or not weight.is_floating_point():
        return

    def delta() -> Tensor:
        total: Tensor = sum((layer.get_delta_weight(name) for name in names[1:]), layer.get_delta_weight(names[0]))
        return total

    def mark(on: bool) -> None:
        layer.merged_adapters[:] = names if on else []

    base = set(map(id, layer.get_base_layer().parameters()))
    yield LoraPair(weight, delta, mark, tuple(param for param in layer.parameters() if id(param) not in base))


def _of_chat(layer: Any) -> LoraPair:
    left, right = layer.lora_left_weight, layer.lora_right_weight
    return LoraPair(
        layer.weight,
        lambda: layer.lora_scaling * (left.t() @ right.t()),
        lambda on: setattr(layer, "fuse_lora", on),
        (left, right),
    )


class LoraFusion:
    """Adds a model's adapters to its weights; what these were waits in host memory."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._fused: list[LoraPair] = []
        self._kept: dict[int, Tensor] = {}
        """What a weight was, by its id; the memory is used again."""

    @property
    def active(self) -> bool:
        """Whether weights hold adapters now."""
        return bool(self._fused)

    @torch.no_grad()
    def fuse(self) -> None:
        """Add them; all weights are whole."""
        for pair in [] if self.active else list(lora_pairs(self._model)):
            weight = pair.weight.data  # written past the counter of versions: the values will be what they were
            kept = self._kept.get(id(pair.weight))
            if kept is None:
                made = host_empty(weight.numel(), weight.dtype, pinned=weight.device.type != "cpu")
                kept = self._kept[id(pair.weight)] = made.view(weight.shape)
            kept.copy_(weight)
            weight += pair.delta().to(weight.dtype)
            pair.mark(True)
            self._fused.append(pair)

    @torch.no_grad()
    def unfuse(self) -> None:
        """Put the weights back."""
        while self._fused:
            pair = self._fused.pop()
            pair.weight.data.copy_(self._kept[id(pair.weight)])
            pair.mark(False)
