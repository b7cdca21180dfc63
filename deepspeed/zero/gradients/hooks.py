"""Hooks on parameters: which gradients have arrived in this backward, and in which buckets they leave.

[Note: two manners] Shards may leave at any time, also in parts. A whole gradient that is reduced where it lies (stage
0) must not arrive while it is sent. So `whole` ones leave early only after a first backward, and never where reentrant
checkpointing runs a backward inside a backward.

[Note: several passes] The last backward before an optimizer step may consist of several passes over other layers (the
stages of a pipeline on one rank). Only arrivals in `final` passes count, and the last one has no `more` after it.

With hundreds of tiny layers, ten microseconds per parameter are a tenth of a step: hooks do little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed.errors import CommError
from deepspeed.zero.gradients.bucket_order import BucketOrder

if TYPE_CHECKING:
    from deepspeed.zero.parameters.fetch_schedule import FetchSchedule

# The number of the backward that is running in this thread, -1 outside one; nested ones have their own.
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class GradientHooks:
    """Follows the gradients of some parameters, by their numbers; `launch(place)` starts a bucket."""

    def __init__(self, launch: Callable[[int], None], *, early: bool = True, whole: bool = False) -> None:
        """Without `early` buckets leave after backward only; `whole`: see [Note: two manners]."""
        self._launch = launch
        self._allowed = early
        self._whole = whole
        self._handles: list[Any] = []
        self._counts: dict[int, int] | None = None
        self._reentrant = False
        self._task = -1
        self.buckets = BucketOrder((), (), launch, budget=0)
        self.clock: FetchSchedule | None = None
        """Where the pass is; if there is one, buckets leave when it says so and not when they are complete."""
        self.notice: Callable[[], None] | None = None
        """Called when a gradient arrives in a backward that was not announced."""
        self.inside = False
        """A backward runs that was announced."""
        self.armed = False
        """A backward runs, or ran, after which everything is launched."""
        self.dirty = False
        """Gradients have arrived since the last `settle`."""
        self.final = True
        """What arrives now is the last gradient of its parameter; see [Note: several passes]."""
        self.more = False
        """Other parameters get theirs in a later pass."""

    def watch(self, buckets: Sequence[Sequence[int]], sizes: Sequence[int], budget: int, *, kept: int = 0) -> None:
        """Send these buckets from now on, the last `kept` at the end; no more than `budget` elements wait."""
        old = self.buckets
        self.buckets = BucketOrder(buckets, sizes, self._launch, budget=budget, kept=kept)
        self.buckets.take_over(old, running=self.armed)

    def hook(self, name: str, param: nn.Parameter, number: int | None, first: Callable[[], None] | None = None) -> None:
        """Follow the arrival of one parameter's gradient; `first` is called before anything else."""

        def arrived(_: Tensor) -> None:
            if not self.inside and self.notice is not None:
                self.notice()
            if first is not None:
                first()
            self.dirty = True
            if number is None or not self.armed or not self.final:
                return
            if self.clock is not None:
                self.buckets.positions[number] = self.clock.position
            if self._whole and self._task != -1 and self._task != _graph_task():
                self._reentrant, self.buckets.early = True, False
            if not self.buckets.arrive(number) and self._whole:
                raise CommError(
                    f"the gradient of {name!r} arrived again after it had been sent to the other ranks. The graph of "
                    "this step differs from the last one's; wrap its backward calls in "
                    "engine.coalesce_grad_reduction()."
                )

        self._handles.append(param.register_post_accumulate_grad_hook(arrived))

    def arm(self) -> None:
        """The backward that starts now ends with everything launched: launch while it runs."""
        if self.armed:
            return
        self.armed = True
        self._task = -1
        steady = self._counts is not None and not self._reentrant
        self.buckets.early = self._allowed and (steady or not self._whole) and self.clock is None
        self.buckets.expect(None if self._whole else self._counts)

    def waiting(self) -> object:
        """What has arrived and left in the backward that runs; equal where the same has."""
        return self.armed, self.final, self.buckets.state()

    def ready(self) -> tuple[int, int]:
        """See `BucketOrder`; nothing where nothing may leave while backward runs."""
        return self.buckets.ready() if self.armed and self.final and self._allowed else (0, 0)

    def launch_until(self, until: int | None) -> None:
        """See `BucketOrder`; everything leaves in the last pass only."""
        if self.armed and self.final and self._allowed and not (self.more and until is None):
            self.buckets.launch_until(until)

    def begin(self) -> None:
        """Called from inside the outermost backward, before any gradient arrives."""
        self._task = _graph_task()
        self.buckets.positions = dict.fromkeys(self.buckets.positions, 0)  # what came in an earlier pass is there

    def expect(self, *, final: bool, more: bool) -> None:
        """A pass over a part of the model begins; see [Note: several passes]."""
        self.final, self.more = final, more

    def part(self) -> None:
        """Launch everything but what is kept back until `settle`; the backward is over."""
        self.arm()
        self.buckets.rest(kept=False)

    def settle(self) -> None:
        """Launch what has not been launched; the backward is over."""
        self.arm()
        self.armed, self.final, self.more = False, True, False
        self.buckets.rest()
        assert not self.buckets.waiting, "every gradient that arrived has left"
        self._counts = self.buckets.counts()
        self.dirty = False

    def forget(self) -> None:
        """Whatever has arrived is dropped."""
        self.armed = self.dirty = self.more = False
        self.final = True
        self.buckets.reset()

    def relearn(self) -> None:
        """Parameters have other numbers now: nothing is known about their arrivals."""
        self._counts = None
        self.buckets.late, self.buckets.sequence = set(), []

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
