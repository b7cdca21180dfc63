"""Pipelines in which torch pretends that there are other ranks: what they would send is known by its form alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.pipe.forms import Form, flatten, map_tensors
from deepspeed.pipe.partition import callable_of
from deepspeed.pipe.specs import Layer, name_of

__all__ = ["foretell", "is_pretended"]


def is_pretended() -> bool:
    """Whether nobody answers but this process: torch's backend "fake"."""
    return comm.get_backend() == "fake"


def foretell(layers: Sequence[Layer], parts: Sequence[int], stages: Sequence[int], example: Any) -> dict[int, Form]:
    """Stage → the form of what comes into it, for some stages behind the first; layers run without memory or values.

    `example` is what the first layer takes, `parts` where stages begin.
    """
    wanted = {parts[stage]: stage for stage in stages if stage > 0}
    found: dict[int, Form] = {}
    tied: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        value = map_tensors(example, mode.from_tensor)
        for number in range(max(wanted, default=-1) + 1):
            if number in wanted:
                found[wanted[number]] = flatten(value)[0]
            if len(found) < len(wanted):
                value = _through(number, layers[number], value, tied)
    return found


def _through(number: int, layer: Layer, value: Any, tied: dict[str, Any]) -> Any:
    try:
        return callable_of(layer, tied)(value)
    except Exception as error:
        raise UsageError(
            f"layer {number} ({name_of(layer)}) could not run over the shapes of example_input, from which a rank "
            f"among pretended ones knows what it would receive: {error}"
        ) from error
