"""Uses: modules with the parameters that have to be whole while they run, and blocks of modules.

[Note: joined blocks] The parameters of a block that fits are gathered together. So the block is one use: while its
forward runs, hooks on the modules inside return at once, which spares the host most of its work. Outside of it they
gather for themselves. Modules in lists may be chosen by the data (experts), so a block with a list inside is not
joined. Nor is one of which the first backward has not used all, from the next step on: nothing would tell that the
gradients of the rest do not come.
"""

from __future__ import annotations

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
    shards: tuple[Shard, ...]
    block: int = -1
    """See [Note: blocks] in fetch_plan.py."""
    events: dict[bool, UseEvent] = field(default_factory=dict)
    """The begin and the end of it, as traces have them; made anew when it uses more."""
    parts: list[ModuleUse] = field(default_factory=list)
    """The uses inside of a block that is one use; see [Note: joined blocks]."""
    inside: ModuleUse | None = None
    """The block that holds the parameters while it runs."""
    ran: bool = False
    """It has run inside of that."""

    def event(self, enter: bool) -> UseEvent:
        """Its begin or its end."""
        found = self.events.get(enter)
        if found is None:
            numbers = tuple(shard.number for shard in self.shards if not shard.persistent)
            found = self.events[enter] = UseEvent(enter, self.number, numbers, self.block)
        return found

    def add(self, shard: Shard) -> None:
        """It uses one more parameter from now on."""
        self.shards = (*self.shards, shard)
        self.events.clear()

    def join(self, part: ModuleUse) -> None:
        """Hold what a use inside of this one needs."""
        self.parts.append(part)
        part.inside = self
        self.shards += tuple(shard for shard in part.shards if shard not in self.shards)

    def split(self) -> None:
        """Let the uses inside hold what they need."""
        theirs = {shard.number for part in self.parts for shard in part.shards}
        self.shards = tuple(shard for shard in self.shards if shard.number not in theirs)
        self.events.clear()
        for part in self.parts:
            part.inside = None
        self.parts.clear()


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


def joined_blocks(root: nn.Module, blocks: dict[int, int], limit: int) -> set[int]:
    """Ids of the `blocks` that are one use, by [Note: joined blocks]; those of more elements than `limit` are not."""
    outermost: dict[int, int] = {}
    for module, number in blocks.items():
        outermost.setdefault(number, module)
    found = {id(module): module for module in root.modules() if id(module) in outermost.values()}
    choosing = (nn.ModuleList, nn.ModuleDict)
    return {
        number
        for number, block in found.items()
        if 0 < _elements(block) <= limit and not any(isinstance(each, choosing) for each in block.modules())
    }


def _elements(module: nn.Module) -> int:
    count = 0
    for param in module.parameters():
        shard = shard_of(param)
        count += param.numel() if shard is None else 0 if shard.persistent else shard.numel
    return count
