"""`FetchCoordinator`: what hooks on modules and parameters tell stage 3; it makes parameters whole and lets go of them.

It counts on each shard how many uses need it at this moment. What is gathered when, and how ranks agree on it, is
`FetchSchedule`.

[Note: differentiated twice] The graph that a backward with `create_graph=True` makes needs parameters, belongs to no
module, and may run first in the next backward. So the parameters of all modules that such a backward came to stay whole
until the next optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from deepspeed.zero.parameters.data import plain_access
from deepspeed.zero.parameters.fetch_schedule import FetchSchedule
from deepspeed.zero.parameters.shapes import WholeShapes
from deepspeed.zero.parameters.shard import Shard, shards_of
from deepspeed.zero.parameters.uses import ModuleUse


class FetchCoordinator:
    """Makes parameters whole before modules need them, and lets go of them afterwards."""

    def __init__(self, schedule: FetchSchedule) -> None:
        self.schedule = schedule
        self._users: dict[int, ModuleUse] = {}
        """A use of each shard, by its number."""
        self._forwards: set[tuple[object, ...]] = set()
        """The kinds of forward with gradients since the last backward."""
        self.stack: list[tuple[ModuleUse, tuple[Shard, ...]]] = []
        """The modules that run inside each other, with what they hold."""
        self._backward: dict[ModuleUse, dict[Shard, None]] = {}
        """The uses of which backward is running, with what they hold."""
        self._holders: dict[Shard, tuple[ModuleUse, ...]] = {}
        """The same by shard."""
        self._inputs_done: set[ModuleUse] = set()
        self._recomputed: dict[ModuleUse, list[Shard]] = {}
        """What modules that were recomputed in backward do not train."""
        self._until_step: dict[Shard, None] = {}
        """What is kept for [Note: differentiated twice]."""
        self.in_backward = False
        self.kind: tuple[object, ...] = ()
        """Which part of the model runs, and how, where it is run in parts: passes of one kind have one plan."""
        self.inputs_only = False
        """A backward computes the gradients of inputs alone: modules are through when theirs are known."""
        self.notice: Callable[[], None] | None = None
        """Called when a backward begins that was not announced."""
        self.bring: Callable[[], None] | None = None
        """Brings back parameters that stay whole and were let go, before a pass."""
        self.shapes: WholeShapes | None = None
        """Where graphs of the model run: entered while backward does, which may run parts of forward again."""

    # ---- what is used

    def add(self, use: ModuleUse) -> None:
        """Know about a use; all ranks add the same ones in the same order."""
        for shard in use.shards:
            self._users.setdefault(shard.number, use)
        self.schedule.add(use)

    def clear(self) -> None:
        """Forget every use and every plan."""
        self.forget_graphs()
        self.schedule.clear()
        self._users.clear()
        self.stack.clear()
        self._backward.clear()
        self._holders.clear()
        self._inputs_done.clear()
        self._recomputed.clear()
        self._forwards.clear()
        if self.in_backward and self.shapes is not None:
            self.shapes.leave()
        self.in_backward = False

    def free_copies(self) -> None:
        """Free what neighbours keep of parameters; on all ranks together, between passes."""
        if self.schedule.copies is not None:
            self.schedule.copies.free()

    @property
    def current(self) -> ModuleUse | None:
        """The innermost module that is running."""
        return self.stack[-1][0] if self.stack else None

    def first_uses(self) -> Iterator[nn.Parameter]:
        """Parameters in the order in which the first forward used them, the same on all ranks."""
        for number in self.schedule.first:
            for shard in self.schedule.uses[number].shards:
                yield shard.param

    # ---- forward: modules run inside each other

    def enter(self, use: ModuleUse) -> bool:
        """A module begins to run; True if it trains not all of its parameters."""
        schedule, trains = self.schedule, True
        if not self.stack and not schedule.key:
            self.bring_back()
            schedule.open(("forward", use.number, *self.kind, torch.is_grad_enabled()), use)
        with plain_access():
            schedule.need(use)
            shards = use.shards
            for shard in shards:
                trains = trains and shard.param.requires_grad
        _hold(use, shards)
        self.stack.append((use, shards))
        return not trains

    def leave(self, use: ModuleUse) -> None:
        """A module has run, or failed."""
        if self.in_backward:
            self._keep_frozen(use)
        if self._pop(use) and not self.stack and not self.in_backward and self.schedule.key:
            if self.schedule.key[-1] is True:
                self._forwards.add(self.schedule.key)
            self.schedule.close()

    def _pop(self, use: ModuleUse) -> bool:
        """Modules above it were left by an exception. False if it never began."""
        if not self.stack or (self.stack[-1][0] is not use and not any(top is use for top, _ in self.stack)):
            return False
        while True:
            top, shards = self.stack.pop()
            for shard in shards:
                shard.holds -= 1
                shard.users.pop(top.number, None)
            with plain_access():
                self.schedule.left(top, shards)
            if top is use:
                return True

    def pass_by(self) -> None:
        """Take part in a forward that the other ranks run and this one does not."""
        for outermost in list(self.schedule.uses.values())[:1]:
            self.enter(outermost)
            self.leave(outermost)

    def also(self, shard: Shard) -> None:
        """The running module needs one more parameter, now and whenever it runs; so does what backward runs again."""
        if not self.stack:
            # The end of a reentrant checkpoint's own backward lets go of what the next one of the module uses.
            if self.in_backward and torch.is_grad_enabled():
                self.before_weights((shard.param,))
            return
        use, held = self.stack[-1]
        self.schedule.need(use, shard if shard not in use.shards else None)
        if shard not in held:
            _hold(use, (shard,))
            self.stack[-1] = use, (*held, shard)

    def hand_over(self, use: ModuleUse, shard: Shard) -> None:
        """A module returns one of its parameters: whoever called it uses that from now on, until it ends."""
        caller = next((top for top, _ in reversed(self.stack) if top is not use), None)
        if caller is not None and shard not in caller.shards:
            self.schedule.need(caller, shard)
            place = next(i for i, (top, _) in enumerate(self.stack) if top is caller)
            _hold(caller, (shard,))
            self.stack[place] = caller, (*self.stack[place][1], shard)

    # ---- backward: modules wait for the gradients of their parameters

    def begin_backward(self) -> None:
        self.bring_back()
        if self.in_backward or not self.schedule.uses:
            return
        self.in_backward = True
        kinds = self.kind or tuple(sorted(self._forwards, key=repr))
        if self.shapes is not None:
            self.shapes.enter()
        self.schedule.open(("backward", kinds, tuple(sorted(self.schedule.kept)), False))

    def bring_back(self) -> None:
        """Before a pass: parameters that stay whole and were let go return."""
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
        held = self._backward.get(use)
        if not held or not held.keys() >= set(use.shards):  # else told by another output or another call of it
            with plain_access():
                self.schedule.need(use)
            self._keep(use)
        for shard in self._recomputed.pop(use, ()):  # the use holds what it needs by itself now
            shard.holds -= 1
        if recorded:
            self.keep_until_step(use.shards)

    def keep_until_step(self, shards: Iterable[Shard]) -> None:
        """These stay whole until the next optimizer step."""
        for shard in shards:
            if shard not in self._until_step:
                self._until_step[shard] = None
                shard.holds += 1

    def _keep(self, use: ModuleUse) -> None:
        held, holders = self._backward.setdefault(use, {}), self._holders
        for shard in use.shards:
            if shard not in held:
                held[shard] = None
                holders[shard] = (*holders[shard], use) if shard in holders else (use,)
                shard.holds += 1
                shard.users[use.number] = None

    def _keep_frozen(self, use: ModuleUse) -> None:
        """A module was recomputed in backward: what it does not train stays whole until its own backward.

        Checkpointing keeps such a parameter itself, not a view of its memory, and looks at its shape when the first
        module of the recomputed ones runs backward.
        """
        frozen = [shard for shard in use.shards if not shard.persistent and not shard.param.requires_grad]
        if frozen and use not in self._recomputed:
            self._recomputed[use] = frozen
            for shard in frozen:
                shard.holds += 1

    def forget_graphs(self) -> None:
        """Parameters are about to change: no graph that was made with them is differentiated any more."""
        kept, self._until_step = list(self._until_step), {}
        for shard in kept:
            shard.holds -= 1
        self.schedule.let_go(kept)
        self.schedule.split_blocks()

    def before_weights(self, params: Iterable[Tensor]) -> None:
        """The gradients of these are computed next, apart from those of their modules' inputs."""
        for shard in shards_of(params):
            if shard.number in self._users:
                use = self._users[shard.number]
                self.before_backward(use.inside or use)

    def gradient_arrived(self, shard: Shard) -> None:
        """Every use of a trained parameter in this backward is over: its gradient is there."""
        holders = self._holders.get(shard, ())
        for use in sorted(holders, key=lambda use: use.number) if len(holders) > 1 else holders:
            self._drop(use, (shard,))
            if use in self._inputs_done:
                self._drop_frozen(use)

    def inputs_done(self, use: ModuleUse) -> None:
        """The gradients of all inputs of a module are known, so nothing but its own parameters can be missing."""
        if use not in self._backward:
            return
        if self.inputs_only:  # those of its parameters are not computed in this backward
            self._drop(use, tuple(self._backward[use]))
        else:
            self._inputs_done.add(use)
            self._drop_frozen(use)

    def end_backward(self) -> None:
        """A backward is over: nothing is needed any more."""
        if self._let_all_go():
            self.schedule.close()

    def abandon(self) -> None:
        """A backward failed."""
        if self._let_all_go():
            self.schedule.abandon()

    def _let_all_go(self) -> bool:
        """Nothing is needed for a backward any more; False if there was none."""
        if not self.in_backward:
            return False
        for use, frozen in self._recomputed.items():
            for shard in frozen:
                shard.holds -= 1
            self.schedule.let_go(frozen, self.schedule.keep.get(use.number, frozenset()))
        self._recomputed.clear()
        for use, held in list(self._backward.items()):
            self._drop(use, tuple(held))
        self.in_backward = False
        if self.shapes is not None:
            self.shapes.leave()
        self._forwards.clear()
        return True

    def _drop_frozen(self, use: ModuleUse) -> None:
        held = self._backward.get(use)
        if held and use in self._inputs_done and not any(shard.param.requires_grad for shard in held):
            self._drop(use, tuple(held))

    def _drop(self, use: ModuleUse, shards: tuple[Shard, ...]) -> None:
        held, all_holders = self._backward[use], self._holders
        for shard in shards:
            del held[shard]
            holders = all_holders.pop(shard)
            if len(holders) > 1:
                all_holders[shard] = tuple(other for other in holders if other is not use)
            shard.holds -= 1
            shard.users.pop(use.number, None)
        if held:
            self.schedule.let_go(shards, self.schedule.keep.get(use.number, frozenset()))
        else:
            del self._backward[use]
            self._inputs_done.discard(use)
            self.schedule.left(use, use.shards)


def _hold(use: ModuleUse, shards: Iterable[Shard]) -> None:
    for shard in shards:
        shard.holds += 1
        shard.users[use.number] = None
