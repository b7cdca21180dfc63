"""The largest Llama that trains on one CUDA device: states on the device, in host memory and on a disk, by budgets.

    python -m benchmarks.gpu_largest --shape 20b --plan                         # the arithmetic, and nothing else
    python -m benchmarks.gpu_largest --shape 20b --budgets 138GB,124GB,66GB     # fp32 states
    python -m benchmarks.gpu_largest --shape 32b --moment-bits 8                # moments of 8 bits
    python -m benchmarks.gpu_largest --shape tiny --device cpu --tile 4096 --budgets 400KB,950KB,2MB    # does it run?

Stage 2 on one rank: bf16 weights on the device, masters and moments wherever the `memory` section has room for them. A
step is forward with activation checkpointing, backward, clipping and AdamW. What is known is printed as it comes: a run
takes minutes, most of them for the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.llama_child import CLIPPING, OPTIMIZER, SHAPES, make_batches, make_config, memory, token_flops

__all__ = ["budgets", "config_of", "host_peak_gib", "main"]

DEFAULT = "138GB,124GB,66GB"


def say(text: str, began: float = time.monotonic()) -> None:
    """A line with the seconds since the process began."""
    print(f"{time.monotonic() - began:7.1f} s  {text}", flush=True)


def budgets(text: str, folder: Path) -> dict[str, Any]:
    """The `memory` section of DEVICE,HOST,DISK."""
    parts = text.split(",")
    if len(parts) != 3 or not all(parts):
        raise SystemExit(f"--budgets {text}: expected three sizes with commas, such as 138GB,124GB,66GB")
    return {**dict(zip(("device", "host", "disk"), parts, strict=True)), "path": str(folder)}


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """What `initialize` gets."""
    params = {**OPTIMIZER, "betas": list(OPTIMIZER["betas"])}
    if options.moment_bits != 32:
        params["moment_bits"] = options.moment_bits
    zero = {"stage": 2} if options.tile is None else {"stage": 2, "sub_group_size": options.tile}
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},  # a step has one micro batch: nothing is added up
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": zero,
        "fused_kernels": {"enabled": options.device == "cuda"},
        "memory": budgets(options.budgets, options.path),
        "steps_per_print": 10**9,
    }


def make_model(shape: str, device: str) -> Any:
    """The model in bf16 from the beginning: a copy in fp32 would not fit beside it."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    known = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(make_config(shape))
    finally:
        torch.set_default_dtype(known)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def host_peak_gib() -> float:
    """The most memory that this process ever had, files that it maps left out where the system tells them apart."""
    facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    peak = int(facts["VmHWM"].split()[0])
    files = sum(int(facts[name].split()[0]) for name in ("RssFile", "RssShmem") if name in facts)
    return (peak - files) / 2**20


def plan(options: argparse.Namespace) -> None:
    """Print where states would live; no device is needed."""
    import torch
    from transformers import LlamaForCausalLM

    from deepspeed.config.memory import MemoryConfig
    from deepspeed.memory import Spread, plan_states, show
    from deepspeed.memory.budget import Widths
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.zero.offload import state_width

    with torch.device("meta"):
        model = LlamaForCausalLM(make_config(options.shape))
    sizes = [(name, param.numel()) for name, param in model.named_parameters()]
    moments = {} if options.moment_bits == 32 else {"moment_bits": options.moment_bits}
    width = state_width(DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))], **moments))
    section = MemoryConfig(**budgets(options.budgets, options.path))
    say(f"{options.shape}: {sum(size for _, size in sizes) / 1e9:.2f}B parameters, {width:.2f} bytes of moments each")
    show(plan_states([sizes], Spread(2, 1), section, widths=Widths(2, 2, 4, width)))


def train(options: argparse.Namespace) -> dict[str, Any]:
    """A few steps, told as they come."""
    import torch
    import torch.distributed as dist

    import deepspeed

    if options.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:
        torch.cuda.set_device(0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", init_method=address, rank=0, world_size=1)
    model = make_model(options.shape, options.device)
    count = sum(param.numel() for param in model.parameters())
    say(f"{options.shape}: a model of {count / 1e9:.2f}B parameters")
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(options), dist_init_required=False
    )
    say(f"an engine; host {host_peak_gib():.1f} GiB, device {memory(options.device)['allocated_gib']:.1f} GiB")
    batches = make_batches(options.shape, options.device)
    tokens = options.micro_batch * batches[0].shape[1]
    seconds: list[float] = []
    losses: list[float] = []
    for number in range(options.steps):
        began = time.monotonic()
        batch = batches[0][: options.micro_batch]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        if options.device == "cuda":
            torch.cuda.synchronize()
        losses.append(float(loss.detach()))
        seconds.append(time.monotonic() - began)
        peaks = memory(options.device)
        say(f"step {number + 1}: {seconds[-1]:.1f} s, {tokens / seconds[-1]:,.0f} tokens/s, loss {losses[-1]:.4f}")
        say(
            f"peaks so far: device {peaks['allocated_gib']:.1f} GiB ({peaks['reserved_gib']:.1f} reserved), host "
            f"{host_peak_gib():.1f} GiB"
        )
    found = {
        "shape": options.shape,
        "parameters": count,
        "moment_bits": options.moment_bits,
        "tokens": tokens,
        "seconds": seconds,
        "losses": losses,
        "tflops": tokens * token_flops(options.shape) / min(seconds) / 1e12,
        "host_gib": host_peak_gib(),
        **peaks,
    }
    say(f"{found['tflops']:.0f} TFLOP/s in the fastest step")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if the model trained: the loss of the same batch fell."""
    made = argparse.ArgumentParser(description="The largest Llama that trains on one CUDA device.")
    made.add_argument("--shape", choices=tuple(SHAPES), default="20b")
    made.add_argument("--budgets", help=f"of device, host and disk; by default {DEFAULT}")
    made.add_argument("--path", type=Path, default=Path("/tmp"), help="a folder on the disk")
    made.add_argument("--moment-bits", type=int, choices=(32, 8), default=32)
    made.add_argument("--micro-batch", type=int, help="samples of a step; the shape's own by default")
    made.add_argument(
        "--tile", type=int, help="sub_group_size: elements that are updated at a time away from the device"
    )
    made.add_argument("--steps", type=int, default=3)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--json", type=Path, help="where to write every number")
    made.add_argument("--plan", action="store_true", help="print where states would live and stop")
    options = made.parse_args(arguments)
    options.budgets = options.budgets or DEFAULT
    options.micro_batch = options.micro_batch or SHAPES[options.shape][-1]
    if options.plan:
        plan(options)
        return 0
    found = train(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.flush()
    fell = len(found["losses"]) < 2 or found["losses"][-1] < found["losses"][0]
    if not fell:
        say(f"NOT MET: the loss of one batch went from {found['losses'][0]:.4f} to {found['losses'][-1]:.4f}")
    return int(not fell)


if __name__ == "__main__":
    code = main()
    os._exit(code)  # not through destructors: a hundred gigabytes are the system's to free
