"""`engine.offload_states` and `reload_states`: what leaves the device, what still works, and that nothing changes."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.zero.offload_states import get_state_devices

import deepspeed
from deepspeed.config.zero import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.errors import UsageError
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.zero.parameters.shard import shard_of
from tests.harness import shared_ranks

Kind = OffloadStateTypeEnum
WIDTH = 12


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.unused = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).float().square().mean()


def make(stage, *, bf16=True, **zero):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": WIDTH, **zero},
    }
    return deepspeed.initialize(model=Net(), model_parameters=None, config=config)[0]


def data(bf16=True):
    torch.manual_seed(1)
    return torch.randn(8, 2, WIDTH).to(torch.bfloat16 if bf16 else torch.float32)


def train(engine, batches, between=lambda number: None):
    losses = []
    for number, batch in enumerate(batches):
        loss = engine(batch)
        engine.backward(loss)
        between(number)
        engine.step()
        losses.append(loss.item())
    return losses


def whole(engine):
    return {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}


def storages(engine):
    """The memory of everything that can be moved."""
    from deepspeed.runtime.offload_states import inventory

    return {
        kind: {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
        for kind, tensors in inventory(engine._parts).items()
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
@shared_ranks(1, 2)
def test_everything_leaves_and_training_goes_on_as_if_nothing_had_been(stage, bf16):
    batches = data(bf16)
    engine = make(stage, bf16=bf16)
    expected = train(engine, batches), whole(engine)
    engine.destroy()
    engine = make(stage, bf16=bf16)

    def away_for_a_moment(_):  # with gradients, half-way through an accumulation and before a step
        held = {kind: [each for each in found.values() if each.nbytes()] for kind, found in storages(engine).items()}
        assert held[Kind.lp_params]
        engine.offload_states()
        left = {kind: sum(each.nbytes() for each in found) for kind, found in held.items()}
        assert not any(left.values()), left
        engine.reload_states()

    found = train(engine, batches, away_for_a_moment), whole(engine)
    assert found[0] == expected[0]
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("stage", [0, 2, 3])
@shared_ranks(2)
def test_only_what_is_included_leaves(stage):
    engine, batches = make(stage), data()
    train(engine, batches[:2])
    for chosen in ([Kind.optim_states], {Kind.hp_params}, [Kind.hp_params, Kind.optim_states], ["optim_states"]):
        before = storages(engine)
        engine.offload_states(include=chosen, pin_memory=False)
        for kind, found in before.items():
            sizes = [storage.nbytes() for storage in found.values()]
            assert all(size == 0 for size in sizes) if kind in chosen else any(sizes) or not sizes, kind
        with torch.no_grad():
            engine(batches[0])  # parameters are here
        engine.reload_states()
        assert not any(storage.nbytes() == 0 for kind in chosen for storage in before[Kind(kind)].values())


@pytest.mark.parametrize("stage", [1, 3])
@shared_ranks(2)
def test_what_needs_absent_states_says_so(stage):
    engine, batches = make(stage), data()
    train(engine, batches[:2])
    engine.reload_states()  # nothing is away
    engine.offload_states(include=[Kind.optim_states])
    with pytest.raises(UsageError, match=r"engine\.step\(\) needs optim_states.*engine\.reload_states\(\)"):
        train(engine, batches[:1])
    with pytest.raises(UsageError, match="optim_states"):
        engine.save_checkpoint("nowhere")
    param = engine.module.first.weight
    with pytest.raises(UsageError, match="optim_states"):
        safe_get_full_fp32_param(param)
    engine.offload_states()  # and the rest
    with torch.no_grad(), pytest.raises(UsageError, match=r"engine\.forward\(\) needs lp_params"):
        engine(batches[0])
    if stage == 3:
        for _ in range(2):
            with pytest.raises(UsageError, match=r"gathering .*weight needs lp_params"):
                deepspeed.zero.GatheredParameters([param]).__enter__()
    engine.reload_states()
    engine.zero_grad()
    train(engine, batches[:2])


@shared_ranks(1)
def test_bad_words(tmp_path):
    engine = make(2)
    with pytest.raises(ValueError, match="device is nvme"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    with pytest.raises(UsageError, match=r"include is \['masters'\].*optim_states"):
        engine.offload_states(include=["masters"])
    with pytest.raises(UsageError, match=r"include is set\(\)"):
        engine.offload_states(include=set())
    engine.offload_states(device="none")
    train(engine, data()[:2])
    engine = make(3, offload_param={"device": "cpu"})
    with pytest.raises(AssertionError, match="offload_param"):
        engine.offload_states()
    model = Net()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    with pytest.raises(AssertionError, match="this engine has none"):
        engine.offload_states()


@shared_ranks(1)
def test_with_states_that_live_on_the_host_the_rest_moves():
    engine = make(2, offload_optimizer={"device": "cpu"})
    train(engine, data()[:2])
    engine.offload_states()
    engine.reload_states()
    train(engine, data()[:2])


@pytest.mark.parametrize("stage", [1, 3])
@shared_ranks(2)
def test_devices_are_told_and_destroying_brings_parameters_back(stage):
    engine = make(stage)
    train(engine, data()[:2])
    assert get_state_devices(engine, Kind.hp_params) == {engine.device}
    assert get_state_devices(engine, Kind.contiguous_grad_buffer) == {engine.device}
    values = [value.clone() for value in whole(engine).values()]
    module = engine.module
    engine.offload_states()
    assert get_state_devices(engine, Kind.contiguous_grad_buffer) == set()
    assert get_state_devices(engine, "lp_params") == {torch.device("cpu")}
    engine.destroy()
    for value, param in zip(values, module.parameters(), strict=True):
        shard = shard_of(param)
        found = param.view(-1) if shard is None else shard.local
        start, stop = (0, value.numel()) if shard is None else shard.interval
        torch.testing.assert_close(found.float(), value.view(-1)[start:stop], rtol=1e-2, atol=1e-2)
