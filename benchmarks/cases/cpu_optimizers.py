"""CPU optimizers beside the speed of memory, and how long the first one takes to start with nothing compiled.

`share` is the bytes that a step must move, by its time, beside what a large copy moves in the same minute. With
`device` gradients arrive in bfloat16 and are to be scaled, and parameters leave in bfloat16: what a step of offloaded
states has to do. Ours does it in the step; others do it around theirs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="cpu_optimizers",
    title="one optimizer step over 16M parameters in host memory",
    file=__file__,
    measures=(
        Measure("share", "of a copy's bandwidth", "%", better="higher", targets=(Target(85.0, where={"bits": 32}),)),
        Measure(
            "step_ms",
            "one step",
            "ms",
            targets=(Target(1.0, than="deepspeed", where={"bits": 32}), Target(1.0, than="torch:fused")),
        ),
        Measure("copy", "a copy", "GB/s", better="higher"),
        Measure("start_s", "the first optimizer", "s", targets=(Target(15.0), Target(1.0, than="deepspeed"))),
    ),
    contenders=("ours", "deepspeed", "torch:fused"),
    parameters=(
        {"rule": "adam", "bits": 32, "device": False},
        {"rule": "adam", "bits": 32, "device": True},
        {"rule": "lion", "bits": 32, "device": False},
        {"rule": "adagrad", "bits": 32, "device": False},
        {"rule": "adam", "bits": 16, "device": True},
        {"rule": "adam", "bits": 8, "device": True},
        {"rule": "first", "bits": 0},
    ),
    rounds=3,
    timeout_s=900.0,
)

ELEMENTS = 16_000_000
PAIRS = 60  # so many that some of each are undisturbed
MOMENTS = {"adam": 2, "lion": 1, "adagrad": 1}
FACTOR = 0.5


def optimizer(job: Job, params: list[Any]) -> Any:
    """The contender's optimizer, or None if it has none such."""
    import torch

    rule, bits = job.parameters["rule"], job.parameters["bits"]
    if job.contender != "ours" and bits != 32:
        return None
    if job.contender == "torch":
        classes = {"adam": torch.optim.AdamW, "adagrad": torch.optim.Adagrad}
        return classes[rule](params, lr=1e-3, fused=True) if rule in classes else None
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    kind = {"adam": DeepSpeedCPUAdam, "lion": DeepSpeedCPULion, "adagrad": DeepSpeedCPUAdagrad}[rule]
    return kind(params, lr=1e-3, **({"moment_bits": bits} if job.contender == "ours" else {}))


def step(job: Job, made: Any, param: Any) -> Callable[[], None]:
    """One step, with what comes before and after it."""
    import torch

    if not job.parameters["device"]:
        param.grad = torch.randn_like(param)
        return made.step
    arrived = torch.randn(param.numel()).to(torch.bfloat16)
    leaves = torch.empty(param.numel(), dtype=torch.bfloat16)
    if job.contender == "ours":
        from deepspeed.ops.one_pass import OnePass

        made.one_pass = OnePass(FACTOR, {param: arrived}, {param: leaves})
        return made.step
    param.grad = torch.empty_like(param)

    def around() -> None:
        param.grad.copy_(arrived)
        param.grad.mul_(FACTOR)
        made.step()
        leaves.copy_(param.detach())

    return around


def seconds(act: Callable[[], Any]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def start(job: Job) -> dict[str, float]:
    """From a process with its imports done to the end of a first step, with an empty cache."""
    import torch

    os.environ["TORCH_EXTENSIONS_DIR"] = os.path.join(job.folder, "extensions")
    if job.contender == "torch":
        return {}
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    param = torch.nn.Parameter(torch.zeros(1024))
    param.grad = torch.ones(1024)
    return {"start_s": seconds(lambda: DeepSpeedCPUAdam([param]).step())}


def measure(job: Job) -> dict[str, float]:
    """The fastest step beside the fastest copy, taken in turn."""
    import torch

    if job.parameters["rule"] == "first":
        return start(job)
    param = torch.nn.Parameter(torch.randn(ELEMENTS))
    made = optimizer(job, [param])
    if made is None:
        return {}
    act = step(job, made, param)
    source, target = torch.randn(ELEMENTS), torch.empty(ELEMENTS)
    act()
    target.copy_(source)
    times = [(seconds(act), seconds(lambda: target.copy_(source))) for _ in range(PAIRS)]
    best, copy = (min(column) for column in zip(*times, strict=True))
    bits, device = job.parameters["bits"], job.parameters["device"]
    # parameter read and written, gradient read, moments read and written, a parameter that leaves
    moved = 8 + (2 + 2 if device else 4) + MOMENTS[job.parameters["rule"]] * 2 * bits / 8
    return {
        "share": 100 * moved / best / (8 / copy),
        "step_ms": best * 1e3,
        "copy": 8 * ELEMENTS / copy / 1e9,
    }
