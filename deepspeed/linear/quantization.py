"""Frozen weights that rest as codes, and the product with them that keeps no whole weight for backward.

[Note: decoded twice] A product with a frozen weight needs the weight again for the gradient of its input. What autograd
keeps are the codes; the weight is decoded, and gathered where ranks share it, once more in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.codec import Codec
from deepspeed.errors import UsageError
from deepspeed.linear.config import LinearQuantization
from deepspeed.transformers.replacement import whole_shape

__all__ = ["QuantizedLinear", "QuantizedParameter"]


@dataclass(frozen=True)
class WeightCodes:
    """How a weight becomes codes: so many rows of bytes, one for each rank that holds a part of it."""

    codec: Codec
    shape: torch.Size
    rows: int = 1
    transposed: bool = False
    """Groups lie along the first dim, of a weight of one row."""

    def require_groups(self, name: str) -> None:
        """Refuse groups that do not divide what a rank holds."""
        numel, group = self.shape.numel() // self.rows, getattr(self.codec, "block", 1)
        if numel % group:
            held = f" / {self.rows} ranks" if self.rows > 1 else ""
            raise UsageError(
                f"{name}: group_size is {group}, which does not divide the {self.shape.numel():,} elements of "
                f"{tuple(self.shape)}{held}; use one that divides {numel:,}, such as {numel & -numel}"
            )

    @torch.no_grad()
    def encode(self, values: Tensor) -> Tensor:
        """The codes of a row, or of all of them, where the values lie; made on the accelerator."""
        there = values.detach().to(get_accelerator().current_device_name())
        if self.transposed:
            there = there.t()
        flat = there.reshape(-1, self.shape.numel() // self.rows)
        return self.codec.encode(flat).view(-1).to(values.device)

    @torch.no_grad()
    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight that the codes of all rows stand for."""
        out = torch.empty(self.rows, self.shape.numel() // self.rows, dtype=dtype, device=codes.device)
        whole = self.codec.decode(codes.view(self.rows, -1), out)
        return whole.view(self.shape[::-1]).t() if self.transposed else whole.view(self.shape)


class QuantizedParameter(nn.Parameter):
    """A frozen parameter that is the codes of a weight; `dequantized` is what they stand for.

    It is encoded when it is made. Moved, it stays codes; a dtype that is asked for is that of `dequantized`.
    """

    codes: WeightCodes
    widened: torch.dtype
    quantization_config: LinearQuantization

    def __new__(
        cls,
        data: Tensor | None = None,
        requires_grad: bool = False,
        quantization_config: LinearQuantization | None = None,
        codes: WeightCodes | None = None,
    ) -> QuantizedParameter:
        """Of float `data`; `codes` replaces what the config says of them."""
        if data is None or not data.is_floating_point():
            found = "nothing" if data is None else str(data.dtype)
            raise UsageError(f"QuantizedParameter: data is {found}; expected a tensor of floats to quantise")
        if requires_grad:
            raise UsageError("QuantizedParameter: requires_grad is true; codes are frozen and get no gradient")
        config = quantization_config or LinearQuantization()
        codes = codes or WeightCodes(config.codec, data.shape)
        codes.require_groups("QuantizedParameter")
        return cls._of(codes.encode(data), codes, data.dtype, config)

    @classmethod
    def adopt(cls, param: Any, codes: WeightCodes, config: LinearQuantization | None) -> None:
        """Let a parameter be its codes from now on; it stays the object that optimizers know."""
        dtype = param.dtype
        param.requires_grad_(False)
        param.grad = None
        param.data = codes.encode(param.data)
        param.__class__ = cls
        param.codes, param.widened, param.quantization_config = codes, dtype, config or LinearQuantization()

    @classmethod
    def _of(
        cls, data: Tensor, codes: WeightCodes, dtype: torch.dtype, config: LinearQuantization
    ) -> QuantizedParameter:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.codes, made.widened, made.quantization_config = codes, dtype, config
        return made

    def dequantized(self) -> Tensor:
        """The weight, in the dtype that it had."""
        return self.codes.decode(self.data, self.widened)

    def to(self, *args: Any, **kwargs: Any) -> QuantizedParameter:
        """As `Tensor.to`; the codes stay codes."""
        wanted = torch.empty(0, dtype=self.widened, device=self.device).to(*args, **kwargs)
        blocking = not kwargs.get("non_blocking", False)
        moved = self.data.to(wanted.device, non_blocking=not blocking)
        return self._of(moved, self.codes, wanted.dtype, self.quantization_config)

    def cuda(self, device: Any = None, non_blocking: bool = False) -> QuantizedParameter:  # type: ignore[override]
        """Moved to the accelerator's device."""
        return self.to(get_accelerator().current_device_name() if device is None else device, non_blocking=non_blocking)

    def offload(self, revert: bool = False) -> None:
        """Let the codes lie in host memory; with `revert` on the accelerator's device again."""
        self.data = self.data.to(get_accelerator().current_device_name() if revert else "cpu")

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedParameter:
        if id(self) not in memo:
            memo[id(self)] = self._of(self.data.clone(), self.codes, self.widened, self.quantization_config)
        copy: QuantizedParameter = memo[id(self)]
        return copy


Whole = Callable[[Tensor, torch.dtype, torch.device], Tensor]
"""The whole weight in a dtype on a device, from what is held of it."""


class FrozenProduct(torch.autograd.Function):
    """`x W^T` for a weight that gets no gradient: [Note: decoded twice]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Tensor, whole: Whole) -> Tensor:
        """`x` [..., in] to [..., out]."""
        ctx.save_for_backward(held)
        ctx.whole = whole
        return functional.linear(x, whole(held, x.dtype, x.device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        """To [..., in]."""
        (grad,) = grads
        if not ctx.needs_input_grad[0]:
            return None, None, None
        (held,) = ctx.saved_tensors
        return grad @ ctx.whole(held, grad.dtype, grad.device), None, None


def frozen_product(x: Tensor, held: Tensor, whole: Whole, bias: Tensor | None) -> Tensor:
    """The product, in autocast's dtype inside of that."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    product: Tensor = FrozenProduct.apply(x, held, whole)  # type: ignore[no-untyped-call]
    return product if bias is None else product + bias.to(product.dtype)


def take_codes(module: nn.Module, codes: WeightCodes | None, state_dict: dict[str, Any], prefix: str) -> None:
    """Let a state dict have codes where it has the floats of a whole weight."""
    value = state_dict.get(f"{prefix}weight")
    if codes is not None and isinstance(value, Tensor) and value.is_floating_point() and value.shape == codes.shape:
        state_dict[f"{prefix}weight"] = codes.encode(value)


class CodedWeight(nn.Module):
    """A layer whose frozen weight is a parameter of codes, by the class that is put before the layer's own."""

    weight: Tensor
    codes: WeightCodes
    widened: torch.dtype

    def rest(self, codec: Codec, config: LinearQuantization | None = None, *, transposed: bool = False) -> None:
        """Let the weight, which the layer has whole, become codes."""
        weight = self.weight
        if weight.numel() != torch.Size(whole_shape(weight)).numel():
            raise UsageError(
                f"{type(self).__name__}: the weight {whole_shape(weight)} is sharded; build the model outside of "
                "zero.Init, or ask zero.Init for weight_quantization.quantized_initialization"
            )
        self.codes, self.widened = WeightCodes(codec, weight.shape, transposed=transposed), weight.dtype
        self.codes.require_groups(type(self).__name__)
        QuantizedParameter.adopt(weight, self.codes, config)

    def full_weight(self) -> Tensor:
        """The weight in the layer's dtype."""
        return self._whole(self.weight, self.widened, self.weight.device)

    def _whole(self, held: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.codes.decode(held.detach().to(device), dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> CodedWeight:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.widened = fn(torch.empty(0, dtype=self.widened, device=self.weight.device)).dtype
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        take_codes(self, self.codes, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class CodedLinear(CodedWeight, nn.Linear):
    """A linear layer whose frozen weight rests as codes."""

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        quantization_config: LinearQuantization | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        nn.Linear.__init__(self, input_dim, output_dim, bias=bias, dtype=dtype)
        config = quantization_config or LinearQuantization()
        self.rest(config.codec, config)

    def forward(self, input: Tensor) -> Tensor:
        return frozen_product(input, self.weight, self._whole, self.bias)


QuantizedLinear = CodedLinear
"""Its published name."""


class CodedEmbedding(CodedWeight, nn.Embedding):
    """An embedding whose frozen weight rests as codes."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self._whole(self.weight, self.widened, input.device)
        return functional.embedding(input, weight, self.padding_idx)


def coded(
    layer: nn.Module, codec: Codec, config: LinearQuantization | None = None, *, transposed: bool = False
) -> None:
    """Let a plain linear layer or embedding rest as codes; it stays the object that it is."""
    kind = {nn.Linear: CodedLinear, nn.Embedding: CodedEmbedding}[type(layer)]
    layer.__class__ = kind
    assert isinstance(layer, CodedWeight), "both kinds are"
    layer.rest(codec, config, transposed=transposed)
