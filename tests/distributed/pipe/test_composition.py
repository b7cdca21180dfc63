"""A pipeline with clipping, 16 bits, loss scales, activation checkpoints and offload; bytes between stages."""

from __future__ import annotations

import pytest
import torch

import deepspeed
from tests.harness import shared_ranks
from tests.pipelines import LENGTH, WIDTH, assert_equal, config, data, pipeline, train_pipeline, train_whole, weights


@shared_ranks(4)
def test_clipping_counts_every_weight_once():
    for zero, schedule in ((0, "zbv"), (3, "1f1b")):
        expected, end = train_whole(2, 2, 2, clip=0.1)
        losses, engine = train_pipeline(2, 2, 2, zero, schedule=schedule, config={"gradient_clipping": 0.1})
        assert losses == pytest.approx(expected, abs=1e-6)
        assert_equal(engine, end)
        engine.destroy()


@shared_ranks(2)
def test_activation_checkpoints_change_nothing():
    expected, end = train_whole(2, 1, 3)
    for schedule, reentrant in (("1f1b", True), ("1f1b", False), ("zb-h1", False)):
        more = {"pipeline": {"activation_checkpoint_interval": 2, "use_reentrant": reentrant}}
        losses, engine = train_pipeline(2, 3, 2, schedule=schedule, config=more)
        assert engine.module.activation_checkpoint_interval == 2
        assert losses == pytest.approx(expected, abs=1e-6)
        assert_equal(engine, end)
        engine.destroy()


@shared_ranks(4)
def test_offload_changes_nothing():
    expected, end = train_whole(2, 2, 2, clip=0.1)
    for zero in (1, 3):
        more = {
            "gradient_clipping": 0.1,
            "zero_optimization": {"stage": zero, "offload_optimizer": {"device": "cpu"}},
            "zero_force_ds_cpu_optimizer": False,
        }
        losses, engine = train_pipeline(2, 2, 2, schedule="1f1b", config=more)
        assert losses == pytest.approx(expected, abs=1e-6)
        assert_equal(engine, end)
        engine.destroy()


@shared_ranks(2)
def test_bf16_follows_fp32():
    expected, _ = train_whole(3, 1, 4)
    for schedule in ("1f1b", "zbv"):
        losses, engine = train_pipeline(2, 4, 3, schedule=schedule, config={"bf16": {"enabled": True}})
        assert all(param.dtype is torch.bfloat16 for param in engine.module.parameters())
        assert losses == pytest.approx(expected, abs=0.05)
        engine.destroy()


@shared_ranks(2)
def test_all_stages_agree_on_a_step_that_is_skipped():
    """The gradient overflows on one stage only; both skip the step and lower the scale."""
    module = pipeline(2)
    more = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    engine, *_ = deepspeed.initialize(model=module, config=config(2, **more))
    source = data(0, 2)
    engine.train_batch(source)
    assert engine.was_step_applied()
    before, scale = weights(engine), engine.loss_scale()
    if engine.is_first_stage():
        spoil = module.get_submodule("1").up.weight.register_hook(lambda grad: grad * float("inf"))
    engine.train_batch(source)
    assert not engine.was_step_applied()
    assert engine.loss_scale() < scale
    assert engine.skipped_steps == 1
    assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())
    if engine.is_first_stage():
        spoil.remove()
    engine.train_batch(source)
    assert engine.was_step_applied()


@shared_ranks(2)
def test_messages_move_while_stages_compute():
    """The second stage, in the forward of one micro-batch, gets the next, which the first computes meanwhile."""
    engine = train_pipeline(2, 3, 1, schedule="gpipe")[1]
    seen = []

    def wait_for_next(*_):
        for message, posted in engine._links._posted.items():
            assert message.kind == "activation"
            for work in posted.works:
                work.wait()
            posted.works.clear()  # nobody waits for them again
            seen.append(message.micro_batch)

    if not engine.is_first_stage():
        engine.module.register_forward_pre_hook(wait_for_next)
    engine.train_batch(data(0, 3))
    assert seen == ([] if engine.is_first_stage() else [1, 2])


@shared_ranks(3)
def test_no_byte_moves_twice():
    count, rows = 3, 2
    _, engine = train_pipeline(3, count, 2, schedule="1f1b")
    sent = engine._links.sent
    hidden, mask = 4 * rows * LENGTH * WIDTH, rows * LENGTH
    rank = engine.get_pipeline_parallel_rank()
    assert sent["activation"] == (2 * count * (hidden + mask) if rank < 2 else 0)
    assert sent["gradient"] == (2 * count * hidden if rank > 0 else 0)
    assert (sent["form"] > 0) == (rank < 2)
    told = sent["form"]
    engine.train_batch(data(0, count))
    assert engine._links.sent["form"] == told
