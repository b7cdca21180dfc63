"""A device without arithmetic: it runs steps of the schedule on lists, and checks everything that they read."""

from __future__ import annotations

from collections import Counter, deque
from random import Random

from deepspeed.generate.blocks import FREED, CacheGroup
from deepspeed.generate.params import SamplingParams
from deepspeed.generate.scheduler import RequestTooLarge, ScheduleLimits, Scheduler
from deepspeed.generate.sequence import Sequence, SequenceState

VOCABULARY = 7
EOS = 0


def states(tokens, state=0):
    """What a cache holds for each token: a number that depends on all tokens up to it."""
    found = []
    for token in tokens:
        state = hash((state, token))
        found.append(state)
    return found


def sampled(state):
    """The token that follows a text."""
    return state % 1009 % VOCABULARY


class Device:
    """Pages on the device and on the host; the tokens it sampled are known to it before they are collected."""

    def __init__(self, scheduler, groups):
        self.scheduler = scheduler
        self.size = scheduler.config.block_size
        self.windows = [group.window for group in groups]
        self.pages = [[[None] * self.size for _ in range(group.blocks)] for group in groups]
        self.host = [[None] * group.host_blocks for group in groups]
        self.moved = Counter()  # blocks that each kind of transfer moved
        self.states = {}  # of all tokens of a sequence, sampled ones too
        self.computed = Counter()  # tokens by uid

    def lose(self):
        """The contents of all pages."""
        self.pages = [[[None] * self.size for _ in pages] for pages in self.pages]

    def run(self, step):
        """Run a step; the tokens of each sequence that samples."""
        self._transfer(step)
        assert step.work
        assert sum(work.count for work in step.work) <= self.scheduler.config.max_tokens_per_step
        assert len({work.sequence.uid for work in step.work}) == len(step.work)
        assert all(work.sequence.state is SequenceState.RUNNING for work in step.work)
        written = [self._write(work) for work in step.work]
        blocks = [block for each in written for block in each]
        assert len(blocks) == len(set(blocks)), "two sequences wrote one block"
        return {work.sequence.uid: tokens for work in step.work if (tokens := self._attend(work)) is not None}

    def _transfer(self, step):
        for kind in ("to_host", "from_host"):
            transfers = getattr(step, kind)
            self.moved[kind] += len(transfers)
            targets = [(group, target) for group, _, target in transfers]
            assert len(targets) == len(set(targets))
        for group, block, host in step.to_host:
            assert None not in self.pages[group][block]
            self.host[group][host] = [*self.pages[group][block]]
        for group, host, block in step.from_host:
            self.pages[group][block] = [*self.host[group][host]]

    def _known(self, work):
        """The states of a sequence up to the end of the work."""
        sequence = work.sequence
        if sequence.uid not in self.states:
            self.states[sequence.uid] = states(sequence.tokens)
        known = self.states[sequence.uid]
        assert work.start >= 0
        assert work.count > 0
        if work.drafts:
            assert work.start + work.count == len(known) + len(work.drafts)
            return known + states(work.drafts, known[-1])
        assert work.start + work.count <= len(known)
        assert work.samples == (work.start + work.count == len(known))
        return known[: work.start + work.count]

    def _write(self, work):
        known, size, written = self._known(work), self.size, set()
        self.computed[work.sequence.uid] += work.count
        for group, blocks in enumerate(work.sequence.blocks):
            for at in range(work.start, work.start + work.count):
                block = blocks[at // size]
                assert block != FREED
                self.pages[group][block][at % size] = known[at]
                written.add((group, block))
        return written

    def _attend(self, work):
        known, size = self._known(work), self.size
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, work.start - window + 1)
            pages, blocks = self.pages[group], work.sequence.blocks[group]
            read = [state for block in blocks[first // size : -(-len(known) // size)] for state in pages[block]]
            assert read[first % size : len(known) - first // size * size] == known[first:], work
        if not work.samples:
            return None
        truth = self.states[work.sequence.uid]
        given = [sampled(known[len(truth) - 1])]
        for at, draft in enumerate(work.drafts, len(truth)):
            if draft != given[-1]:
                break
            given.append(sampled(known[at]))
        self.states[work.sequence.uid] = truth + states(given, truth[-1])
        return given


def check_blocks(scheduler, device):
    """Each block is empty, cached, or held as often as sequences name it; keys and blocks agree."""
    live = scheduler._by_uid.values()
    for group, pool in enumerate(scheduler._cache.pools):
        held = Counter(block for each in live for block in each.blocks[group : group + 1] for block in block)
        del held[FREED]
        assert {block: count for block, count in enumerate(pool._references) if count} == held
        assert sorted([*pool._empty, *pool._idle, *held]) == list(range(pool.size))
        assert {block: key for block, key in enumerate(pool._keys) if key} == {b: k for k, b in pool._by_key.items()}
        assert set(pool._idle) <= set(pool._by_key.values())
        hosts = [*pool._host_empty, *pool._host_by_key.values()]
        assert sorted(hosts) == list(range(len(device.host[group])))
    assert len(scheduler._running) <= scheduler.config.max_sequences
    assert all(not each.blocks for each in live if each.state is not SequenceState.RUNNING)


def expected(sequence, limit):
    """The tokens of a sequence that runs alone."""
    tokens, params = sequence.tokens[: sequence.prompt_length], sequence.params
    state = states(tokens)[-1]
    while True:
        tokens = [*tokens, sampled(state)]
        if tokens[-1] == EOS and not params.ignore_eos and len(tokens) - sequence.prompt_length > params.min_tokens:
            return tokens, "stop"
        if len(tokens) >= limit:
            return tokens, "length"
        state = states(tokens[-1:], state)[0]


class Schedule:
    """A random schedule: what arrives, is cancelled, drafted and collected late."""

    def __init__(self, seed):
        self.random = random = Random(seed)
        size = random.choice([1, 2, 3, 4, 4, 8])
        windows = random.choice([[None], [None], [3], [None, 5], [9, None], [2, None, 12], [1, 7]])
        self.config = ScheduleLimits(
            max_tokens_per_step=random.randint(1, 24),
            max_sequences=random.randint(1, 8),
            max_context=random.randint(6, 60),
            block_size=size,
            prefix_cache=random.random() < 0.8,
        )
        host = random.choice([0, 0, 2, 30])
        self.groups = [
            CacheGroup((at,), random.randint(2, 16) + 12 // size, each, host and random.choice([host, 1]))
            for at, each in enumerate(windows)
        ]
        self.scheduler = Scheduler(self.config, self.groups)
        self.device = Device(self.scheduler, self.groups)
        self.in_flight = deque()
        self.late = random.choice([0, 1, 1, 1, 2])  # steps in flight while the next one is planned
        self.drafts = random.random() < 0.5
        self.disturbed = random.random() < 0.5
        self.texts = [[random.randrange(1, VOCABULARY) for _ in range(50)] for _ in range(3)]
        self.sequences = []
        self.untouched = set()
        self.steps = 0

    def run(self, arrivals=8):
        """Run it until all sequences have ended, and check their tokens."""
        random = self.random
        left = random.randint(1, arrivals)
        while left or self.scheduler._by_uid or self.in_flight:
            if left and random.random() < 0.4:
                self._add()
                left -= 1
            if self.disturbed and self.sequences and random.random() < 0.15:
                self._disturb()
            self._step()
            assert self.steps < 20_000, "no end"
        assert check_blocks(self.scheduler, self.device) is None
        assert all(pool.available == pool.size for pool in self.scheduler._cache.pools)
        stats = self.scheduler.stats
        assert (stats.waiting, stats.running, stats.swapped) == (0, 0, 0)
        assert not self.scheduler._waiting
        assert not self.scheduler._forks
        for each in self.sequences:
            assert each.finished
            if each.uid in self.untouched:
                assert (each.tokens, each.finish_reason) == expected(each, each.limit)
        return stats

    def _add(self):
        random = self.random
        text = random.choice(self.texts)
        prompt = text[: random.randint(1, 40)] + random.choices(range(1, VOCABULARY), k=random.randint(0, 3))
        most = random.choice([None, 1, 5, 30])
        params = SamplingParams(
            max_tokens=most,
            min_tokens=random.choice([0, 0, 1]),
            ignore_eos=random.random() < 0.7,
            n=random.choice([1, 1, 1, 2, 4]),
            prompt_logprobs=random.choice([None, None, None, 0]),
        )
        uid, ends = len(self.sequences), frozenset() if params.ignore_eos else frozenset({EOS})
        request = [
            Sequence(uid + at, prompt, params, request=uid, index=at, priority=random.choice([0, 0, 1]), end_ids=ends)
            for at in range(params.n)
        ]
        for each in request:
            each.priority = request[0].priority
        try:
            self.scheduler.add(request)
        except RequestTooLarge:
            return
        self.sequences += request
        self.untouched.update(each.uid for each in request)

    def _disturb(self):
        each = self.random.choice(self.sequences)
        what = self.random.random()
        if what < 0.1:
            self.scheduler.reset()
            self.device.lose()
        elif self.scheduler.finish(each.uid, "error" if what < 0.2 else "cancelled"):
            self.untouched.discard(each.uid)

    def _guess(self):
        """Drafts of which some are right."""
        random, guesses = self.random, {}
        for each in self.scheduler.decoding:
            tokens = [*each.tokens]
            for _ in range(random.randint(0, 4)):
                right = sampled(states(tokens)[-1])
                tokens.append(right if random.random() < 0.7 else random.randrange(VOCABULARY))
            guesses[each.uid] = tokens[len(each.tokens) :]
        return guesses

    def _step(self):
        step = self.scheduler.next(self._guess() if self.drafts else None)
        self.steps += 1
        if self.steps % 4 == 0:
            check_blocks(self.scheduler, self.device)
        if step is not None:
            self.in_flight.append((step, self.device.run(step)))
        if self.in_flight and (step is None or len(self.in_flight) > self.late):
            step, tokens = self.in_flight.popleft()
            for each in self.scheduler.collect(step, tokens):
                assert each.tokens
                assert each.tokens == each.sequence.tokens[-len(each.tokens) :]
        elif step is None:
            assert not self.scheduler._by_uid, "sequences wait, nothing is in flight, and nothing runs"
