"""One rank of `benchmarks/pipeline.py`: layers that sleep, trained by a pipeline of this library or of another one."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _Sleep(torch.autograd.Function):
    """Sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, before: float, after: float) -> Tensor:
        ctx.after = after
        time.sleep(before)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.after)
        return grad, None, None


class Sleeper(nn.Module):
    """As long in forward, in the gradients of its inputs and in those of its weight as it is told."""

    def __init__(self, width: int, forward: float, inputs: float, weights: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.times = forward, inputs, weights

    def forward(self, value: Tensor) -> Tensor:
        forward, inputs, weights = self.times
        weight = _Sleep.apply(self.weight, 0.0, weights)
        return _Sleep.apply(value + self.shift, forward, inputs) * weight


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, labels)


def batches(count: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        for _ in range(count):
            yield torch.ones(1, width), torch.zeros(1, width)


def with_deepspeed(case: dict, layers: list) -> list[float]:
    """This library, or DeepSpeed: whichever the interpreter has."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    deepspeed.init_distributed(dist_backend="gloo")
    chosen = {} if case["library"] == "deepspeed" else {"schedule": case["schedule"]}
    specs = [LayerSpec(Sleeper, *arguments) for arguments in layers]
    module = PipelineModule(specs, num_stages=case["ranks"], loss_fn=loss_fn, partition_method="uniform", **chosen)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case["micro_batches"],
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # as torch's step, which measures no gradients
        "steps_per_print": 10**9,
    }
    if case["library"] != "deepspeed":  # as the others, which neither look at gradients nor measure them
        config["nonfinite_gradients"] = "ignore"
        config["zero_optimization"] = {"stage": 1, "compute_grad_norm": False}
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    data = batches(case["micro_batches"], case["width"])
    return timed(lambda: engine.train_batch(data), case["steps"])


def with_torch(case: dict, layers: list) -> list[float]:
    """torch.distributed.pipelining."""
    from torch.distributed import pipelining as pipes

    dist.init_process_group("gloo")
    rank, ranks, count = dist.get_rank(), case["ranks"], case["micro_batches"]
    chunks = 2 if case["schedule"] in ("interleaved", "zbv", "dualpipev") else 1
    stages, per = ranks * chunks, len(layers) // (ranks * chunks)
    mine = [rank] if chunks == 1 else [rank, rank + ranks]
    if case["schedule"] in ("zbv", "dualpipev"):
        mine = [rank, stages - 1 - rank]
    parts = [nn.Sequential(*(Sleeper(*each) for each in layers[s * per : (s + 1) * per])) for s in mine]
    built = [pipes.PipelineStage(p, s, stages, torch.device("cpu")) for p, s in zip(parts, mine, strict=True)]
    kinds = {
        "gpipe": pipes.ScheduleGPipe,
        "1f1b": pipes.Schedule1F1B,
        "interleaved": pipes.ScheduleInterleaved1F1B,
        "zbv": pipes.ScheduleZBVZeroBubble,
        "dualpipev": pipes.ScheduleDualPipeV,
    }
    schedule = kinds[case["schedule"]](built[0] if chunks == 1 else built, count, loss_fn=loss_fn)
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=1e-3)
    last = stages - 1 in mine
    inputs, labels = torch.ones(count, case["width"]), torch.zeros(count, case["width"])

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*([inputs] if 0 in mine else []), **({"target": labels, "losses": []} if last else {}))
        optimizer.step()

    return timed(step, case["steps"])


def timed(step: Callable[[], Any], count: int) -> list[float]:
    """Seconds of each step, from where all ranks begin to where all are through; the first ones warm up."""
    spent = []
    for _ in range(count + 2):
        dist.barrier()
        began = time.perf_counter()
        step()
        dist.barrier()
        spent.append(time.perf_counter() - began)
    return spent[2:]


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    run = with_torch if given["library"] == "torch" else with_deepspeed
    found = run(given, given["layers"])
    if os.environ["RANK"] == "0":
        print("SECONDS", json.dumps(found), flush=True)
    os._exit(0)
