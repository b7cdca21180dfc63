"""Tiles that a device updates: what it keeps, when that comes home, and that everybody sees the newest values."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

import deepspeed
from deepspeed.zero.states import host_step as streaming
from tests.harness import shared_ranks
from tests.models import batches, make

STEPS = 6


class Instant:
    """A stream or an event of a device that is never behind."""

    def __init__(self, *_, **__):
        pass

    def wait_stream(self, _):
        pass

    def wait_event(self, _):
        pass

    def record(self, _=None):
        pass

    def wait(self):
        pass

    def synchronize(self):
        pass


@contextmanager
def pretended_device():
    """The host's memory in the place of a device that keeps as many tiles as `stay` says, None for no help at all."""
    pretended = SimpleNamespace(
        Stream=Instant, Event=Instant, stream=lambda _: nullcontext(), current_stream=lambda: Instant()
    )
    setting = SimpleNamespace(stay=None, brought=0)
    plain = streaming.StateStreamer._go_home

    def counted(self, arena, here, *, wait=False):
        setting.brought += wait
        return plain(self, arena, here, wait=wait)

    def helps(turns, optimizer, _):  # as the real one: only once all states are there
        there = all(streaming._complete(turn.tile.arena, optimizer) for turn in turns)
        return setting.stay if there else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "get_accelerator", lambda: pretended)
        patch.setattr("deepspeed.zero.states.host_step.can_stream", helps)
        patch.setattr(streaming.StateStreamer, "_go_home", counted)
        yield setting


def engine_of(accumulation=1, stage=2, bf16=False):
    """Tiles of a few hundred elements, so that there are several."""
    zero = {"stage": stage, "sub_group_size": 300, "offload_optimizer": {"device": "cpu"}}
    config = {
        "train_micro_batch_size_per_gpu": 12,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.3,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": zero,
    }
    return deepspeed.initialize(model=make(), config=config)[0]


def train(engine, steps=STEPS, between=lambda engine, place: None):
    for place, batch in enumerate(batches(steps, 12)):
        engine.backward(engine(*batch))
        engine.step()
        between(engine, place)


def values(engine):
    """Weights, masters' moments and steps, as a checkpoint would have them."""
    state = engine.optimizer.state_dict()["optimizer_state_dict"]["state"]
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        found = [param.detach().clone() for param in engine.module.parameters()]
    return found + [
        torch.as_tensor(value).clone().float() for entry in state.values() for _, value in sorted(entry.items())
    ]


def without_help(device, between=lambda engine, place: None, **options):
    """What training gives where the host updates everything."""
    device.stay = None
    engine = engine_of(**options)
    train(engine, between=between)
    return values(engine)


def same(ours, theirs):
    assert len(ours) == len(theirs), "as many tensors"
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("stay", "options"),
    [
        *((stay, {}) for stay in (None, 0, 1, 2, 99)),
        (2, {"accumulation": 2}),
        (99, {"accumulation": 3, "bf16": True}),
        (1, {"stage": 3, "bf16": True}),
        (99, {"stage": 3, "accumulation": 2}),
    ],
)
@shared_ranks(1)
def test_numbers_do_not_depend_on_who_updates(stay, options):
    with pretended_device() as device:
        expected = without_help(device, **options)
        device.stay = stay
        helped = engine_of(**options)
        train(helped)
        assert device.brought == 0, "nobody asked for the states"
        same(values(helped), expected)
        assert (device.brought > 0) == bool(stay), "what the device kept came when it was asked for"
        brought = device.brought
        values(helped)
        assert device.brought == brought, "once"


@shared_ranks(1)
def test_states_stay_while_nobody_asks():
    with pretended_device() as device:
        device.stay = 99
        engine = engine_of()
        train(engine, 3)
        arenas = {piece.arena for piece in engine._parts.states.away.values()}
        assert len(arenas) > 2, "several tiles"
        ahead = [arena for arena in arenas if arena.ahead is not None]
        assert len(ahead) == len(arenas), "the device kept all"
        assert all(arena.mirrored for arena in ahead), "and will not fetch them again"


@shared_ranks(1)
def test_what_forward_needs_first_stays():
    with pretended_device() as device:
        device.stay = 1
        engine = engine_of()
        train(engine, 3)
        pieces = list(engine._parts.states.away.values())
        assert pieces[0].param is next(engine.module.parameters()), "states are in the order of the model"
        assert [arena is pieces[0].arena for arena in {piece.arena for piece in pieces} if arena.ahead] == [True]


@pytest.mark.parametrize("stay", [1, 99])
@shared_ranks(1)
def test_who_reads_or_writes_between_steps_sees_the_newest(stay):
    with pretended_device() as device:

        def meddle(engine, place):
            if place == 1:  # a state is read
                param = next(engine.module.parameters())
                deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg")
            if place == 2:  # a state is written
                param = next(engine.module.parameters())
                deepspeed.utils.safe_set_full_optimizer_state(param, torch.full(param.shape, 0.01), "exp_avg")
            if place == 3:  # parameters are written
                with torch.no_grad():
                    for param in engine.module.parameters():
                        param.mul_(0.9)

        expected = without_help(device, between=meddle)
        device.stay = stay
        helped = engine_of()
        train(helped, between=meddle)
        same(values(helped), expected)


@shared_ranks(1)
def test_a_device_that_stops_helping_gives_everything_back():
    with pretended_device() as device:

        def stop(engine, place):
            device.stay = 99 if place in (0, 1, 4) else None

        expected = without_help(device)
        device.stay = 99
        helped = engine_of()
        train(helped, between=stop)
        same(values(helped), expected)


@shared_ranks(1)
def test_the_state_of_the_wrapper_is_the_newest():
    with pretended_device() as device:
        device.stay = 99
        engine = engine_of()
        train(engine, 2)
        before = [entry["exp_avg"].clone() for entry in engine.optimizer.state.values()]
        train(engine, 1)
        after = [entry["exp_avg"] for entry in engine.optimizer.state.values()]
        assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True)), "a step was taken"
        assert all(arena.ahead is None for arena in {p.arena for p in engine._parts.states.away.values()}), (
            "all at home"
        )
