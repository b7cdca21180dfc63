"""Train a small model with experts on several ranks, on a task of which each expert can take a part.

    deepspeed --num_gpus 2 examples/moe/train.py --ep_size 2          # or: torchrun --nproc-per-node 2 …

Every rank holds num_experts / ep_size of the experts; nothing else of the script knows of ranks. The config is
ds_config.json in this folder, or what --deepspeed_config names.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.moe.layer import MoE

WIDTH, KINDS = 32, 4


class Model(nn.Module):
    """One layer of experts between two linear ones."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.experts = MoE(WIDTH, expert, num_experts=KINDS, ep_size=ep_size, k=2, min_capacity=0)
        self.outward = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        hidden, balance, _ = self.experts(torch.relu(self.inward(tokens)))
        return nn.functional.mse_loss(self.outward(hidden), wanted) + 0.01 * balance


def batch(step: int, rank: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens of four kinds, each with a map of its own to what is wanted."""
    maps = torch.randn(KINDS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5
    generator = torch.Generator().manual_seed(1 + 1000 * step + rank)
    kinds = torch.randint(0, KINDS, (size,), generator=generator)
    tokens = torch.randn(size, WIDTH, generator=generator)
    tokens[:, :KINDS] = 3.0 * nn.functional.one_hot(kinds, KINDS)
    wanted = torch.einsum("sm,smn->sn", tokens, maps[kinds])
    return tokens.to(device), wanted.to(device)


def main() -> None:
    """Train, and print the loss now and then."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep_size", type=int, default=1, help="ranks over which the experts are spread")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--local_rank", type=int, default=-1, help="given by launchers")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    options = parser.parse_args()
    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    torch.manual_seed(rank)  # so that the experts of different ranks are different ones
    engine, *_ = deepspeed.initialize(args=options, model=Model(options.ep_size))
    for step in range(options.steps):
        loss = engine(*batch(step, rank, engine.train_micro_batch_size_per_gpu(), engine.device))
        engine.backward(loss)
        engine.step()
        if rank == 0 and (step % 50 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
