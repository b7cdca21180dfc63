"""The schedule of generation: which tokens of which sequences the next step computes, and in which blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter

from deepspeed.errors import UsageError
from deepspeed.generate.blocks import BlockCache, CacheGroup, Transfers
from deepspeed.generate.sequence import Sequence, SequenceState, SequenceUpdate

_rank = attrgetter("rank")


class RequestTooLarge(UsageError):
    """A request that would not fit in an empty cache, or whose prompt fills the context."""


@dataclass(frozen=True, slots=True)
class ScheduleLimits:
    """Limits of the schedule."""

    max_tokens_per_step: int = 768
    max_sequences: int = 512
    max_context: int = 8192
    block_size: int = 32
    prefix_cache: bool = True
    short_context: int = 1 << 62  # the keys of longer sequences are others, from their first token on

    def __post_init__(self) -> None:
        for field in fields(self)[:4]:
            value = getattr(self, field.name)
            if value < 1:
                raise UsageError(f"{field.name} is {value}; it must be at least 1")


@dataclass(slots=True)  # not frozen: that takes three times as long to make
class ScheduledWork:
    """Compute `count` tokens of a sequence from position `start`.

    Ids at positions the sequence does not know are, in order: the pending one, which is still on the device (then
    count is 1), or `drafts`. `samples`: the last token gives the next one (with drafts, every position from the last
    known token on gives one).
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What one step does, in this order: `to_host`, `from_host`, then the forward of `work`, decode first.

    Steps run in the order in which they were handed out. Each layer writes the keys and values of all work before any
    work reads: a sequence may share a block that another one fills in the same step. Block tables (`sequence.blocks`)
    are those at the return of `next`; pack them before it is called again.
    """

    work: tuple[ScheduledWork, ...]
    to_host: Transfers
    from_host: Transfers


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts of now and sums since the start; blocks are summed over the cache groups."""

    waiting: int
    running: int
    swapped: int
    total_blocks: int
    free_blocks: int  # can be taken at once, cached ones included
    cached_blocks: int  # held by no sequence, but found by prefix
    host_blocks: int
    host_used_blocks: int
    prefix_hit_tokens: int
    preemptions: int
    drafted: int
    accepted: int


class Scheduler:
    """Hands out steps and takes their tokens; asynchronous: `next` may be called before the last step's `collect`.

    Sequences run by rank: priority, then arrival. One that needs a block takes it from the last of the ranks, and the
    first is never preempted. As each fits in the empty cache, the first always progresses, so that all of them end.
    """

    def __init__(self, config: ScheduleLimits, groups: Iterable[CacheGroup]) -> None:
        groups = tuple(groups)
        self.config = config
        self._cache = BlockCache(groups, config.block_size)
        self._host_blocks = sum(group.host_blocks for group in groups)
        self._by_uid: dict[int, Sequence] = {}  # all that have not ended
        self._running: list[Sequence] = []  # by rank
        self._prompts: set[Sequence] = set()  # running, with more than one token to compute
        self._waiting: list[Sequence] = []  # by rank
        self._forks: dict[int, list[Sequence]] = {}  # of a sequence that computes its prompt for them
        self._arrivals = self._swapped = self._hit_tokens = self._preemptions = self._drafted = self._accepted = 0

    def add(self, request: Iterable[Sequence]) -> None:
        """Queue the sequences of one request, which share a prompt; RequestTooLarge if it can never run."""
        request = list(request)
        first = request[0]
        limit = self._limit(first)
        if len({each.uid for each in request} - self._by_uid.keys()) < len(request):
            raise UsageError(f"{[each.uid for each in request]}: each sequence that has not ended needs its own uid")
        self._arrivals += 1
        for each in request:
            each.limit = limit
            each.rank = (-each.priority, self._arrivals, each.index)
            self._by_uid[each.uid] = each
        self._lead(request)

    def finish(self, uid: int, reason: str) -> bool:
        """End a sequence at any moment; False if it has ended already. "error" also forgets its cached blocks."""
        sequence = self._by_uid.get(uid)
        if sequence is None:
            return False
        state, sequence.state = sequence.state, SequenceState.FINISHED
        sequence.finish_reason = reason
        del self._by_uid[uid]
        if state is SequenceState.RUNNING:
            del self._running[bisect_left(self._running, sequence.rank, key=_rank)]
            self._prompts.discard(sequence)
            self._cache.free(sequence, forget=reason == "error")
        else:
            self._leave_queue(sequence, state)
        followers = self._forks.pop(uid, None)
        if followers:
            self._lead(followers)
        return True

    def next(self, drafts: Mapping[int, Collection[int]] | None = None) -> ScheduledStep | None:
        """The next step; None: nothing can run until more is collected or added. `drafts`: guesses by uid."""
        decodes, chunks, spare = self._continue(drafts or {})
        if spare > 0:
            self._admit(chunks, spare)
        if not decodes and not chunks:
            return None  # blocks that left for the host leave with the next step
        for work in chunks:
            if work.samples and work.sequence.uid in self._forks:
                for each in self._forks.pop(work.sequence.uid):
                    self._wait(each)
        return ScheduledStep((*decodes, *chunks), *self._cache.end_step())

    def collect(self, step: ScheduledStep, sampled: Mapping[int, list[int]]) -> list[SequenceUpdate]:
        """Take a step's tokens by uid: one, or the accepted drafts and one; those of ended sequences are dropped."""
        updates = []
        size, finished, swapped = self.config.block_size, SequenceState.FINISHED, SequenceState.SWAPPED
        for work in step.work:
            sequence = work.sequence
            if not work.samples or sequence.state is finished:
                continue
            new = sampled[sequence.uid]
            tokens = sequence.tokens
            tokens += new
            sequence.pending -= 1
            reason = None
            if len(tokens) >= sequence.limit or not sequence.end_ids.isdisjoint(new):
                reason, new = self._ending(sequence, new)
            if work.drafts:
                self._roll_back(sequence, work, len(new))
            length, computed = len(tokens), sequence.computed
            if (computed if computed < length else length) // size > sequence.registered:
                self._cache.register(sequence, min(computed, length))
            if sequence.state is swapped and not sequence.pending:
                self._wait(sequence)
            if reason is not None:
                self.finish(sequence.uid, reason)
            updates.append(SequenceUpdate(sequence, new))
        return updates

    def reset(self) -> None:
        """Forget the contents of the cache, for new weights or new memory: what runs is computed again."""
        while self._running:
            self._preempt(self._running.pop())
        self._cache.reset()

    @property
    def decoding(self) -> list[Sequence]:
        """Running sequences for which drafts can be given now: all tokens known, all but the last computed."""
        return [each for each in self._running if not each.pending and each.computed == len(each.tokens) - 1]

    @property
    def stats(self) -> SchedulerStats:
        """Counts for monitors."""
        pools = self._cache.pools
        return SchedulerStats(
            waiting=len(self._by_uid) - len(self._running) - self._swapped,
            running=len(self._running),
            swapped=self._swapped,
            total_blocks=sum(pool.size for pool in pools),
            free_blocks=sum(pool.available for pool in pools),
            cached_blocks=sum(pool.cached for pool in pools),
            host_blocks=self._host_blocks,
            host_used_blocks=sum(pool.host_cached for pool in pools),
            prefix_hit_tokens=self._hit_tokens,
            preemptions=self._preemptions,
            drafted=self._drafted,
            accepted=self._accepted,
        )

    # what runs

    def _continue(self, drafts: Mapping[int, Collection[int]]) -> tuple[list[ScheduledWork], list[ScheduledWork], int]:
        """Work of the running sequences, one token or chunks of prompts, and how many tokens more may be admitted."""
        running = self._running
        decodes: list[ScheduledWork] = []
        chunks: list[ScheduledWork] = []
        reserved = min(len(running) - len(self._prompts), self.config.max_tokens_per_step)  # one for each decode
        spare = self.config.max_tokens_per_step - reserved
        short = False
        at = 0
        while at < len(running):  # it may lose sequences at its end
            sequence = running[at]
            at += 1
            start = sequence.computed
            known = len(sequence.tokens) + sequence.pending
            if known >= sequence.limit:
                continue  # it ends with what is in flight
            if self._outgrows(sequence, known):
                at -= 1
                self._preempt(running.pop(at))
                continue
            count = known - start  # 0 or less with drafts in flight
            guesses: tuple[int, ...] = ()
            prompt = sequence in self._prompts
            if prompt:
                count = min(count, spare)
            elif len(decodes) == reserved:
                count = 0
            elif drafts and not sequence.pending:
                end = sequence.limit - 1 if sequence.long else min(sequence.limit - 1, self.config.short_context)
                guesses = tuple(drafts.get(sequence.uid, ()))[: max(0, min(spare, end - known))]
                count += len(guesses)
            if count <= 0:
                continue
            if start + count > sequence.reach:
                preemptions = self._preemptions
                reach = self._make_room(sequence, start, start + count)
                short = short or reach <= start or self._preemptions > preemptions
                count = min(count, reach - start)
                if count <= 0:
                    continue
                guesses = guesses[: count - 1]
            if not prompt:
                decodes.append(ScheduledWork(sequence, start, count, True, guesses))
                sequence.computed = start + count
                sequence.pending += 1
                spare -= len(guesses)
            else:
                chunks.append(self._chunk(sequence, start, count))
                spare -= count
        return decodes, chunks, 0 if short else spare + reserved - len(decodes)

    def _chunk(self, sequence: Sequence, start: int, count: int) -> ScheduledWork:
        """Tokens of a sequence that are known, all but the last of which give no new one."""
        end = sequence.computed = start + count
        samples = end == len(sequence.tokens)
        if samples:
            sequence.pending += 1
            self._prompts.discard(sequence)
        else:
            self._prompts.add(sequence)
        self._cache.register(sequence, end)
        return ScheduledWork(sequence, start, count, samples)

    def _make_room(self, sequence: Sequence, start: int, end: int) -> int:
        """Blocks up to `end`, from the last ranks if not even `start` has one; how far they reach."""
        reach = self._cache.grow(sequence, start, end)
        while reach <= start and self._running[-1] is not sequence:
            self._preempt(self._running.pop())
            reach = self._cache.grow(sequence, start, end)
        assert reach > start or self._running[0] is not sequence, f"{sequence} does not fit in the empty cache"
        return reach

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks of a sequence that no longer runs; those that are full can be found again."""
        self._prompts.discard(sequence)
        self._cache.free(sequence)
        sequence.state = SequenceState.SWAPPED
        self._swapped += 1
        self._preemptions += 1
        if not sequence.pending:  # else when all its tokens are known
            self._wait(sequence)

    def _ending(self, sequence: Sequence, new: list[int]) -> tuple[str | None, list[int]]:
        """Why a sequence ends with one of its new tokens, if it does, and those up to it; the others are removed."""
        tokens = sequence.tokens
        before = len(tokens) - len(new)
        for at in range(before, len(tokens)):
            reason = None
            if tokens[at] in sequence.end_ids and at - sequence.prompt_length >= sequence.params.min_tokens:
                reason = "stop"
            elif at + 1 >= sequence.limit:
                reason = "length"
            if reason is not None:
                del tokens[at + 1 :]
                return reason, tokens[before:]
        return None, tokens[before:]

    def _roll_back(self, sequence: Sequence, work: ScheduledWork, given: int) -> None:
        """Keep of what was computed for drafts what the accepted ones used."""
        assert 1 <= given <= len(work.drafts) + 1, f"{given} tokens for {len(work.drafts)} drafts of {sequence}"
        self._drafted += len(work.drafts)
        self._accepted += given - 1
        sequence.computed = min(sequence.computed, len(sequence.tokens) - 1)

    # what waits

    def _admit(self, chunks: list[ScheduledWork], spare: int) -> None:
        """Let waiting sequences run, by rank, as long as the tokens that they know fit in the cache."""
        running, waiting = self._running, self._waiting
        while waiting and spare > 0 and len(running) < self.config.max_sequences:
            sequence = waiting[0]
            if not self._place(sequence, spare):
                return
            del waiting[0]
            if sequence.state is SequenceState.SWAPPED:
                self._swapped -= 1
            sequence.state = SequenceState.RUNNING
            insort(running, sequence, key=_rank)
            start = sequence.computed
            end = self._cache.grow(sequence, start, min(len(sequence.tokens), start + spare))
            assert end > start, f"{sequence} was admitted, but no block is left for it"
            spare -= end - start
            chunks.append(self._chunk(sequence, start, end - start))

    def _place(self, sequence: Sequence, spare: int) -> bool:
        """Give a waiting sequence the blocks that hold its beginning already; False if the rest would not fit.

        What runs will need blocks soon: one for each sequence stays, so that the new one is not preempted at once.
        """
        size = self.config.block_size
        hit = self._cache.match(sequence)
        end = min(len(sequence.tokens), hit * size + spare)
        if self._running and not self._cache.fits(sequence, hit, end, len(self._running)):
            return False
        self._cache.claim(sequence, hit)
        if sequence.state is SequenceState.WAITING:
            if sequence.parent is not None:  # whose prompt it shares
                sequence.cached_tokens = sequence.parent.cached_tokens
            else:
                sequence.cached_tokens = hit * size
                self._hit_tokens += hit * size
        return True

    def _lead(self, request: list[Sequence]) -> None:
        """Queue sequences of one prompt: the first computes it, the others follow when it has."""
        leader, *followers = request
        for each in request:
            each.parent = None if each is leader else leader
            each.root = self._root(each)
        if followers:
            self._forks[leader.uid] = followers
        self._wait(leader)

    def _outgrows(self, sequence: Sequence, length: int) -> bool:
        return length > self.config.short_context and not sequence.long

    def _wait(self, sequence: Sequence) -> None:
        if self._outgrows(sequence, len(sequence.tokens)):
            sequence.long, sequence.hashes = True, []
            sequence.root = self._root(sequence)
        insort(self._waiting, sequence, key=_rank)

    def _root(self, sequence: Sequence) -> bytes:
        """Where hashes begin: those of its request alone, if nothing is to be shared or every token of it scored."""
        private = not self.config.prefix_cache or sequence.params.prompt_logprobs is not None
        root = self._cache.root((sequence.parent or sequence).uid if private else None)
        return root + b"long/" if sequence.long else root

    def _leave_queue(self, sequence: Sequence, state: SequenceState) -> None:
        """Forget that a sequence waits."""
        if state is SequenceState.SWAPPED:
            self._swapped -= 1
            if sequence.pending:
                return
        elif sequence.parent is not None:
            followers = self._forks.get(sequence.parent.uid, [])
            if sequence in followers:
                followers.remove(sequence)
                return
        del self._waiting[bisect_left(self._waiting, sequence.rank, key=_rank)]

    def _limit(self, sequence: Sequence) -> int:
        """The length at which a sequence ends, within its parameters, the context and the empty cache."""
        prompt, asked, context = sequence.prompt_length, sequence.params.max_tokens, self.config.max_context
        if not prompt:
            raise UsageError("the prompt has no token; it needs at least one")
        if prompt >= context:
            raise RequestTooLarge(
                f"the prompt has {prompt} tokens, and max_context is {context}: shorten the prompt to at most "
                f"{context - 1} tokens, or raise max_context"
            )
        wanted = context if asked is None else min(prompt + asked, context)
        if self._cache.capacity is None or wanted - 1 <= self._cache.capacity:  # the last token is not put there
            return wanted
        most = self._cache.capacity + 1
        if asked is not None or prompt >= most:
            raise RequestTooLarge(
                f"the prompt has {prompt} tokens, max_tokens is {asked}, but the whole "
                f"cache holds {most - 1} tokens: ask for less, or make the cache larger"
            )
        return most
