"""Run by the environment of the real DeepSpeed: load checkpoints, train three steps, print the losses, save again.

    python continue_deepspeed.py FOLDER NAME...

FOLDER/NAME holds a checkpoint of the fixtures' model; its name begins with stageN_dtype. Prints one JSON line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
import traceback

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 24)
        self.body = nn.Sequential(nn.Linear(24, 37), nn.GELU(), nn.LayerNorm(37), nn.Linear(37, 24))
        self.out = nn.Linear(24, 50, bias=False)
        self.out.weight = self.emb.weight
        self.register_buffer("seen", torch.zeros(3))
        self.frozen = nn.Linear(24, 24)
        self.frozen.requires_grad_(False)

    def forward(self, ids):
        hidden = self.emb(ids)
        hidden = hidden + self.body(hidden) + self.frozen(hidden)
        return nn.functional.cross_entropy(self.out(hidden).float().view(-1, 50), ids.roll(-1, 1).reshape(-1))


def groups(net):
    trained = [param for param in net.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim == 1], "weight_decay": 0.0},
    ]


def batch(step, rank, world):
    ids = torch.randint(0, 50, (12, 16), generator=torch.Generator().manual_seed(100 + step))
    return ids[rank * (12 // world) : (rank + 1) * (12 // world)]


def config(stage, dtype, world):
    more = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    if dtype == "fp16":
        more["fp16"]["initial_scale_power"] = 8
    warmup = {"warmup_min_lr": 0, "warmup_max_lr": 3e-3, "warmup_num_steps": 5}
    return {
        "train_batch_size": 12, "train_micro_batch_size_per_gpu": 12 // world, "gradient_clipping": 1.0,
        "steps_per_print": 10**9, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **more,
    }  # fmt: skip


def one(deepspeed, folder, name, rank, world):
    torch.manual_seed(0)
    net = Net()
    stage, dtype = int(name[5]), name.split("_")[1]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=groups(net), config=config(stage, dtype, world))
    path, client = engine.load_checkpoint(os.path.join(folder, name))
    losses = []
    for step in (3, 4, 5):
        loss = engine(batch(step, rank, world))
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / world)
    engine.save_checkpoint(os.path.join(folder, name), tag="later")
    engine.destroy()
    return {
        "losses": losses,
        "loaded": path is not None,
        "client": {key: client[key] for key in ("note",) if key in client},
    }


def run(rank, world, store, folder, names, out):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    torch.set_num_threads(1)
    # On some processors the first bf16 product fails in one library and torch changes to another for good, which
    # moves last bits: let that happen before anything is compared.
    torch.ones(8, 8, dtype=torch.bfloat16) @ torch.ones(8, 8, dtype=torch.bfloat16)
    torch.nn.functional.linear(torch.ones(96, 24).bfloat16(), torch.ones(37, 24).bfloat16(), torch.ones(37).bfloat16())
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    results = {}
    for name in names:
        try:
            results[name] = one(deepspeed, folder, name, rank, world)
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    if rank == 0:
        with open(out, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    folder, names = sys.argv[1], sys.argv[2:]
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        out = os.path.join(scratch, "out.json")
        arguments = (2, os.path.join(scratch, "store"), folder, names, out)
        torch.multiprocessing.spawn(run, args=arguments, nprocs=2)
        with open(out) as file:
            results = file.read()
    sys.stdout.write(results + "\n")
