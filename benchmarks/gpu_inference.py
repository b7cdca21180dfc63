"""Generation on one CUDA device with models of random weights: tokens/s beside what the memory allows.

    python benchmarks/gpu_inference.py --out FOLDER                      # every part that ten minutes hold
    python benchmarks/gpu_inference.py --out FOLDER --parts decode,moe   # some parts, in their order
    python benchmarks/gpu_inference.py --out FOLDER --tiny               # all parts at a tiny shape, on any machine

Each part has a time limit. Limits of rates: 15.01 GB of weights (8B Llama) and 131,072 bytes of cache a token are read
at 4.26 TB/s; products run at 790 TFLOP/s. FOLDER gets the rows as JSON and a picture of throughput against latency.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.inference_bench import Bench, params, prompts, some_steps, start, timed
from benchmarks.inference_load import clients, requests, rollouts, serve, speculation
from deepspeed.accelerator import get_accelerator
from deepspeed.generate.llm import LLM

__all__ = ["PARTS", "main", "picture"]


def decode_steps(bench: Bench, llm: LLM, batch: int, name: str) -> None:
    """Tokens/s of steps in which all sequences decode, from contexts of 512 on."""
    length = bench.count(512)
    prompt_steps = batch * length // 768 + 8
    start(bench, llm, batch, prompt_steps + 16, seed=batch)  # captures graphs
    while llm.busy:
        llm.step()
    steps = 8 if bench.tiny else 100 if batch < 100 else 60
    start(bench, llm, batch, prompt_steps + steps + 8, seed=1000 + batch)
    some_steps(llm, 4)
    found: list[tuple[int, float]] = []
    seconds = timed(lambda: found.append(some_steps(llm, steps)))
    while llm.busy:
        llm.step()
    (count, host), step = found[0], f"{1000 * seconds / steps:.2f}"
    bench.row(name, count / seconds, step_ms=step, host_ms=f"{1000 * host:.2f}", graphs=llm.stats()["graphs"])


def decode(bench: Bench, name: str = "decode {}", *, most: int = 256, shape: str = "8b", **keys: Any) -> None:
    """Steps that decode, at several batches."""
    batches = [each for each in bench.batches if each <= most]
    manager = {"max_ragged_sequence_count": max(batches), **keys.pop("manager", {})}
    with LLM(bench.model(shape), bench.config(**manager), **keys) as llm:
        for batch in batches:
            decode_steps(bench, llm, batch, name.format(batch))


def packed(bench: Bench) -> None:
    """fp8 weights and cache with prompts, and int4 weights; packing replaces a model's weights, so each has its own."""
    fp8 = {"quantization": {"quantization_mode": "fp8"}, "manager": {"kv_dtype": "fp8"}}
    bench.drop()
    decode(bench, "fp8 {}", most=32, **fp8)
    bench.drop()
    prefill(bench, "prompts of 2048, fp8", quantization=fp8["quantization"])
    bench.drop()
    decode(bench, "int4 {}", most=1, quantization={"quantization_mode": "w4a16"})
    bench.drop()


def prefill(bench: Bench, name: str = "prompts of 2048", **keys: Any) -> None:
    """Prompts of 2,048, of which one token is made."""
    length, count = bench.count(2048), 8
    with LLM(bench.model(), bench.config(max_ragged_batch_size=2048), **keys) as llm:

        def run() -> None:
            while llm.busy:
                llm.step()

        for turn in range(2):
            for prompt in prompts(bench, count, length, seed=50 + turn):
                llm.submit(prompt, params(1))
            seconds = timed(run)
    bench.row(name, count * length / seconds)


def context(bench: Bench) -> None:
    """One sequence that decodes at the end of 131,072 tokens."""
    length, steps = bench.count(131_072) // 16 if bench.tiny else 130_900, 8 if bench.tiny else 100
    manager = {"max_context": 131_072, "max_ragged_batch_size": 8192, "max_ragged_sequence_count": 1}
    with LLM(bench.model(), bench.config(**manager)) as llm:
        begin = time.perf_counter()
        llm.submit(prompts(bench, 1, length, seed=4)[0], params(steps + 20))
        while not llm.step():
            pass
        read = time.perf_counter() - begin
        some_steps(llm, 8)
        seconds = timed(lambda: some_steps(llm, steps))
        while llm.busy:
            llm.step()
    bench.row("context 131072, batch 1", steps / seconds, prompt_s=f"{read:.1f}")


def host(bench: Bench) -> None:
    """A 32B shape whose blocks wait in host memory: one forward serves 256 sequences."""
    batch = bench.count(256)
    model = bench.model("32b", "cpu")
    blocks = sum(param.nbytes for param in model.model.layers.parameters())
    tiers = {"device": sum(param.nbytes for param in model.parameters()) - blocks, "host": "120GB"}
    manager = {"max_ragged_sequence_count": batch, "max_ragged_batch_size": 8192 if not bench.tiny else 768}
    with LLM(model, bench.config(**manager), memory=tiers) as llm:
        start(bench, llm, batch, 24, seed=6, length=256)
        some_steps(llm, 1)
        steps = 4
        found: list[tuple[int, float]] = []
        seconds = timed(lambda: found.append(some_steps(llm, steps)))
    bench.drop()
    bench.row("weights in the host, batch 256", found[0][0] / seconds, step_s=f"{seconds / steps:.2f}")
    bench.row("weights in the host, read", blocks * steps / seconds / 1e9, "GB/s")


def profile(bench: Bench) -> None:
    """Kernels of a few decode steps, the longest first."""
    with LLM(bench.model(), bench.config(max_ragged_sequence_count=max(bench.batches))) as llm:
        for batch in bench.batches:
            start(bench, llm, batch, 40 + batch, seed=77 + batch)
            with torch.profiler.profile() as seen:
                some_steps(llm, 4)
                get_accelerator().synchronize()
            while llm.busy:
                llm.step()
            kind = "cpu_time_total" if bench.device == "cpu" else "cuda_time_total"
            table = seen.key_averages().table(sort_by=kind, row_limit=24, max_name_column_width=70)
            (bench.args.out / f"profile_{batch}.txt").write_text(table)


def peer(bench: Bench) -> None:
    """Transformers' generate, eager: what more tokens cost."""
    model, few, many = bench.model(), 2, bench.count(26, 6)
    for batch in bench.batches[:2]:
        ids = torch.tensor(prompts(bench, batch, bench.count(512), seed=5), device=bench.device)

        def run(new: int, ids: torch.Tensor = ids) -> None:
            mask = torch.ones_like(ids)
            model.generate(
                ids, attention_mask=mask, min_new_tokens=new, max_new_tokens=new, do_sample=False, pad_token_id=0
            )

        run(few)
        seconds = timed(partial(run, many)) - timed(partial(run, few))
        bench.row(f"Transformers eager {batch}", (many - few) * batch / max(seconds, 1e-9))


PARTS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "decode": (decode, 90),
    "prefill": (prefill, 45),
    "requests": (requests, 90),
    "plain": (partial(decode, name="decode {} plain", most=32, kernels=False), 60),
    "speculation": (speculation, 45),
    "context": (context, 60),
    "clients": (clients, 75),
    "peer": (peer, 30),
    "profile": (profile, 60),
    "serve": (serve, 150),
    "packed": (packed, 120),
    "moe": (partial(decode, name="experts {}", most=32, shape="30b_a3b"), 90),
    "rollouts": (rollouts, 90),
    "host": (host, 120),
}
"""What runs, and its limit in seconds; parts of one model follow each other."""
_USUAL = [name for name in PARTS if name != "profile"]


def picture(rows: dict[str, dict[str, Any]]) -> str:
    """Tokens/s over the milliseconds of a step, as SVG with logarithmic axes; a line for each kind of row."""
    from benchmarks.bars import COLOURS

    lines: dict[str, list[tuple[float, float]]] = {}
    for name, row in rows.items():
        if "step_ms" in row:
            kind = " ".join(word for word in name.split() if not word.isdigit())
            lines.setdefault(kind, []).append((float(row["step_ms"]), row["tokens/s"]))
    points = [point for line in lines.values() for point in line]
    drawn = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="440" font-family="sans-serif" font-size="12">'
    ]
    drawn.append('<rect width="640" height="440" fill="white"/><text x="250" y="430">milliseconds of a step</text>')
    drawn.append('<text x="10" y="16">tokens/s</text>')
    if points:
        ends = [(min(axis) * 0.8, max(axis) * 1.25) for axis in zip(*points, strict=True)]

        def place(point: Sequence[float]) -> tuple[float, float]:
            parts = [
                float(torch.tensor(each / low).log() / torch.tensor(high / low).log())
                for each, (low, high) in zip(point, ends, strict=True)
            ]
            return 60 + 440 * parts[0], 390 - 360 * parts[1]

        for number, (kind, line) in enumerate(lines.items()):
            colour = COLOURS[number % len(COLOURS)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, sorted(line)))
            drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            drawn.append(f'<text x="520" y="{30 + 16 * number}" fill="{colour}">{kind}</text>')
            for point in line:
                x, y = place(point)
                told = f"{point[1]:,.0f} at {point[0]:g} ms"
                drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
                drawn.append(f'<text x="{x + 6:.1f}" y="{y:.1f}">{told}</text>')
    return "\n".join([*drawn, "</svg>"])


def main(words: Sequence[str] | None = None) -> int:
    """Parts in order, then the table as JSON; 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(_USUAL), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=580, help="of all parts; what does not fit is left out")
    parser.add_argument("--layers", type=int, help="another number of layers, for a try")
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on the CPU too")
    args = parser.parse_args(words)
    chosen = args.parts.split(",")
    if unknown := [each for each in chosen if each not in PARTS]:
        parser.error(f"--parts {','.join(unknown)}: there are {', '.join(PARTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    import transformers

    bench = Bench(args)
    print(bench.device, "torch", torch.__version__, "transformers", transformers.__version__, flush=True)
    for name, (part, limit) in PARTS.items():
        if name in chosen:
            with bench.part(name, limit):
                part(bench)
            (args.out / "inference.json").write_text(json.dumps(bench.rows, indent=1))
    (args.out / "inference.svg").write_text(picture(bench.rows))
    return int(any("failed" in row for row in bench.rows.values()))


if __name__ == "__main__":
    sys.exit(main())
