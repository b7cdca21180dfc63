"""Fused kernels of models and optimizers on one CUDA device: time, and bytes per second against a copy.

    python -m benchmarks.gpu_kernels            # forward and backward of each, beside torch's
    python -m benchmarks.gpu_kernels --sweep    # updates with programs of other shapes: elements/warps, * as it is

Bytes are those that have to move at least: what is read and written once.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

__all__ = ["SIZES", "Update", "main", "sweep", "sweep_rounding"]

TOKENS, WIDTH, INNER, HEADS, KV_HEADS, HEAD, CLASSES = 16384, 2048, 8192, 32, 8, 64, 32000
SIDE = 8192
GB = 1e9
BUSY = 2_000_000  # cycles, a millisecond
BLOCKS, WARPS = (512, 1024, 2048, 4096), (2, 4, 8)
SPANS, TILES = (8192, 16384, 32768, 65536), ((64, 64), (32, 128), (64, 128), (128, 64))
SWEPT = 8  # times that each is run


def seconds(run: Callable[[], Any], repeat: int = 20) -> float:
    """The median time of a call on the device, which has something to do until the host has launched all of it."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeat):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY)
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
    from deepspeed.ops.model.gated import bias_gelu, gated
    from deepspeed.ops.model.norm import layer_norm, rms_norm, rms_norm_reference
    from deepspeed.ops.model.rotary import rotary, rotary_reference

    a, b = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy = 2 * a.numel() / seconds(lambda: b.copy_(a))
    print(f"copy: {copy / GB:.0f} GB/s")
    if "--sweep" in sys.argv[1:]:
        for line in sweep(itertools.chain(_updates(), _coded_updates()), copy, partial(seconds, repeat=SWEPT)):
            print(line, flush=True)
        for line in sweep_rounding(copy, partial(seconds, repeat=SWEPT)):
            print(line, flush=True)
        return 0
    _product_lines()
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
    for name, (run, moved) in _roundings().items():
        took = seconds(run)
        print(f"{name:14} {1e3 * took:7.3f} ms {moved / took / GB:6.0f} GB/s {moved / took / copy:4.0%}")
    _update_lines(_updates(), copy)
    _update_lines(_coded_updates(), copy)
    return 0


def _product_lines() -> None:
    """What products reach alone: the ceiling of a step."""
    a, b = numbers(SIDE, SIDE), numbers(SIDE, SIDE)
    scale = torch.ones((), device="cuda")
    runs: dict[str, Callable[[], Any]] = {"products bf16": lambda: a @ b.t()}
    if torch.cuda.get_device_capability() >= (8, 9):
        c, d = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        runs["products fp8"] = lambda: torch._scaled_mm(
            c, d.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    for name, run in runs.items():
        took = seconds(run)
        print(f"{name:14} {1e3 * took:7.3f} ms, {2 * SIDE**3 / took / 1e12:.0f} TFLOP/s")


def _roundings() -> dict[str, tuple[Callable[[], Any], int]]:
    """Passes of rounding to 8 bits, and the bytes that each moves: gradients of a wide layer, with both layouts."""
    from deepspeed.ops.fp8.kernels.quantise import largest, round_joined

    x = numbers(TOKENS, INNER)
    found, made = largest([x]), torch.empty((), device=x.device)
    row, column = (torch.empty(shape, dtype=torch.float8_e5m2, device=x.device) for shape in (x.shape, x.t().shape))
    both = partial(round_joined, [x], 1, found, row, column, made=made, smallest=1e-12)
    return {"fp8 largest": (partial(largest, [x]), 2 * x.numel()), "fp8 rounding": (both, 4 * x.numel())}


def sweep_rounding(copy: float, time: Callable[[Callable[[], Any]], float]) -> Iterator[str]:
    """As `sweep`, for the passes that round."""
    from deepspeed.ops.fp8.kernels import quantise

    swept = {"fp8 largest": ("SPAN", SPANS), "fp8 rounding": ("TILE", TILES)}
    for name, (run, moved) in _roundings().items():
        size, sizes = swept[name]
        now = getattr(quantise, size), getattr(quantise, f"{size}_WARPS")
        found = []
        for shape in itertools.product(sizes, WARPS):
            with patch.multiple(quantise, **{size: shape[0], f"{size}_WARPS": shape[1]}):
                found.append((moved / time(run) / copy, shape))
        yield f"{name:14} {_shares(found, now)}"


def _shares(found: list[tuple[float, tuple[Any, int]]], now: tuple[Any, int]) -> str:
    """Shares of a copy by (size, or sides, and warps), the best first."""
    return "  ".join(
        f"{'x'.join(map(str, size)) if isinstance(size, tuple) else size}/{warps}"
        f"{'*' if (size, warps) == now else ''} {share:.1%}"
        for share, (size, warps) in sorted(found, reverse=True)
    )


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


SIZES = [WIDTH * INNER] * 48 + [WIDTH] * 33


def _zeros(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(size, device="cuda", dtype=dtype) for size in SIZES]


class Update(NamedTuple):
    """An update over all `SIZES`, and the bytes that it moves per element."""

    name: str
    run: Callable[[], Any]
    nbytes: float
    more: str = ""
    theirs: bool = False
    """torch's, which has no programs of ours."""


def _update_lines(updates: Iterable[Update], copy: float) -> None:
    for each in updates:
        took, moved = seconds(each.run), sum(SIZES) * each.nbytes
        print(
            f"{each.name:14} {1e3 * took:7.3f} ms {moved / took / GB:6.0f} GB/s {moved / took / copy:4.0%}{each.more}"
        )


def _updates() -> Iterator[Update]:
    """Updates of an optimizer: fp32 masters, bf16 gradients in, bf16 weights out."""
    from deepspeed.ops.adam import ONE_PASS as ADAM
    from deepspeed.ops.adam import AdamRule
    from deepspeed.ops.lamb import ONE_PASS as LAMB
    from deepspeed.ops.lamb import LambRule
    from deepspeed.ops.lion import ONE_PASS as LION
    from deepspeed.ops.lion import LionRule
    from deepspeed.ops.muon.momentum import Momenta, MomentumRule, apply_triton, directions_triton
    from deepspeed.ops.one_pass import Conditions
    from deepspeed.ops.optimizer import ParameterBatch
    from deepspeed.ops.registry import op

    params, grads, outs = _zeros(), _zeros(torch.bfloat16), _zeros(torch.bfloat16)
    first, second = _zeros(), _zeros()
    given = Conditions(torch.ones((), device="cuda"), torch.zeros((), device="cuda"))
    two, one = (ParameterBatch(3, moments, params, grads, outs=outs) for moments in ((first, second), (first,)))
    yield Update("adam triton", lambda: ADAM.triton(two, AdamRule(1e-4), given), 28)
    wide = _zeros()

    def fused() -> None:
        torch._foreach_copy_(wide, grads)
        op("adam")(params, wide, first, second, 3, AdamRule(1e-4))
        torch._foreach_copy_(outs, params)

    yield Update("adam torch", fused, 28, ", with its casts", theirs=True)
    yield Update("lion triton", lambda: LION.triton(one, LionRule(1e-4), given), 20)
    # weights and both moments are read twice, since norms of whole tensors are between
    yield Update("lamb triton", lambda: LAMB.triton(two, LambRule(1e-4), given), 40, ", two passes")
    momenta = Momenta(params, grads, first, list(outs), conditions=given)
    rule = MomentumRule(0.95, lr=1e-3)
    yield Update("muon direction", lambda: directions_triton(momenta, rule, wide), 10)
    yield Update("muon apply", lambda: apply_triton(momenta, rule, wide), 24)


def _coded_updates() -> Iterator[Update]:
    """The same with moments in 8 bits."""
    from deepspeed.ops.adam import ONE_PASS as ADAM
    from deepspeed.ops.adam import AdamRule
    from deepspeed.ops.blockwise import blocks
    from deepspeed.ops.lion import ONE_PASS as LION
    from deepspeed.ops.lion import LionRule
    from deepspeed.ops.optimizer import ParameterBatch

    params, grads, outs = _zeros(), _zeros(torch.bfloat16), _zeros(torch.bfloat16)
    for name, update, made, count in (("adam", ADAM, AdamRule(1e-4), 2), ("lion", LION, LionRule(1e-4), 1)):
        codes = tuple(_zeros(torch.uint8) for _ in range(count))
        scales = tuple([torch.zeros(blocks(size), device="cuda") for size in SIZES] for _ in range(count))
        batch = ParameterBatch(3, codes, params, grads, outs=outs, scales=scales)
        nbytes = 12 + count * (2 + 8 / 256)
        yield Update(f"{name} 8 bits", partial(update.triton, batch, made), nbytes)


def sweep(updates: Iterable[Update], copy: float, time: Callable[[Callable[[], Any]], float]) -> Iterator[str]:
    """A line for every update: its share of `copy` (bytes per second) with programs of every shape, the best first."""
    from deepspeed.ops.kernels import many

    now = many.SHAPE
    for each in updates:
        if each.theirs:
            continue
        found = []
        for block, warps in itertools.product(BLOCKS, WARPS):
            with patch.object(many, "SHAPE", many.Shape(block, warps)):
                found.append((sum(SIZES) * each.nbytes / time(each.run) / copy, (block, warps)))
        yield f"{each.name:14} {_shares(found, (now.block, now.warps))}"


if __name__ == "__main__":
    sys.exit(main())
