"""A step does not wait for a norm that nothing depends on; whoever asks does, and it is completed in any case."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm.dispatch import DEFAULT
from deepspeed.comm.pending import CollectiveWork
from deepspeed.errors import CommError
from deepspeed.events import StepFinished
from deepspeed.log import logger
from tests.harness import ranks
from tests.pipelines import config, data, pipeline

OVER_RANKS, OVER_STAGES = "gradient norm", "gradient norm over stages"


@contextmanager
def waits():
    """How often operations were waited for, by label."""
    counted: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        wait = CollectiveWork.wait

        def counting(work, timeout=None):
            counted[work._entry[5]] += 1
            return wait(work) if timeout is None else wait(work, timeout)

        patch.setattr(CollectiveWork, "wait", counting)
        yield counted


def staged(*, judged=False, **more):
    """In bfloat16 a norm that is inf need not be looked at, so that nothing depends on it."""
    precision = {"bf16": {"enabled": True, "check_grad_overflow": judged}}
    return deepspeed.initialize(model=pipeline(2), config=config(2, **precision, **more))[0]


def expected_norms(steps):
    """Of steps that wait for them."""
    engine, batches, norms = staged(judged=True), data(0, 2), []
    for _ in range(steps):
        engine.train_batch(batches)
        norms.append(engine.get_global_grad_norm())
    assert len(set(norms)) == steps
    return norms


@ranks(2)
def test_a_pipeline_waits_for_the_norm_when_it_is_asked_for():
    engine, batches = staged(), data(0, 2)
    assert engine.get_global_grad_norm() is None
    expected = expected_norms(3)
    with waits() as counted:
        engine.train_batch(batches)
        assert counted[OVER_STAGES] == 0
        assert engine.get_global_grad_norm() == expected[0]
        assert isinstance(engine.get_global_grad_norm(), float)
        assert counted[OVER_STAGES] == 1
        engine.train_batch(batches)
        assert counted[OVER_STAGES] == 1
        engine.train_batch(batches)
        assert counted[OVER_STAGES] == 2, "the norm that nobody asked for is complete before the next begins"
        assert engine.get_global_grad_norm() == expected[2]
        engine.train_batch(batches)
        engine.destroy()
        assert counted[OVER_STAGES] == 4


@ranks(2)
def test_listeners_wait_if_they_read():
    engine, batches, heard = staged(steps_per_print=1000), data(0, 2), []
    expected = expected_norms(2)
    with engine.events.subscribe(StepFinished, heard.append), waits() as counted:
        losses = [engine.train_batch(batches) for _ in range(2)]
        assert counted[OVER_STAGES] == 1, "of the first step only, before the second"
        assert [event.grad_norm for event in heard] == expected
        assert [float(event.loss) for event in heard] == [float(loss) for loss in losses]


@ranks(2)
def test_the_loss_of_hosts_has_no_message_of_its_own():
    """It comes with what ranks tell each other at the end of a batch."""
    engine, batches, heard = staged(), data(0, 2), []
    with engine.events.subscribe(StepFinished, heard.append), waits() as counted:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DEFAULT, "label", "the loss")  # whatever has no label of its own
            loss = engine.train_batch(batches)
        assert counted["the loss"] == 0
    assert float(heard[0].loss) == float(loss)


def replicated(stage, *, judged=False, **zero):
    torch.manual_seed(0)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True, "check_grad_overflow": judged},
        "zero_optimization": {"stage": stage, **zero},
    }
    return deepspeed.initialize(model=nn.Linear(4, 4), config=settings)[0]


@ranks(2)
def test_data_parallel_steps_do_not_wait_either():
    rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for stage in (1, 2, 3):
        judged = replicated(stage, judged=True)
        judged.backward(judged(rows.bfloat16()).pow(2).sum())
        judged.step()
        engine = replicated(stage)
        with waits() as counted:
            engine.backward(engine(rows.bfloat16()).pow(2).sum())
            engine.step()
            engine.zero_grad()
            assert counted[OVER_RANKS] == 0, stage
            assert engine.optimizer._global_grad_norm == judged.get_global_grad_norm() > 0, stage
            assert isinstance(engine.optimizer._global_grad_norm, float)
            assert engine.get_global_grad_norm() == engine.optimizer._global_grad_norm
            assert counted[OVER_RANKS] == 1, stage


@ranks(2)
def test_a_norm_that_is_not_wanted_is_not_found():
    engine = replicated(1, compute_grad_norm=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.zero.states.states.total_norm", lambda *_: pytest.fail("it was measured"))
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4).bfloat16()).sum())
            engine.step()
            assert engine.get_global_grad_norm() is None


@ranks(2)
def test_clipping_waits_before_it_updates():
    engine, batches = staged(gradient_clipping=0.5), data(0, 2)
    with waits() as counted:
        engine.train_batch(batches)
        assert counted[OVER_STAGES] == 1
    assert engine.get_global_grad_norm() == expected_norms(1)[0]


@ranks(2)
def test_a_failed_reduction_is_told_by_name_and_does_not_keep_from_closing():
    engine, batches = staged(), data(0, 2)
    engine.train_batch(batches)
    with pytest.MonkeyPatch.context() as patch:
        wait, warned = CollectiveWork.wait, []

        class Broken:
            def wait(self, *timeout):
                raise RuntimeError("Connection closed by peer")

        def failing(work, timeout=None):
            if work._entry[5] == OVER_STAGES:
                work._work = Broken()
            return wait(work) if timeout is None else wait(work, timeout)

        patch.setattr(CollectiveWork, "wait", failing)
        patch.setattr(logger, "warning", lambda text, *args: warned.append(text % args))
        with pytest.raises(CommError, match=OVER_STAGES):
            engine.get_global_grad_norm()
        with pytest.raises(CommError, match=OVER_STAGES):
            engine.train_batch(batches)
        engine.destroy()
        assert any(OVER_STAGES in each for each in warned)
