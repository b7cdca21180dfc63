"""Fused kernels of models on one CUDA device: time, and bytes per second against a copy of the same device.

    PYTHONPATH=.:.gpu-deps python3 -m benchmarks.gpu_kernels            # forward and backward of each, beside torch's

Bytes are those that have to move at least: what is read and written once.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["main"]

TOKENS, WIDTH, INNER, HEADS, KV_HEADS, HEAD, CLASSES = 16384, 2048, 8192, 32, 8, 64, 32000
GB = 1e9


def seconds(run: Callable[[], Any], repeat: int = 20) -> float:
    """The median time of a call on the device."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeat):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def numbers(*shape: int, grad: bool = False) -> Tensor:
    """Random bf16."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)


def both(make: Callable[[], Tensor | tuple[Tensor, ...]], inputs: list[Tensor]) -> tuple[float, float]:
    """Seconds of the forward, and of the backward."""
    with torch.no_grad():
        forward = seconds(make)
    outs = make()
    outs = outs if isinstance(outs, tuple) else (outs,)
    upstream = [torch.randn_like(out) for out in outs]
    return forward, seconds(lambda: torch.autograd.grad(outs, inputs, upstream, retain_graph=True))


def row(name: str, times: tuple[float, float], plain: tuple[float, float], moved: tuple[int, int], copy: float) -> str:
    """One line of the table."""
    cells = [
        f"{1e3 * mine:7.3f} ms ({other / mine:4.1f}x torch) {nbytes / mine / GB:6.0f} GB/s {nbytes / mine / copy:4.0%}"
        for mine, other, nbytes in zip(times, plain, moved, strict=True)
    ]
    return f"{name:14} " + " | ".join(cells)


def main() -> int:
    """Print the table."""
    from deepspeed.ops.model.bias_gelu import bias_gelu
    from deepspeed.ops.model.gated import gated
    from deepspeed.ops.model.norm import layer_norm, rms_norm, rms_norm_reference
    from deepspeed.ops.model.rotary import rotary, rotary_reference

    a, b = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy = 2 * a.numel() / seconds(lambda: b.copy_(a))
    print(f"copy: {copy / GB:.0f} GB/s")
    x, w, bias = numbers(TOKENS, WIDTH, grad=True), numbers(WIDTH, grad=True), numbers(WIDTH, grad=True)
    size = x.numel() * 2
    mine = both(lambda: rms_norm(x, w, 1e-6)[0], [x, w])
    print(
        row(
            "rms_norm",
            mine,
            both(lambda: rms_norm_reference(x, None, w, 1e-6, 0.0)[0], [x, w]),
            (2 * size, 3 * size),
            copy,
        )
    )
    mine = both(lambda: layer_norm(x, w, bias, 1e-6)[0], [x, w, bias])
    plain = both(lambda: torch.nn.functional.layer_norm(x, (WIDTH,), w, bias), [x, w, bias])
    print(row("layer_norm", mine, plain, (2 * size, 3 * size), copy))
    g, u = numbers(TOKENS, INNER, grad=True), numbers(TOKENS, INNER, grad=True)
    size = g.numel() * 2
    mine = both(lambda: gated(g, u, "silu"), [g, u])
    plain = both(lambda: torch.nn.functional.silu(g) * u, [g, u])
    print(row("gated silu", mine, plain, (3 * size, 5 * size), copy))
    bias = numbers(INNER, grad=True)
    mine = both(lambda: bias_gelu(g, bias, "gelu_tanh"), [g, bias])
    plain = both(lambda: torch.nn.functional.gelu(g + bias, approximate="tanh"), [g, bias])
    print(row("bias gelu", mine, plain, (2 * size, 3 * size), copy))
    q = numbers(4, TOKENS // 4, HEADS, HEAD).transpose(1, 2).requires_grad_()
    k = numbers(4, TOKENS // 4, KV_HEADS, HEAD).transpose(1, 2).requires_grad_()
    cos, sin = numbers(1, TOKENS // 4, HEAD), numbers(1, TOKENS // 4, HEAD)
    size = (q.numel() + k.numel()) * 2
    mine = both(lambda: rotary(q, k, cos, sin), [q, k])
    print(row("rotary", mine, both(lambda: rotary_reference(q, k, cos, sin), [q, k]), (2 * size, 2 * size), copy))
    _loss_lines()
    _adam_lines(copy)
    return 0


def _loss_lines() -> None:
    from deepspeed.ops.model.linear_loss import linear_loss

    hidden, weight = numbers(TOKENS, WIDTH, grad=True), numbers(CLASSES, WIDTH, grad=True)
    labels = torch.randint(CLASSES, (TOKENS,), device="cuda")

    def fused() -> None:
        torch.autograd.grad(linear_loss(hidden, weight, None, labels), [hidden, weight])

    def plain() -> None:
        logits = torch.nn.functional.linear(hidden, weight).float()
        torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), [hidden, weight])

    for name, run in (("linear_loss", fused), ("plain", plain)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        took = seconds(run, 5)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        rate = 6 * TOKENS * WIDTH * CLASSES / took / 1e12
        print(f"{name:14} {1e3 * took:7.3f} ms, peak {peak:.2f} GiB; its products at {rate:.0f} TFLOP/s")


def _adam_lines(copy: float) -> None:
    from deepspeed.ops.adam.kernels.update import adam_many
    from deepspeed.ops.adam.rule import AdamRule, Conditions, op

    sizes = [WIDTH * INNER] * 48 + [WIDTH] * 33
    lists = [[torch.zeros(size, device="cuda") for size in sizes] for _ in range(3)]
    grads = [torch.zeros(size, device="cuda", dtype=torch.bfloat16) for size in sizes]
    outs = [torch.zeros(size, device="cuda", dtype=torch.bfloat16) for size in sizes]
    given = Conditions(torch.ones((), device="cuda"), torch.zeros((), device="cuda"))
    inputs = (lists[0], grads, lists[1], lists[2])
    took = seconds(lambda: adam_many(inputs, outs, 3, AdamRule(1e-4), conditions=given))
    moved = sum(sizes) * 28
    print(f"adam triton    {1e3 * took:7.3f} ms {moved / took / GB:6.0f} GB/s {moved / took / copy:4.0%}")
    wide = [torch.zeros(size, device="cuda") for size in sizes]

    def fused() -> None:
        for grad, narrow in zip(wide, grads, strict=True):
            grad.copy_(narrow)
        op("adam")(lists[0], wide, lists[1], lists[2], 3, AdamRule(1e-4))
        torch._foreach_copy_(outs, lists[0])

    took = seconds(fused)
    print(
        f"adam torch     {1e3 * took:7.3f} ms {moved / took / GB:6.0f} GB/s {moved / took / copy:4.0%}, with its casts"
    )


if __name__ == "__main__":
    sys.exit(main())
