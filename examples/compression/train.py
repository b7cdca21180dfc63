"""Trains a small classifier, then again with 8-bit weights and half of the hidden rows, and compares both.

deepspeed --num_gpus 2 examples/compression/train.py
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed import comm
from deepspeed.compression.compress import init_compression, redundancy_clean

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--output", type=Path, default=Path("compressed"), help="folder of the saved weights")
parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
arguments = parser.parse_args()

INPUTS, HIDDEN, CLASSES = 32, 256, 8
COMPRESSION = {
    "weight_quantization": {
        "shared_parameters": {"enabled": True, "quantize_groups": CLASSES, "store_integers": True},
        "different_groups": {"all": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["*"]}},
    },
    "row_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": arguments.steps // 2},
        "different_groups": {"hidden": {"params": {"dense_ratio": 0.5}, "modules": ["0"], "related_modules": [["2"]]}},
    },
}


def batch(step: int, rows: int = 64) -> tuple[Tensor, Tensor]:
    """Points around the centre of their class."""
    centres = torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(0))
    made = torch.Generator().manual_seed(1 + step)
    classes = torch.randint(CLASSES, (rows,), generator=made)
    return centres[classes] + 1.5 * torch.randn(rows, INPUTS, generator=made), classes


def train(config: dict[str, Any]) -> tuple[float, int]:
    """Accuracy on new points, and bytes of the saved weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    compressed = "compression_training" in config
    engine = deepspeed.initialize(model=init_compression(model, config) if compressed else model, config=config)[0]
    for step in range(arguments.steps):
        points, classes = batch(step * comm.get_world_size() + comm.get_rank())
        engine.backward(nn.functional.cross_entropy(engine(points.to(engine.device)), classes.to(engine.device)))
        engine.step()
    small = engine.module.cpu()
    if compressed:
        redundancy_clean(small, config)  # plain layers: fewer rows, and codes of 8 bits
    points, classes = batch(-1, rows=4096)
    accuracy = (small.eval()(points).argmax(1) == classes).float().mean().item()
    file = arguments.output / ("pytorch_model.bin" if compressed else "plain.bin")
    if comm.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(small.state_dict(), file)
    comm.barrier()
    return accuracy, file.stat().st_size


base = {"train_micro_batch_size_per_gpu": 64, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
results = {"plain": train(base), "compressed": train({**base, "compression_training": COMPRESSION})}
if comm.get_rank() == 0:
    for name, (accuracy, size) in results.items():
        print(f"{name:10}  accuracy {accuracy:.3f}  {size / 1024:5.1f} KiB")
deepspeed.comm.destroy_process_group()
