"""Training steps of a contender beside those of plain PyTorch in the same processes, one of each at a time.

A machine's speed drifts by more than the few per cent that these cases look for, between processes and within one.
So each contender trains its copy of a model next to a second copy under plain PyTorch (DistributedDataParallel where
there are several ranks), each goes first in every other pair, and the median of the pairs' ratios counts. PyTorch as a
contender runs the same code with itself on both sides: what it differs from 1 by is the resolution.

Only `measure` of a case imports this file, since it imports torch.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.case import Job

__all__ = [
    "GPT",
    "SMALL",
    "Batch",
    "Engine",
    "Loop",
    "alternate",
    "compare",
    "contest",
    "decayed_optimizer",
    "fully_sharded",
    "median_ratio",
    "small_gpt",
    "steps",
]

CLIPPING = 1.0
RATE, DECAY = 1e-4, 0.01
SMALL = {"layers": 6, "width": 384, "heads": 6, "vocabulary": 8192, "length": 64}  # 14M parameters

Batch = tuple[Tensor, ...]
Step = Callable[[Batch], None]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


class GPT(nn.Module):
    """A decoder whose output layer is its embedding; returns the loss."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        # by calling the embedding, not by slicing its weight: real DeepSpeed gathers only what a module is called for
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def small_gpt(job: Job, samples: int = 1) -> tuple[GPT, Batch]:
    """The 14M-parameter GPT of several cases, the same on every rank, and this rank's batch."""
    torch.manual_seed(0)
    model = GPT(**SMALL)
    torch.manual_seed(1 + job.rank)
    shape = (samples, SMALL["length"])
    return model, (torch.randint(SMALL["vocabulary"], shape), torch.randint(SMALL["vocabulary"], shape))


def compare(job: Job, model: nn.Module, batch: Batch, *, pairs: int, warm_up: int = 3) -> dict[str, float]:
    """{"ratio": step over PyTorch's, "step_ms": the step}: medians; a step takes as long as on its slowest rank.

    Reported by rank 0. Every rank brings its own batch and the same model. The case's parameters are the keys of
    `zero_optimization`; with none of them it is stage 0.
    """
    dist.init_process_group("gloo")
    both = steps(job, model, copy.deepcopy(model), batch[0].shape[0])
    return contest(*both, batch, pairs=pairs, warm_up=warm_up)


def contest(contender: Step, reference: Step, batch: Batch, *, pairs: int, warm_up: int) -> dict[str, float]:
    """What `compare` returns, of any two steps; ends the process group."""
    times = alternate(contender, reference, batch, pairs=pairs, warm_up=warm_up)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank:
        return {}
    mine, plain = times.tolist()
    return {"ratio": median_ratio(mine, plain), "step_ms": statistics.median(mine) * 1e3}


def steps(job: Job, model: nn.Module, twin: nn.Module, micro_batch: int) -> tuple[Step, Step]:
    """The contender's step of `model` and PyTorch's step of `twin`."""
    contender: Step
    if job.contender != "torch":
        contender = Engine(model, micro_batch, **job.parameters)
    elif job.flavour == "fsdp2":
        contender = fully_sharded(model)
    else:
        contender = _plain(job, model)
    return contender, _plain(job, twin)


def alternate(contender: Step, reference: Step, batch: Batch, *, pairs: int, warm_up: int) -> Tensor:
    """Seconds of each step on this rank: a row for the contender, a row for the reference."""
    times = torch.zeros(2, pairs, dtype=torch.float64)
    for number in range(-warm_up, pairs):
        for which in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            (contender, reference)[which](batch)
            if number >= 0:
                times[which, number] = time.perf_counter() - start
    return times


def median_ratio(mine: list[float], plain: list[float]) -> float:
    """The median of mine over plain, by two pairs at a time: within two pairs each side has gone first once."""
    doubles = range(0, len(mine) - 1, 2)
    return statistics.median(sum(mine[at : at + 2]) / sum(plain[at : at + 2]) for at in doubles)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)


def decayed_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups as Transformers' Trainer makes them: biases and norms do not decay."""
    exempt = {id(param) for part in model.modules() if isinstance(part, nn.LayerNorm) for param in part.parameters()}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, param in model.named_parameters():
        groups[id(param) not in exempt and not name.endswith("bias")].append(param)
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": 0.1 if decays else 0.0} for decays, params in groups.items()],
        lr=1e-4,
        fused=True,
    )


class Loop:
    """What one would write with PyTorch alone, over a model or what wraps it."""

    def __init__(self, model: nn.Module, called: nn.Module, make_optimizer: MakeOptimizer = _optimizer) -> None:
        self.model = model
        self.called = called
        self.optimizer = make_optimizer(model)

    def forward(self, batch: Batch) -> Tensor:
        loss: Tensor = self.called(*batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Afterwards gradients are where they wait for the update."""
        loss.backward()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIPPING)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def __call__(self, batch: Batch) -> None:
        self.backward(self.forward(batch))
        self.update()


def _plain(job: Job, model: nn.Module) -> Loop:
    return Loop(model, nn.parallel.DistributedDataParallel(model) if job.ranks > 1 else model)


def fully_sharded(model: nn.Module, make_optimizer: MakeOptimizer = _optimizer) -> Loop:
    """FSDP2 as its documentation shows it: every block, then the root."""
    from torch.distributed.fsdp import fully_shard  # only here: its import takes a while

    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    return Loop(model, model, make_optimizer)


class Engine(Loop):
    """The loop of the documentation, with the same optimizer; `zero` are keys of `zero_optimization`.

    Where states are offloaded the config names the same rule, so that each library takes its own for the host.
    """

    def __init__(
        self,
        model: nn.Module,
        micro_batch: int,
        *,
        bf16: bool = False,
        make_optimizer: MakeOptimizer = _optimizer,
        **zero: Any,
    ) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"  # where the reference computes, also on a machine with more
        deepspeed: Any = importlib.import_module("deepspeed")
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        config = {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_clipping": CLIPPING,
            "steps_per_print": 10**9,
            "bf16": {"enabled": bf16},
            "zero_optimization": {"stage": 0, **zero},
        }
        super().__init__(model, model, make_optimizer)
        given: dict[str, Any] = {"optimizer": self.optimizer}
        if "offload_optimizer" in zero:
            config["optimizer"] = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY}}
            given = {"model_parameters": model.parameters()}
        self.engine, *_ = deepspeed.initialize(model=model, config=config, **given)

    def forward(self, batch: Batch) -> Tensor:
        loss: Tensor = self.engine(*batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()
