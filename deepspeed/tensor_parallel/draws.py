"""Random numbers of ranks that share layers: the same where they compute the same, different ones for their own heads.

[Note: numbers of a rank's own] Inside an attention that drops some of its scores each rank draws for its own heads. The
seed comes from one number of the generator that all ranks have alike, so that a recomputation, which rewinds that
generator, draws the same again, and nothing has to be kept or saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.parallel import AxisGroup
from deepspeed.parallel.regions import Peers

__all__ = ["Draws", "drops", "numbers_of_its_own", "same_generators"]

_APART = 0x9E3779B97F4A7C15  # odd, so that the seeds of ranks differ


class Draws:
    """Puts a state of this rank's own into the generators, from the begin of an attention to its last projection."""

    def __init__(self, axis: Peers) -> None:
        self._rank = axis.rank
        self._surrounding: tuple[Tensor, Tensor | None] | None = None

    def __deepcopy__(self, _: Any) -> Draws:
        return self

    def begin(self, module: nn.Module, *_: Any) -> None:
        """As a pre-hook of an attention module."""
        if module.training:
            self.apart()

    def apart(self) -> None:
        """From now on numbers are those of this rank."""
        if self._surrounding is not None:
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        accelerator = get_accelerator()
        on_device = accelerator.device_name() != "cpu"
        self._surrounding = torch.get_rng_state(), accelerator.get_rng_state() if on_device else None
        torch.manual_seed((seed + self._rank * _APART) % 2**63)

    def end(self, *_: Any) -> None:
        """What comes now is computed by all ranks alike; also as a hook behind the module."""
        if self._surrounding is None:
            return
        (host, device), self._surrounding = self._surrounding, None
        torch.set_rng_state(host)
        if device is not None:
            get_accelerator().set_rng_state(device)


@contextmanager
def numbers_of_its_own(axis: Peers) -> Iterator[None]:
    """Numbers drawn inside are different on each rank; those afterwards are as they would be on all of them."""
    draws = Draws(axis)
    if axis.size > 1:
        draws.apart()
    try:
        yield
    finally:
        draws.end()


def drops(module: nn.Module) -> bool:
    """Whether an attention module drops scores in training."""
    names = ("attention_dropout", "attn_dropout", "dropout", "dropout_prob", "dropout_p")
    values = [getattr(module, name, 0.0) for name in names]
    rates = [value.p if isinstance(value, nn.Dropout) else value for value in values]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def same_generators(axis: AxisGroup) -> None:
    """Give all ranks of an axis the random states of the first: what is whole must be dropped alike everywhere."""
    accelerator, device = get_accelerator(), comm.group_device()
    host = torch.get_rng_state().to(device)
    comm.broadcast(host, src=axis.ranks[0], group=axis.group)
    torch.set_rng_state(host.cpu())
    if accelerator.device_name() != "cpu":
        state = accelerator.get_rng_state().to(device)
        comm.broadcast(state, src=axis.ranks[0], group=axis.group)
        accelerator.set_rng_state(state.cpu())
