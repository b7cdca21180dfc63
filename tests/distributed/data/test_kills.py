"""`kill -9` at a random micro step: the continued run has the bits of the unbroken one, on as many ranks and on others.

Two trainings: `sampled` with the sampler by difficulty, batches cut to a curriculum's length, random layer token drop
and layer drop; `packed` with dynamic batching and its learning rate. Each step writes which samples it saw.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.data.analyzer import DataAnalyzer
from deepspeed.data.dynamic_batching import get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed
from deepspeed.data.random_ltd import convert_to_random_ltd
from tests.harness import ranks

STEPS, LENGTH, BATCH, ACCUMULATION = 6, 16, 8, 2
LENGTHS = [3 + number * 7919 % 14 for number in range(400)]


class Texts(torch.utils.data.Dataset):
    """Tokens, whole or of the length of the text; it notes which were asked for."""

    def __init__(self, cut: bool = False) -> None:
        self.cut, self.seen = cut, []

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, number: int) -> Tensor:
        self.seen.append(number)
        return ((torch.arange(LENGTH) * (number + 1)) % 23)[: LENGTHS[number] if self.cut else LENGTH]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.layer(hidden_states).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.layers = nn.Embedding(23, 8), nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy((hidden @ self.tokens.weight.T).flatten(0, 1), tokens.flatten())


def settings(mode: str, folder: Path, world: int) -> dict[str, Any]:
    schedule = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 2}}
    found: dict[str, Any] = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // world // ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2 if mode == "sampled" else 1},
    }
    if mode == "packed":
        batching = {"enabled": True, "max_tokens": 40, "sequence_picking_order": "random"}
        return {**found, "data_efficiency": {"seed": 3, "data_sampling": {"dynamic_batching": batching}}}
    metric = {
        "index_to_sample_path": str(folder / "seqlen/seqlen_index_to_sample"),
        "index_to_metric_path": str(folder / "seqlen/seqlen_index_to_metric"),
        "difficulty_type": "value",
        "min_difficulty": 4,
        "max_difficulty": LENGTH,
        **schedule,
    }
    sampling = {
        "enabled": True,
        "data_cluster_path": str(folder / "clusters"),
        "curriculum_metrics": {"seqlen": metric},
    }
    dropping = {
        "enabled": True,
        "total_layer_num": 4,
        "random_ltd_layer_num": 2,
        "random_ltd_layer_id": [1, 2],
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": 2,
            "max_value": LENGTH,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 6, "seq_per_step": 2},
        },
    }
    routing = {"random_ltd": dropping}
    length = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 6, "max_difficulty": LENGTH, **schedule}
    drop = {"enabled": True, "theta": 0.5, "gamma": 1.0, "drop_blocks": True, "blocks": ["layers"]}
    return {
        **found,
        "curriculum_learning": {**length, "cut_batches": True},
        "progressive_layer_drop": drop,
        "data_efficiency": {"seed": 3, "data_sampling": {"curriculum_learning": sampling}, "data_routing": routing},
    }


def padded(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


@ranks(1, 2)
def life(mode: str, place: str, killed: list[int] | None) -> None:
    """Train from the last checkpoint to the end, or to a micro step in which every rank is killed."""
    folder, data = Path(place), Texts(mode == "packed")
    config = settings(mode, folder, dist.get_world_size())
    model = Model() if mode == "packed" else convert_to_random_ltd(Model(), Block)
    given = None if mode == "packed" else data
    engine = deepspeed.initialize(model=model, training_data=given, config=config)[0]
    if mode == "packed":
        loader, schedule, _ = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
            data, engine, LENGTHS, dataloader_collate_fn=padded
        )
        engine.training_dataloader, engine.lr_scheduler = loader, schedule
    engine.load_checkpoint(folder / "saved")
    while engine.global_steps < STEPS:
        data.seen = []
        for micro in range(ACCUMULATION):
            engine.backward(engine(next(engine.training_dataloader)))
            if [engine.global_steps, micro] == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.step()
        found = {"seen": data.seen, "lr": engine.get_lr()}
        (folder / f"step{engine.global_steps}-{dist.get_rank()}").write_text(json.dumps(found))
        engine.save_checkpoint(folder / "saved")
    weights = {name: value.tolist() for name, value in engine.module_state_dict().items()}
    (folder / f"weights{dist.get_rank()}").write_text(json.dumps(weights))


def written(folder: Path) -> dict[str, str]:
    """What the lives of a folder wrote: floats as JSON give their bits back."""
    return {each.name: each.read_text() for each in folder.iterdir() if each.name[:4] in ("step", "weig")}


def seen(folder: Path) -> list[list[int]]:
    """The samples of each step, of all ranks."""
    files = [sorted(folder.glob(f"step{step}-*")) for step in range(1, STEPS + 1)]
    return [sorted(sample for each in step for sample in json.loads(each.read_text())["seen"]) for step in files]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", ["sampled", "packed"])
def test_a_killed_run_continues_with_the_bits_and_samples_of_the_unbroken_one(tmp_path, mode, world):
    whole, broken, other = tmp_path / "whole", tmp_path / "broken", tmp_path / "other"
    chance = random.Random(f"{mode}{world}")
    for each in (whole, broken):
        each.mkdir()
        DataAnalyzer(
            range(len(LENGTHS)),
            batch_size=400,
            metric_names=["seqlen"],
            metric_functions=[lambda numbers: torch.tensor([LENGTHS[each] for each in numbers])],
            metric_types=["single_value_per_sample"],
            save_path=str(each),
        ).run_map_reduce()
    life(ranks_=world, mode=mode, place=str(whole), killed=None)
    kill = [chance.randrange(1, STEPS), chance.randrange(ACCUMULATION)]
    with pytest.raises(pytest.fail.Exception, match="SIGKILL"):
        life(ranks_=world, mode=mode, place=str(broken), killed=kill)
    shutil.copytree(broken, other)
    life(ranks_=world, mode=mode, place=str(broken), killed=None)
    assert written(broken) == written(whole)
    for file in other.glob("step*"):
        if int(file.name[4]) > kill[0]:
            file.unlink()
    life(ranks_=3 - world, mode=mode, place=str(other), killed=None)
    assert seen(other) == seen(whole)
    if mode == "packed":
        together = [sample for step in seen(whole) for sample in step]
        assert len(set(together)) == len(together)
