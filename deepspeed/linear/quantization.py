"""Frozen weights that rest as codes, and the product with them that keeps no whole weight for backward.

[Note: decoded twice] A product with a frozen weight needs the weight again for the gradient of its input. What autograd
keeps are the codes; the weight is decoded, and gathered where ranks share it, once more in backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.codec import BlockCodec, RangeCodec
from deepspeed.errors import UsageError
from deepspeed.fragments import DimSplit
from deepspeed.linear.config import LinearQuantization
from deepspeed.parallel.regions import OwnProduct, RankGroup

__all__ = ["QuantizedLinear", "QuantizedParameter"]


@dataclass(frozen=True)
class WeightCodes:
    """How a weight becomes codes: so many rows of bytes, one for each rank that holds a part of it."""

    codec: BlockCodec | RangeCodec
    shape: torch.Size
    rows: int = 1
    transposed: bool = False
    """Groups lie along the first dim, of a weight of one row."""

    def require_groups(self, name: str) -> None:
        """Refuse groups that do not divide what a rank holds."""
        numel, group = self.shape.numel() // self.rows, self.codec.block
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

    def in_rows(self, codes: Tensor, rows: int) -> tuple[WeightCodes, Tensor]:
        """The same codes, of so many ranks."""
        made = replace(self, rows=rows)
        made.require_groups("LoRAConfig.base_weight_sharding")
        before, after = self.shape.numel() // self.rows, self.shape.numel() // rows
        found = codes.new_zeros(rows, self.codec.nbytes(after))
        for (old, size), (new, _) in zip(self.codec.sections(before), self.codec.sections(after), strict=True):
            nbytes = size * (before // self.codec.block)
            section = codes.view(self.rows, -1)[:, old : old + nbytes].reshape(rows, -1)
            found[:, new : new + section.shape[1]] = section
        return made, found.view(-1)

    def cut(self, split: DimSplit, rank: int) -> tuple[WeightCodes, DimSplit]:
        """The codes of a rank's part of the weight, and how the bytes of all are cut: groups stay as they are."""
        height, width = self.shape[::-1] if self.transposed else self.shape
        by_rows = split.dim == (1 if self.transposed else 0)
        group, starts = self.codec.block, [0] if by_rows else range(0, height * width, width)
        factor = width if by_rows else 1
        sections = self.codec.sections(height * width)
        ranks = []
        for held in split.parts:
            runs = [(at + start * factor, at + stop * factor) for at in starts for start, stop in held]
            self._require_cut(split, runs)
            runs = [(start // group, stop // group) for start, stop in runs]
            ranks.append(tuple((at + a * size, at + b * size) for at, size in sections for a, b in runs))
        shape = torch.Size(split.shape(self.shape, rank))
        return replace(self, shape=shape), DimSplit(0, tuple(ranks))

    def _require_cut(self, split: DimSplit, runs: Sequence[tuple[int, int]]) -> None:
        """Refuse a cut through groups, and one whose codes would begin at other bytes."""
        group, numel = self.codec.block, sum(stop - start for start, stop in runs)
        fits = math.gcd(*(end for run in runs for end in run))
        padded = self.codec.nbytes(numel) != sum(size for _, size in self.codec.sections(numel)) * (numel // group)
        if fits % group or padded:
            found = "cuts through groups" if fits % group else f"makes {numel // group} groups, no multiple of 4"
            largest = min(fits & -fits, numel & -numel if fits % group else numel // 4 & -(numel // 4))
            raise UsageError(
                f"tensor_parallel: a frozen weight {tuple(self.shape)} of codes with group_size {group} is to be split "
                f"over {split.ranks} ranks along dim {split.dim}, which {found}. Use a group_size that divides "
                f"{largest}"
            )


def opened(weight: Any) -> AbstractContextManager[None]:
    """Inside, a weight that `zero.Init` sharded is whole; what it has become is sharded as it was."""
    found: AbstractContextManager[None] = weight.opened() if hasattr(weight, "opened") else nullcontext()
    return found


class FrozenWeight(OwnProduct):
    """A layer over a frozen weight that may rest as codes, and of which this rank may have a part alone."""

    codes: WeightCodes | None = None
    cut: tuple[DimSplit, int] | None = None
    """How the whole weight is cut over tensor-parallel ranks, and the part that is here."""

    def weight_cut(self, split: DimSplit, axis: RankGroup) -> DimSplit | None:
        """See `OwnProduct`."""
        self.cut = split, axis.rank
        if self.codes is None:
            return split
        self.codes, of_bytes = self.codes.cut(split, axis.rank)
        weight = self._parameters.get("weight")
        if isinstance(weight, QuantizedParameter):
            weight.codes = self.codes
        return of_bytes

    def own_part(self, value: Tensor) -> Tensor:
        """Of a whole weight, where only a part of it is here."""
        if self.cut is None or value.dim() != 2 or value.shape[self.cut[0].dim] != self.cut[0].total:
            return value
        return self.cut[0].cut(value, self.cut[1])

    def take_codes(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Let a state dict have codes where it has the floats of a whole weight."""
        value, codes = state_dict.get(f"{prefix}weight"), self.codes
        if codes is None or not isinstance(value, Tensor) or not value.is_floating_point():
            return
        part = self.own_part(value)
        if part.shape == codes.shape:
            state_dict[f"{prefix}weight"] = codes.encode(part)


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


class CodedWeight(FrozenWeight):
    """A layer whose frozen weight is a parameter of codes, by the class that is put before the layer's own."""

    weight: Tensor
    codes: WeightCodes
    widened: torch.dtype

    def rest(
        self, codec: BlockCodec | RangeCodec, config: LinearQuantization | None = None, *, transposed: bool = False
    ) -> None:
        """Let the weight become codes."""
        with opened(self.weight):
            weight = self.weight
            self.codes, self.widened = WeightCodes(codec, weight.shape, transposed=transposed), weight.dtype
            self.codes.require_groups(type(self).__name__)
            QuantizedParameter.adopt(weight, self.codes, config)

    def full_weight(self) -> Tensor:
        """The weight in the layer's dtype."""
        return self._whole(self.weight, self.widened, self.weight.device)

    def base_product(self, inputs: Tensor, *, with_bias: bool) -> Tensor:
        """See `OwnProduct`."""
        return frozen_product(inputs, self.weight, self._whole, self._parameters.get("bias") if with_bias else None)

    def _whole(self, held: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.codes.decode(held.detach().to(device), dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> CodedWeight:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.widened = fn(torch.empty(0, dtype=self.widened, device=self.weight.device)).dtype
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.take_codes(state_dict, prefix)
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
        return self.base_product(input, with_bias=True)


QuantizedLinear = CodedLinear
"""Its published name."""


class CodedEmbedding(CodedWeight, nn.Embedding):
    """An embedding whose frozen weight rests as codes."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self._whole(self.weight, self.widened, input.device)
        return functional.embedding(input, weight, self.padding_idx)


def coded(
    layer: nn.Module,
    codec: BlockCodec | RangeCodec,
    config: LinearQuantization | None = None,
    *,
    transposed: bool = False,
) -> None:
    """Let a plain linear layer or embedding rest as codes; it stays the object that it is."""
    kind: Any = {nn.Linear: CodedLinear, nn.Embedding: CodedEmbedding}[type(layer)]
    layer.__class__ = kind
    assert isinstance(layer, CodedWeight), "both kinds are"
    layer.rest(codec, config, transposed=transposed)
