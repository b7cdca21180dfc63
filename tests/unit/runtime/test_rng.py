"""The model-parallel random state tracker: what it keeps apart, what it refuses, what it gives back."""

from __future__ import annotations

import pytest
import torch

from deepspeed.accelerator import reset_accelerator, set_accelerator
from deepspeed.accelerator.cpu import CPU_Accelerator
from deepspeed.errors import DeepSpeedError
from deepspeed.runtime import rng
from deepspeed.runtime.rng import CudaRNGStatesTracker, RandomStateError, get_cuda_rng_tracker


@pytest.fixture(autouse=True)
def empty_slot():
    rng.get_cuda_rng_tracker().reset()
    set_accelerator(CPU_Accelerator())
    with torch.random.fork_rng(devices=[]):
        yield
    reset_accelerator()
    rng.get_cuda_rng_tracker().reset()


def seeded(seed, count=4):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def test_add_leaves_the_generator_alone():
    torch.manual_seed(3)
    CudaRNGStatesTracker().add("dropout", 99)
    assert torch.equal(torch.rand(4), seeded(3))


def test_fork_draws_from_its_state_and_goes_on_there():
    tracker = CudaRNGStatesTracker()
    tracker.add("dropout", 99)
    torch.manual_seed(3)
    with tracker.fork("dropout"):
        first = torch.rand(2)
    outside = torch.rand(4)
    with tracker.fork("dropout"):
        second = torch.rand(2)
    assert torch.equal(outside, seeded(3))
    generator = torch.Generator().manual_seed(99)
    assert torch.equal(first, torch.rand(2, generator=generator))
    assert torch.equal(second, torch.rand(2, generator=generator))


def test_fork_restores_after_an_error():
    tracker = CudaRNGStatesTracker()
    tracker.add("dropout", 99)
    torch.manual_seed(3)
    with pytest.raises(ZeroDivisionError), tracker.fork("dropout"):
        torch.rand(2)
        _ = 1 / 0
    assert torch.equal(torch.rand(4), seeded(3))


def test_states_come_back_as_they_were():
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    states = tracker.get_states()
    with tracker.fork():
        first = torch.rand(3)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(3), first)
    states.clear()
    assert "model-parallel-rng" in tracker.get_states()


def test_rewound_states_are_gone_afterwards():
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    early = tracker.get_states()
    with tracker.fork("a"):
        torch.rand(3)
    late = tracker.get_states()
    with tracker.rewound(early):
        assert torch.equal(tracker.get_states()["a"], early["a"])
        with tracker.fork("a"):
            torch.rand(30)
    assert torch.equal(tracker.get_states()["a"], late["a"])


def test_refusals_say_what_to_do():
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    with pytest.raises(RandomStateError, match="seed 1 is in use already"):
        tracker.add("b", 1)
    with pytest.raises(RandomStateError, match="'a' already"):
        tracker.add("a", 2)
    with pytest.raises(RandomStateError, match=r"no random state 'model-parallel-rng' \(known: 'a'\)"), tracker.fork():
        pass
    assert issubclass(RandomStateError, (DeepSpeedError, ValueError))
    tracker.add("c", 2)  # the refused seed 2 of 'a' was not booked
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.add("a", 1)


def test_model_parallel_seeds():
    rng.seed_model_parallel(10, tensor_rank=3)
    assert torch.equal(torch.rand(4), seeded(10))
    with get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(4), seeded(10 + 2718 + 3))
    rng.seed_model_parallel(10, tensor_rank=3)  # again: earlier states go first


def test_reseeding_touches_the_model_parallel_state_alone():
    rng.seed_model_parallel(10, tensor_rank=1)
    get_cuda_rng_tracker().add("other", 5)
    other = get_cuda_rng_tracker().get_states()["other"]
    rng.reseed_model_parallel(20, tensor_rank=1)
    assert torch.equal(torch.rand(4), seeded(10))
    assert torch.equal(get_cuda_rng_tracker().get_states()["other"], other)
    with get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(4), seeded(20 + 2718 + 1))


def test_reseeding_needs_a_state():
    with pytest.raises(RandomStateError, match="model_parallel_cuda_manual_seed"):
        rng.reseed_model_parallel(20, tensor_rank=0)
