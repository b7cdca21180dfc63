"""Flips one bit of a weight on the last rank, as faulty memory does, and shows what verify mode reports.

deepspeed --num_gpus 2 examples/verify/train.py
"""

import argparse
import ctypes

import torch
from torch import nn

import deepspeed
from deepspeed import comm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
arguments = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "verify": {"every": 2, "action": "stop"},
}
engine = deepspeed.initialize(model=model, config=config)[0]
for step in range(1, arguments.steps + 1):
    if step == arguments.steps - 1 and comm.get_rank() == comm.get_world_size() - 1:
        ctypes.c_uint8.from_address(engine.module[2].weight.data_ptr() + 5 * 4).value ^= 16
    try:
        engine.backward(engine(torch.randn(8, 32, device=engine.device)).square().mean())
        engine.step()
    except deepspeed.DeepSpeedError as error:
        if comm.get_rank() == 0:
            print(error)
        break
