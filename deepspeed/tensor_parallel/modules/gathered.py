"""Split parameters made whole for a while."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.parallel.cut import cut_of
from deepspeed.tensor_parallel.gathering import whole_of

__all__ = ["GatherReplacedLayerParams"]


class GatherReplacedLayerParams:
    """A context in which split parameters are whole; all ranks that share them enter and leave it.

    What is written to them inside counts on every rank that wrote it: they are cut again at the end.
    """

    def __init__(self, params: Iterable[Tensor] | Tensor, module: nn.Module, enabled: bool = True) -> None:
        wanted = {id(each) for each in ([params] if isinstance(params, Tensor) else params)}
        self._found: dict[int, tuple[Tensor, Any, Any]] = {}
        for layer in module.modules() if enabled else ():
            share = cut_of(layer)
            for name, split in {} if share is None else share.splits.items():
                param = layer._parameters.get(name)
                if param is not None and id(param) in wanted:
                    self._found[id(param)] = param, split, share.axis  # type: ignore[union-attr]

    @torch.no_grad()
    def __enter__(self) -> None:
        for param, split, axis in self._found.values():
            if axis.size > 1:
                param.data = whole_of(param.data, split, axis)

    @torch.no_grad()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for param, split, axis in self._found.values():
            if axis.size > 1:
                param.data = split.cut(param.data, axis.rank).clone()
