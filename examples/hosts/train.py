"""The smallest training job worth starting on several hosts: it shows who takes part, and learns a line.

deepspeed --hostfile examples/hosts/hostfile examples/hosts/train.py
"""

from __future__ import annotations

import argparse
import os
import socket

import torch

import deepspeed
from deepspeed import comm

STEPS, BATCH = 20, 24  # samples of a step over all ranks: divisible by 1, 2, 3, 4, 6, 8, 12 and 24 ranks
CONFIG = {
    "train_batch_size": BATCH,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.0}},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--backend", default=None, help="of the communication; default: what suits the device")
    args = parser.parse_args()
    deepspeed.init_distributed(args.backend, verbose=False)
    rank, world = comm.get_rank(), comm.get_world_size()
    print(f"rank {rank} of {world} is local rank {os.environ['LOCAL_RANK']} on {socket.gethostname()}", flush=True)

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    inputs = torch.randn(BATCH, 3)
    wanted = inputs @ torch.tensor([[1.0], [-2.0], [3.0]]) + 0.5
    own = slice(rank, None, world)  # all ranks together see the whole batch, however many they are
    inputs, wanted = inputs[own].to(engine.device), wanted[own].to(engine.device)
    for _ in range(STEPS):
        loss = torch.nn.functional.mse_loss(engine(inputs), wanted)
        engine.backward(loss)
        engine.step()
    total = loss.detach().clone()
    comm.all_reduce(total)
    print(f"loss {total.item() / world:.4f} after {STEPS} steps", flush=True)
    engine.destroy()
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
