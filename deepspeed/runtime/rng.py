"""The random states of a rank: those that model-parallel ranks keep apart, and all of them for a checkpoint.

Ranks that hold slices of one layer must draw the same numbers where they compute the same thing, and different ones
inside their slices (dropout of a sliced activation). The device's generator serves the first; the tracker keeps
named states for the second and puts one of them into the generator for the length of a `fork`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import DeepSpeedError

MODEL_PARALLEL_RNG = "model-parallel-rng"
_SEED_OFFSET = 2718


class RandomStateError(DeepSpeedError, ValueError):
    """A random state that is missing, or that is there already."""


class CudaRNGStatesTracker:
    """Named states of the accelerator's generator, whichever accelerator it is, the CPU too."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states and seeds."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Name → state as it is now; later forks do not change what is returned."""
        return dict(self.states_)  # a fork puts a new tensor in place of the old one, it never writes into one

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Go back to states that `get_states` returned."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new state, as the generator has it right after `manual_seed(seed)`; the generator stays as it is."""
        if seed in self.seeds_:
            raise RandomStateError(
                f"seed {seed} is in use already, so {name!r} would repeat another state's numbers; give another seed, "
                "or call reset() first"
            )
        if name in self.states_:
            raise RandomStateError(f"there is a random state {name!r} already; use another name, or call reset() first")
        accelerator = get_accelerator()
        surrounding = accelerator.get_rng_state()
        try:
            accelerator.manual_seed(seed)
            state = accelerator.get_rng_state()
        finally:
            accelerator.set_rng_state(surrounding)
        self.seeds_.add(seed)
        self.states_[name] = state

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Draw from the named state inside the context; the next fork goes on where this one ended."""
        if name not in self.states_:
            known = ", ".join(map(repr, sorted(self.states_))) or "none"
            raise RandomStateError(
                f"there is no random state {name!r} (known: {known}); call "
                f"deepspeed.checkpointing.model_parallel_cuda_manual_seed(seed), or add({name!r}, seed), first"
            )
        accelerator = get_accelerator()
        surrounding = accelerator.get_rng_state()
        accelerator.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(surrounding)

    @contextmanager
    def rewound(self, states: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Earlier states inside the context, for a recomputation; afterwards those from before it."""
        surrounding = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(surrounding)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this process."""
    return _tracker


def model_parallel_seed(seed: int, tensor_rank: int) -> int:
    """The seed of a rank's own state, different on each rank of a tensor-parallel group."""
    return seed + _SEED_OFFSET + tensor_rank


def seed_model_parallel(seed: int, tensor_rank: int) -> None:
    """Seed the device's generator alike on all ranks, and the model-parallel state by rank; earlier states go."""
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(MODEL_PARALLEL_RNG, model_parallel_seed(seed, tensor_rank))


def reseed_model_parallel(seed: int, tensor_rank: int) -> None:
    """Start the model-parallel state anew from another seed; the device's generator and other states stay."""
    with _tracker.fork():
        get_accelerator().manual_seed(model_parallel_seed(seed, tensor_rank))


def capture_states() -> dict[str, Any]:
    """What `restore_states` needs; numpy's only where the program uses numpy."""
    version, internal, gauss = random.getstate()
    # As tensors: hundreds of numbers, each an object, would take most of the time of reading a small checkpoint.
    state: dict[str, Any] = {"python": [version, torch.tensor(internal), gauss], "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), *rest]
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        state["device"] = accelerator.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    if tracked:
        state["tracker"] = tracked
    return state


def restore_states(state: Mapping[str, Any]) -> None:
    """Go on drawing the numbers that would have come next; what was not captured stays as it is."""
    if "python" in state:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal.tolist()), gauss))
    if "torch" in state:
        torch.set_rng_state(state["torch"].clone())
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    accelerator = get_accelerator()
    if "device" in state and accelerator.device_name() != "cpu":
        accelerator.set_rng_state(state["device"].clone())
    if "tracker" in state:
        get_cuda_rng_tracker().set_states({name: value.clone() for name, value in state["tracker"].items()})
