"""`LoRAOptimizedLinear`: adapters beside a frozen weight, which rests whole or shared, as it is or as codes.

[Note: shared weights] With one rank to a weight, it is a frozen parameter: ZeRO cuts and offloads it like any other, as
codes if it is such. Shared by more ranks, or offloaded here, it is no parameter: this rank's part is an attribute that
engines neither cut nor send, and that checkpoints leave out. Ranks that hold the same part begin with equal values.
Checkpoints have a number that follows from the whole weight, so that adapters do not go on over another one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.fragments import DimSplit
from deepspeed.linear.config import LinearQuantization, LoRAConfig
from deepspeed.linear.quantization import (
    CodedLinear,
    FrozenWeight,
    QuantizedParameter,
    WeightCodes,
    frozen_product,
    opened,
)
from deepspeed.memory.host import host_empty
from deepspeed.memory.tier import Tier
from deepspeed.parallel import AxisGroup
from deepspeed.parallel.mpu import current_layout
from deepspeed.parallel.regions import RankGroup

__all__ = ["LoRAOptimizedLinear", "OptimizedLinear"]


class OptimizedLinear(nn.Module):
    """Makes the linear layer that the configs ask for: with adapters, with a weight in few bits, or a plain one."""

    def __new__(  # type: ignore[misc]
        cls,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: LinearQuantization | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
    ) -> nn.Module:
        """`linear_cls` makes the plain layer, and adapters."""
        if lora_config is not None:
            return LoRAOptimizedLinear(
                input_dim, output_dim, bias, lora_config, quantization_config, device, dtype, linear_cls
            )
        if quantization_config is not None:
            layer = CodedLinear(input_dim, output_dim, bias, quantization_config, dtype)
            return layer if device is None else layer.to(device)
        return linear_cls(input_dim, output_dim, bias=bias, device=device, dtype=dtype)


class LoRAOptimizedLinear(FrozenWeight):
    """`y = W x + b + (alpha / r) B A x`, of which only `A` and `B` are trained."""

    weight: Any
    bias: nn.Parameter | None
    lora_weight_1: nn.Linear
    lora_weight_2: nn.Linear

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: LinearQuantization | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
    ) -> None:
        super().__init__()
        plain = nn.Linear(input_dim, output_dim, bias=bias, device=device, dtype=dtype)
        self._begin(plain, lora_config or LoRAConfig(), quantization_config, linear_cls)
        if not self.lora_config.delay_lora_init:
            self.init_lora()

    @classmethod
    def adopt(cls, layer: nn.Linear, lora: LoRAConfig, quantization: LinearQuantization | None) -> LoRAOptimizedLinear:
        """Make one of a plain layer, which stays the object that it is; `init_lora` follows."""
        made: Any = layer
        made.__class__ = cls
        made._begin(made, lora, quantization, nn.Linear)
        result: LoRAOptimizedLinear = made
        return result

    def _begin(
        self,
        plain: Any,
        lora: LoRAConfig,
        quantization: LinearQuantization | None,
        linear_cls: Callable[..., nn.Module],
    ) -> None:
        self.input_dim, self.output_dim = plain.in_features, plain.out_features
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.lora_config, self.quantization_config, self.linear_cls = lora, quantization, linear_cls
        self.register_parameter("weight", plain.weight)
        self.register_parameter("bias", plain.bias)
        for param in (self.weight, self.bias):
            if param is not None:
                param.requires_grad_(False)
        self.dtype = plain.weight.dtype
        self.lora_scaling_factor = lora.lora_alpha / lora.lora_r
        self.initialized = self.disabled = False
        self.tier = Tier.DEVICE
        self.samples: AxisGroup | None = None
        """Ranks that have this layer and its part of the weight, once an engine knows them."""
        self.codes = None
        self.axis: AxisGroup | None = None
        self.part: Tensor | None = None
        """What this rank holds of a weight that is no parameter: [Note: shared weights]."""

    # ---- the frozen weight

    def disable(self) -> None:
        """Compute as a plain frozen layer for good; only before `init_lora`."""
        if self.initialized:
            raise UsageError("LoRAOptimizedLinear.disable: the layer has adapters; call it before init_lora")
        self.disabled = True

    def init_lora(self, samples: AxisGroup | None = None) -> None:
        """Let the weight rest as the configs say, and add adapters; nothing happens a second time.

        `samples`: the ranks that have this layer, where they are others than those of the current layout.
        """
        if self.disabled or self.initialized:
            return
        weight, config = self.weight, self.lora_config
        self._require_values(weight)
        self.dtype, device = weight.dtype, weight.device
        if config.base_weight_sharding > 1 or config.offload or self.quantization_config is not None:
            with opened(weight):
                self._rest(weight, samples)
        for name, sizes in (
            ("lora_weight_1", (self.input_dim, config.lora_r)),
            ("lora_weight_2", (config.lora_r, self.output_dim)),
        ):
            setattr(self, name, self.linear_cls(*sizes, bias=False, device=device, dtype=self.dtype))
        nn.init.kaiming_uniform_(self.lora_weight_1.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_weight_2.weight)
        self.initialized = True

    def _rest(self, weight: Any, samples: AxisGroup | None) -> None:
        """As the configs say, of a weight that is whole."""
        axis: AxisGroup | None = None
        replicas, size = samples, self.lora_config.base_weight_sharding
        if size > 1:
            replicas, axis = _sharing(size, weight.numel(), samples)
        if self.quantization_config is not None:
            self.codes = WeightCodes(self.quantization_config.codec, weight.shape, 1 if axis is None else axis.size)
            self.codes.require_groups("LoRAOptimizedLinear")
        if axis is not None or self.lora_config.offload:
            self._hold(weight.detach(), axis, replicas)
            weight.data = weight.data.new_empty(0)
        elif self.codes is not None:
            QuantizedParameter.adopt(weight, self.codes, self.quantization_config)

    @staticmethod
    def _require_values(weight: Tensor) -> None:
        if weight.is_meta:
            raise UsageError(
                f"LoRAOptimizedLinear: the weight {tuple(weight.shape)} is on the meta device and has no values; set "
                "delay_lora_init, load the weights, and call deepspeed.linear.init_lora(model)"
            )

    @torch.no_grad()
    def _hold(self, weight: Tensor, axis: AxisGroup | None, replicas: AxisGroup | None) -> None:
        """Keep this rank's part of the weight, which is no parameter any more."""
        part = weight.reshape(-1) if axis is None else weight.reshape(axis.size, -1)[axis.rank]
        part = part.to(get_accelerator().current_device_name())
        part = part.clone() if self.codes is None else self.codes.encode(part)
        if replicas is None and comm.is_initialized():
            replicas = current_layout.get().samples
        if replicas is not None and replicas.size > 1:
            comm.broadcast(part, src=replicas.ranks[0], group=replicas.group)
        self._parameters.pop("weight")
        self.part, self.axis, self.weight = part, axis, None
        made: Any = self
        if type(self) is LoRAOptimizedLinear:
            made.__class__ = _LoRAOverHeldWeight
        self.fingerprint = _fingerprint(part, axis, self.codes)

    # ---- tensor parallelism

    def weight_cut(self, split: DimSplit, axis: RankGroup) -> DimSplit | None:
        """See `OwnProduct`; a part that is no parameter is shared anew, by the ranks that `settle` found."""
        held, codes, shape = self.part, self.codes, torch.Size((self.output_dim, self.input_dim))
        whole = None if held is None else self._all_of(held.to(get_accelerator().current_device_name()))
        if codes is not None and whole is not None:
            self.codes, whole = codes.in_rows(whole, 1)
        told = super().weight_cut(split, axis)
        self.output_dim, self.input_dim = split.shape(shape, axis.rank)
        if whole is None or told is None:
            return told
        part = told.cut(whole if codes is not None else whole.view(shape), axis.rank).reshape(-1)
        size, self.axis = self.lora_config.base_weight_sharding, None
        if size > 1:
            _, self.axis = _sharing(size, self.output_dim * self.input_dim, self.samples)
            if self.codes is not None:
                self.codes, part = self.codes.in_rows(part, size)
            part = part.view(size, -1)[self.axis.rank]
        self.part = part.clone()
        self.rest_in(self.tier)
        return None

    def adapters(self) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
        """See `OwnProduct`."""
        if not self.initialized:
            return {}, {}
        return {"lora_weight_1": self.lora_weight_1}, {"lora_weight_2": self.lora_weight_2}

    def base_product(self, inputs: Tensor, *, with_bias: bool) -> Tensor:
        """See `OwnProduct`."""
        bias = self.bias if with_bias else None
        if not self.initialized:
            return functional.linear(inputs, self.held, bias)
        return frozen_product(inputs, self.held, self._whole, bias)

    def adapted(self, inputs: Tensor, output: Tensor) -> Tensor:
        """See `OwnProduct`."""
        if not self.initialized:
            return output
        added: Tensor = self.lora_weight_2(self.lora_weight_1(inputs))
        return output + self.lora_scaling_factor * added

    # ---- where it rests

    @torch.no_grad()
    def rest_in(self, tier: Tier) -> None:
        """Let what is held of a weight that is no parameter lie on the device or in host memory."""
        part = self.part
        assert part is not None, "parameters lie where ZeRO puts them"
        if tier is Tier.HOST:
            self.part = host_empty(part.numel(), part.dtype, pinned=True).copy_(part)
        else:
            self.part = part.to(get_accelerator().current_device_name(), copy=True)
        self.tier = tier

    @torch.no_grad()
    def hold_in(self, dtype: torch.dtype) -> None:
        """Let a weight that is no parameter follow the dtype of those that are."""
        if self.part is not None:
            self.dtype = dtype
            if self.codes is None and self.part.dtype != dtype:
                self.part = self.part.to(dtype)
                self.rest_in(self.tier)

    @property
    def held(self) -> Tensor:
        """What lies here of the weight."""
        found = self.weight if self.part is None else self.part
        assert found is not None, "it is one or the other"
        return found

    def full_weight(self) -> Tensor:
        """The whole frozen weight in the layer's dtype; ranks that share it call this together."""
        device = self.held.device if self.axis is None else torch.device(get_accelerator().current_device_name())
        return self._whole(self.held, self.dtype, device)

    @torch.no_grad()
    def _whole(self, held: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        mine = self._all_of(held.detach().to(device, non_blocking=True))
        if self.codes is not None:
            return self.codes.decode(mine, dtype)
        return mine.view(self.output_dim, self.input_dim).to(dtype)

    def _all_of(self, mine: Tensor) -> Tensor:
        """What all ranks hold that share the weight."""
        if self.axis is None:
            return mine
        rows = mine.new_empty(self.axis.size * mine.numel())
        with comm.labelled("frozen weight of a LoRA layer"):
            comm.all_gather_into_tensor(rows, mine, group=self.axis.group)
        return rows

    # ---- as a module

    def forward(self, input_tensor: Tensor) -> Tensor:
        """`input_tensor` [..., input_dim] to [..., output_dim]."""
        return self.adapted(input_tensor, self.base_product(input_tensor, with_bias=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> LoRAOptimizedLinear:
        memo.update({id(each): each for each in (self.axis, self.samples)})  # the ranks stay the same
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def extra_repr(self) -> str:
        """Sizes, and how the weight rests."""
        form = "plain" if self.codes is None else self.codes.codec.name
        ranks = 1 if self.axis is None else self.axis.size
        return f"{self.input_dim}, {self.output_dim}, r={self.lora_config.lora_r}, base={form}, ranks={ranks}"

    def _apply(self, fn: Any, recurse: bool = True) -> LoRAOptimizedLinear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        part = self.part
        kept = fn(torch.empty(0, dtype=self.dtype, device="cpu" if part is None else part.device))
        self.dtype = kept.dtype
        if part is not None:
            if self.tier is not Tier.HOST:
                self.part = part.to(kept.device)
            self.hold_in(kept.dtype)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self.part is None:
            self.take_codes(state_dict, prefix)
        elif isinstance(value := state_dict.pop(f"{prefix}weight", None), Tensor):
            whole, value = value, self.own_part(value)
            if value.shape != (self.output_dim, self.input_dim):
                rest[-1].append(
                    f"{prefix}weight has the shape {tuple(value.shape)} there and {(self.output_dim, self.input_dim)} "
                    "in the model"
                )
            else:
                self._replace(value, whole)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @torch.no_grad()
    def _replace(self, value: Tensor, whole: Tensor) -> None:
        """Take this rank's part of another weight, of which `value` is what this rank computes with."""
        part = value.reshape(-1) if self.axis is None else value.reshape(self.axis.size, -1)[self.axis.rank]
        self.held.copy_(part if self.codes is None else self.codes.encode(part))
        if value is whole:
            self.fingerprint = _fingerprint(self.held, self.axis, self.codes)
        else:
            codes = None if self.codes is None else replace(self.codes, shape=whole.shape, rows=1)
            flat = whole.to(self.dtype).reshape(-1)
            self.fingerprint = _fingerprint(flat if codes is None else codes.encode(flat), None, codes)


class _LoRAOverHeldWeight(LoRAOptimizedLinear):
    """A layer whose weight is no parameter: [Note: shared weights]."""

    def get_extra_state(self) -> int:
        """Of the state dict: what tells frozen weights apart."""
        return self.fingerprint

    def set_extra_state(self, state: int) -> None:
        """Refuse what was trained over another weight."""
        if state != self.fingerprint:
            raise UsageError(
                f"a LoRA layer ({self.extra_repr()}): its frozen weight, which checkpoints leave out, is not the one "
                "that the adapters in the checkpoint were trained with. Build the model from the same weights, with "
                "the same quant_config and dtype; load_adapters takes adapters over any weight"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if f"{prefix}_extra_state" in rest[2]:  # it may have come from a model with whole weights
            rest[2].remove(f"{prefix}_extra_state")


def _fingerprint(part: Tensor, axis: AxisGroup | None, codes: WeightCodes | None) -> int:
    """A number that follows from a weight in bf16, however ranks share it and wherever it lies."""
    if codes is not None:  # what they stand for: between codes and scales lies what was in memory before
        part = WeightCodes(codes.codec, torch.Size([codes.shape.numel() // codes.rows])).decode(part, torch.bfloat16)
    flat = part.detach().to(torch.bfloat16).view(torch.uint8)
    words = functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)
    first = 0 if axis is None else axis.rank * words.numel()
    places = torch.arange(first + 1, first + 1 + words.numel(), device=words.device)
    total = ((words ^ (words >> 29)) * (places * 0x9E3779B97F4A7C1 | 1)).sum()
    if axis is not None:
        comm.all_reduce(total, group=axis.group)
    return int(total)


def _sharing(size: int, numel: int, samples: AxisGroup | None) -> tuple[AxisGroup, AxisGroup]:
    """(ranks that hold the same part, ranks that share a weight)."""
    if not comm.is_initialized():
        raise UsageError(
            f"LoRAConfig: base_weight_sharding is {size}, but this process is alone; call deepspeed.init_distributed() "
            "before the model is built"
        )
    samples = samples or current_layout.get().samples
    if samples.size % size:
        raise UsageError(
            f"LoRAConfig: base_weight_sharding is {size}, which does not divide the {samples.size} ranks that share "
            "samples; use a divisor"
        )
    if numel % size:
        raise UsageError(f"LoRAConfig: base_weight_sharding is {size}, which does not divide {numel:,} elements")
    return samples.split(size=size)
