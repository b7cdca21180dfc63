"""Train a small GPT on the source text of Python's standard library, with any number of processes.

deepspeed --num_gpus 2 examples/gpt/train.py --deepspeed_config examples/gpt/ds_config.json
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import curve
import data
import torch
from model import GPT, Shape
from torch import Tensor

import deepspeed
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.profiling.progress import ProgressBar, short
from deepspeed.runtime.dataloader import RepeatingLoader

FOLDER = Path(__file__).parent
PROMPT = b"    def __init__(self"


@dataclass
class History:
    """What happened while training; losses are means over all ranks."""

    training: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Over all ranks, evaluation left out."""
        return self.tokens / max(self.seconds, 1e-9)


def parse_args() -> argparse.Namespace:
    shape = Shape()
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=None, help="optimizer steps; None: total_num_steps of the config's schedule")
    add("--layers", type=int, default=shape.layers, help="transformer blocks")
    add("--heads", type=int, default=shape.heads, help="attention heads of each block")
    add("--width", type=int, default=shape.width, help="size of a token's vector")
    add("--context", type=int, default=shape.context, help="tokens that the model sees at once")
    add("--evaluations", type=int, default=12, help="how often the validation loss is taken while training")
    add("--validation_windows", type=int, default=128, help="windows of held-out text in each evaluation")
    add("--sample", type=int, default=400, help="tokens to write at the end")
    add("--seed", type=int, default=1234, help="of the first weights and of the sample")
    add("--output", type=Path, default=Path("gpt-output"), help="folder for the loss curve")
    add("--local_rank", type=int, default=-1, help="set by the launcher")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(FOLDER / "ds_config.json"))
    args = parser.parse_args()
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps {args.steps}: give 1 or more")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the loss curve needs matplotlib: pip install 'deepspeed[examples]'")
    return args


def share_cores() -> None:
    """Give each rank its share of the cores, unless it has one: torch would take all of them in every rank."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def train(engine: deepspeed.DeepSpeedEngine, validation: Iterable[Any], *, steps: int, evaluations: int) -> History:
    """Take the steps; every micro batch is a forward, a backward and a step of the engine."""
    history, every = History(), math.ceil(steps / max(1, evaluations))
    batches = iter(RepeatingLoader(engine.training_dataloader))
    history.validation.append((0, evaluate(engine, validation)))
    with ProgressBar(total=steps, description="training", lines=15) as bar:
        for step in range(1, steps + 1):
            began, lr = time.perf_counter(), engine.get_lr()[0]
            loss = torch.zeros((), device=engine.device)
            for _ in range(engine.gradient_accumulation_steps()):
                tokens, following = (part.to(engine.device) for part in next(batches))
                loss += engine.backward(engine(tokens, following))
                engine.step()
                history.tokens += tokens.numel() * comm.get_world_size()
            comm.all_reduce(loss)
            history.training.append(loss.item() / comm.get_world_size())
            history.seconds += time.perf_counter() - began
            if step % every == 0 or step == steps:
                history.validation.append((step, evaluate(engine, validation)))
            bar.update(loss=f"{history.training[-1]:.3f}", lr=f"{lr:.2e}", tokens_per_s=history.tokens_per_s)
    return history


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine, batches: Iterable[Any]) -> float:
    """The mean loss over the windows of all ranks."""
    engine.eval()
    total = torch.zeros(2, device=engine.device)  # loss × windows, windows
    for batch in batches:
        tokens, following = (part.to(engine.device) for part in batch)
        total += torch.stack((engine(tokens, following) * len(tokens), total.new_tensor(len(tokens))))
    engine.train()
    comm.all_reduce(total)
    return (total[0] / total[1]).item()


def sample(engine: deepspeed.DeepSpeedEngine, count: int, seed: int) -> str:
    """Text that the model writes after the prompt; all ranks take part, since each holds a part of the weights."""
    engine.eval()
    prompt = data.encode(PROMPT).long().to(engine.device)
    generator = torch.Generator().manual_seed(seed)
    with deepspeed.zero.unwrap_model_for_generation(engine) as model:
        if comm.get_rank() != 0:
            return ""
        return data.decode(model.continued(prompt, count, temperature=0.7, top=40, generator=generator))


def introduce(engine: deepspeed.DeepSpeedEngine, files: int, train_text: Tensor, held_out: Tensor, steps: int) -> None:
    shape, (batch, micro, accumulation) = engine.module.shape, engine.get_batch_info()
    ranks, threads = comm.get_world_size(), torch.get_num_threads()
    layers, heads = counted(shape.layers, "layer"), counted(shape.heads, "head")
    split = f"{counted(ranks, 'rank')} x {counted(accumulation, 'micro step')} x {micro}"
    print(
        f"text      {files} files of the standard library: {short(len(train_text))} tokens to train on, "
        f"{short(len(held_out))} held out\n"
        f"model     {layers} of width {shape.width}, {heads}, a context of {shape.context} tokens: "
        f"{parameters(engine)} parameters\n"
        f"training  {counted(steps, 'step')} of {batch} windows ({split}) on {get_accelerator().device_name()}, "
        f"{counted(threads, 'thread')} per rank",
        flush=True,
    )


def report(engine: deepspeed.DeepSpeedEngine, history: History, text: str, args: argparse.Namespace) -> None:
    """The curve, a sample and the summary."""
    args.output.mkdir(parents=True, exist_ok=True)
    picture = args.output / "loss.png"
    ranks, last = counted(comm.get_world_size(), "rank"), history.training[-20:]
    title = f"A GPT of {parameters(engine)} parameters reads Python's standard library on {ranks}"
    curve.draw(picture, history.training, history.validation, title)
    rule = "-" * 80
    print(f"\na sample, beginning with {PROMPT.decode().strip()!r}:\n{rule}\n{text}\n{rule}\n")
    (_, unlearned), (_, learned) = history.validation[0], history.validation[-1]
    rows = {
        "parameters": parameters(engine),
        "steps": f"{len(history.training)} on {ranks}, {short(history.tokens)} tokens",
        "time": f"{history.seconds:.0f} s, {short(history.tokens_per_s)} tokens/s",
        "training loss": f"first {history.training[0]:.3f}, final {mean(last):.3f} (mean of the last {len(last)})",
        "validation loss": f"first {unlearned:.3f}, final {learned:.3f}",
        "loss curve": str(picture),
    }
    for name, value in rows.items():
        print(f"{name:<16} {value}")


def parameters(engine: deepspeed.DeepSpeedEngine) -> str:
    # ds_numel: at stage 3 a parameter is empty except while it is used
    return short(sum(getattr(weight, "ds_numel", weight.numel()) for weight in engine.module.parameters()))


def counted(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def main() -> None:
    args = parse_args()
    share_cores()
    torch.manual_seed(args.seed)
    files = data.source_files()
    train_text, held_out = data.read(files)
    shape = Shape(data.VOCABULARY, args.context, args.layers, args.heads, args.width)
    engine, *_ = deepspeed.initialize(args=args, model=GPT(shape), training_data=data.Windows(train_text, args.context))
    steps = args.steps or (engine.scheduler_params() or {}).get("total_num_steps")
    if steps is None:
        raise SystemExit("the schedule of the config has no total_num_steps; say with --steps how many to train")
    validation = engine.deepspeed_io(
        data.spread(data.Windows(held_out, args.context), args.validation_windows), route="eval"
    )
    if comm.get_rank() == 0:
        introduce(engine, len(files), train_text, held_out, steps)
    history = train(engine, validation, steps=steps, evaluations=args.evaluations)
    text = sample(engine, args.sample, args.seed)
    if comm.get_rank() == 0:
        report(engine, history, text, args)
    engine.destroy()
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
