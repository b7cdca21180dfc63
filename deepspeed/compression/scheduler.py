"""`compression_scheduler`: turns the techniques of a model's layers on at their steps, and drops bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.compression.basic_layer import CompressedLayer, compression_of
from deepspeed.compression.eigenvalue import BlockCurvature
from deepspeed.compression.layer_state import LayerCompression
from deepspeed.compression.snip import BlockRemoval
from deepspeed.config.compression import CompressionConfig, Technique
from deepspeed.log import log_dist, warn_once

__all__ = ["compression_scheduler"]

Read = Callable[[nn.Parameter], Tensor | None]
"""Finds the whole gradient or the whole value of a parameter."""


class compression_scheduler:
    """The state of all compressed layers of a model after `training_steps` optimizer steps."""

    def __init__(self, model: nn.Module, compression_config: CompressionConfig | Mapping[str, Any]) -> None:
        found = compression_config
        self.section = found if isinstance(found, CompressionConfig) else CompressionConfig.model_validate(dict(found))
        self.model = model
        self.training_steps = 0
        self.curvature: BlockCurvature | None = None
        """Tells how long the layers of blocks keep their bits; None: all as long."""
        self.make_init()
        self.step(step_zero_check=True)

    def make_init(self) -> None:
        """Look for the compressed layers."""
        both = ((name, compression_of(module)) for name, module in self.model.named_modules())
        self.layers: dict[str, LayerCompression] = {name: each for name, each in both if each is not None}
        self.scored: list[tuple[CompressedLayer, BlockRemoval]] = []
        for module in self.model.modules():
            pruning = module.compressed.prunings.get("sparse_pruning") if isinstance(module, CompressedLayer) else None
            if isinstance(module, CompressedLayer) and pruning is not None and pruning.removal is not None:
                self.scored.append((module, pruning.removal))

    def before_backward(self, loss: Tensor, scale: float) -> None:
        """The backward of the last micro-batch of a step comes next; its loss tells how long bits last."""
        curvature = self.curvature
        if curvature is None or self.training_steps % curvature.resolution:
            return
        reached = self.training_steps + curvature.resolution - self._weights_from
        paces = [(name, layer.pace) for name, layer in self.layers.items() if layer.pace is not None]
        if any(pace.bits > pace.rounding.target_bits and reached >= pace.edge for _, pace in paces):
            for block, factor in curvature.factors(loss, scale, self.training_steps).items():
                for name, pace in paces:
                    if f"{name}.".startswith(block):
                        pace.factor = factor

    def state_dict(self) -> dict[str, Any]:
        """What does not follow from the number of steps: how long bits of layers have lasted, and will."""
        paces = {name: layer.pace for name, layer in self.layers.items() if layer.pace is not None}
        if self.curvature is None or not self.curvature.known:
            return {}
        return {"factors": {name: [*pace.factors, pace.factor] for name, pace in paces.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken."""
        if self.curvature is not None and "factors" in state:
            self.curvature.known = True
        for name, (*before, now) in state.get("factors", {}).items():
            pace = self.layers[name].pace if name in self.layers else None
            if pace is not None:
                pace.factors, pace.factor = before, now

    def before_step(self, gradient: Read = attrgetter("grad"), value: Read = torch.detach) -> None:
        """An optimizer step comes next: snip_momentum looks at the gradients that it is taken with."""
        for layer, removal in self.scored:
            weight = layer._parameters["weight"]
            if weight is None or not removal.watches(self.training_steps):
                continue
            found = gradient(weight)
            if found is not None:
                here = value(weight)
                assert here is not None, "what has a gradient has a value"
                layer.see_gradient(found, here)

    def step(self, step_zero_check: bool = False) -> None:
        """An optimizer step was taken; with `step_zero_check`, none was yet."""
        if not step_zero_check:
            self.training_steps += 1
        self.check_all_modules()

    def enter(self, step: int) -> None:
        """A forward pass with so many optimizer steps before it begins."""
        self.training_steps = step
        self.check_all_modules()

    def check_all_modules(self) -> None:
        """Check every technique."""
        self.check_weight_quantization()
        self.check_activation_quantization()
        self.check_sparse_pruning()
        self.check_head_pruning()
        self.check_row_pruning()
        self.check_channel_pruning()

    def check_weight_quantization(self) -> None:
        """Round weights, in the bits of this step."""
        offset = self._weights_from
        for name, layer in self.layers.items():
            layer.weights_on = layer.weights is not None and self.training_steps >= offset
            if layer.pace is None or not layer.weights_on:
                continue
            layer.step = self.training_steps - offset
            if not layer.pace.advance(layer.step):
                continue
            if layer.pace.rounding.verbose:
                log_dist(f"{name}: {layer.pace.bits} bits from step {self.training_steps} on")
            if self.curvature is not None and not self.curvature.known:
                warn_once(
                    f"eigenvalue.enabled is true, and a bit of {name} went at step {self.training_steps} by the period "
                    "alone: neither a loss nor a checkpoint told eigenvalues before. Differentiate by "
                    "engine.backward(loss)"
                )

    @property
    def _weights_from(self) -> int:
        """The step from which on weights are rounded."""
        return self.section.weight_quantization.shared_parameters.schedule_offset

    def check_activation_quantization(self) -> None:
        """Round inputs from their step on."""
        on = self._begun(self.section.activation_quantization)
        for layer in self.layers.values():
            if layer.activations is not None:
                layer.activations.on = on

    def check_sparse_pruning(self) -> None:
        """Mask elements from their step on."""
        self._check("sparse_pruning", self.section.sparse_pruning)
        for layer, _ in self.scored:
            layer.remove_blocks(self.training_steps)

    def check_row_pruning(self) -> None:
        """Mask outputs from their step on."""
        self._check("row_pruning", self.section.row_pruning)

    def check_head_pruning(self) -> None:
        """Mask heads from their step on."""
        self._check("head_pruning", self.section.head_pruning)

    def check_channel_pruning(self) -> None:
        """Mask channels from their step on."""
        self._check("channel_pruning", self.section.channel_pruning)

    def _check(self, name: str, technique: Technique) -> None:
        on = self._begun(technique)
        for layer in self.layers.values():
            if name in layer.prunings:
                layer.prunings[name].on = on

    def _begun(self, technique: Technique) -> bool:
        return self.training_steps >= technique.shared_parameters.schedule_offset  # type: ignore[attr-defined, no-any-return]
