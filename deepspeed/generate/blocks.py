"""Blocks of the cache: who holds them, which prefixes they keep, which leave for the host, in plain Python.

[Note: order inside a step]
A step runs its copies to the host, then those from the host, then the forward, after everything of the steps before. So
a block may be taken while an earlier step that reads or writes it is in flight, and a block that leaves for the host
may be a destination of the same step. What must not happen within one step: a host block is read or written and given
to another key (`_busy`), or a block is given away that this step reads or fills (the scheduler preempts only what the
step does not run, and lets sequences begin after that).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from deepspeed.errors import UsageError
from deepspeed.generate.sequence import Sequence

_DIGEST = 32  # bytes: prefixes are equal if their digests are
FREED = -1  # a block that fell out of the window


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share block tables: `blocks` on the device; `window`: how many tokens a query reads, itself too."""

    layers: tuple[int, ...]
    blocks: int
    window: int | None = None
    host_blocks: int = 0
    """For blocks that leave the device."""


Transfers = tuple[tuple[int, int, int], ...]
"""Block copies of a step: (group, source, destination)."""


class BlockPool:
    """The blocks of one cache group: held by sequences, cached under a key, or empty; `to_host` lists what leaves."""

    def __init__(self, group: int, blocks: int, host_blocks: int) -> None:
        self._group = group
        self.size = blocks
        self._references = [0] * blocks
        self._keys: list[bytes | None] = [None] * blocks
        self._empty = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and held by none; least recently used first
        self._by_key: dict[bytes, int] = {}
        self._host_empty = list(range(host_blocks - 1, -1, -1))
        self._host_by_key: OrderedDict[bytes, int] = OrderedDict()
        self._busy: set[int] = set()  # host blocks that this step copies
        self.to_host: list[tuple[int, int, int]] = []
        self.from_host: list[tuple[int, int, int]] = []

    @property
    def available(self) -> int:
        """Blocks that `take` can give."""
        return len(self._empty) + len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks that are held by none and can be found by key."""
        return len(self._idle)

    @property
    def host_cached(self) -> int:
        """Host blocks with content."""
        return len(self._host_by_key)

    def take(self) -> int:
        """An empty block, held once; the least recently used content leaves for it."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            key = self._keys[block]
            assert key is not None, "an idle block has a key"
            del self._by_key[key]
            self._keys[block] = None
            self._keep_on_host(block, key)
        self._references[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more reference."""
        if not self._references[block]:
            del self._idle[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One reference less; content with a key stays until `take` needs the block."""
        self._references[block] -= 1
        if self._references[block]:
            return
        if self._keys[block] is None:
            self._empty.append(block)
        else:
            self._idle[block] = None

    def has(self, key: bytes) -> bool:
        """Whether the content is on the device or on the host."""
        return key in self._by_key or key in self._host_by_key

    def held(self, key: bytes) -> bool:
        """Whether a sequence holds the content, so that another may without a block more."""
        block = self._by_key.get(key)
        return block is not None and self._references[block] > 0

    def hold_key(self, key: bytes) -> int | None:
        """Hold the device block of a key; None: it is on the host, where it stays for `bring`."""
        block = self._by_key.get(key)
        if block is None:
            self._host_by_key.move_to_end(key)
            self._busy.add(self._host_by_key[key])
            return None
        self.hold(block)
        return block

    def bring(self, key: bytes) -> int:
        """A device block that receives the content of a key from the host; the host keeps its copy."""
        block = self.take()
        self.from_host.append((self._group, self._host_by_key[key], block))
        self.name(block, key)
        return block

    def name(self, block: int, key: bytes) -> None:
        """Let a block be found by a key; of equal contents the first is found."""
        if key not in self._by_key and self._keys[block] is None:
            self._by_key[key] = block
            self._keys[block] = key

    def forget(self, block: int) -> None:
        """Let content not be found any more."""
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            del self._by_key[key]
            self._drop_from_host(key)

    def reset(self) -> None:
        """Forget all contents."""
        for block in self._idle:
            self._empty.append(block)
        self._idle.clear()
        for block in self._by_key.values():
            self._keys[block] = None
        self._by_key.clear()
        for key in [*self._host_by_key]:
            self._drop_from_host(key)
        self.to_host.clear()
        self._busy.clear()

    def end_step(self) -> None:
        """The copies of this step were handed out."""
        self.to_host.clear()
        self.from_host.clear()
        self._busy.clear()

    def _keep_on_host(self, block: int, key: bytes) -> None:
        if key in self._host_by_key:
            self._host_by_key.move_to_end(key)
            return
        if self._host_empty:
            host = self._host_empty.pop()
        elif self._host_by_key:
            oldest, host = next(iter(self._host_by_key.items()))
            if host in self._busy:
                return
            del self._host_by_key[oldest]
        else:
            return
        self._host_by_key[key] = host
        self._busy.add(host)
        self.to_host.append((self._group, block, host))

    def _drop_from_host(self, key: bytes) -> None:
        host = self._host_by_key.pop(key, None)
        if host is not None:
            self._host_empty.append(host)


class BlockCache:
    """The blocks of sequences in all cache groups, and the prefixes that they share."""

    def __init__(self, groups: Iterable[CacheGroup], block_size: int) -> None:
        groups = tuple(groups)
        if not groups:
            raise UsageError("a cache needs at least one group of layers; found none")
        for group in groups:
            if group.blocks < 1 or (group.window is not None and group.window < 1):
                raise UsageError(f"{group}: blocks and window must be at least 1")
        self.block_size = block_size
        self.pools = [BlockPool(at, group.blocks, group.host_blocks) for at, group in enumerate(groups)]
        self._windows = [group.window for group in groups]

    @property
    def capacity(self) -> int | None:
        """The longest sequence that fits in the empty cache; None: any, since every group has a window."""
        sizes = [
            pool.size * self.block_size
            for pool, window in zip(self.pools, self._windows, strict=True)
            if window is None or pool.size <= -(-(window - 1) // self.block_size)
        ]
        return min(sizes, default=None)

    @staticmethod
    def root(private: int | None) -> bytes:
        """Where a chain of hashes begins; `private`: a number that keeps it apart from all others."""
        return b"" if private is None else b"%d/" % private

    def match(self, sequence: Sequence) -> int:
        """How many leading blocks of known tokens are cached; never the last token, which is always computed."""
        keys = self._hash(sequence, (len(sequence.tokens) - 1) // self.block_size)
        most = len(keys)
        for pool, window in zip(self.pools, self._windows, strict=True):
            if window is None:
                most = next((at for at in range(most) if not pool.has(keys[at])), most)
        pools = [(pool, window) for pool, window in zip(self.pools, self._windows, strict=True) if window is not None]
        if not pools or not most:
            return most
        runs = [0] * len(pools)  # blocks present in a row, up to here
        best = 0
        for at in range(most):
            runs = [run + 1 if pool.has(keys[at]) else 0 for run, (pool, _) in zip(runs, pools, strict=True)]
            hit = at + 1
            if all(
                run >= hit - self._first(hit * self.block_size, window)
                for run, (_, window) in zip(runs, pools, strict=True)
            ):
                best = hit
        return best

    def fits(self, sequence: Sequence, hit: int, end: int, reserve: int) -> bool:
        """Whether the blocks up to position `end` can be taken, those of known tokens too, with `reserve` left over."""
        for pool, window in zip(self.pools, self._windows, strict=True):
            first = self._first(hit * self.block_size, window)
            if window is None:
                wanted = -(-len(sequence.tokens) // self.block_size)
            else:  # a chunk may be shorter than up to `end`
                wanted = min(-(-end // self.block_size) - first, -(-(window - 1) // self.block_size) + 2)
            shared = sum(pool.held(key) for key in sequence.hashes[first:hit])
            if wanted - shared + reserve > pool.available:
                return False
        return True

    def claim(self, sequence: Sequence, hit: int) -> None:
        """Give a sequence the cached blocks that `match` found."""
        found = []
        for pool, window in zip(self.pools, self._windows, strict=True):
            first = self._first(hit * self.block_size, window)
            found.append((first, [pool.hold_key(key) for key in sequence.hashes[first:hit]]))
        for pool, (first, blocks) in zip(self.pools, found, strict=True):  # only now: `bring` takes blocks
            keys = sequence.hashes[first:hit]
            held = [pool.bring(key) if block is None else block for key, block in zip(keys, blocks, strict=True)]
            sequence.blocks.append([FREED] * first + held)
            sequence.freed.append(first)
        sequence.registered = hit
        sequence.computed = sequence.reach = hit * self.block_size

    def grow(self, sequence: Sequence, start: int, end: int) -> int:
        """Give blocks up to position `end`, as far as there are any; free what queries from `start` on do not read.

        Groups without a window get the blocks of all known tokens at once, so that a prompt that began can end.
        """
        size = self.block_size
        reach = end
        for group, pool in enumerate(self.pools):
            blocks, window = sequence.blocks[group], self._windows[group]
            if window is not None:
                self._trim(sequence, group, self._first(start, window))
            wanted = -(-(end if window is not None else max(end, len(sequence.tokens))) // size)
            while len(blocks) < wanted and pool.available:
                blocks.append(pool.take())
            reach = min(reach, len(blocks) * size)
        sequence.reach = min(len(blocks) for blocks in sequence.blocks) * size
        return reach

    def register(self, sequence: Sequence, length: int) -> None:
        """Let others find the full blocks among the first `length` tokens, which must be known."""
        full = length // self.block_size
        keys = self._hash(sequence, full)
        for pool, blocks in zip(self.pools, sequence.blocks, strict=True):
            for at in range(sequence.registered, full):
                if blocks[at] != FREED:
                    pool.name(blocks[at], keys[at])
        sequence.registered = full

    def free(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Take all blocks from a sequence, the last first: a prefix is worth more than what follows it."""
        for pool, blocks in zip(self.pools, sequence.blocks, strict=False):
            for block in reversed(blocks):
                if block != FREED:
                    if forget:
                        pool.forget(block)
                    pool.release(block)
        sequence.blocks, sequence.freed = [], []
        sequence.computed = sequence.registered = sequence.reach = 0

    def reset(self) -> None:
        """Forget all contents; no sequence may hold blocks."""
        for pool in self.pools:
            pool.reset()

    def end_step(self) -> tuple[Transfers, Transfers]:
        """The copies to and from the host since the last call."""
        to_host = tuple(each for pool in self.pools for each in pool.to_host)
        from_host = tuple(each for pool in self.pools for each in pool.from_host)
        for pool in self.pools:
            pool.end_step()
        return to_host, from_host

    def _first(self, start: int, window: int | None) -> int:
        """The first block that a query at `start` reads."""
        return 0 if window is None else max(0, start - window + 1) // self.block_size

    def _trim(self, sequence: Sequence, group: int, first: int) -> None:
        blocks = sequence.blocks[group]
        for at in range(sequence.freed[group], min(first, len(blocks))):
            self.pools[group].release(blocks[at])
            blocks[at] = FREED
        sequence.freed[group] = max(sequence.freed[group], min(first, len(blocks)))

    def _hash(self, sequence: Sequence, blocks: int) -> list[bytes]:
        """Keys of the first `blocks` blocks, each of the key before it and its tokens."""
        hashes, size = sequence.hashes, self.block_size
        for at in range(len(hashes), blocks):
            before = hashes[-1] if hashes else sequence.root
            tokens = array("q", sequence.tokens[at * size : (at + 1) * size]).tobytes()
            hashes.append(blake2b(before + tokens, digest_size=_DIGEST).digest())
        return hashes if len(hashes) == blocks else hashes[:blocks]
