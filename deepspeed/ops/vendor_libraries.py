"""What `initialize` begins before anything else: loads that take long on a machine's first start.

torch opens the GPU vendor's libraries of products and of attention at their first use, which takes two seconds on a
machine that has not read them since it was started. A thread uses each once with zeros, on the stream that new threads
have, the default one: there, torch keeps no working memory that the first step would not ask for as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from deepspeed.log import logger
from deepspeed.ops.precompile import THREADS, compiles, load_triton

Use = Callable[[torch.device], object]  # uses a library once

_ROWS = 256
_MOST = 2048
"""Of sides of a matrix: which kernel is taken matters little, and memory may be scarce."""


@contextmanager
def load_ahead(model: nn.Module, source: Any) -> Iterator[None]:
    """Load what the model needs while the body runs, if the config asks for kernels; then no thread uses the device."""
    config = _as_given(source)
    loading = []
    if _enabled(config, "fused_kernels", "fp8") and compiles():
        load_triton()
        if (device := _device()) is not None:
            loading.append(THREADS.submit(load_libraries, device, _seen(model, config)))
    try:
        yield
    finally:
        wait(loading)


def _as_given(source: Any) -> Mapping[str, Any]:
    """A config before it is validated; empty where that is not sure to be readable twice."""
    if isinstance(source, (str, os.PathLike)) and os.path.isfile(source):
        from deepspeed.config.read import read  # here: a dict need not wait until the config's schema is imported

        return read(source)[0]
    return source if isinstance(source, Mapping) else {}


def _enabled(config: Mapping[str, Any], *names: str) -> bool:
    sections = [config.get(name) for name in names]
    return any(isinstance(section, Mapping) and section.get("enabled") is True for section in sections)


def _device() -> torch.device | None:
    """The GPU that this rank is going to use; None where that is not sure before the ranks have met."""
    count, local_rank = torch.cuda.device_count(), os.environ.get("LOCAL_RANK", "")
    index = int(local_rank) if local_rank.isdecimal() else 0
    sure = local_rank.isdecimal() or count == 1
    return torch.device("cuda", index) if sure and index < count else None


def _seen(model: nn.Module, config: Mapping[str, Any]) -> list[Use]:
    """What the model uses first, in the order of a forward that would wait for it: attention, a linear layer."""
    half = torch.float16 if _enabled(config, "fp16") else torch.float32
    dtype = torch.bfloat16 if _enabled(config, "bf16", "bfloat16") else half
    try:
        linear = next((each for each in model.modules() if isinstance(each, nn.Linear)), None)
        heads = next(filter(None, map(_heads, model.modules())), None)
    except Exception:  # noqa: BLE001 - properties of a user's modules may raise anything
        return []
    uses: list[Use] = [] if heads is None else [partial(attention, *heads, dtype)]
    if linear is not None:
        kinds = [product, product8] if _enabled(config, "fp8") else [product]
        uses += [partial(kind, linear.in_features, linear.out_features, dtype) for kind in kinds]
    return uses


def _heads(module: nn.Module) -> tuple[int, int] | None:
    """(number, width) of the heads of a module that lets torch attend: torch's own, and models of Transformers."""
    if isinstance(module, nn.MultiheadAttention):
        return module.num_heads, module.head_dim
    config = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return None
    count, size = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not isinstance(count, int) or not isinstance(size, int) or count < 1:
        return None
    width = getattr(config, "head_dim", None)
    return count, width if isinstance(width, int) else size // count


def load_libraries(device: torch.device, uses: Sequence[Use]) -> None:
    """Use each in order; what fails is left to its first use."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for use in uses:
        try:
            use(device)
        except Exception as error:  # noqa: BLE001 - a guess that nothing depends on
            logger.debug("a library could not be loaded ahead: %s: %s", type(error).__name__, error)


def product(inner: int, outer: int, dtype: torch.dtype, device: torch.device) -> object:
    """A linear layer, forth and back."""
    x, weight = (_zeros(rows, inner, dtype=dtype, device=device) for rows in (_ROWS, outer))
    out = functional.linear(x, weight)
    return torch.autograd.grad(out, (x, weight), out.detach())


def product8(inner: int, outer: int, dtype: torch.dtype, device: torch.device) -> object:
    """Scaled products of 8-bit numbers: those of a forward, and of a backward."""
    x, weight = (torch.zeros(rows, min(inner, _MOST), device=device) for rows in (_ROWS, min(outer, _MOST)))
    one, weight = torch.ones((), device=device), weight.to(torch.float8_e4m3fn).t()
    by = partial(torch._scaled_mm, mat2=weight, scale_a=one, scale_b=one, out_dtype=dtype)
    values, gradients = x.to(torch.float8_e4m3fn), x.to(torch.float8_e5m2)
    return [by(values, use_fast_accum=True), by(gradients, use_fast_accum=False)]


def attention(heads: int, width: int, dtype: torch.dtype, device: torch.device) -> object:
    """Causal attention, forth and back, by the kernel that torch chooses."""
    x = _zeros(1, heads, _ROWS, width, dtype=dtype, device=device)
    out = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    return torch.autograd.grad(out, x, out.detach())


def _zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros([min(side, _MOST) for side in shape], dtype=dtype, device=device, requires_grad=True)
