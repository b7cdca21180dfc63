"""Weights in 4 or 8 bits by groups along one dim, as `weight_quantization.post_init_quant` asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.comm.codec import BlockCodec, RangeCodec
from deepspeed.errors import UsageError
from deepspeed.fusion.packed_linear import packed_embedding
from deepspeed.log import log_dist
from deepspeed.ops.generate.packed import pack, packed_linear
from deepspeed.ops.generate.packed_weight import UNIT, PackedWeight

__all__ = ["DeQuantizer", "QuantizedEmbedding", "QuantizedLinear", "Quantizer"]

_KEYS = {"num_bits", "group_size", "group_dim", "symmetric"}
_MODES = {4: "w4a16", 8: "w8a16"}


def _checked(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(bits, group size, group dim) of a config."""
    unknown = sorted(set(config) - _KEYS)
    if unknown or config.get("num_bits") not in _MODES:
        raise UsageError(
            f"weight quantization: num_bits is {config.get('num_bits')!r}, expected 4 or 8; "
            f"the keys are {', '.join(sorted(_KEYS))}" + (f", not {', '.join(unknown)}" if unknown else "")
        )
    if config.get("symmetric", False):
        raise UsageError(
            "weight quantization: symmetric is true; groups have a scale and a minimum here, set it to false"
        )
    size, dim = config.get("group_size"), config.get("group_dim", 1)
    if not isinstance(size, int) or size < 1 or dim not in (0, 1) or size * config["num_bits"] % 8:
        even = ", even for 4 bits," if config["num_bits"] == 4 else ""
        raise UsageError(
            f"weight quantization: group_size is {size!r} and group_dim {dim!r}, expected a number above 0{even} and "
            "0 or 1"
        )
    return int(config["num_bits"]), size, int(dim)


class _Groups:
    """The codec of a config, over tensors whose groups lie along `group_dim`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self._bits, self._size, self._dim = _checked(config)
        self._codec = RangeCodec(BlockCodec(f"int{self._bits}", self._size))

    def _along(self, tensor: Tensor) -> Tensor:
        """A matrix with groups along its rows; called a second time, as it was."""
        return tensor if self._dim else tensor.t()

    def _parts(self, message: Tensor, numel: int, lines: int) -> tuple[Tensor, Tensor, Tensor]:
        payload, scales = self._codec.parts(message, numel)
        codes, scale, middle = (each.view(lines, -1) for each in (payload, scales, self._codec.middles(message, numel)))
        return codes, scale, middle


class Quantizer(_Groups):
    """Rounds matrices to integers by groups; two of 4 bits share a byte."""

    def quantize(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(codes in bytes, scales, middles of the ranges), with a line for each of those that groups lie along."""
        if tensor.shape[self._dim] % self._size:
            raise UsageError(
                f"weight quantization: group_size is {self._size}, which does not divide dim {self._dim} of "
                f"{tuple(tensor.shape)}"
            )
        along = self._along(tensor.detach())
        return self._parts(self._codec.encode(along.reshape(1, -1)), tensor.numel(), len(along))


class DeQuantizer(_Groups):
    """Widens what a `Quantizer` of the same config rounded."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config)
        self.dtype = dtype

    def dequantize(self, tensor: Tensor, quant_scale: Tensor, quant_min: Tensor) -> Tensor:
        """The values, in the dtype."""
        lines, numel = len(tensor), tensor.numel() * 8 // self._bits
        message = tensor.new_empty(1, self._codec.nbytes(numel))
        for part, given in zip(self._parts(message, numel, lines), (tensor, quant_scale, quant_min), strict=True):
            part.copy_(given)
        whole = self._codec.decode(message, torch.empty(1, numel, dtype=self.dtype, device=tensor.device))
        return self._along(whole.view(lines, -1)).contiguous()


class _Held(nn.Module):
    """A layer with its weight in few bits: packed for kernels where groups allow it, else by `Quantizer`."""

    def __init__(self, config: Mapping[str, Any], pre_quant_layer: nn.Linear | nn.Embedding) -> None:
        nn.Module.__init__(self)
        options = {name: value for name, value in vars(pre_quant_layer).items() if name not in vars(self)}
        self.__dict__.update(options)
        self._parameters.update(pre_quant_layer._parameters)
        weight = self._parameters.pop("weight").detach()  # type: ignore[union-attr]
        bits, size, dim = _checked(config)
        self.config = dict(config)
        self._dtype = weight.dtype
        self._widener = DeQuantizer(config, weight.dtype)
        self._form: tuple[str, tuple[int, int], int] | None = None
        if weight.shape[dim] % size:
            raise UsageError(
                f"weight quantization: group_size is {size}, which does not divide dim {dim} of {tuple(weight.shape)}"
            )
        if dim == 1 and size % UNIT == 0:
            made = pack(weight, _MODES[bits], size, symmetric=False)
            parts: tuple[Tensor | None, ...] = (made.data, made.scales, made.zeros)
            self._form = made.mode, made.shape, made.group_size
        else:
            parts = Quantizer(config).quantize(weight)
        for name, part in zip(("weight_numbers", "weight_scales", "weight_offsets"), parts, strict=True):
            self.register_buffer(name, part)

    @property
    def held(self) -> PackedWeight | None:
        """The packed weight; None where groups are of another kind."""
        if self._form is None:
            return None
        mode, shape, size = self._form
        return PackedWeight(mode, self.weight_numbers, self.weight_scales, self.weight_offsets, shape, size, False)  # type: ignore[arg-type]

    def widened(self) -> Tensor:
        """The weight that groups of another kind stand for."""
        return self._widener.dequantize(self.weight_numbers, self.weight_scales, self.weight_offsets)  # type: ignore[arg-type]

    def _apply(self, fn: Any, recurse: bool = True) -> _Held:
        names = ("weight_numbers", "weight_scales", "weight_offsets")
        held = {name: self._buffers.pop(name) for name in names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in held.items():
            if value is not None:
                moved = fn(torch.empty(0, dtype=self._dtype, device=value.device))
                held[name], dtype = value.to(moved.device), moved.dtype
        self._buffers.update(held)
        self._dtype = self._widener.dtype = dtype
        return self


class QuantizedLinear(_Held, nn.Linear):
    """A linear layer made of another one."""

    def forward(self, input: Tensor) -> Tensor:
        held = self.held
        if held is not None:
            return packed_linear(input, held, self.bias)
        return functional.linear(input, self.widened(), self.bias)


class QuantizedEmbedding(_Held, nn.Embedding):
    """An embedding made of another one."""

    def __init__(self, config: Mapping[str, Any], pre_quant_layer: nn.Embedding) -> None:
        if pre_quant_layer.max_norm is not None or pre_quant_layer.sparse:
            raise UsageError("weight quantization: an embedding with max_norm or sparse gradients keeps its weight")
        super().__init__(config, pre_quant_layer)

    def forward(self, input: Tensor) -> Tensor:
        held = self.held
        if held is not None:
            return packed_embedding(input, held, self._dtype)
        return functional.embedding(input, self.widened())


def _init_group_wise_weight_quantization(model: nn.Module, ds_config: Mapping[str, Any]) -> nn.Module:
    """Replace the layers whose names the config's `weight_quantization.post_init_quant` has parts of."""
    wanted = (ds_config.get("weight_quantization") or {}).get("post_init_quant") or {}
    for config in wanted.values():
        _checked(config)
    count = 0
    for name, module in list(model.named_modules()):
        matching = [part for part in wanted if part in name]
        if not isinstance(module, (nn.Linear, nn.Embedding)) or isinstance(module, _Held) or not matching:
            continue
        if len(matching) > 1:
            raise UsageError(f"{name} matches {' and '.join(map(repr, matching))}; let one of them match it")
        parent, _, last = name.rpartition(".")
        kind: Any = QuantizedLinear if isinstance(module, nn.Linear) else QuantizedEmbedding
        setattr(model.get_submodule(parent), last, kind(wanted[matching[0]], module))
        count += 1
    log_dist(f"weight_quantization: {count} layers hold their weights in fewer bits")
    return model
