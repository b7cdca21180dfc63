"""Trains a small model with DeepCompile: at stage 3 its graphs gather parameters and reduce gradients.

deepspeed --num_gpus 2 examples/compile/train.py
"""

import argparse

import torch
from torch import nn

import deepspeed
from deepspeed import comm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--backend", default="eager", help="eager needs no compiler; inductor is faster")
parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
arguments = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": arguments.stage, "stage3_param_persistence_threshold": 0},
    "compile": {"deepcompile": True},
}
engine = deepspeed.initialize(model=model, config=config)[0]
engine.compile(backend=arguments.backend)
for step in range(1, arguments.steps + 1):
    inputs = torch.randn(8, 32, device=engine.device)
    loss = (engine(inputs) - inputs[:, :1]).square().mean()
    engine.backward(loss)
    engine.step()
    if comm.get_rank() == 0 and step in (1, arguments.steps):
        print(f"step {step}: loss {loss.item():.4f}, {engine.get_compile_time():.1f} s in passes and compilers")
