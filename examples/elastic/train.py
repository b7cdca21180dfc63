"""Training that goes on: ranks and hosts may die or join, and the loss curve continues from the newest checkpoint.

deepspeed --elastic_training --num_gpus=2 examples/elastic/train.py --deepspeed_config=examples/elastic/ds_config.json
torchrun --nproc-per-node=2 --max-restarts=3 examples/elastic/train.py --deepspeed_config=… # also runs it

Three lines make a script elastic: the `elasticity` section of its config, `load_checkpoint` at the start, and
`save_checkpoint` now and then. The engine's data loader continues at the exact sample, on any number of ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import mse_loss

import deepspeed
from deepspeed import comm

SAMPLES = 960


def parse_args(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--local_rank", type=int, default=-1, help="set by the launcher")
    add("--checkpoints", default="elastic_checkpoints", help="folder of the checkpoints, seen by all hosts")
    add("--steps", type=int, default=40, help="optimizer steps")
    add("--save_every", type=int, default=5, help="steps between two checkpoints")
    add("--die_at", type=int, default=0, help="after this step the last rank kills itself, once, to see what happens")
    return deepspeed.add_config_arguments(parser).parse_args(words)


def points() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def main(words: Sequence[str] | None = None) -> float:
    """Train, and return the loss of the last step over all ranks."""
    args = parse_args(words)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    engine, _, loader, _ = deepspeed.initialize(args=args, model=model, training_data=points())
    first = comm.get_rank() == 0
    engine.load_checkpoint(args.checkpoints)
    if first:
        micro, accumulated = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
        share = f"{comm.get_world_size()} ranks × {micro} × {accumulated}"
        print(f"after step {engine.global_steps}: a batch of {engine.train_batch_size()} = {share}", flush=True)
    losses: list[torch.Tensor] = []
    loss = 0.0
    while engine.global_steps < args.steps:
        for inputs, wanted in loader:
            before = engine.global_steps
            output = mse_loss(engine(inputs.to(engine.device)), wanted.to(engine.device))
            engine.backward(output)
            engine.step()
            losses.append(output.detach())
            if engine.global_steps == before:
                continue  # the batch is not whole yet
            loss = mean(losses)
            losses.clear()
            if engine.global_steps == args.die_at:
                die_once(Path(args.checkpoints))
            if engine.global_steps % args.save_every == 0:
                engine.save_checkpoint(args.checkpoints)
                if first:
                    print(f"step {engine.global_steps}: loss {loss:.6f}", flush=True)
            if engine.global_steps == args.steps:
                break
    engine.destroy()
    return loss


def mean(losses: list[torch.Tensor]) -> float:
    """Over the micro batches of all ranks."""
    total = torch.stack(losses).mean()
    comm.all_reduce(total)
    return total.item() / comm.get_world_size()


def die_once(folder: Path) -> None:
    """Let the last rank fail as a crash would, unless it did so before."""
    mark = folder / "died"
    if comm.get_rank() == comm.get_world_size() - 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
