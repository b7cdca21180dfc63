"""Random numbers of ranks that share layers: equal for what all of them hold, different for what is split.

[Note: numbers of a rank's own] From the outputs of a layer that is split by columns to the layer that is split by rows
each rank draws from a random state of its own, and afterwards the shared state goes on where it was: what ranks drew in
between may be of different sizes. The seed comes from one number of the shared state, so that a recomputation, which
rewinds that state, draws the same again, and nothing has to be kept or saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.parallel import AxisGroup
from deepspeed.parallel.regions import Peers
from deepspeed.tensor_parallel.layers import ColumnParallel, RowParallel

__all__ = ["Draws", "draw_apart", "numbers_of_its_own", "same_generators"]

_APART = 0x9E3779B97F4A7C15  # odd, so that the seeds of ranks differ


class Draws:
    """Puts a random state of this rank's own into the generators, and the shared one back."""

    def __init__(self, axis: Peers) -> None:
        self._rank = axis.rank
        self._seed: int | None = None
        self._shared: tuple[Tensor, Tensor | None] | None = None

    def __deepcopy__(self, _: Any) -> Draws:
        return self

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
def numbers_of_its_own(axis: Peers) -> Iterator[None]:
    """Numbers drawn inside are different on each rank; those afterwards are as they would be on all of them."""
    draws = Draws(axis)
    if axis.size > 1:
        draws.apart()
    try:
        yield
    finally:
        draws.end()


def draw_apart(model: nn.Module, axis: Peers, blocks: Sequence[nn.Module] = ()) -> None:
    """Let each rank draw its own numbers for activations that are split: between split layers, or in all of `blocks`.

    A model without dropout stays as it is.
    """
    if not any(map(_drops, model.modules())):
        return
    draws = Draws(axis)
    for block in blocks:
        block.register_forward_pre_hook(draws.begin)
        block.register_forward_hook(draws.end, always_call=True)
    for outer, layer in () if blocks else _with_adapters(model):
        if any(isinstance(getattr(hook, "__self__", None), Draws) for hook in outer._forward_hooks.values()):
            continue  # AutoTP split it before
        # An adapter drops what its layer reads: it is whole before a column layer, and split before a row layer.
        if isinstance(layer, ColumnParallel) and not layer.share.gather_output:
            outer.register_forward_pre_hook(draws.end)
            outer.register_forward_hook(draws.begin)
        elif isinstance(layer, RowParallel):
            outer.register_forward_hook(draws.end, always_call=True)
    model.register_forward_hook(draws.end, always_call=True)  # a forward that fails leaves no state of a rank's own


def _with_adapters(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """(layer with its adapters, layer itself) of all modules that are no part of an adapter."""
    inner: set[int] = set()
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module):
            inner.update(map(id, module.modules()))
            yield module, base
        elif id(module) not in inner:
            yield module, module


def _drops(module: nn.Module) -> bool:
    """Whether a module may drop something in training: it is a dropout, or it or its config has a rate."""
    own = getattr(module, "p", 0.0) if isinstance(module, nn.modules.dropout._DropoutNd) else 0.0
    held = (*vars(module).items(), *getattr(getattr(module, "config", None), "__dict__", {}).items())
    rates = [own, *(value for name, value in held if "drop" in name)]
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
