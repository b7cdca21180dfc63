"""The `verify` section on several ranks: it names a bit that was flipped, and says nothing of clean steps."""

import ctypes
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import VerificationError
from deepspeed.zero.gradients.reduction import ReduceToOwners
from tests.harness import ranks, shared_ranks

WIDTH = 12


def build(stage, *, every=1, parameters=8, dtype="bf16", optimizer="AdamW", seed=None, **verify):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    params = {"lr": 1e-2, "weight_decay": 0.1}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": optimizer, "params": params},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "verify": {"every": every, "parameters": parameters, **verify},
    }
    if dtype == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif dtype != "fp32":
        config[dtype] = {"enabled": True}
    engine = deepspeed.initialize(model=model, config=config)[0]
    torch.manual_seed(dist.get_rank() if seed is None else seed)
    return engine


def train(engine, steps=1):
    for _ in range(2 * steps):
        batch = torch.randn(2, WIDTH, dtype=next(engine.parameters()).dtype)
        engine.backward(engine(batch).square().mean())
        engine.step()


def flip(tensor, element=0, bit=3):
    """Change a bit in memory, as a cosmic ray does: nothing that counts writes sees it."""
    at = tensor.data_ptr() + element * tensor.element_size() + bit // 8
    ctypes.c_uint8.from_address(at).value ^= 1 << bit % 8


def moment(engine, name="exp_avg"):
    return next(state[name] for state in engine.basic_optimizer.state.values() if state.get(name) is not None)


def found(engine, *words):
    """The message of the error that the next step raises on all ranks."""
    with pytest.raises(VerificationError) as error:
        train(engine)
    text = str(error.value)
    for word in words:
        assert word in text, (word, text)
    return text


def clean(stage, dtype, optimizer, steps=4):
    engine = build(stage, dtype=dtype, optimizer=optimizer, action="stop", every=2, parameters=3)
    train(engine, steps)
    engine.destroy()


@shared_ranks(2, 3)
def test_clean_steps_raise_nothing():
    for stage, dtype, optimizer in (
        (0, "fp32", "AdamW"),
        (0, "autocast", "AdamW"),
        (0, "bf16", "SGD"),
        (1, "fp16", "Adam"),
        (1, "fp32", "Lion"),
        (2, "bf16", "AdamW"),
        (3, "bf16", "Adam"),
        (3, "fp32", "Adagrad"),
    ):
        clean(stage, dtype, optimizer)


@ranks(2)
def test_a_thousand_clean_steps_raise_nothing():
    for stage in (1, 3):
        engine = build(stage, action="stop", every=10, parameters=1)
        train(engine, 500)
        engine.destroy()


@shared_ranks(2, 3)
def test_flipped_bits_are_named():
    last = dist.get_world_size() - 1
    mine = dist.get_rank() == last
    for stage in range(4):
        engine = build(stage, every=1, action="stop")
        train(engine)
        if stage < 3 and mine:
            flip(engine.module[2].weight.data, 17)
        if stage == 3 and mine:
            flip(engine.module[0].bias.data, 5)  # it persists
        name, place = ("2.weight", "[1, 5]") if stage < 3 else ("0.bias", "[5]")
        found(engine, f"{name}{place}", f"rank {last}: ", "the copy of rank 0")
        engine.destroy()

        engine = build(stage, action="stop")
        train(engine)
        if mine:
            flip(moment(engine), 1)
        found(engine, f"rank {last}: exp_avg of ", "expected")
        engine.destroy()

        engine = build(stage, every=2, action="stop", seed=7 + dist.get_rank() * (stage % 2))
        train(engine, 3)
        state = torch.get_rng_state()
        state[1000] ^= 2
        if mine:
            torch.set_rng_state(state)
        found(engine, f"rank {last}: the state of the random generator of cpu[1000]")
        engine.destroy()


@shared_ranks(2, 3)
def test_a_flipped_bit_of_a_bucket_in_flight_is_named_and_replayed(tmp_path):
    whole = ReduceToOwners.start

    def start(self, send, share):
        if dist.get_rank() == 1 and send.numel() > WIDTH:
            flip(send, WIDTH - 1, 8 * send.element_size() - 1)
        return whole(self, send, share)

    for stage in range(4):
        engine = build(stage, every=1, action="save", replay=str(tmp_path / str(stage)))
        train(engine)
        with mock.patch.object(ReduceToOwners, "start", start):
            found(engine, "the reduced gradient of ", "a plain sum over ranks")
        engine.destroy()
        dist.barrier()
        report = deepspeed.replay(tmp_path / str(stage))
        first = report.differences[0]
        assert report.step == 2
        assert first.tensor.startswith("the reduced gradient of ")
        assert str(first) in "\n".join(report.recorded)
