"""Whole values into layers of which a rank has a part, by the published helpers of AutoTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.parallel.regions import Members
from deepspeed.tensor_parallel.layers import share_of

__all__ = ["Loading", "ReplaceWithTensorSlicing"]


class Loading:
    """Values of a state dict for one module; of a layer that ranks share, this rank's part."""

    @staticmethod
    def is_load_module(module: nn.Module) -> bool:
        """Whether a module has parameters or buffers of its own."""
        return bool(module._parameters or module._buffers)

    @staticmethod
    @torch.no_grad()
    def load_buffer(module: nn.Module, state_dict: Mapping[str, Tensor], prefix: str) -> None:
        """Take over the buffers that the dict has; those on the meta device become real."""
        for name, buffer in module._buffers.items():
            value = state_dict.get(prefix + name)
            if buffer is None or value is None:
                continue
            if buffer.is_meta:
                module._buffers[name] = value.to(get_accelerator().current_device_name(), copy=True)
            else:
                buffer.copy_(value)

    @staticmethod
    @torch.no_grad()
    def load(
        module: nn.Module, state_dict: Mapping[str, Tensor], prefix: str, mp_group: ProcessGroup | None = None
    ) -> None:
        """Take over the module's own parameters and buffers that the dict has, whole or as this rank's part.

        `mp_group` are the ranks that share the layer; a layer that is split knows them, and another group is an error.
        """
        share = share_of(module)
        if share is not None and mp_group is not None and share.axis.size != mp_group.size():
            raise UsageError(
                f"Loading: {prefix or type(module).__name__} is split over {share.axis.size} ranks, but mp_group has "
                f"{mp_group.size()}"
            )
        for name, param in module._parameters.items():
            value = state_dict.get(prefix + name)
            if param is None or value is None:
                continue
            split = None if share is None else share.splits.get(name)
            if share is not None and split is not None and value.shape[split.dim] == split.total:
                value = split.cut(value, share.axis.rank)
            if value.shape != param.shape:
                raise UsageError(
                    f"Loading: {prefix}{name} has the shape {tuple(value.shape)}; expected {tuple(param.shape)}, or "
                    "the whole of it where ranks share the layer"
                )
            if param.is_meta:
                value = value.to(get_accelerator().current_device_name(), param.dtype, copy=True)
                module._parameters[name] = nn.Parameter(value, requires_grad=param.requires_grad)
            else:
                param.copy_(value)
        Loading.load_buffer(module, state_dict, prefix)


class ReplaceWithTensorSlicing:
    """Copies a rank's part of a whole tensor; which dim is cut follows from the two shapes.

    Weights are [inputs, outputs], or [outputs, inputs] with `int8`; `out_dim` and `in_dim` say so otherwise.
    """

    def __init__(
        self, mp_group: ProcessGroup | None = None, mp_size: int = 1, out_dim: int = 1, in_dim: int = 0
    ) -> None:
        self.mp_group, self.mp_size, self.out_dim, self.in_dim = mp_group, mp_size, out_dim, in_dim
        self.gpu_index = 0 if mp_group is None else Members(mp_group).rank

    def merge_assert(self, dim1: int, dim2: int) -> None:
        """Raise unless the first is larger: a part must be smaller than the whole."""
        if dim1 <= dim2:
            raise UsageError(f"a whole of {dim1} elements is cut into parts of {dim2}; a part must be smaller")

    def strided_copy(
        self,
        dst: Tensor | None,
        src: Tensor | None,
        num_splits: int,
        int8: bool = False,
        allocate_tensor: bool = False,
    ) -> nn.Parameter | None:
        """The same of outputs that are `num_splits` parts side by side, such as fused queries, keys and values."""
        if src is None or dst is None:
            return None if src is None else nn.Parameter(src, requires_grad=False)
        dim = self._outputs(src, int8)
        if src.shape[dim] == dst.shape[dim]:
            return self._into(dst, src, allocate_tensor)
        self.merge_assert(src.shape[dim], dst.shape[dim])
        if src.shape[dim] % num_splits or dst.shape[dim] % num_splits:
            raise UsageError(
                f"dim {dim} of {tuple(src.shape)} and of its part {tuple(dst.shape)} does not divide into {num_splits}"
            )
        width = dst.shape[dim] // num_splits
        parts = [self._own(each, dim, width) for each in src.chunk(num_splits, dim)]
        return self._into(dst, torch.cat(parts, dim), allocate_tensor)

    def copy(
        self, dst: Tensor | None, src: Tensor | None, int8: bool = False, allocate_tensor: bool = False
    ) -> nn.Parameter | None:
        """This rank's part of `src` in `dst`, or in new memory of its shape."""
        if src is None or dst is None:
            return None if src is None else nn.Parameter(src, requires_grad=False)
        if src.shape == dst.shape:
            return self._into(dst, src, allocate_tensor)
        different = [dim for dim in range(src.dim()) if src.dim() == dst.dim() and src.shape[dim] != dst.shape[dim]]
        if len(different) != 1:
            raise UsageError(
                f"{tuple(dst.shape)} is no part of {tuple(src.shape)}: they must have as many dims and differ in one"
            )
        (dim,) = different
        self.merge_assert(src.shape[dim], dst.shape[dim])
        return self._into(dst, self._own(src, dim, dst.shape[dim]), allocate_tensor)

    def _outputs(self, src: Tensor, int8: bool) -> int:
        return 0 if src.dim() == 1 else self.in_dim if int8 else self.out_dim

    def _own(self, whole: Tensor, dim: int, width: int) -> Tensor:
        if whole.shape[dim] != width * self.mp_size:
            raise UsageError(
                f"dim {dim} of a whole has {whole.shape[dim]} elements, and a part {width}, of which {self.mp_size} "
                f"ranks make {width * self.mp_size}"
            )
        return whole.narrow(dim, self.gpu_index * width, width)

    def _into(self, dst: Tensor, values: Tensor, allocate: bool) -> nn.Parameter:
        with torch.no_grad():
            target: Any = torch.empty_like(dst, device=values.device) if allocate else dst.detach()
            target.copy_(values)
        return nn.Parameter(target, requires_grad=False)
