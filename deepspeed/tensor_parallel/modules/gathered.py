"""Split parameters made whole for a while, and what a converter of checkpoints asks about them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.parallel.cut import cut_of
from deepspeed.tensor_parallel.apply import splits_of
from deepspeed.tensor_parallel.gathering import whole_of

__all__ = ["GatherReplacedLayerParams", "collect_autotp_universal_checkpoint_info"]


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


def collect_autotp_universal_checkpoint_info(model: nn.Module) -> dict[str, Any]:
    """Patterns of the names of parameters by how their slices are put together, as `universal_checkpoint_info`.

    Those of fused parts and of copies are told apart, since no pattern says how they are cut.
    """
    splits = splits_of(model)
    patterns = {name: f"^{re.escape(name)}$" for name, _ in model.named_parameters(remove_duplicate=False)}
    fused = {name for name, split in splits.items() if split.shared or any(len(part) > 1 for part in split.parts)}
    simple = {name: split for name, split in splits.items() if name not in fused}
    tokens = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name in ("weight", "bias")
        if hasattr(module, "vocab_start_index") or isinstance(module, nn.Embedding)
    }
    return {
        "universal_checkpoint_version": 0.4,
        "parameter_with_row_parallelism_patterns": [patterns[n] for n, split in simple.items() if split.dim == 1],
        "tp_replicated_parameter_patterns": [pattern for name, pattern in patterns.items() if name not in splits],
        "vocabulary_parameter_patterns": [patterns[name] for name in simple if name in tokens],
        "parameter_with_sub_params": [],
        "autotp_unsupported_parameter_patterns": {
            patterns[name]: "its parts are fused, or several ranks hold copies" for name in sorted(fused)
        },
    }
