"""The random states of one rank, as values that a checkpoint holds: Python's, numpy's, torch's and the device's."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.rng import get_cuda_rng_tracker

__all__ = ["capture", "restore"]


def capture() -> dict[str, Any]:
    """What `restore` needs; numpy's only where the program uses numpy."""
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


def restore(state: Mapping[str, Any]) -> None:
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
