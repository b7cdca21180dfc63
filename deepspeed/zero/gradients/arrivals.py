"""Which gradients have arrived in this backward: complete buckets are launched at once, in an order all ranks share.

[Note: when a bucket is launched] Buckets are launched in their own order, which is the same on every rank, each as
soon as its last gradient has arrived and all buckets before it are launched. Two things forbid launching before
backward ends: the first backward, in which we learn how this model behaves, and reentrant checkpointing, which runs
a backward inside a backward, so that a parameter's gradient may arrive several times.

[Note: cost per parameter] With hundreds of tiny layers, ten microseconds per parameter are a tenth of a step. So hooks
do little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import CommError

__all__ = ["Arrivals"]

# The number of the backward that is running in this thread, -1 outside one; nested ones have their own.
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class Arrivals:
    """Hooks on parameters, and the launching of buckets.

    `launch(place)` starts the bucket at that place of the list given to `watch`; without `early` after backward only.
    """

    def __init__(self, launch: Callable[[int], None], *, early: bool = True) -> None:
        self._launch = launch
        self._allowed = early
        self._handles: list[Any] = []
        self._members: list[frozenset[int]] = []
        self._missing: list[set[int]] = []
        self._early = False
        self._seen_backward = False
        self._reentrant = False
        self._task = -1
        self._next = 0
        self.armed = False
        """A backward runs, or ran, after which everything is launched."""
        self.dirty = False
        """Gradients have arrived since the last `settle`."""

    def watch(self, buckets: Sequence[Sequence[nn.Parameter]]) -> None:
        """Forget earlier buckets; these are the parameters of each, in the order of launching."""
        self.close()
        self._members = [frozenset(id(param) for param in bucket) for bucket in buckets]
        self._missing = [set() for _ in buckets]
        self._seen_backward = False

    def hook(self, name: str, param: nn.Parameter, bucket: int | None, first: Callable[[], None] | None = None) -> None:
        """Follow the arrival of one parameter's gradient; `first` is called before anything else."""
        number = id(param)

        def arrived(_: Tensor) -> None:
            if first is not None:
                first()
            self.dirty = True
            if self.armed and bucket is not None:
                self._note(name, number, bucket)

        self._handles.append(param.register_post_accumulate_grad_hook(arrived))

    def arm(self) -> None:
        """The backward that starts now ends with everything launched: launch while it runs."""
        if self.armed:
            return
        self.armed = True
        self._early = self._allowed and self._seen_backward and not self._reentrant
        self._task = -1
        self._next = 0
        self._missing = [set(members) for members in self._members]

    def begin(self) -> None:
        """Called from inside the outermost backward, before any gradient arrives."""
        self._task = _graph_task()

    def settle(self) -> None:
        """Launch what has not been launched; the backward is over."""
        self.arm()
        self._seen_backward = True
        self.armed = False
        while self._next < len(self._members):
            self._launch_next()
        self.dirty = False

    def forget(self) -> None:
        """Whatever has arrived is dropped."""
        self.armed = self.dirty = False

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._members, self._missing = [], []

    def _note(self, name: str, number: int, bucket: int) -> None:
        if bucket < self._next:
            raise CommError(
                f"the gradient of {name!r} arrived again after it had been sent to the other ranks. The graph of this "
                "step differs from the first one's; wrap its backward calls in engine.coalesce_grad_reduction()."
            )
        missing = self._missing[bucket]
        missing.discard(number)
        if not self._reentrant and self._task != -1 and _graph_task() != self._task:
            self._reentrant, self._early = True, False
        if self._early and not missing:
            while self._next < len(self._members) and not self._missing[self._next]:
                self._launch_next()

    def _launch_next(self) -> None:
        place = self._next
        self._next += 1
        self._launch(place)
