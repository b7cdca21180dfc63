"""Random numbers of ranks that share layers: equal for what all of them hold, different for what is split.

[Note: numbers of a rank's own] From the outputs of a layer that is split by columns to the layer that is split by rows
each rank draws from a random state of its own, and afterwards the shared state goes on where it was: what ranks drew in
between may be of different sizes. The seed comes from one number of the shared state, so that a recomputation, which
rewinds that state, draws the same again, and nothing has to be kept or saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.parallel.process_groups import ranks_of
from deepspeed.parallel.regions import RankGroup, Uncopied

_APART = 0x9E3779B97F4A7C15  # odd, so that the seeds of ranks differ


class RankGenerator(Uncopied):
    """Puts a random state of this rank's own into the generators, and the shared one back."""

    def __init__(self, axis: RankGroup) -> None:
        self._rank = axis.rank
        self._seed: int | None = None
        self._shared: tuple[Tensor, Tensor | None] | None = None

    def begin(self, module: nn.Module, *_: Any) -> None:
        """What comes now is split; also as a hook."""
        if module.training:
            self.apart()

    def apart(self) -> None:
        """From now on numbers are those of this rank."""
        if self._is_apart():
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        accelerator = get_accelerator()
        on_device = accelerator.device_name() != "cpu"
        self._shared = torch.get_rng_state(), accelerator.get_rng_state() if on_device else None
        self._seed = (seed + self._rank * _APART) % 2**63
        torch.manual_seed(self._seed)

    def end(self, *_: Any) -> None:
        """What comes now is computed by all ranks alike; also as a hook."""
        if self._is_apart() and self._shared is not None:
            host, device = self._shared
            torch.set_rng_state(host)
            if device is not None:
                get_accelerator().set_rng_state(device)
        self._seed = self._shared = None

    def _is_apart(self) -> bool:
        """By the generator itself: a recomputation that stops between two split layers puts the shared state back."""
        return self._seed is not None and torch.initial_seed() == self._seed


@contextmanager
def rank_generator(axis: RankGroup) -> Iterator[None]:
    """Numbers drawn inside are different on each rank; those afterwards are as they would be on all of them."""
    draws = RankGenerator(axis)
    if axis.size > 1:
        draws.apart()
    try:
        yield
    finally:
        draws.end()


def sync_generators(axis: RankGroup) -> None:
    """Give all ranks of an axis the random states of the first: what is whole must be dropped alike everywhere."""
    accelerator, device, first = get_accelerator(), comm.group_device(), ranks_of(axis.group)[0]
    host = torch.get_rng_state().to(device)
    comm.broadcast(host, src=first, group=axis.group)
    torch.set_rng_state(host.cpu())
    if accelerator.device_name() != "cpu":
        state = accelerator.get_rng_state().to(device)
        comm.broadcast(state, src=first, group=axis.group)
        accelerator.set_rng_state(state.cpu())
