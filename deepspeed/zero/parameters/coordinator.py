"""`FetchCoordinator`: what hooks on modules and parameters tell stage 3; it makes parameters whole and lets go of them.

Who needs what at this moment is `UseCounts`; what is gathered when, and how ranks agree on it, is `FetchSchedule`.

[Note: differentiated twice] The graph that a backward with `create_graph=True` makes needs parameters, belongs to no
module, and may run first in the next backward. So the parameters of all modules that such a backward came to stay whole
until the next optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from deepspeed.zero.parameters.fetch_schedule import FetchSchedule
from deepspeed.zero.parameters.shard import Shard, shards_of
from deepspeed.zero.parameters.uses import ModuleUse, UseCounts


class FetchCoordinator:
    """Makes parameters whole before modules need them, and lets go of them afterwards."""

    def __init__(self, schedule: FetchSchedule) -> None:
        self.schedule = schedule
        self._holds = UseCounts(schedule.left, schedule.loosened)
        self._uses: dict[int, ModuleUse] = {}
        self._users: dict[int, ModuleUse] = {}
        """A use of each shard, by its number."""
        self._forwards: set[tuple[object, ...]] = set()
        """The kinds of forward with gradients since the last backward."""
        self.in_backward = False
        self.kind: tuple[object, ...] = ()
        """Which part of the model runs, and how, where it is run in parts: passes of one kind have one plan."""
        self.inputs_only = False
        """A backward computes the gradients of inputs alone: modules are through when theirs are known."""
        self.notice: Callable[[], None] | None = None
        """Called when a backward begins that nobody has announced."""
        self.bring: Callable[[], None] | None = None
        """Brings back parameters that stay whole and were let go, before a pass."""

    # ---- what is used

    def add(self, use: ModuleUse) -> None:
        """Know about a use; all ranks add the same ones in the same order."""
        self._uses[use.number] = use
        for shard in use.shards:
            self._users.setdefault(shard.number, use)
        self.schedule.add(use)

    def clear(self) -> None:
        """Forget every use and every plan."""
        self.forget_graphs()
        self.schedule.clear()
        self._uses.clear()
        self._users.clear()
        self._holds.clear()
        self._forwards.clear()
        self.in_backward = False

    @property
    def current(self) -> ModuleUse | None:
        """The innermost module that is running."""
        return self._holds.current

    def first_uses(self) -> Iterator[nn.Parameter]:
        """Parameters in the order in which the first forward used them, the same on all ranks."""
        for number in self.schedule.first:
            for shard in self._uses[number].shards:
                yield shard.param

    # ---- forward

    def enter(self, use: ModuleUse) -> None:
        """A module begins to run."""
        if not self.schedule.running:
            self._bring()
            self.schedule.open(("forward", use.number, *self.kind, torch.is_grad_enabled()), use)
        self.schedule.need(use)
        self._holds.push(use)

    def leave(self, use: ModuleUse) -> None:
        """A module has run, or failed."""
        if self.in_backward:
            self._holds.keep_frozen(use)
        if self._holds.pop(use) and not self._holds.running and not self.in_backward and self.schedule.running:
            if self.schedule.grad:
                self._forwards.add(self.schedule.key)
            self.schedule.close()

    def pass_by(self) -> None:
        """Take part in a forward that the other ranks run and this one does not."""
        for outermost in list(self._uses.values())[:1]:
            self.enter(outermost)
            self.leave(outermost)

    def also(self, shard: Shard) -> None:
        """The running module needs one more parameter, now and whenever it runs."""
        use = self.current
        if use is None:
            return
        if shard not in use.shards:
            self.schedule.extend(use, shard)
        self.schedule.need(use)
        self._holds.also(shard)

    def hand_over(self, use: ModuleUse, shard: Shard) -> None:
        """A module returns one of its parameters: whoever called it uses that from now on."""
        caller = self._holds.caller_of(use)
        if caller is not None and shard not in caller.shards:
            self.schedule.extend(caller, shard)
            self._holds.lend(caller, shard)

    # ---- backward

    def begin_backward(self) -> None:
        """A backward begins."""
        self._bring()
        if self.in_backward or not self._uses:
            return
        self.in_backward = True
        kinds = self.kind or tuple(sorted(self._forwards, key=repr))
        self.schedule.open(("backward", kinds, tuple(sorted(self.schedule.kept)), False))

    def _bring(self) -> None:
        if self.bring is not None:
            self.bring()

    def before_backward(self, use: ModuleUse, *, recorded: bool = False) -> None:
        """The gradient of a module's output is known: its parameters are needed next.

        `recorded`: this backward makes a graph; see [Note: differentiated twice].
        """
        if not self.in_backward:
            if self.notice is not None:
                self.notice()
            self.begin_backward()
        if not self._holds.holds_all(use):
            self.schedule.need(use)
            self._holds.keep(use)
        self._holds.release_frozen(use)
        if recorded:
            self._holds.keep_until_step(use)

    def forget_graphs(self) -> None:
        """Parameters are about to change: no graph that was made with them is differentiated any more."""
        self.schedule.let_go(self._holds.end_step())

    def before_weights(self, params: Iterable[Tensor]) -> None:
        """The gradients of these are computed next, apart from those of their modules' inputs."""
        for shard in shards_of(params):
            if shard.number in self._users:
                self.before_backward(self._users[shard.number])

    def gradient_arrived(self, shard: Shard) -> None:
        """Every use of a trained parameter in this backward is over: its gradient is there."""
        self._holds.arrived(shard)

    def inputs_done(self, use: ModuleUse) -> None:
        """The gradients of all inputs of a module are known."""
        self._holds.inputs_done(use, all_of_it=self.inputs_only)

    def end_backward(self) -> None:
        """A backward is over: nothing is needed any more."""
        if not self.in_backward:
            return
        self._holds.end_backward()
        self.in_backward = False
        self._forwards.clear()
        self.schedule.close()

    def abandon(self) -> None:
        """A backward failed."""
        if self.in_backward:
            self.in_backward = False
            self._forwards.clear()
            self._holds.end_backward()
            self.schedule.abandon()
