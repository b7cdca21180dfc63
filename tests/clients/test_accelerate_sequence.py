"""Accelerate's and Trainer's own ways to sequence parallelism, against plain training of whole sequences."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional

import deepspeed
from deepspeed.published import groups
from tests.clients import tiny
from tests.clients.trainers import arguments, auto, forget_clients
from tests.harness import ranks

LENGTH, ROWS, CLIP = 8, 8, 0.5


def samples():
    rows = tiny.tokens(ROWS, LENGTH)
    for number, row in enumerate(rows):
        row["labels"] = [-100] * (number % 5) + row["labels"][number % 5 :]
    return rows


def collate(rows):
    batch = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}
    return {**batch, "position_ids": torch.arange(LENGTH).expand(len(rows), LENGTH)}


def parallel(size):
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    return ParallelismConfig(sp_backend="deepspeed", sp_size=size, sp_handler=handler)


def plain():
    """The losses of the same training in one process."""
    model = tiny.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for row in samples():
        batch = collate([row])
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [1, 3])
@ranks(2, timeout=400)
def test_the_loop_of_accelerate(stage):
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

    forget_clients()
    made = Accelerator(
        parallelism_config=parallel(2),
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=1, gradient_clipping=CLIP),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model = tiny.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(samples(), batch_size=1, collate_fn=collate)
    model, optimizer, loader = made.prepare(model, optimizer, loader)
    assert isinstance(model, deepspeed.DeepSpeedEngine)
    group = groups._get_sequence_parallel_group()
    losses = []
    for batch in loader:
        labels = batch["shift_labels"]
        loss = model(**batch, labels=labels).loss
        parts = torch.distributed.nn.functional.all_gather(loss, group=group)
        counts = torch.distributed.nn.functional.all_gather((labels != -100).sum(), group=group)
        loss = sum(part * count for part, count in zip(parts, counts, strict=True) if count > 0) / sum(counts)
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == pytest.approx(plain(), abs=1e-5)
    made.end_training()


@pytest.mark.parametrize("stage", [0, 3])
@ranks(2, timeout=400)
def test_trainer(stage, tmp_path):
    from transformers import Trainer

    config = auto(stage) | {"zero_allow_untested_optimizer": True}
    given = arguments(
        tmp_path,
        deepspeed=config,
        parallelism_config=parallel(2),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        max_steps=ROWS,
        max_grad_norm=CLIP,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        average_tokens_across_devices=False,
        remove_unused_columns=False,
    )
    trainer = Trainer(tiny.llama(), given, train_dataset=samples(), eval_dataset=samples(), data_collator=collate)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == ROWS
    assert losses == pytest.approx(plain(), abs=1e-4)  # Trainer rounds what it logs
    assert trainer.evaluate()["eval_loss"] > 0
    assert dist.get_world_size() == 2
