"""Checkpointed layers in a row of which only the first one's input is kept; the others' are computed from it again.

[Note: chains]
Backward comes to the last layer of a chain first. What was its input is then computed by running the layers before it
once more, without a graph, and the inputs that appear on the way wait for their layers, whose turn is next. So a chain
of k layers keeps one input instead of k, holds k - 1 while backward is in it, and costs k - 1 forwards of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from deepspeed.runtime.activation_checkpointing.layer_marker import Layer

__all__ = ["Chain", "hidden_of"]


class _Run:
    """A layer as it ran: with its random numbers, and with autocast as it was."""

    def __init__(self, layer: Layer, given: torch.Tensor) -> None:
        self._layer, self._device = layer, given.device.type
        self._host_numbers = torch.get_rng_state()
        self._devices, self._numbers = get_device_states(given)
        self._casts = torch.is_autocast_enabled(self._device)
        self._dtype = torch.get_autocast_dtype(self._device)

    def again(self, given: torch.Tensor) -> torch.Tensor:
        """What the layer gave for this input."""
        kind = self._device if self._devices else "cuda"
        with (
            torch.no_grad(),
            torch.random.fork_rng(self._devices, device_type=kind),
            torch.autocast(self._device, self._dtype, enabled=self._casts),
        ):
            torch.set_rng_state(self._host_numbers)
            if self._devices:
                set_device_states(self._devices, self._numbers, device_type=self._device)
            # as it was then; a reentrant checkpoint warns of an input without
            result: torch.Tensor = hidden_of(self._layer(given.detach().requires_grad_(given.is_floating_point())))
            return result


class Chain:
    """A row of layers; `first` gives the input of the first of them once it is known."""

    def __init__(self) -> None:
        self.first: Callable[[], torch.Tensor] | None = None
        self._runs: list[_Run] = []
        self._inputs: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, layer: Layer, given: torch.Tensor) -> None:
        """The next layer is about to run with this input."""
        self._runs.append(_Run(layer, given))

    def input_of(self, position: int) -> torch.Tensor:
        """The input of a layer but the first; a second time it is computed anew."""
        if position not in self._inputs:
            assert self.first is not None, "the first input is kept before any other is asked for"
            hidden = self.first()
            for before in range(position):
                hidden = self._runs[before].again(hidden)
                self._inputs[before + 1] = hidden
        return self._inputs.pop(position)


def hidden_of(result: Any) -> Any:
    """What a layer hands to the next one."""
    return result[0] if isinstance(result, tuple) and result else result
