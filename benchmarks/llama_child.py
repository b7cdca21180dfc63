"""One process of gpu_llama.py: makes a contender, trains the Llama with it, and prints its numbers on a marked line.

It takes one argument, a JSON object with the fields of `Task`. Every contender starts from the same weights and sees
the same batches.
"""

from __future__ import annotations

import cProfile
import importlib
import itertools
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "CLIPPING",
    "MARK",
    "OPTIMIZER",
    "SHAPES",
    "Task",
    "host_time",
    "make_batches",
    "make_config",
    "measure",
    "timed",
    "token_flops",
]

ROOT = Path(__file__).resolve().parent.parent
MARK = "gpu-llama-result "
COMPARED = 5  # losses of the first steps
HOST_STEPS = 5
CLIPPING = 1.0
OPTIMIZER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

# hidden, layers, feed-forward, heads, key-value heads, vocabulary, sequence, micro batch
SHAPES = {
    "1b": (2048, 16, 8192, 32, 8, 32000, 4096, 4),
    "3b": (3072, 28, 8192, 24, 8, 32000, 4096, 8),  # 3.0B parameters, with activation checkpointing
    "8b": (4096, 32, 14336, 32, 8, 128256, 4096, 4),  # 8.0B parameters, with activation checkpointing
    "7b": (4096, 32, 12288, 32, 32, 32000, 1024, 1),  # 7.2B parameters; of gpu_scale.py
    "20b": (6144, 50, 16384, 48, 8, 32000, 4096, 1),  # 19.9B and 32.0B parameters; of gpu_largest.py
    "32b": (5120, 65, 27648, 40, 8, 32000, 4096, 1),
    "two-ranks": (512, 8, 1536, 8, 4, 8192, 256, 2),
    "tiny": (64, 2, 128, 4, 2, 256, 32, 2),
}
_TRAITS = frozenset(["cpu", "both", "fused", "fp8", "rows", "blocks", "compiled", "deepcompile", "codes", "backward"])
CHECKPOINTED = ("3b", "8b", "20b", "32b")


@dataclass(frozen=True)
class Task:
    """What to measure.

    `contender` is plain, fsdp2, or ours or deepspeed with a stage after a colon, then traits after dashes:
    ours:2-cpu has its optimizer in host memory, ours:3-both its parameters too; ours:0-fused has fused kernels,
    ours:0-fp8 products of 8 bits (ours:0-fp8-rows with a scale per row, ours:0-fp8-blocks per 128 numbers of it),
    plain-compiled is compiled, ours:3-deepcompile by DeepCompile; ours:0-codes has moments of 8 bits, ours:0-backward
    its optimizer in backward, clipped by the last norm.
    """

    contender: str
    shape: str = "1b"
    device: str = "cuda"
    steps: int = 15
    warm_up: int = 6
    accumulation: int = 1
    threshold: int | None = None  # stage3_param_persistence_threshold
    deepspeed_path: str = ""
    profile: bool = False
    breakdown: bool = False
    curve: int = 0
    """How many losses are told besides times, from the first step on."""

    @property
    def kind(self) -> str:
        return self.contender.partition("-")[0].partition(":")[0]

    @property
    def stage(self) -> int:
        return int(self.contender.partition("-")[0].partition(":")[2] or 0)

    @property
    def traits(self) -> frozenset[str]:
        """What the contender's name asks for behind its stage."""
        asked = frozenset(self.contender.split("-")[1:])
        if unknown := asked - _TRAITS:
            raise ValueError(f"{self.contender}: nobody knows {', '.join(sorted(unknown))}")
        return asked

    @property
    def offload(self) -> dict[str, Any]:
        """The keys of zero_optimization that the contender's name asks for."""
        away = {"device": "cpu", "pin_memory": True}
        names = {"cpu": ("offload_optimizer",), "both": ("offload_optimizer", "offload_param")}
        return {name: away for trait in self.traits & set(names) for name in names[trait]}


# ---- the contenders: each makes a function that takes one step on a batch and returns the loss, and one that tells the
# norm of the gradients of the last step

Contender = tuple[Callable[[Any], Any], Callable[[], Any]]


def make_config(shape: str) -> Any:
    """Transformers' description of a shape."""
    from transformers import LlamaConfig

    hidden, layers, inner, heads, kv_heads, vocabulary, length, _ = SHAPES[shape]
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
        tie_word_embeddings=False,
    )


def make_model(shape: str, device: str) -> Any:
    """The same weights for everybody: made in fp32 from the seed, rounded to bf16."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(make_config(shape))
    if shape in CHECKPOINTED:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.to(torch.bfloat16).train()


def make_batches(shape: str, device: str, rank: int = 0, count: int = 16) -> list[Any]:
    """Random tokens; few enough batches that the loss falls."""
    import torch

    *_, vocabulary, length, micro_batch = SHAPES[shape]
    generator = torch.Generator().manual_seed(1 + rank)
    return [torch.randint(vocabulary, (micro_batch, length), generator=generator).to(device) for _ in range(count)]


def plain(model: Any, task: Task) -> Contender:
    """A loop by hand: fp32 masters, one pass per list of tensors, no synchronisation with the device."""
    import torch

    if "compiled" in task.traits:
        model.compile()
    params = list(model.parameters())
    masters = [torch.nn.Parameter(param.detach().float()) for param in params]
    optimizer = torch.optim.AdamW(masters, fused=True, **OPTIMIZER)
    norms: list[Any] = [None]

    def step(tokens: Any) -> Any:
        for _ in range(task.accumulation):
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / task.accumulation).backward()
        for param, master in zip(params, masters, strict=True):
            master.grad, param.grad = param.grad.float(), None
        norms[0] = torch.nn.utils.clip_grad_norm_(masters, CLIPPING, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, lambda: norms[0]


def fsdp2(model: Any, task: Task) -> Contender:
    """torch's fully_shard of every layer and the root, computing in bf16 from fp32 shards."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    join(task.device)
    model.float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
    norms: list[Any] = [None]

    def step(tokens: Any) -> Any:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms[0] = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, lambda: norms[0].full_tensor()


def engine(model: Any, task: Task) -> Contender:
    """This library or real DeepSpeed, whichever `import deepspeed` finds."""
    join(task.device)
    deepspeed: Any = importlib.import_module("deepspeed")
    zero: dict[str, Any] = {"stage": task.stage, **task.offload}
    if task.threshold is not None and zero["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = task.threshold
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SHAPES[task.shape][-1],
        "gradient_accumulation_steps": task.accumulation,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": {**OPTIMIZER, "betas": list(OPTIMIZER["betas"])}},
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    if "fused" in task.traits:
        config["fused_kernels"] = {"enabled": True}
    if "fp8" in task.traits:
        recipes = {"rows": "row", "blocks": "block"}
        scaling = next((recipes[trait] for trait in recipes if trait in task.traits), "tensor")
        config["fp8"] = {"enabled": True, "scaling": scaling}
    if "codes" in task.traits:
        config["optimizer"]["params"]["moment_bits"] = 8
    if "backward" in task.traits:
        config["optimizer_in_backward"] = {"enabled": True, "clip_by_last_norm": True}
    if "deepcompile" in task.traits:
        config["compile"] = {"deepcompile": True}
    made, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if task.traits & {"compiled", "deepcompile"}:
        made.compile()

    def step(tokens: Any) -> Any:
        for _ in range(task.accumulation):
            loss = made(input_ids=tokens, labels=tokens).loss
            made.backward(loss)
            made.step()
        return loss.detach()

    return step, made.get_global_grad_norm


def join(device: str) -> None:
    """The process group of RANK and WORLD_SIZE: NCCL for a rank alone on its device, otherwise gloo."""
    import torch.distributed as dist

    if not dist.is_initialized():
        alone = device == "cuda" and os.environ["WORLD_SIZE"] == "1"
        dist.init_process_group("nccl" if alone else "gloo")


MAKERS = {"plain": plain, "fsdp2": fsdp2, "ours": engine, "deepspeed": engine}

# ---- measuring


def measure(task: Task) -> dict[str, Any]:
    """The numbers of one contender, or its profile on the standard output."""
    import torch

    if task.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:
        torch.cuda.set_device(0)
    sync = torch.cuda.synchronize if task.device == "cuda" else lambda: None
    model = make_model(task.shape, task.device)
    batches = make_batches(task.shape, task.device, int(os.environ["RANK"]))
    sync()
    if task.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    make, norm = MAKERS[task.kind](model, task)
    step, losses = recorded(make)
    sync()
    made_s = time.perf_counter() - began
    step(batches[0])
    sync()
    first_s = time.perf_counter() - began
    first_norm = norm()
    for number in range(1, max(task.warm_up, COMPARED)):
        step(batches[number % len(batches)])
    sync()
    if task.profile:
        profile(step, batches, sync)
        return {}
    steady = timed(step, batches, task.steps, task.device)
    result = {
        "breakdown": _kernels(step, batches) if task.breakdown else None,
        "losses": [float(loss) for loss in losses[:COMPARED]],
        "grad_norm": None if first_norm is None else float(first_norm),
        "tokens": batches[0].numel() * task.accumulation,
        "token_flops": token_flops(task.shape),
        "step_s": statistics.median(steady),
        "steps_s": steady,
        "make_s": made_s,
        "first_start_s": first_s - statistics.median(steady),
        "host_ms": 1e3 * host_time(step, batches, sync),
        **memory(task.device),
    }
    if task.curve:
        print(f"\n{MARK}{json.dumps(result)}", flush=True)  # times are known, however the rest goes
        while len(losses) < task.curve:
            step(batches[len(losses) % len(batches)])
        result["curve"] = [float(loss) for loss in losses[: task.curve]]
    return result


def recorded(step: Callable[[Any], Any]) -> tuple[Callable[[Any], Any], list[Any]]:
    """(the same step, the losses of all its calls as they come, which nobody has waited for)."""
    losses: list[Any] = []

    def run(tokens: Any) -> Any:
        losses.append(step(tokens))
        return losses[-1]

    return run, losses


def token_flops(shape: str) -> float:
    """Operations that a token needs in forward and backward: products, and attention to what is before it."""
    hidden, layers, inner, heads, kv_heads, vocabulary, length, _ = SHAPES[shape]
    layer = 2 * hidden * hidden * (1 + kv_heads / heads) + 3 * hidden * inner
    return 6 * (layers * layer + hidden * vocabulary) + 6 * layers * hidden * length


def _kernels(step: Any, batches: list[Any]) -> dict[str, Any]:
    """The device's time by kernel."""
    sys.path.append(str(ROOT))  # behind everything else: whose `deepspeed` is taken was decided before
    from benchmarks.breakdown import breakdown

    return breakdown(step, batches)


def timed(step: Any, batches: list[Any], count: int, device: str) -> list[float]:
    """Seconds of each step by events on the device, nothing waiting in between; on a CPU by the clock."""
    import torch

    if device == "cpu":
        marks = [time.perf_counter()]
        for number in range(count):
            step(batches[number % len(batches)])
            marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for number in range(count):
        step(batches[number % len(batches)])
        events[number + 1].record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def host_time(step: Any, batches: list[Any], sync: Callable[[], None]) -> float:
    """Seconds until a step returns, begun with an idle device.

    An upper bound of what Python and launches cost: the host also waits for a full queue or a value of the device.
    """
    times = []
    for number in range(HOST_STEPS):
        sync()
        began = time.perf_counter()
        step(batches[number % len(batches)])
        times.append(time.perf_counter() - began)
    sync()
    return statistics.median(times)


def memory(device: str) -> dict[str, float]:
    """Peaks since just before the contender was made, and what the allocator did."""
    import torch

    if device == "cpu":
        return {"allocated_gib": 0.0, "reserved_gib": 0.0, "alloc_retries": 0, "device_allocs": 0}
    stats = torch.cuda.memory_stats()
    return {
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "alloc_retries": stats["num_alloc_retries"],
        "device_allocs": stats.get("num_device_alloc", 0),
    }


def profile(step: Any, batches: list[Any], sync: Callable[[], None]) -> None:
    """Where the host spends five steps; the device is idle when each begins."""
    profiler = cProfile.Profile()
    for number in range(HOST_STEPS):
        sync()
        profiler.enable()
        step(batches[number % len(batches)])
        profiler.disable()
    shown = pstats.Stats(profiler)
    shown.sort_stats("tottime").print_stats(30)
    shown.sort_stats("cumulative").print_stats(40)


def main(text: str) -> None:
    """Measure and print."""
    task = Task(**json.loads(text))
    if task.kind in ("ours", "deepspeed"):
        # both are called `deepspeed`: whose it is depends on the path alone
        sys.path.insert(0, str(ROOT) if task.kind == "ours" else task.deepspeed_path)
    result = measure(task)
    print(f"\n{MARK}{json.dumps(result)}", flush=True)
    # not through destructors: a communicator of the CUDA device may wait there for ranks that are gone
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
