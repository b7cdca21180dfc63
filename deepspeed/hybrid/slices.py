"""Generation at stage 3 by slices: neighbours share the layers while they generate, and make each other's calls.

No rank ever has a whole layer: a parameter is whole for the moment in which its slice is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.generate import weights
from deepspeed.parallel.regions import GroupMembers
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.saving.stream import WeightBuckets
from deepspeed.tensor_parallel import split

_BUCKET = 64 << 20
Call = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]


class SlicedModel:
    """A model's architecture on the ranks of a group, and its weights while a phase lasts."""

    def __init__(self, parts: Parts, base: nn.Module, size: int) -> None:
        world, rank = comm.get_world_size(), comm.get_rank()
        if world % size or parts.layout.tensor.size > 1:
            found = f"{world} ranks" if world % size else "tensor_parallel.autotp_size, by which training splits layers"
            raise DeepSpeedConfigError(
                f"hybrid_engine.inference_tp_size is {size}, which does not go with {found}. Set it to a divisor of "
                "the number of ranks, or to 1 where training splits layers.",
                path="hybrid_engine.inference_tp_size",
            )
        groups = [list(range(first, first + size)) for first in range(0, world, size)]
        self.ranks = groups[rank // size]
        self.axis = [GroupMembers(comm.new_group(each)) for each in groups][rank // size]
        self._parts, self._base = parts, base
        self.model = self._split()

    def _split(self) -> nn.Module:
        """The model cut into slices, without memory but for its buffers, which are those of training."""
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            model: nn.Module = type(self._base)(self._base.config)
        model.to(self._parts.precision.param)
        split(model, self.axis, TPTrainingConfig(autotp_size=self.axis.size))
        own = dict(self._base.named_modules())
        for name, module in model.named_modules():
            if module._buffers:
                module._buffers = dict(own[name]._buffers)
        model.generation_config = self._base.generation_config
        return model.eval().requires_grad_(False)

    def fill(self) -> None:
        """Take memory, and this rank's slice of every parameter; all ranks of the world call this."""
        made: dict[int, nn.Parameter] = {}
        for module in self.model.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    if id(param) not in made:
                        made[id(param)] = nn.Parameter(torch.empty_like(param, device=self._parts.device), False)
                    module._parameters[name] = made[id(param)]
        for bucket in WeightBuckets(self._parts, _BUCKET, None, merge=True):
            weights.update(self.model, bucket, self.axis)

    def empty(self) -> None:
        """Give the memory back."""
        for module in self.model.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    module._parameters[name] = nn.Parameter(param.to("meta"), False)

    def each(self, call: Call, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make the calls of all ranks of the group, one after the other; the result of this rank's own."""
        told: list[Any] = [None] * self.axis.size
        comm.all_gather_object(told, _moved((inputs, dict(kwargs)), torch.device("cpu")), group=self.axis.group)
        results = [call(*_moved(each, self._parts.device)) for each in told]
        return results[self.axis.rank]


def _moved(value: Any, device: torch.device) -> Any:
    """The same with its tensors on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(each, device) for each in value)
    return {name: _moved(each, device) for name, each in value.items()} if isinstance(value, dict) else value
