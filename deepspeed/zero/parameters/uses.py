"""Uses: modules with the parameters that have to be whole while they run, and which of these are needed now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from deepspeed.zero.parameters.fetch_plan import UseEvent
from deepspeed.zero.parameters.shard import Shard, shard_of

# A block of more elements is gathered module by module: two of them are whole at a time.
_LARGEST = 400 << 20
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(eq=False)
class ModuleUse:
    """A module that uses parameters."""

    number: int
    name: str
    module: nn.Module
    shards: list[Shard]
    block: int = -1
    """See [Note: blocks] in fetch_plan.py."""
    events: dict[bool, UseEvent] = field(default_factory=dict)
    """The begin and the end of it, as traces have them; made anew when it uses more."""

    def event(self, enter: bool) -> UseEvent:
        """Its begin or its end."""
        found = self.events.get(enter)
        if found is None:
            numbers = tuple(shard.number for shard in self.shards if not shard.persistent)
            found = self.events[enter] = UseEvent(enter, self.number, numbers, self.block)
        return found

    def add(self, shard: Shard) -> None:
        """It uses one more parameter from now on."""
        self.shards.append(shard)
        self.events.clear()


def blocks_of(root: nn.Module) -> tuple[dict[int, int], int]:
    """The block of each module that is in one, by id, and the elements of the largest.

    Blocks are the outermost modules that stand in lists of several and are not too large.
    """
    found: dict[int, int] = {}
    largest, count = 0, 0
    pending: list[nn.Module] = [root]
    seen: set[int] = set()
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        children = list(module.children())
        if isinstance(module, _LISTS) and len(children) > 1:
            sizes = [_elements(child) for child in children]
            for child, size in zip(children, sizes, strict=True):
                if 0 < size <= _LARGEST:
                    found.update({id(each): count for each in child.modules() if id(each) not in found})
                    largest, count = max(largest, size), count + 1
                else:
                    pending.append(child)
        else:
            pending += reversed(children)
    return found, largest


def _elements(module: nn.Module) -> int:
    count = 0
    for param in module.parameters():
        shard = shard_of(param)
        count += param.numel() if shard is None else 0 if shard.persistent else shard.numel
    return count


Left = Callable[[ModuleUse, Sequence[Shard]], None]


class UseCounts:
    """Counts on each shard how many uses need it; `left` is told of every use that ends, `loosened` of parts of one."""

    def __init__(self, left: Left, loosened: Left) -> None:
        self._left, self._loosened = left, loosened
        self._stack: list[tuple[ModuleUse, tuple[Shard, ...]]] = []
        self._backward: dict[int, tuple[ModuleUse, set[Shard]]] = {}
        self._of: dict[int, set[int]] = {}
        """The uses of which backward is running, by the number of the shard that they hold."""
        self._inputs_done: set[int] = set()
        self._recomputed: dict[int, tuple[ModuleUse, list[Shard]]] = {}
        self._until_step: dict[int, Shard] = {}

    # ---- forward: modules run inside each other

    @property
    def current(self) -> ModuleUse | None:
        """The innermost module that is running."""
        return self._stack[-1][0] if self._stack else None

    @property
    def running(self) -> bool:
        """True inside any module."""
        return bool(self._stack)

    def push(self, use: ModuleUse) -> None:
        """A module runs."""
        shards = tuple(use.shards)
        for shard in shards:
            _hold(use, shard)
        self._stack.append((use, shards))

    def pop(self, use: ModuleUse) -> bool:
        """A module has run, or failed; modules above it were left by an exception. False if it never began."""
        if not self._stack or (self._stack[-1][0] is not use and not any(top is use for top, _ in self._stack)):
            return False
        while True:
            top, shards = self._stack.pop()
            for shard in shards:
                _loosen(top, shard)
            self._left(top, shards)
            if top is use:
                return True

    def also(self, shard: Shard) -> None:
        """The innermost module needs one more parameter until it ends."""
        top, shards = self._stack[-1]
        if shard not in shards:
            _hold(top, shard)
            self._stack[-1] = (top, (*shards, shard))

    def caller_of(self, use: ModuleUse) -> ModuleUse | None:
        """The module that runs around a module."""
        return next((top for top, _ in reversed(self._stack) if top is not use), None)

    def lend(self, caller: ModuleUse, shard: Shard) -> None:
        """A module that runs needs one more parameter until it ends."""
        place = next(i for i, (top, _) in enumerate(self._stack) if top is caller)
        _hold(caller, shard)
        self._stack[place] = (caller, (*self._stack[place][1], shard))

    # ---- backward: modules wait for the gradients of their parameters

    def holds_all(self, use: ModuleUse) -> bool:
        """True if the backward of a module holds all it needs, told by another output or another call of it."""
        _, held = self._backward.get(use.number, (use, None))
        return bool(held) and held is not None and held.issuperset(use.shards)

    def keep(self, use: ModuleUse) -> None:
        """The backward of a module runs."""
        _, held = self._backward.setdefault(use.number, (use, set()))
        for shard in use.shards:
            if shard not in held:
                held.add(shard)
                self._of.setdefault(shard.number, set()).add(use.number)
                _hold(use, shard)

    def keep_frozen(self, use: ModuleUse) -> None:
        """A module was recomputed in backward: what it does not train stays whole until its own backward.

        Checkpointing keeps such a parameter itself, not a view of its memory, and looks at its shape when the first
        module of the recomputed ones runs backward.
        """
        frozen = [shard for shard in use.shards if not shard.persistent and not shard.param.requires_grad]
        if frozen and use.number not in self._recomputed:
            self._recomputed[use.number] = use, frozen
            for shard in frozen:
                shard.holds += 1

    def release_frozen(self, use: ModuleUse) -> None:
        """The backward of a module that was recomputed runs: it holds what it needs by itself."""
        _, frozen = self._recomputed.pop(use.number, (use, []))
        for shard in frozen:
            shard.holds -= 1

    def keep_until_step(self, use: ModuleUse) -> None:
        """A graph of the backward of a module needs its parameters, too."""
        for shard in use.shards:
            if shard.number not in self._until_step:
                self._until_step[shard.number] = shard
                shard.holds += 1

    def end_step(self) -> list[Shard]:
        """No such graph is needed any more; returns what was kept for one."""
        kept, self._until_step = list(self._until_step.values()), {}
        for shard in kept:
            shard.holds -= 1
        return kept

    def arrived(self, shard: Shard) -> None:
        """The gradient of a parameter is there: every use of it in this backward is over."""
        for number in sorted(self._of.get(shard.number, ())):
            self._drop(number, (shard,))
            self._drop_frozen(number)

    def inputs_done(self, use: ModuleUse, *, all_of_it: bool = False) -> None:
        """The gradients of all inputs of a module are known, so nothing but its own parameters can be missing.

        `all_of_it`: those are not computed in this backward.
        """
        if use.number in self._backward:
            if all_of_it:
                self._drop(use.number, tuple(self._backward[use.number][1]))
                return
            self._inputs_done.add(use.number)
            self._drop_frozen(use.number)

    def end_backward(self) -> None:
        """Nothing is needed any more."""
        for use, frozen in list(self._recomputed.values()):
            self.release_frozen(use)
            self._loosened(use, frozen)
        for number, (_, held) in list(self._backward.items()):
            self._drop(number, tuple(held))

    def clear(self) -> None:
        """Forget all holds, without telling."""
        self._stack.clear()
        self._backward.clear()
        self._of.clear()
        self._inputs_done.clear()
        self._recomputed.clear()

    def _drop_frozen(self, number: int) -> None:
        _, held = self._backward.get(number, (None, None))
        if held and number in self._inputs_done and not any(shard.param.requires_grad for shard in held):
            self._drop(number, tuple(held))

    def _drop(self, number: int, shards: Iterable[Shard]) -> None:
        use, held = self._backward[number]
        dropped = list(shards)
        for shard in dropped:
            held.discard(shard)
            self._of[shard.number].discard(number)
            _loosen(use, shard)
        if held:
            self._loosened(use, dropped)
        else:
            del self._backward[number]
            self._inputs_done.discard(number)
            self._left(use, use.shards)


def _hold(use: ModuleUse, shard: Shard) -> None:
    shard.holds += 1
    shard.users.add(use.number)


def _loosen(use: ModuleUse, shard: Shard) -> None:
    shard.holds -= 1
    shard.users.discard(use.number)
