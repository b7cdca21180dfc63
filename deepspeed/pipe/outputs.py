"""What the outputs of the micro-batches of a batch become together: a mean, or all rows of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import UsageError

__all__ = ["averaged", "joined", "number"]


def number(value: Any) -> Tensor:
    """One number as a tensor without its history."""
    return value.detach().float() if isinstance(value, Tensor) else torch.tensor(float(value))


def averaged(outputs: list[Any]) -> Any:
    """The mean over micro-batches, tensor by tensor; None without outputs."""
    if not outputs:
        return None
    if isinstance(outputs[0], Tensor):
        shapes = sorted({tuple(each.shape) for each in outputs})
        if len(shapes) > 1:
            raise UsageError(
                f"the outputs of micro-batches have the shapes {shapes}, of which there is no mean: pass "
                "eval_batch(..., reduce_output=None) for a list of them"
            )
        return torch.stack([each.float() for each in outputs]).mean(0)
    if isinstance(outputs[0], (tuple, list)):
        return type(outputs[0])(averaged([each[place] for each in outputs]) for place in range(len(outputs[0])))
    return outputs[0]


def joined(outputs: list[Any]) -> Any:
    """The outputs of all micro-batches along their first dim where they fit together, else a list; None without any."""
    if not outputs:
        return None
    rows = [each for each in outputs if isinstance(each, Tensor) and each.dim() > 0]
    if len(rows) == len(outputs) and len({each.shape[1:] for each in rows}) == 1:
        return torch.cat(rows)
    return outputs
