"""Bytes of model states: what is alive in this process, and what ZeRO's formula says. Imports torch."""

from __future__ import annotations

import contextlib
import gc

import torch
from torch import Tensor

__all__ = ["live_bytes", "zero_formula"]


def live_bytes() -> int:
    """Bytes of all tensors alive in this process, by storage: views count once, released storages not at all."""
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        # by type: isinstance would ask every proxy for its __class__, and some warn or compute when asked
        if not issubclass(type(found), Tensor):
            continue
        for tensor in (found, found.grad if found.is_leaf else None):  # nothing in Python may hold a gradient yet
            if tensor is not None and tensor.layout == torch.strided and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                with contextlib.suppress(RuntimeError):  # a compiler's stand-in has no memory
                    storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)  # empty ones
    return sum(storages.values())


def zero_formula(stage: int, params: int, ranks: int, *, param: int = 2, gradient: int = 2, state: int = 12) -> float:
    """Bytes per rank: stage 1 shares the optimizer's state, stage 2 gradients too, stage 3 parameters too.

    `param`, `gradient` and `state` are bytes per parameter. The state is the fp32 master (4) and Adam's moments (8).
    """
    shares = [ranks if stage >= first else 1 for first in (3, 2, 1)]
    return sum(params * size / share for size, share in zip((param, gradient, state), shares, strict=True))
