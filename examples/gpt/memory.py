"""What each ZeRO stage holds on every rank: bytes of live tensors beside the formula.

    deepspeed --num_gpus 2 examples/gpt/memory.py

Takes two steps of the example's GPT in fp32 at each stage, then counts parameters, gradients after backward, and the
optimizer's moments.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import chain

import torch
from model import GPT, Shape
from rich.console import Console
from rich.table import Table
from torch import Tensor

import deepspeed
from deepspeed import comm

PARAM, GRADIENT, STATE = 4, 4, 8  # bytes per parameter in fp32: the optimizer has two moments


def held(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the memory behind some tensors, each piece counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    storages.pop(0, None)
    return sum(storages.values())


def measure(stage: int, shape: Shape) -> tuple[int, int, int, int]:
    """(parameters in all, and on this rank bytes of parameters, gradients, optimizer states)."""
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(
        model=GPT(shape),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "steps_per_print": None,
        },
    )
    weights = list(engine.module.parameters())
    count = sum(getattr(weight, "ds_numel", weight.numel()) for weight in weights)
    tokens = torch.randint(shape.vocabulary, (1, shape.context), device=engine.device)
    for _ in range(2):
        engine.backward(engine(tokens, tokens))
        reduced = getattr(engine.optimizer, "averaged_gradients", None) or {}
        gradients = held([*(weight.grad for weight in weights), *chain.from_iterable(reduced.values())])
        engine.step()
    shards = [weight.ds_tensor for weight in weights if hasattr(weight, "ds_tensor")]
    states = engine.basic_optimizer.state
    moments = [value for state in states.values() for value in state.values() if isinstance(value, Tensor)]
    found = count, held([*weights, *shards]), gradients, held(moments)
    engine.destroy()
    return found


def formula(stage: int, count: int, ranks: int) -> tuple[float, float, float]:
    """The same by ZeRO's definition: stage 1 shares the states, stage 2 gradients too, stage 3 parameters too."""
    params, gradients, states = (
        count * width / (ranks if stage >= first else 1) for width, first in ((PARAM, 3), (GRADIENT, 2), (STATE, 1))
    )
    return params, gradients, states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    shape = Shape(width=parser.parse_args().width)
    deepspeed.init_distributed()
    ranks = comm.get_world_size()
    table = Table(title=f"MiB of model states per rank, {ranks} ranks: counted / formula")
    for name in ("stage", "parameters", "gradients", "optimizer", "together"):
        table.add_column(name, justify="right")
    for stage in range(4):
        count, *counted = measure(stage, shape)
        expected = formula(stage, count, ranks)
        cells = [f"{c / 2**20:.2f} / {e / 2**20:.2f}" for c, e in zip(counted, expected, strict=True)]
        table.add_row(str(stage), *cells, f"{sum(counted) / 2**20:.2f} / {sum(expected) / 2**20:.2f}")
    if comm.get_rank() == 0:
        Console(width=100).print(table)
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
