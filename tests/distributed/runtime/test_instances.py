"""Attributes of engines, optimizers and monitors that projects read, and methods that they replace."""

from __future__ import annotations

import math

import pytest
import torch
from deepspeed.runtime.pipe import schedule
from torch import nn

import deepspeed
from deepspeed.errors import UsageError
from deepspeed.pipe.engine import PipelineEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from tests.harness import shared_ranks
from tests.pipelines import config as pipeline_config
from tests.pipelines import data, pipeline
from tests.told import Told


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def made(stage: int, **more) -> DeepSpeedEngine:
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return deepspeed.initialize(model=model(), config=settings | more)[0]


def backward(engine, scale: float = 1.0) -> torch.Tensor:
    torch.manual_seed(torch.distributed.get_rank())
    loss = scale * engine(torch.randn(2, 4).to(next(engine.module.parameters()).dtype)).float().square().mean()
    engine.backward(loss)
    return loss


@shared_ranks(2)
def test_an_engine_tells_what_it_is():
    engine = made(0)
    assert engine._support_torch_style_backward is True
    assert engine.save_non_zero_checkpoint is (torch.distributed.get_rank() == 0)
    assert engine.save_zero_checkpoint is False
    assert engine.has_moe_layers is False
    assert engine.num_experts == []
    engine.tput_timer.update_epoch_count()
    assert engine.tput_timer.epoch_count == 1
    engine.scale_wrt_gas = False
    assert engine.scale_wrt_gas is False


def plain_norm(loss_scale: float) -> float:
    """Of the mean gradient of two ranks, in one process."""
    net, total = model(), None
    for rank in range(2):
        torch.manual_seed(rank)
        loss = net(torch.randn(2, 4)).square().mean() / 2
        total = loss if total is None else total + loss
    total.backward()
    return loss_scale * math.sqrt(sum(param.grad.square().sum().item() for param in net.parameters()))


@shared_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_optimizer_measures_what_the_next_step_uses(stage):
    engine = made(stage)
    optimizer = engine.optimizer
    assert optimizer.dp_process_group is not None
    assert torch.distributed.get_world_size(optimizer.dp_process_group) == 2
    assert optimizer.get_lr() == 0.1
    assert optimizer.external_loss_scale is None
    backward(engine)
    assert optimizer.scaled_global_norm() == pytest.approx(plain_norm(1.0), rel=1e-5)
    assert optimizer.check_overflow() is False
    owned = [param for params in optimizer.params_in_partition for param in params]
    assert owned
    assert {id(param) for param in owned} <= {id(param) for param in engine.module.parameters()}
    numel = sum(flat.numel() for flat in optimizer.single_partition_of_fp32_groups)
    assert 0 < optimizer.grad_partitions_flat_buffer.numel() <= numel
    engine.step()
    assert float(engine.get_global_grad_norm()) == pytest.approx(plain_norm(1.0), rel=1e-5)
    backward(engine, float("inf"))
    assert optimizer.check_overflow() is True
    assert optimizer.overflow is True


@shared_ranks(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_script_overrides_the_loss_scale(stage):
    engine = made(stage, fp16={"enabled": True, "initial_scale_power": 4})
    optimizer = engine.optimizer
    optimizer.override_loss_scale(64.0)
    assert optimizer.external_loss_scale == optimizer.loss_scale == 64.0
    backward(engine)
    assert optimizer.scaled_global_norm() == pytest.approx(plain_norm(64.0), rel=0.02)
    engine.step()
    assert engine.global_steps == 1
    backward(engine, float("inf"))
    engine.step()
    assert engine.skipped_steps == 1
    assert optimizer.loss_scale == 64.0


@shared_ranks(1)
def test_replaced_methods_are_used_or_named(monkeypatch):
    monkeypatch.setattr(DeepSpeedEngine, "_broadcast_model", lambda self: None)
    monkeypatch.setattr("deepspeed.runtime.engine.MoE", nn.Linear)
    with Told() as lines:
        engine = made(0)
        engine._copy_recovery_script = lambda path: None
    text = "\n".join(lines)
    assert "DeepSpeedEngine._broadcast_model was replaced by the script, which has no effect here" in text
    assert "engine._copy_recovery_script was replaced" in text
    assert "deepspeed.runtime.engine.MoE was replaced" in text
    with pytest.raises(UsageError, match=r"engine\.load_moe_state_dict\(\) does nothing here"):
        engine.load_moe_state_dict()


@shared_ranks(1)
def test_progress_is_reported_by_the_script(monkeypatch):
    seen = []
    monkeypatch.setattr(DeepSpeedEngine, "_report_progress", lambda self, step: seen.append(step))
    engine = made(0, steps_per_print=2)
    for _ in range(5):
        backward(engine)
        engine.step()
    assert seen == [2, 4]


@shared_ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_are_clipped_by_the_script(stage, monkeypatch):
    seen = []

    def clip(self):
        seen.append(torch.nn.utils.clip_grad_value_(self.module.parameters(), 1e-3))

    with monkeypatch.context() as patch, Told() as lines:
        patch.setattr(DeepSpeedEngine, "clip_fp32_gradients", clip)
        engine = made(stage, optimizer={"type": "SGD", "params": {"lr": 1.0}}, zero_allow_untested_optimizer=True)
        before = [param.detach().clone() for param in engine.module.parameters()]
        backward(engine)
        engine.step()
    moved = max((param - old).abs().max().item() for param, old in zip(engine.module.parameters(), before, strict=True))
    if stage == 0:
        assert seen
        assert moved == pytest.approx(1e-3, rel=1e-3)
    else:
        assert not seen
        assert any("clip_fp32_gradients was replaced" in line for line in lines)


# ---- pipelines


@shared_ranks(2)
def test_a_pipeline_tells_its_place():
    engine = deepspeed.initialize(model=pipeline(2), config=pipeline_config(count=2))[0]
    rank = torch.distributed.get_rank()
    assert engine.grid.get_stage_id() == engine.stage_id == rank
    assert (engine.is_pipe_parallel, engine.is_data_parallel, engine.is_model_parallel) == (True, False, False)
    assert (engine.micro_batches, engine.micro_batch_size) == (2, engine.train_micro_batch_size_per_gpu())
    assert (engine.prev_stage, engine.next_stage, engine.num_stages) == (rank - 1, rank + 1, 2)
    assert engine.total_loss is None
    assert engine.first_output_send
    loss = engine.train_batch(data(0, 2))
    assert not engine.first_output_send
    if rank == 1:
        assert engine.total_loss.item() == pytest.approx(2 * loss.item(), rel=1e-6)
    else:
        assert engine.total_loss is None
    engine.eval_batch(data(0, 2), return_logits=True)
    assert len(engine.fwd_outputs) == (2 if rank == 1 else 0)


class Note(schedule.PipeInstruction):
    """An instruction of a script's own."""


def forwards_first(self):
    """All forwards, then all backwards, with an instruction between."""
    for number in range(self.micro_batches):
        yield [schedule.LoadMicroBatch(number), schedule.ForwardPass(number)]
    yield [Note(word="turn")]
    for number in range(self.micro_batches):
        yield [schedule.BackwardPass(number)]
    yield [schedule.ReduceGrads(), schedule.OptimizerStep(), Note(word="end")]


def trained():
    engine = deepspeed.initialize(model=pipeline(2), config=pipeline_config(count=3))[0]
    return engine, [engine.train_batch(data(step, 3)).item() for step in range(2)]


@shared_ranks(2)
def test_the_steps_of_a_script_are_played(monkeypatch):
    _, expected = trained()
    seen = []
    monkeypatch.setattr(schedule.TrainSchedule, "steps", forwards_first)
    monkeypatch.setattr(PipelineEngine, "_INSTRUCTION_MAP", {Note: lambda engine, word: seen.append(word)})
    engine, losses = trained()
    assert losses == pytest.approx(expected, rel=1e-6)
    assert seen == ["turn", "end"] * 2
    assert engine._plan(3).rank(0) == "F0 F1 F2 B0 B1 B2"


@shared_ranks(2)
def test_steps_that_cannot_be_played(monkeypatch):
    monkeypatch.setattr(schedule.TrainSchedule, "steps", forwards_first)
    with pytest.raises(UsageError, match=r"Note\(word='turn'\), which is not known; add Note and its handler"):
        trained()

    class Lost(schedule.TrainSchedule):
        def steps(self):
            yield [schedule.LoadMicroBatch(0), schedule.ForwardPass(0)]

    monkeypatch.undo()
    monkeypatch.setattr(schedule, "TrainSchedule", Lost)
    with pytest.raises(UsageError, match="Lost"):
        trained()
