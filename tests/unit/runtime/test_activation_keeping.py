"""What waits for backward in place of an input, and the buffer it may wait in."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.activation_checkpointing.configuration import (
    ALONE,
    SMALLEST,
    CheckpointingSettings,
    InputKeeper,
    is_activation,
)
from deepspeed.runtime.activation_checkpointing.offload import CallGroup, CheckpointBuffers, CheckpointingError

CPU = torch.device("cpu")


def empty(numel, dtype, device):
    return torch.empty(numel, dtype=dtype, device=device)


def contiguous(number=2):
    settings = CheckpointingSettings(
        partition_activations=True, contiguous_memory_optimization=True, number_checkpoints=number
    )
    return InputKeeper(settings, ALONE)


def test_what_is_an_activation():
    assert is_activation(torch.ones(SMALLEST))
    assert is_activation(torch.ones(SMALLEST, dtype=torch.bfloat16))
    assert not is_activation(torch.ones(SMALLEST - 1))
    assert not is_activation(torch.ones(SMALLEST, dtype=torch.int64))
    assert not is_activation(torch.nn.Parameter(torch.ones(SMALLEST)))
    assert not is_activation(torch.ones(1, 1).expand(SMALLEST, 2))
    assert not is_activation("text")


def test_without_settings_nothing_is_active():
    keeper = InputKeeper(CheckpointingSettings(), ALONE)
    assert not keeper.active
    assert not InputKeeper(CheckpointingSettings(partition_activations=True), ALONE).active


@pytest.mark.parametrize("dims", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_values_and_strides_come_back(dims):
    keeper = contiguous()
    tensor = torch.randn(8, 16, 24).permute(dims)
    back = keeper.give_back(keeper.keep(0, tensor, CallGroup()))
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()
    assert back.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_a_slice_comes_back_by_value():
    keeper = contiguous()
    tensor = torch.randn(64, 64)[:, 3:40]
    assert torch.equal(keeper.give_back(keeper.keep(0, tensor, CallGroup())), tensor)


def test_a_change_in_place_is_found():
    keeper = contiguous()
    small = torch.ones(3)
    kept = keeper.keep(0, small, CallGroup())
    assert keeper.give_back(kept) is small
    small.add_(1)
    with pytest.raises(CheckpointingError, match=r"shape \[3\], is at version 1 but was given at version 0"):
        keeper.give_back(kept)


def test_a_slot_is_free_when_its_holder_is_gone():
    arena = CheckpointBuffers(2, empty)
    first, second = (arena.take(0, 100, torch.float32, CPU) for _ in range(2))
    with pytest.raises(DeepSpeedConfigError, match="number_checkpoints") as caught:
        arena.take(0, 100, torch.float32, CPU)
    assert caught.value.path == "activation_checkpointing.number_checkpoints"
    assert first.tensor.data_ptr() != second.tensor.data_ptr()
    address = first.tensor.data_ptr()
    del first
    gc.collect()
    assert arena.take(0, 50, torch.float32, CPU).tensor.data_ptr() == address


def test_each_position_and_dtype_has_its_own_buffer():
    arena = CheckpointBuffers(1, empty)
    held = [arena.take(0, 128, torch.float32, CPU), arena.take(1, 128, torch.float32, CPU)]
    held.append(arena.take(0, 128, torch.bfloat16, CPU))
    assert arena.buffer_elements == 3 * 128


def test_a_larger_input_gets_a_larger_buffer_and_the_small_one_goes():
    arena = CheckpointBuffers(2, empty)
    small = arena.take(0, 128, torch.float32, CPU)
    small.tensor.fill_(7)
    large = arena.take(0, 1000, torch.float32, CPU)
    assert large.tensor.numel() == 1000
    assert arena.buffer_elements == 2 * 128 + 2 * 1024
    with pytest.raises(DeepSpeedConfigError):
        arena.take(0, 10, torch.float32, CPU)  # both buffers count
    large.tensor.fill_(1)
    assert small.tensor.eq(7).all()
    del small, large
    gc.collect()
    kept = arena.take(0, 1000, torch.float32, CPU)
    assert arena.buffer_elements == 2 * 1024
    assert kept.tensor.numel() == 1000


@given(st.lists(st.tuples(st.integers(1, 2000), st.booleans()), max_size=30))
def test_slots_that_live_together_never_overlap(requests):
    arena = CheckpointBuffers(8, empty)
    held = []
    for value, (numel, drop) in enumerate(requests):
        if (drop or len(held) == 8) and held:
            held.pop(0)
        slot = arena.take(0, numel, torch.float32, CPU)
        slot.tensor.fill_(value)
        held.append((value, slot))
        assert all(bool(slot.tensor.eq(wrote).all()) for wrote, slot in held)
        del slot
