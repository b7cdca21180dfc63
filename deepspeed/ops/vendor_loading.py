"""Libraries of the GPU's vendor, brought into memory by a thread before a model needs them.

torch opens those of products and of attention at their first use, and each then looks through hundreds of megabytes for
its kernels: on a machine that has not done so since it was started, two seconds of a first step. So that there is no
list of files, each is used once with numbers that mean nothing. The thread computes on the stream that new threads
have, the default one: there, torch keeps no working memory that the first step would not ask for as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial

import torch
from torch.nn import functional

from deepspeed.log import logger
from deepspeed.ops.background import begun

__all__ = ["Use", "attention", "load_vendor", "product", "product8", "wait_for_vendor"]

Use = Callable[[torch.device], object]
"""Uses a library once."""

_ROWS = 256
_MOST = 2048
"""Of sides of a matrix: which kernel is taken matters little, and memory may be scarce."""

_OPEN: set[Future[None]] = set()


def load_vendor(device: torch.device, uses: Sequence[Use]) -> Future[None]:
    """Begin to use each, in one thread and in order; returns at once. What fails is left to who needs it."""
    future = begun(partial(_load, device, uses), "deepspeed-load-vendor")
    _OPEN.add(future)
    future.add_done_callback(_OPEN.discard)
    return future


def wait_for_vendor() -> None:
    """Return when nothing is being loaded: who forks must not do so while a thread opens libraries."""
    wait(_OPEN.copy())


def _load(device: torch.device, uses: Sequence[Use]) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for use in uses:
        try:
            use(device)
        except Exception as error:  # noqa: BLE001 - a guess, which nobody waits for
            logger.debug("a library could not be loaded ahead: %s: %s", type(error).__name__, error)


def product(inner: int, outer: int, dtype: torch.dtype) -> Use:
    """A linear layer, forth and back."""

    def use(device: torch.device) -> object:
        x, weight = (_zeros(rows, inner, dtype=dtype, device=device) for rows in (_ROWS, outer))
        out = functional.linear(x, weight)
        return torch.autograd.grad(out, (x, weight), out.detach())

    return use


def product8(inner: int, outer: int, dtype: torch.dtype) -> Use:
    """Scaled products of 8-bit numbers: those of a forward, and of a backward."""

    def use(device: torch.device) -> object:
        x, weight = (torch.zeros(rows, min(inner, _MOST), device=device) for rows in (_ROWS, min(outer, _MOST)))
        one, weight = torch.ones((), device=device), weight.to(torch.float8_e4m3fn).t()
        kinds = {torch.float8_e4m3fn: True, torch.float8_e5m2: False}  # values are summed fast, gradients are not
        return [
            torch._scaled_mm(x.to(kind), weight, one, one, out_dtype=dtype, use_fast_accum=fast)
            for kind, fast in kinds.items()
        ]

    return use


def attention(heads: int, width: int, dtype: torch.dtype) -> Use:
    """Causal attention, forth and back, by the kernel that torch chooses."""

    def use(device: torch.device) -> object:
        x = _zeros(1, heads, _ROWS, width, dtype=dtype, device=device)
        out = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return torch.autograd.grad(out, x, out.detach())

    return use


def _zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros([min(side, _MOST) for side in shape], dtype=dtype, device=device, requires_grad=True)
