"""Beside the passes of a pipeline: gradients leave during the last one, those of weights wait, replicas help."""

from __future__ import annotations

import itertools

import pytest

import deepspeed
from deepspeed.errors import PipelineError
from deepspeed.pipe.executor import Executor
from deepspeed.zero.gradients import replicated
from deepspeed.zero.gradients.bucket_order import BucketOrder
from tests.harness import ranks
from tests.pipelines import assert_equal, config, data, pipeline, train_whole

SMALL = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 0}


def start(schedule, count, zero, **more):
    module = pipeline(2, schedule=schedule)
    small = {"stage": zero, **(SMALL if zero else {})}
    return deepspeed.initialize(model=module, config=config(count, **{**more, "zero_optimization": small}))[0]


def trained(engine, steps, count):
    source = data(engine._parts.layout["dp"].rank, count)
    return [float(engine.train_batch(source)) for _ in range(steps)]


@ranks(4)
def test_gradients_leave_while_the_last_backward_runs(monkeypatch):
    """Also those of a stage that is through while another one of the rank is not."""
    monkeypatch.setattr(replicated, "BUCKET_BYTES", 256)
    monkeypatch.setattr(replicated, "FIRST_BYTES", 256)
    events = []
    leave = BucketOrder._leave
    monkeypatch.setattr(BucketOrder, "_leave", lambda self: (events.append("left"), leave(self)))
    for schedule, zero in (("1f1b", 0), ("zb-h1", 1), ("1f1b", 2), ("1f1b", 3), ("interleaved", 0), ("zbv", 3)):
        expected, end = train_whole(3, 2, 3)
        engine = start(schedule, 3, zero)
        handles = [
            param.register_post_accumulate_grad_hook(lambda _: events.append("came"))
            for param in engine.module.parameters()
        ]
        source = data(engine._parts.layout["dp"].rank, 3)
        losses = []
        for _ in range(3):
            events.clear()
            losses.append(float(engine.train_batch(source)))
        last = len(events) - events[::-1].index("came")
        early, late = events[:last].count("left"), events[last:].count("left")
        assert early > late > 0, (schedule, zero, early, late)  # what stages share leaves last
        assert "left" not in events[: events.count("came") // 4], (schedule, zero, "".join(each[0] for each in events))
        assert losses == pytest.approx(expected, abs=1e-6), (schedule, zero)
        assert_equal(engine, end)
        for handle in handles:
            handle.remove()
        engine.destroy()


@ranks(4)
def test_gradients_of_weights_wait(monkeypatch):
    """At every ZeRO stage, and where activations are computed again."""
    parts = []
    weights = Executor._weights
    inputs = Executor._inputs

    def noted(self, name, run):
        parts.append(name)
        result = run()
        parts.append("end")
        return result

    monkeypatch.setattr(Executor, "_weights", lambda self, *args: noted(self, "W", lambda: weights(self, *args)))
    monkeypatch.setattr(Executor, "_inputs", lambda self, *args: noted(self, "I", lambda: inputs(self, *args)))
    cases = (("zb-h1", 3, 0), ("zb-h1", 0, 1), ("zbv", 3, 2), ("dualpipev", 2, 1))
    for schedule, zero, interval in cases:
        count = 4
        expected, end = train_whole(2, 2, count, clip=0.1)
        more = {"gradient_clipping": 0.1, "pipeline": {"activation_checkpoint_interval": interval}}
        engine = start(schedule, count, zero, **more)
        handles = [
            param.register_post_accumulate_grad_hook(lambda _: parts.append("came"))
            for name, param in engine.module.named_parameters()
            if "tied" not in name
        ]
        parts.clear()
        assert trained(engine, 2, count) == pytest.approx(expected, abs=1e-6), (schedule, zero, interval)
        assert_equal(engine, end)
        during, place = {"I": 0, "W": 0, "end": 0}, "end"
        for part in parts:
            if part == "came":
                during[place] += 1
            else:
                place = part
        if not engine.is_first_stage() or schedule != "zb-h1":
            assert during["I"] == 0 < during["W"], (schedule, zero, interval, during)
        for handle in handles:
            handle.remove()
        engine.destroy()


@ranks(4)
def test_a_stage_that_fails_on_one_replica_keeps_nobody_waiting():
    """Replicas share weights and reductions; those of one that failed go on without its results."""
    for schedule, zero, when, backward in (("1f1b", 3, 1, False), ("zb-h1", 3, 1, True), ("1f1b", 1, 2, True)):
        expected, end = train_whole(2, 2, 3)
        engine = start(schedule, 3, zero)
        calls, layout = itertools.count(), engine._parts.layout
        unlucky = layout["pp"].rank == 1 and layout["dp"].rank == 0

        def fail(*_, calls=calls, when=when):
            if next(calls) == when:
                raise ValueError("out of luck")

        layer = engine.module.get_submodule("5") if layout["pp"].rank == 1 else None
        handle = None
        if unlucky:
            handle = layer.up.weight.register_hook(fail) if backward else layer.register_forward_pre_hook(fail)
        with pytest.raises(PipelineError, match=rf"rank 2: stage 1 failed in the .* of micro-batch {when}: ValueError"):
            engine.train_batch(data(layout["dp"].rank, 3))
        if handle is not None:
            handle.remove()
        assert trained(engine, 2, 3) == pytest.approx(expected, abs=1e-6), (schedule, zero)
        assert_equal(engine, end)
        engine.destroy()
