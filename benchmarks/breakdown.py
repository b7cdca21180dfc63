"""Where the device's time of a step goes, by kind of kernel: what torch's profiler saw, sorted by names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["KINDS", "breakdown", "kind_of", "lines"]

# the first pattern that is found in a kernel's name tells its kind
_PATTERNS = (
    ("attention", r"flash|fmha|sdpa|attention|cudnn_generated.*(fort|sdpa)"),
    ("optimizer", r"adam|multi_tensor|_update\b|update_kernel|trust_kernel|lion|lamb(?!da)"),
    ("loss", r"cross_entropy|nll_loss|softmax|_losses"),
    ("products", r"gemm|cutlass|nvjet|cublas|xmma|splitK|matmul|_mm_|_product"),
    ("copies and casts", r"copy|memcpy|memset|fill|CatArray|convert"),
    ("reductions", r"reduce|norm"),
)
KINDS = (*(kind for kind, _ in _PATTERNS), "elementwise")


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name; what nothing else matches is elementwise."""
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, kernel, re.IGNORECASE)), KINDS[-1])


def breakdown(step: Callable[[Any], Any], batches: Sequence[Any], steps: int = 2) -> dict[str, Any]:
    """Milliseconds of a step per kind, and of the kernels that take longest."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for number in range(steps):
            step(batches[number % len(batches)])
        torch.cuda.synchronize()
    kernels = {
        event.key: (event.self_device_time_total / steps / 1e3, event.count / steps)
        for event in seen.key_averages()
        if event.self_device_time_total > 0
    }
    kinds = dict.fromkeys(KINDS, 0.0)
    for name, (spent, _) in kernels.items():
        kinds[kind_of(name)] += spent
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])
    return {"kinds": kinds, "kernels": [(name, *numbers) for name, numbers in longest]}


def lines(found: Mapping[str, Mapping[str, Any]], longest: int = 0) -> list[str]:
    """A table of milliseconds per kind, a column per contender; with `longest`, that many kernels of each below it."""
    width = max(len(kind) for kind in KINDS)
    columns = [max(10, len(name)) for name in found]
    rows = [
        [f"{'device ms':<{width}}", *(f"{name:>{size}}" for name, size in zip(found, columns, strict=True))],
        *(
            [f"{kind:<{width}}"]
            + [f"{seen['kinds'][kind]:>{size}.1f}" for seen, size in zip(found.values(), columns, strict=True)]
            for kind in KINDS
        ),
        [f"{'all':<{width}}"]
        + [f"{sum(seen['kinds'].values()):>{size}.1f}" for seen, size in zip(found.values(), columns, strict=True)],
    ]
    text = ["  ".join(row) for row in rows]
    for name, seen in found.items() if longest else ():
        text += [f"{name}: longest kernels"]
        text += [
            f"  {spent:8.2f} ms {count:6.0f} x {kernel[:150]}" for kernel, spent, count in seen["kernels"][:longest]
        ]
    return text
