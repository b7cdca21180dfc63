"""Checkpoints of experts that tensor-parallel ranks have, dealt to them or shared, load at other sizes and stages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.distributed.moe.test_auto import config
from tests.distributed.moe.test_expert_checkpoints import shared_folder
from tests.harness import ranks

pytest.importorskip("transformers")


def engine_of(size, tp, stage, inner=1, seed=0):
    from tests.distributed.moe.families import model_of

    model = model_of("mixtral")
    if seed:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
    made = config(stage, size or 1, expert_parallel={"enabled": bool(size), "expert_tensor_parallel_size": inner})
    made["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    return deepspeed.initialize(model=model, config=made | {"tensor_parallel": {"autotp_size": tp}})[0]


def train(engine, steps, tp):
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        given = [torch.randint(1, 32, (1, 5), generator=generator) for _ in range(4)][dist.get_rank() // tp]
        loss = engine(input_ids=given, labels=given).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@ranks(4, timeout=300)
def test_any_layout_loads():
    folder = shared_folder("dealt")
    layouts = [(2, 2, 1, 1), (4, 2, 3, 1), (0, 2, 0, 1), (2, 2, 2, 1), (4, 1, 1, 1)]  # see `engine_of`; 0: all have all
    round_trips(folder, layouts)


@ranks(4, timeout=300)
def test_any_layout_loads_what_ranks_shared():
    round_trips(shared_folder("shared"), [(2, 2, 1, 2), (4, 1, 3, 1), (2, 2, 3, 2), (2, 2, 0, 2), (0, 1, 1, 1)])


def round_trips(folder, layouts):
    for number, ((size, tp, stage, inner), other) in enumerate(zip(layouts, layouts[1:] + layouts[:1], strict=True)):
        engine = engine_of(size, tp, stage, inner)
        train(engine, 2, tp)
        engine.save_checkpoint(folder, tag=str(number))
        whole = engine.zero3_consolidated_16bit_state_dict()
        engine.destroy()
        loaded = engine_of(*other, seed=1)
        loaded.load_checkpoint(folder, tag=str(number))
        again = loaded.zero3_consolidated_16bit_state_dict()
        if dist.get_rank() == 0:
            masters = get_fp32_state_dict_from_zero_checkpoint(folder, tag=str(number))
            assert set(whole) == set(again) == set(masters)
            for name, value in whole.items():
                where = f"{name}: {(size, tp, stage, inner)} to {other}"
                torch.testing.assert_close(again[name], value, rtol=0, atol=0, msg=where)
                torch.testing.assert_close(masters[name], value, rtol=0, atol=0, msg=where)
        assert all(torch.tensor(loss).isfinite() for loss in train(loaded, 1, other[1]))
        loaded.destroy()
