"""One process of gpu_scale.py: a Llama in bf16 as rank 0 of many, on one device; see [Note: quiet collectives].

`child.py` runs it as it runs a case. A model that is sharded is never whole on the device: this library and DeepSpeed
make it within `zero.Init`, FSDP2 shards it before it has memory. Weights are what torch's layers draw on the device,
without Transformers' own pass over them, which takes longer and needs whole parameters.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from benchmarks.agreements import agreements, waiting_s
from benchmarks.case import Job
from benchmarks.llama_child import CLIPPING, OPTIMIZER, SHAPES, host_time, make_batches, make_config, timed

__all__ = ["CHECKPOINTED", "layer_elements", "measure", "zero_section"]

CHECKPOINTED = ("7b", "tiny")  # shapes whose activations are computed again in backward
GIB = 2**30
WARM_UP = 3
LOCAL = 8  # ranks of a node

Step = Callable[[Any], Any]


def measure(job: Job) -> dict[str, float]:
    """The numbers of one contender; `shape`, `world`, `device`, `steps` and `reentrant` are its parameters."""
    import torch

    from benchmarks.quiet import quiet_group

    device = str(job.parameters["device"])
    os.environ["DS_ACCELERATOR"] = device
    os.environ["LOCAL_WORLD_SIZE"] = str(LOCAL)
    if device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.backends.mkldnn.enabled = False  # on a CPU without bf16 it fails in every product before another is used
    torch.manual_seed(0)
    with quiet_group(int(job.parameters["world"]), device) as traffic:
        began = time.perf_counter()
        step = (_fsdp2 if job.contender == "torch" else _engine)(job)
        batches = make_batches(str(job.parameters["shape"]), device)
        return {"build_s": time.perf_counter() - began, **_run(step, batches, traffic, job)}


def layer_elements(shape: str) -> int:
    """Parameters of one decoder layer."""
    hidden, _, inner, heads, kv_heads, *_ = SHAPES[shape]
    return 2 * hidden * hidden + 2 * hidden * hidden // heads * kv_heads + 3 * hidden * inner + 2 * hidden


def zero_section(flavour: str, shape: str) -> dict[str, Any]:
    """Keys of `zero_optimization`: a stage, with "block" buckets of one decoder layer, with "zeropp" codes for all."""
    stage, _, keys = flavour.partition("-")
    section: dict[str, Any] = {"stage": int(stage)}
    if keys == "block":
        section["stage3_prefetch_bucket_size"] = section["reduce_bucket_size"] = layer_elements(shape)
    if keys == "zeropp":
        section |= {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": LOCAL}
    return section


# ---- the contenders


def _llama(job: Job) -> Any:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedModel

    def draw(embedding: Any) -> None:
        # as small as other weights, since a gather repeats the first rank's part of all of them
        torch.nn.init.normal_(embedding.weight, std=0.02)

    shape = str(job.parameters["shape"])
    quick = mock.patch.object(PreTrainedModel, "init_weights")
    small = mock.patch.object(torch.nn.Embedding, "reset_parameters", new=draw)
    with quick, small:
        model = LlamaForCausalLM(make_config(shape))
    if shape in CHECKPOINTED:
        model.gradient_checkpointing_enable({"use_reentrant": bool(job.parameters["reentrant"])})
    return model.train()


def _optimizer(model: Any) -> Any:
    """Norms do not decay; by name, since a sharded parameter's dims are not the whole one's."""
    import torch

    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, param in model.named_parameters():
        groups["norm" not in name].append(param)
    settings = {key: value for key, value in OPTIMIZER.items() if key != "weight_decay"}
    decay = OPTIMIZER["weight_decay"]
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": decay if decays else 0.0} for decays, params in groups.items()],
        fused=True,
        **settings,
    )


def _engine(job: Job) -> Step:
    """This library or real DeepSpeed, whichever `import deepspeed` finds."""
    import torch

    # before `zero.Init`, which replaces functions of torch that imports look at
    importlib.import_module("transformers.models.llama.modeling_llama")
    deepspeed: Any = importlib.import_module("deepspeed")
    device, shape = str(job.parameters["device"]), str(job.parameters["shape"])
    zero = zero_section(job.flavour, shape)
    config = {
        "train_micro_batch_size_per_gpu": SHAPES[shape][-1],
        "bf16": {"enabled": True},
        "gradient_clipping": CLIPPING,
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    with contextlib.ExitStack() as stack:
        if zero["stage"] == 3:
            stack.enter_context(deepspeed.zero.Init(config_dict_or_path=config))
        else:
            stack.enter_context(torch.device(device))
            torch.set_default_dtype(torch.bfloat16)
            stack.callback(torch.set_default_dtype, torch.float32)
        model = _llama(job)
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model), config=config)
    if job.flavour.endswith("-compiled"):
        engine.compile()

    def step(tokens: Any) -> Any:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _fsdp2(job: Job) -> Step:
    """Every layer, then the root; computes and reduces in bf16 from fp32 shards, as the others do."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = str(job.parameters["device"])
    with torch.device("meta"):
        model = _llama(job)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers were computed without memory
    with torch.no_grad():
        for name, param in model.named_parameters():
            shard = param.to_local()
            _ = shard.fill_(1.0) if "norm" in name else shard.normal_(0.0, 0.02)
    optimizer = _optimizer(model)

    def step(tokens: Any) -> Any:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


# ---- measuring


def _run(step: Step, batches: list[Any], traffic: Any, job: Job) -> dict[str, float]:
    """Peaks of the first steps and of steady ones, speed, host time, and the collectives of the last step."""
    device, steps = str(job.parameters["device"]), int(job.parameters["steps"])
    memory = _Memory(device)
    memory.restart()
    kept = memory.now()
    losses = [step(batches[number % len(batches)]) for number in range(WARM_UP)]
    first_peak = memory.peak()
    memory.restart()
    steady = statistics.median(timed(step, batches, steps, device))
    found = {
        "tokens_s": batches[0].numel() / steady,
        "kept_gib": kept,
        "first_peak_gib": first_peak,
        "peak_gib": memory.peak(),
        "host_ms": 1e3 * host_time(step, batches, memory.sync),
        "loss": float(losses[-1]),
    }
    before = agreements()
    traffic.clear()
    step(batches[0])
    found |= {"collectives": float(traffic.calls.total()), "sent_gib": traffic.sent.total() / GIB}
    waiting = waiting_s(agreements() - before, int(job.parameters["world"]))
    return found | {"agreement_ms": 1e3 * waiting}


class _Memory:
    """Allocated bytes of the device in GiB; a CPU has no such counters."""

    def __init__(self, device: str) -> None:
        import torch

        self._cuda: Any = torch.cuda if device == "cuda" else None

    def sync(self) -> None:
        if self._cuda:
            self._cuda.synchronize()

    def restart(self) -> None:
        self.sync()
        if self._cuda:
            self._cuda.reset_peak_memory_stats()

    def now(self) -> float:
        return float(self._cuda.memory_allocated()) / GIB if self._cuda else 0.0

    def peak(self) -> float:
        self.sync()
        return float(self._cuda.max_memory_allocated()) / GIB if self._cuda else 0.0
