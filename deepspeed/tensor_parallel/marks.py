"""Parameters that a model split by itself, by the marks that Megatron's layers set on them."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from deepspeed.fragments import Split, even

__all__ = ["marked_splits"]


def marked_splits(model: nn.Module, ranks: int, known: Collection[str]) -> dict[str, Split] | None:
    """How marked parameters are cut over `ranks`, but for `known` names; None if a mark does not tell.

    A part lies at its rank's place along `partition_dim`; with a stride, or without a dim, nothing can be said.
    """
    found = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in known or not getattr(param, "tensor_model_parallel", False):
            continue
        dim, stride = getattr(param, "partition_dim", None), getattr(param, "partition_stride", 1)
        shape = getattr(param, "ds_shape", param.shape)
        if not isinstance(dim, int) or not 0 <= dim < len(shape) or stride != 1:
            return None
        found[name] = Split.of(dim, [even(shape[dim] * ranks, ranks)])
    return found
