"""A step of a wide model, plain and with fewer bytes between ranks: seconds, and bytes by kind of link.

deepspeed --num_gpus 2 examples/fewer_bytes/train.py --way zeropp
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import deepspeed
from deepspeed import comm

ADAM = {"type": "AdamW", "params": {"lr": 1e-4}}
STAGE3 = {"stage": 3, "stage3_param_persistence_threshold": 0}  # also small weights travel
ZEROPP = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
WAYS: dict[str, dict[str, Any]] = {
    "stage0": {"optimizer": ADAM},
    "onebit": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4, "freeze_step": 2}}},
    "stage3": {"optimizer": ADAM, "zero_optimization": STAGE3},
    "zeropp": {"optimizer": ADAM, "zero_optimization": {**STAGE3, **ZEROPP}},
    "mics": {"optimizer": ADAM, "zero_optimization": {**STAGE3, "mics_shard_size": 2}},
}
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, default="zeropp")
    parser.add_argument("--steps", type=int, default=5, help="that are timed")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    args = parser.parse_args()
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(args.width, args.width, bias=False) for _ in range(args.layers)]
    config = {"train_micro_batch_size_per_gpu": 4, **WAYS[args.way]}
    engine, *_ = deepspeed.initialize(model=torch.nn.Sequential(*layers), config=config)
    inputs = torch.randn(4, args.width, device=engine.device)

    def step() -> float:
        comm.barrier()
        began = time.perf_counter()
        engine.backward(engine(inputs).square().mean())
        engine.step()
        comm.barrier()
        return time.perf_counter() - began

    for _ in range(WARM_UP):
        step()
    seconds = [step() for _ in range(args.steps)]
    comm.configure(enabled=True)
    comm.reset_log()
    step()
    found = (comm.log_summary(return_dict=True) or {})["traffic"]
    comm.configure(enabled=False)
    if comm.get_rank() == 0:
        links = [each for codecs in found.values() for each in codecs.values()]
        near, far = (sum(each[kind] for each in links) / 1e6 for kind in ("within_node_bytes", "between_nodes_bytes"))
        took = statistics.median(seconds)
        print(
            f"{args.way}: {took:.2f} s a step; a rank sends {near:.1f} MB within its node, {far:.1f} MB to others",
            flush=True,
        )
    engine.destroy()
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
