"""Generation on one CUDA device with an 8B Llama shape of random weights: tokens/s beside what the memory allows.

    python benchmarks/gpu_inference.py --out FOLDER [--parts decode,plain,prefill,requests,peer] [--seconds 240]

Limits: 15.01 GB of weights and 131,072 bytes of cache a token are read at 4.26 TB/s; products run at 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from deepspeed.generate.llm import LLM
from deepspeed.generate.params import SamplingParams

VOCABULARY = 128_256
GOALS = {
    "decode 1": (283, 210),
    "decode 32": (7_880, 6_000),
    "decode 256": (28_000, 20_000),
    "decode 1 plain": (283, 150),
    "decode 32 plain": (7_880, 4_000),
    "prompts of 2048": (54_500, 38_000),
    "256 requests, output": (13_700, 9_000),
    "fp8 1": (526, 330),
    "fp8 32": (14_900, 8_800),
    "int4 1": (882, 440),
}


def llama(layers: int) -> Any:
    """The shape of Llama 3 8B, with random values that were made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return model.eval()


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Token ids."""
    chosen = random.Random(seed)
    return [[chosen.randrange(VOCABULARY) for _ in range(length)] for _ in range(count)]


def params(new: int) -> SamplingParams:
    """Greedy, to a length."""
    return SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)


class Bench:
    """Measures, prints and keeps rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rows = args, {}
        self.until = time.monotonic() + args.seconds

    def row(self, name: str, rate: float, **facts: Any) -> None:
        """One line of the table."""
        limit, goal = GOALS.get(name, (None, None))
        self.rows[name] = {"tokens/s": rate, "limit": limit, "goal": goal, **facts}
        told = f"{name:28} {rate:10.1f} tokens/s"
        told += f"   goal {goal:>7,}  limit {limit:>7,}  {100 * rate / limit:5.1f} %" if limit else ""
        print(told + "".join(f"  {key} {value}" for key, value in facts.items()), flush=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part that fails is told, and the others go on."""
        print(f"# {name}, {self.until - time.monotonic():.0f} s left", flush=True)
        try:
            yield
        except Exception as error:  # noqa: BLE001  # a row less, but the table of the others
            import traceback

            traceback.print_exc()
            self.rows[name] = {"failed": repr(error)[:500]}
        gc.collect()
        torch.cuda.empty_cache()


def timed(call: Callable[[], Any]) -> float:
    """Seconds, the device included."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def start(llm: LLM, batch: int, new: int, seed: int) -> None:
    """Run prompts of 512 until all sequences decode."""
    for prompt in prompts(batch, 512, seed):
        llm.submit(prompt, params(new))
    started: set[int] = set()
    while len(started) < batch:
        started.update(token.uid for token in llm.step())


def some_steps(llm: LLM, steps: int) -> tuple[int, float]:
    """(tokens, median of the host's seconds) of so many steps."""
    count, hosts = 0, []
    for _ in range(steps):
        count += len(llm.step())
        hosts.append(llm.stats()["host_seconds"])
    return count, sorted(hosts)[len(hosts) // 2]


def decode(bench: Bench, llm: LLM, batch: int, name: str) -> None:
    """Tokens/s of steps in which all sequences decode, from contexts of 512 on."""
    prompt_steps = batch * 512 // 768 + 8
    start(llm, batch, prompt_steps + 16, seed=batch)  # captures graphs
    while llm.busy:
        llm.step()
    steps = 100 if batch < 100 else 60
    start(llm, batch, prompt_steps + steps + 8, seed=1000 + batch)
    some_steps(llm, 4)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    count, host = some_steps(llm, steps)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    while llm.busy:
        llm.step()
    facts = {"step_ms": f"{1000 * seconds / steps:.2f}", "host_ms": f"{1000 * host:.2f}"}
    bench.row(name, count / seconds, **facts, graphs=llm.stats()["graphs"])


def profile(llm: LLM, batch: int, out: Path, name: str) -> None:
    """Kernels of a few decode steps, the longest first."""
    start(llm, batch, 40 + batch, seed=77 + batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(4):
            llm.step()
        torch.cuda.synchronize()
    while llm.busy:
        llm.step()
    table = seen.key_averages().table(sort_by="cuda_time_total", row_limit=24, max_name_column_width=70)
    (out / f"{name}.txt").write_text(table)
    keep = [line[:72] + line[-90:] for line in table.splitlines()[:30]]
    print("\n".join(keep), flush=True)


def prefill(bench: Bench, llm: LLM) -> None:
    """Prompts of 2,048, of which one token is made."""
    for turn in range(2):
        for prompt in prompts(8, 2048, seed=50 + turn):
            llm.submit(prompt, params(1))

        def run() -> None:
            while llm.busy:
                llm.step()

        seconds = timed(run)
    bench.row("prompts of 2048", 8 * 2048 / seconds)


def requests(bench: Bench, llm: LLM) -> None:
    """256 requests at once, 100 to 1,024 tokens in and out."""
    chosen = random.Random(0)
    asked = [(chosen.randint(100, 1024), chosen.randint(100, 1024)) for _ in range(256)]
    for number, (length, new) in enumerate(asked):
        llm.submit(prompts(1, length, seed=9000 + number)[0], params(new))
    count = 0
    hosts: list[float] = []

    def run() -> None:
        nonlocal count
        while llm.busy and time.monotonic() < bench.until:
            count += len(llm.step())
            hosts.append(llm.stats()["host_seconds"])

    seconds = timed(run)
    hosts.sort()
    bench.row(
        "256 requests, output",
        count / seconds,
        seconds=f"{seconds:.1f}",
        done=not llm.busy,
        steps=len(hosts),
        host_ms=f"{1000 * hosts[len(hosts) // 2]:.2f}",
        graphs=llm.stats()["graphs"],
    )


def packed(bench: Bench, settings: dict[str, Any]) -> None:
    """fp8 weights and cache, and int4 weights."""
    fp8 = {**settings["state_manager"], "kv_dtype": "fp8"}
    for name, mode, manager, batches in (
        ("fp8", "fp8", fp8, (1, 32)),
        ("int4", "w4a16", settings["state_manager"], (1,)),
    ):
        with bench.part(name):
            model = llama(bench.args.layers)
            keys = {"quantization": {"quantization_mode": mode}, "state_manager": manager}
            with LLM(model, keys) as llm:
                for batch in batches:
                    decode(bench, llm, batch, f"{name} {batch}")
            del model


def peer(bench: Bench, model: Any, batch: int) -> None:
    """Transformers' generate, eager: what more tokens cost."""
    ids = torch.tensor(prompts(batch, 512, seed=5), device="cuda")

    def run(new: int) -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=new,
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )

    run(2)
    short = timed(lambda: run(2))
    long = timed(lambda: run(26))
    bench.row(f"Transformers eager {batch}", 24 * batch / (long - short))


def main() -> None:
    """Parts in order, then the table as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="decode,profile,plain,prefill,requests,peer")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batches", default="1,32,256")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    bench, parts = Bench(args), args.parts.split(",")
    import transformers

    print(
        torch.cuda.get_device_name(), "torch", torch.__version__, "transformers", transformers.__version__, flush=True
    )
    begin = time.perf_counter()
    model = llama(args.layers)
    torch.cuda.synchronize()
    print(f"model built in {time.perf_counter() - begin:.1f} s", flush=True)
    batches = [int(each) for each in args.batches.split(",")]
    most = 512 if "requests" in parts else max(batches)
    manager = {"max_context": 8192, "memory_config": {"size": 8_000_000_000}, "max_ragged_sequence_count": most}
    settings = {"state_manager": manager}
    if {"decode", "requests", "profile"} & set(parts):
        begin = time.perf_counter()
        with LLM(model, settings) as llm:
            print(f"engine built in {time.perf_counter() - begin:.1f} s: {llm.stats()}", flush=True)
            if "decode" in parts:
                for batch in batches:
                    with bench.part(f"decode {batch}"):
                        decode(bench, llm, batch, f"decode {batch}")
            if "profile" in parts:
                for batch in batches:
                    with bench.part(f"profile {batch}"):
                        profile(llm, batch, args.out, f"profile_{batch}")
            if "requests" in parts:
                with bench.part("requests"):
                    requests(bench, llm)
    if "prefill" in parts:
        wide = {"state_manager": {**settings["state_manager"], "max_ragged_batch_size": 2048}}
        with bench.part("prefill"), LLM(model, wide) as llm:
            prefill(bench, llm)
    if "packed" in parts:
        packed(bench, settings)
    if "plain" in parts:
        with bench.part("plain"), LLM(model, settings, kernels=False) as llm:
            for batch in [each for each in batches if each <= 32]:
                decode(bench, llm, batch, f"decode {batch} plain")
    if "peer" in parts:
        for batch in (1, 32):
            with bench.part(f"peer {batch}"):
                peer(bench, model, batch)
    (args.out / "inference.json").write_text(json.dumps(bench.rows, indent=1))


if __name__ == "__main__":
    main()
