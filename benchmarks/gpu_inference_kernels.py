"""Kernels of text generation on one CUDA device: right beside their references, then their time in a CUDA graph.

    python -m benchmarks.gpu_inference_kernels                     # all, at the shapes of an 8B Llama
    python -m benchmarks.gpu_inference_kernels --only streamed     # rows whose name contains this
    python -m benchmarks.gpu_inference_kernels --tune              # other shapes of programs as well, the best first

Bytes are those that have to move at least; their share is of 4.26 TB/s, that of operations of 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["Case", "cases", "main"]

BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 4.26e12, 790e12
HIDDEN, INNER, HEADS, KV_HEADS, HEAD, CLASSES, BLOCK = 4096, 14336, 32, 8, 128, 128256, 32
FLUSHED = 256e6
"""Bytes that runs of one graph go over together, so that no weight stays in the cache."""


@dataclass
class Case:
    """One kernel at one shape: `make(copies)` gives runs over so many separate inputs."""

    name: str
    moved: float
    operations: float
    run: Callable[..., Any]
    """Takes the inputs and a shape of programs, or None for the usual one."""
    inputs: Callable[[], tuple[Any, ...]]
    expected: Callable[..., Any]
    tiles: tuple[Any, ...] = ()
    tolerance: float = 2e-2


def seconds(runs: list[Callable[[], Any]], repeat: int = 5) -> float:
    """Of one run, in a graph that has all of them several times."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), max(1, 32 // len(runs))
    with torch.cuda.graph(graph):
        for _ in range(times):
            for run in runs:
                run()
    graph.replay()
    best = float("inf")
    for _ in range(repeat):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3)
    return best / (times * len(runs))


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """Random numbers on the device."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(scale).to(dtype)


def attention_cases() -> Iterator[Case]:
    """Decode and prefill over pages."""
    from deepspeed.ops.generate.attention import AttentionOptions, paged_attention_reference
    from deepspeed.ops.generate.kernels.attention import AttentionTile, attend

    shapes = [(1, 1, 544), (32, 1, 544), (256, 1, 544), (1, 1, 131072), (1, 2048, 2048), (4, 512, 4096)]
    for (sequences, count, context), dtype in itertools.product(shapes, (torch.bfloat16, torch.float8_e4m3fn)):
        if dtype != torch.bfloat16 and count > 1:
            continue

        def inputs(
            sequences: int = sequences, count: int = count, context: int = context, dtype: torch.dtype = dtype
        ) -> tuple[Any, ...]:
            blocks = -(-context // BLOCK)
            pages = [numbers(sequences * blocks, BLOCK, KV_HEADS, HEAD, dtype=dtype) for _ in range(2)]
            tables = torch.randperm(sequences * blocks, device="cuda").view(sequences, blocks).int()
            starts = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * count
            lengths = torch.full((sequences,), context, device="cuda", dtype=torch.int32)
            scales = [torch.ones(KV_HEADS, device="cuda") for _ in range(2)] if dtype != torch.bfloat16 else [None] * 2
            options = AttentionOptions(HEAD**-0.5, count, key_scale=scales[0], value_scale=scales[1])
            return numbers(sequences * count, HEADS, HEAD), *pages, tables, starts, lengths, options

        def run(*given: Any, tile: Any = None) -> Tensor:
            return attend(*given[:-1], replace(given[-1], tile=tile))

        kept = sequences * context * KV_HEADS * HEAD * 2 * dtype.itemsize
        pairs = sequences * count * (context - (count - 1) / 2)
        tiles: tuple[Any, ...]
        if count == 1:
            programs = sequences * KV_HEADS
            wanted = {max(1, min(64, each // programs, context // 128)) for each in (132, 264, 528, 1056)}
            shapes_ = itertools.product((32, 64, 128), (2, 3, 4), (2, 4), sorted(wanted)[-2:])
            tiles = tuple(AttentionTile(16, keys, stages, warps, splits) for keys, stages, warps, splits in shapes_)
        else:
            shapes_ = [
                (64, 64, 2, 4, 1),
                (64, 64, 3, 4, 1),
                (64, 128, 2, 4, 1),
                (128, 64, 2, 8, 1),
                (128, 64, 3, 8, 1),
                (128, 64, 4, 8, 1),
                (128, 64, 2, 4, 1),
                (128, 32, 3, 4, 1),
                (128, 128, 2, 8, 1),
            ]
            tiles = tuple(AttentionTile(*each) for each in shapes_)
        label = f"attention {sequences}x{count} of {context}" + (" fp8" if dtype != torch.bfloat16 else "")
        moved = kept + 2 * sequences * count * HEADS * HEAD * 2
        yield Case(label, moved, 4 * pairs * HEADS * HEAD, run, inputs, paged_attention_reference, tiles)


def row_tiles() -> tuple[Any, ...]:
    """Shapes of programs for one row, and of those for several."""
    from deepspeed.ops.generate.kernels.row import RowTile
    from deepspeed.ops.generate.kernels.streaming import ProductTile

    rows = (RowTile(*each) for each in itertools.product((4, 8, 16), (8, 16, 32), (4,)))
    return *rows, *(ProductTile(*each) for each in itertools.product((64, 128), (128,), (3, 4, 6), (4, 8)))


def product_cases() -> Iterator[Case]:
    """Few rows times weights."""
    from deepspeed.ops.generate.kernels import streaming
    from deepspeed.ops.generate.streaming import streamed_gated_reference, streamed_linear_reference

    tiles = tuple(
        streaming.ProductTile(*each) for each in itertools.product((64, 128), (64, 128, 256), (3, 5), (4,))
    )  # fmt: skip
    layers = {
        "q,k,v": (HIDDEN, (4096, 1024, 1024)),
        "o": (4096, (HIDDEN,)),
        "down": (INNER, (HIDDEN,)),
        "head": (HIDDEN, (CLASSES,)),
    }
    for rows, (name, (inner, outs)) in itertools.product((1, 8, 32, 64), layers.items()):

        def inputs(rows: int = rows, inner: int = inner, outs: tuple[int, ...] = outs) -> tuple[Any, ...]:
            return numbers(rows, inner), [numbers(out, inner, scale=inner**-0.5) for out in outs], [None] * len(outs)

        def run(*given: Any, tile: Any = None) -> Any:
            return streaming.stream(*given, tile)

        moved = 2 * (inner * sum(outs) + rows * (inner + sum(outs)))
        yield Case(
            f"streamed {name} rows {rows}", moved, 2 * rows * inner * sum(outs), run, inputs,
            streamed_linear_reference, tiles,
        )  # fmt: skip
    for rows in (1, 8, 32, 64):

        def gated_inputs(rows: int = rows) -> tuple[Any, ...]:
            weights = tuple(numbers(INNER, HIDDEN, scale=HIDDEN**-0.5) for _ in range(2))
            return numbers(rows, HIDDEN), weights

        def gated_run(x: Tensor, weights: tuple[Tensor, Tensor], tile: Any = None) -> Tensor:
            return streaming.stream_gated(x, weights, (None, None), "silu", tile)

        moved = 2 * (2 * INNER * HIDDEN + rows * (INNER + HIDDEN))
        yield Case(
            f"streamed gate,up rows {rows}", moved, 4 * rows * INNER * HIDDEN, gated_run, gated_inputs,
            lambda x, weights: streamed_gated_reference(x, *weights, "silu"), tiles,
        )  # fmt: skip


def packed_cases() -> Iterator[Case]:
    """Rows times packed weights."""
    from deepspeed.ops.fp8.quantise import round_rows
    from deepspeed.ops.generate.kernels.packed import multiply
    from deepspeed.ops.generate.kernels.streaming import ProductTile
    from deepspeed.ops.generate.packed import FEW_ROWS, pack, packed_linear, packed_linear_reference

    modes = [("w8a16", True), ("w4a16", True), ("w4a16", False), ("wf6af16", True), ("fp8", True)]
    tiles = tuple(ProductTile(*each) for each in itertools.product((64, 128), (128,), (2, 3, 4, 6), (4, 8)))
    for (mode, symmetric), rows, (outs, inner) in itertools.product(
        modes, (1, 32, 768), ((INNER, HIDDEN), (HIDDEN, INNER), (HIDDEN, HIDDEN))
    ):
        if rows > 32 and (outs, inner) != (INNER, HIDDEN):
            continue

        def inputs(
            rows: int = rows, outs: int = outs, inner: int = inner, mode: str = mode, symmetric: bool = symmetric
        ) -> tuple[Any, ...]:
            return numbers(rows, inner), pack(numbers(outs, inner, scale=inner**-0.5), mode, 128, symmetric)

        def run(x: Tensor, packed: Any, tile: Any = None) -> Tensor:
            if tile is None:
                return packed_linear(x, packed)
            if packed.mode == "fp8" and len(x) > FEW_ROWS:
                rounded = round_rows(x, torch.float8_e4m3fn)
                return multiply(rounded.rows, packed, None, tile, x_scale=rounded.scale, dtype=x.dtype)
            return multiply(x, packed, None, tile)

        bits = {"w8a16": 8.125, "w4a16": 4.125 + (0 if symmetric else 1 / 16), "wf6af16": 6.125, "fp8": 8.0}[mode]
        moved = outs * inner * bits / 8 + 2 * rows * (outs + inner)
        yield Case(
            f"packed {mode}{'' if symmetric else ' zeros'} {outs}x{inner} rows {rows}", moved, 2 * rows * outs * inner,
            run, inputs, packed_linear_reference,
            row_tiles() if rows == 1 and mode != "wf6af16" else () if rows > 64 else tiles,
            5e-2 if mode == "fp8" and rows > FEW_ROWS else 2e-2,
        )  # fmt: skip


def small_cases() -> Iterator[Case]:
    """Writes to pages and sampling."""
    from deepspeed.ops.generate.pages import PageTarget, rotary_write, rotary_write_reference
    from deepspeed.ops.generate.sampling import SamplingTensors, sample, sample_reference

    for rows in (1, 32, 2048):

        def inputs(rows: int = rows) -> tuple[Any, ...]:
            pages = [torch.zeros(256, BLOCK, KV_HEADS, HEAD, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
            slots = torch.randperm(256 * BLOCK, device="cuda")[:rows]
            rotated = numbers(rows, HEAD), numbers(rows, HEAD)
            states = (numbers(rows, heads, HEAD) for heads in (HEADS, KV_HEADS, KV_HEADS))
            return *states, *rotated, PageTarget(pages[0], pages[1], slots)

        moved = 2 * rows * HEAD * 2 * (HEADS + 2 * KV_HEADS + 1)
        yield Case(
            f"rotary_write rows {rows}", moved, 0, lambda *given, tile=None: rotary_write(*given), inputs,
            rotary_write_reference,
        )  # fmt: skip
    ways: dict[str, dict[str, float]] = {"greedy": {}, "plain": {}, "top_p": {"top_p": 0.9}, "top_k": {"top_k": 50}}
    ways["top_k, top_p"] = {"top_k": 50, "top_p": 0.9}
    for rows, (name, way) in itertools.product((1, 32, 256), ways.items()):

        def inputs(rows: int = rows, name: str = name, way: dict[str, float] = way) -> tuple[Any, ...]:  # type: ignore[misc]
            heat = torch.full((rows,), 0.0 if name == "greedy" else 0.8, device="cuda")
            whole = torch.arange(rows, device="cuda")
            options = {
                key: torch.full((rows,), value, device="cuda", dtype=torch.int64 if key == "top_k" else torch.float32)
                for key, value in way.items()
            }
            return numbers(rows, CLASSES, scale=3.0), SamplingTensors(heat, whole, whole, **options)

        yield Case(
            f"sample {name} rows {rows}", rows * CLASSES * 2, 0, lambda *given, tile=None: sample(*given)[0], inputs,
            lambda logits, tensors: sample_reference(logits, tensors)[0], tolerance=0.02,
        )  # fmt: skip


def cases() -> Iterator[Case]:
    """All of them."""
    yield from itertools.chain(attention_cases(), product_cases(), packed_cases(), small_cases())


def difference(found: Any, expected: Any) -> float:
    """The norm of the difference by that of what is expected; of tokens the part that differs."""
    if isinstance(found, (list, tuple)):
        return max(difference(a, b) for a, b in zip(found, expected, strict=True))
    if found.dtype == torch.int64:
        return float((found != expected).float().mean())
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def measure(case: Case, tiles: tuple[Any, ...]) -> Iterator[tuple[float, float, Any]]:
    """(seconds, difference to the reference, shape of programs) for the usual shape and each of these."""
    copies = max(1, min(8, int(FLUSHED / case.moved)))
    sets = [case.inputs() for _ in range(copies)]
    expected = case.expected(*sets[0])
    for tile in (None, *tiles):
        with contextlib.suppress(*([Exception] if tile is not None else [])):
            wrong = difference(case.run(*sets[0], tile=tile), expected)
            yield seconds([partial(case.run, *given, tile=tile) for given in sets]), wrong, tile


def line(case: Case, took: float, wrong: float, note: str = "") -> str:
    """One line of the table."""
    share, units = case.moved / took / BYTES_PER_SECOND, case.operations / took / OPERATIONS_PER_SECOND
    verdict = "" if wrong <= case.tolerance else "  WRONG"
    return (
        f"{case.name:36} {1e6 * took:9.1f} us {case.moved / 1e6:9.2f} MB {share:6.1%} of bytes "
        f"{units:6.1%} of operations  difference {wrong:.1e}{verdict} {note}"
    )


def warm(case: Case, tunes: bool) -> None:
    """Compile what a case launches; what fails here fails again where it is measured."""
    with torch.no_grad():
        given = case.inputs()
        for tile in (None, *(case.tiles if tunes else ())):
            with contextlib.suppress(Exception):
                case.run(*given, tile=tile)
    torch.cuda.synchronize()


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="rows whose name contains one of these, separated by ;")
    parser.add_argument("--tune", action="store_true", help="try other shapes of programs")
    parser.add_argument("--limit", type=float, default=150, help="seconds after which no further row begins")
    args = parser.parse_args()
    names = args.only.split(";")
    begun = time.monotonic()
    torch.manual_seed(0)
    chosen = [case for case in cases() if any(name in case.name for name in names)]
    with ThreadPoolExecutor(12) as threads, torch.no_grad():
        for _ in threads.map(lambda case: warm(case, args.tune), chosen):
            pass
    print(f"compiled in {time.monotonic() - begun:.0f} s")
    for case in chosen:
        if time.monotonic() - begun > args.limit:
            print(f"{case.name:36} left out: {args.limit:.0f} seconds are over")
            continue
        try:
            with torch.no_grad():
                usual, *found = measure(case, case.tiles if args.tune else ())
                print(line(case, *usual[:2]), flush=True)
            for took, wrong, tile in sorted(found, key=lambda each: each[0])[:4]:
                print(line(case, took, wrong, str(tile)), flush=True)
        except Exception as error:  # noqa: BLE001 - the other rows are wanted too
            print(f"{case.name:36} failed: {type(error).__name__}: {str(error)[-1500:]}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
