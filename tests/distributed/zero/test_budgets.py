"""The `memory` section: states spill from tier to tier as budgets say, and the numbers stay those of a run without."""

from __future__ import annotations

import io
from collections import Counter
from contextlib import redirect_stdout

import pytest
import torch

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.memory.tier import Tier
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.zero.offload import state_width
from deepspeed.zero.parameters.offloaded import FileChunks
from deepspeed.zero.parameters.shard import shards_of
from tests.harness import shared_ranks
from tests.user_models import whole

WIDTH, LAYERS = 16, 24
LAYER = WIDTH * WIDTH
ELEMENTS = LAYERS * LAYER
WINDOW = 3 * LAYER * 12  # bytes of three tiles on their way, masters and two moments


class Net(torch.nn.Module):
    """Layers of one size, the last of which nobody uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x)) + x
        return x.float().square().mean()


def build(stage, memory, *, bf16=True, model=None, client=None, **config):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": LAYER}
    if client is None:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    return deepspeed.initialize(
        model=Net() if model is None else model,
        optimizer=client or None,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": bf16},
            "gradient_clipping": 0.1,
            "zero_optimization": zero,
            "memory": memory,
            **config,
        },
    )[0]


def train(engine, steps=3):
    dtype = engine.module.layers[0].weight.dtype
    for batch in torch.randn(steps, 2, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype):
        engine.backward(engine(batch))
        engine.step()
    return whole(engine)


def tiers(engine):
    """Elements of the optimizer's pieces by the tier that they really lie in."""
    found = Counter()
    for group in engine._parts.states.groups:
        for piece in group.pieces:
            arena = piece.arena
            tier = Tier.DEVICE if arena is None else Tier.HOST if arena.swap is None else Tier.DISK
            found[tier] += piece.master.numel()
    return found


def chunks(engine):
    found = Counter()
    for shard in shards_of(engine.module.parameters()):
        files = isinstance(shard.remote, FileChunks) and shard.remote.rests(shard.data)
        found[Tier.DISK if files else Tier.DEVICE if shard.remote is None else Tier.HOST] += shard.chunk
    return found


def budgets(stage, world, folder, *, bf16):
    """From all on the device to nothing there; with `world` ranks on a machine."""
    param, grad, on_device = (2, 2, 14) if bf16 else (4, 4, 12)
    states = ELEMENTS if stage == 0 else -(-ELEMENTS // world)
    params = param * (ELEMENTS if stage < 3 else LAYERS * -(-LAYER // world)) + 16
    disk = {"disk": "1GB", "path": str(folder)}
    yield {"device": "1GB"}
    yield {"device": params + on_device * states // 2}
    yield {"device": params, "host": (WINDOW + grad * states + 12 * states // 2) * world, **disk}
    if stage == 3:
        yield {"device": params // 2}
        yield {"device": 0, "host": (params // 2 + WINDOW + grad * states) * world, **disk}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
@shared_ranks(1, 3)
def test_the_numbers_of_a_run_without_budgets(stage, bf16, tmp_path):
    world = deepspeed.comm.get_world_size()
    engine = build(stage, {}, bf16=bf16)
    expected = train(engine)
    engine.destroy()
    found = []
    for memory in budgets(stage, world, tmp_path, bf16=bf16):
        engine = build(stage, memory, bf16=bf16)
        values = train(engine)
        found.append((set(tiers(engine)), set(chunks(engine))))
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6, msg=f"{memory} {name}")
        engine.destroy()
    states, params = zip(*found, strict=True)
    assert states[:3] == ({Tier.DEVICE}, {Tier.DEVICE, Tier.HOST}, {Tier.HOST, Tier.DISK})
    if stage == 3:
        assert params[-2:] == ({Tier.DEVICE, Tier.HOST}, {Tier.HOST, Tier.DISK})


@pytest.mark.parametrize("stage", [2, 3])
@shared_ranks(2)
def test_what_the_table_says_is_where_things_are(stage, tmp_path):
    memory = {"device": 2 * ELEMENTS, "host": 2 * WINDOW + 10 * ELEMENTS, "disk": "1GB", "path": str(tmp_path)}
    if stage == 3:
        memory["device"] //= 4
    with redirect_stdout(io.StringIO()) as said:
        engine = build(stage, memory)
    train(engine)
    table = [line.split() for line in said.getvalue().splitlines()]
    if deepspeed.comm.get_rank() > 0:
        assert not table
        return
    cells = [(tier, kind, count.replace(",", "")) for tier, kind, count, *_ in table[1:]]
    told = {(tier, kind): int(count) for tier, kind, count in cells if count.isdigit()}
    for tier, count in tiers(engine).items():
        assert told[tier.value, "moments"] == count
    assert len(tiers(engine)) == 2
    if stage == 3:
        for tier, count in chunks(engine).items():
            assert told[tier.value, "parameters"] == count


@pytest.mark.parametrize("stage", [2, 3])
@shared_ranks(1)
def test_a_step_takes_no_more_of_the_device_than_was_planned(stage):
    engine = build(stage, {"device": 2 * ELEMENTS + 14 * ELEMENTS // 2})
    optimizer, seen = engine._parts.states._optimizer, []
    step = optimizer.step

    def watched():
        for group in engine._parts.states.groups:
            here = [piece for piece in group.pieces if not piece.away]
            seen.extend((piece.gradient.dtype, piece.master.grad) for piece in here if piece.gradient is not None)
        return step()

    optimizer.step = watched
    train(engine, steps=1)
    assert len(seen) >= LAYERS // 3, "the gradients of what stays on the device"
    assert set(seen) == {(torch.bfloat16, None)}, "a gradient was copied to float32, for which there is no budget"


@shared_ranks(1)
def test_a_step_that_is_one_for_all_tiers_updates_what_stays_on_the_device():
    found = []
    for narrow in (False, True):  # as on a GPU, where Muon reads gradients as they came
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("deepspeed.runtime.step.stepper.reads_narrow", lambda *_, narrow=narrow: narrow)
            muon = {"type": "Muon", "params": {"lr": 1e-2}}
            engine = build(2, {"device": 2 * ELEMENTS + 10 * ELEMENTS // 2}, client=False, optimizer=muon)
            assert set(tiers(engine)) == {Tier.DEVICE, Tier.HOST}
            found.append(train(engine))
            engine.destroy()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=0, msg=name)


@shared_ranks(2)
def test_checkpoints_cross_budgets(tmp_path):
    first = build(2, {"device": 2 * ELEMENTS + 8 * LAYER})
    train(first)
    first.save_checkpoint(tmp_path)
    expected = train(first)
    for stage, memory in [(2, {}), (3, {"device": 0}), (1, {"device": 2 * ELEMENTS + 4000, "host": "1GB"})]:
        other = build(stage, memory)
        other.load_checkpoint(tmp_path)
        found = train(other)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@shared_ranks(1)
def test_too_little_is_told_before_training(tmp_path):
    with pytest.raises(DeepSpeedConfigError, match=r"memory.device: 100 B are less than .* stage 2 keeps whole"):
        build(2, {"device": 100})
    with pytest.raises(DeepSpeedConfigError, match=r"find no place, from '.*' .*memory.disk and memory.path"):
        build(3, {"device": 0, "host": 1000})
    with pytest.raises(DeepSpeedConfigError, match=r"memory.device: zero_optimization.offload_optimizer says where"):
        build(2, {"device": 0}, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})

    class Odd(torch.optim.AdamW):
        pass

    model = Net()
    client = Odd(model.parameters())
    disk = {"device": 2 * ELEMENTS, "host": WINDOW + 3 * ELEMENTS, "disk": "1GB", "path": str(tmp_path)}
    with pytest.raises(DeepSpeedConfigError, match=r"memory.disk: .*a step of Odd needs those of all parameters"):
        build(2, disk, model=model, client=client, zero_allow_untested_optimizer=True)


@shared_ranks(2)
def test_models_that_are_born_within_budgets(tmp_path):
    for memory in ({"device": 2 * ELEMENTS // 4}, {"device": 0, "host": "1GB", "disk": "1GB", "path": str(tmp_path)}):
        found = []
        for given in ({}, memory):
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 3},
                "memory": given,
            }
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = Net()
            engine = build(3, given, model=model)
            found.append(train(engine))
            assert bool(chunks(engine)[Tier.HOST]) == bool(given)
            engine.destroy()
        for name, value in found[0].items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)


@shared_ranks(1)
def test_what_an_optimizer_keeps_is_known_before_its_first_step():
    params = [torch.nn.Parameter(torch.zeros(10, 10))]
    assert state_width(torch.optim.AdamW(params)) == 8
    assert state_width(torch.optim.SGD(params)) == 0
    assert state_width(torch.optim.SGD(params, momentum=0.9)) == 4
    assert state_width(FusedAdam(params)) == 8
    assert 2 < state_width(DeepSpeedCPUAdam(params, moment_bits=8)) < 2.1
    given = torch.optim.AdamW(params)
    state_width(given)
    assert not given.state
    assert given.param_groups[0]["params"][0] is params[0]


@shared_ranks(1)
def test_any_optimizer_of_the_client(tmp_path):
    model = Net()
    client = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    engine = build(
        2, {"device": 2 * ELEMENTS + 30 * LAYER}, model=model, client=client, zero_allow_untested_optimizer=True
    )
    train(engine)
    assert set(tiers(engine)) == {Tier.DEVICE, Tier.HOST}
