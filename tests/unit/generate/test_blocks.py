"""One pool of blocks: what leaves first, what the host keeps, what is found again."""

from __future__ import annotations

from itertools import pairwise

import pytest

from deepspeed.errors import UsageError
from deepspeed.generate.blocks import BlockCache, BlockPool, CacheGroup
from deepspeed.generate.params import SamplingParams
from deepspeed.generate.sequence import Sequence


def fill(pool, keys):
    """Blocks with content that none holds."""
    for key in keys:
        block = pool.take()
        pool.name(block, key)
        pool.release(block)


def sequence(cache, tokens, length=None):
    """A sequence whose first tokens are computed and registered."""
    made = Sequence(0, tokens, SamplingParams())
    made.root = cache.root(None)
    cache.claim(made, cache.match(made))
    cache.grow(made, made.computed, len(made.tokens))
    cache.register(made, len(made.tokens) if length is None else length)
    return made


def test_the_least_recently_used_leaves():
    pool = BlockPool(0, 3, 0)
    fill(pool, [b"a", b"b", b"c"])
    assert (pool.available, pool.cached) == (3, 3)
    pool.release(pool.hold_key(b"a"))
    pool.take()
    assert [pool.has(key) for key in (b"a", b"b", b"c")] == [True, False, True]
    assert not pool.to_host


def test_the_host_keeps_what_leaves_the_device():
    pool = BlockPool(0, 2, 2)
    fill(pool, [b"a", b"b"])
    fill(pool, [b"c", b"d"])
    assert [block for _, block, _ in pool.to_host] == [0, 1]
    assert len({host for *_, host in pool.to_host}) == 2
    fill(pool, [b"e"])  # both host blocks are written in this step: c cannot leave to them
    assert not pool.has(b"c")
    assert len(pool.to_host) == 2
    hosts = {block: host for _, block, host in pool.to_host}
    pool.end_step()
    assert pool.hold_key(b"a") is None
    block = pool.bring(b"a")
    assert pool.from_host == [(0, hosts[0], block)]
    assert pool.has(b"d")  # it took the place of b on the host
    assert not pool.has(b"b")
    pool.end_step()
    pool.hold_key(b"e")
    pool.release(block)
    fill(pool, [b"f"])
    assert pool.has(b"a")
    assert not pool.to_host  # the host had it still


def test_forgetting():
    pool = BlockPool(0, 2, 2)
    fill(pool, [b"a", b"b", b"c"])
    block = pool.hold_key(b"c")
    pool.forget(block)
    pool.release(block)
    assert [pool.has(key) for key in (b"a", b"b", b"c")] == [True, True, False]
    pool.reset()
    assert (pool.available, pool.cached, pool.host_cached, pool.to_host) == (2, 0, 0, [])


@pytest.mark.parametrize(("tokens", "hit"), [(8, 1), (9, 2), (3, 0), (4, 0), (5, 1), (40, 3)])
def test_the_last_token_is_always_computed(tokens, hit):
    cache = BlockCache([CacheGroup((0,), 20)], 4)
    sequence(cache, range(13))
    other = Sequence(1, range(tokens), SamplingParams())
    other.root = cache.root(None)
    assert cache.match(other) == hit


def test_prefixes_are_equal_only_from_their_beginning():
    cache = BlockCache([CacheGroup((0,), 20)], 2)
    sequence(cache, [1, 2, 3, 4, 5])
    for tokens, root, hit in [
        ([1, 2, 3, 4, 9], cache.root(None), 2),
        ([9, 9, 3, 4, 5], cache.root(None), 0),
        ([1, 2, 9, 9, 5], cache.root(None), 1),
        ([1, 2, 3, 4, 9], cache.root(7), 0),
        ([513, 3, 4, 9], cache.root(None), 0),
    ]:
        other = Sequence(1, tokens, SamplingParams())
        other.root = root
        assert cache.match(other) == hit


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
def test_a_window_frees_what_no_query_reads(window):
    cache = BlockCache([CacheGroup((0,), 20), CacheGroup((1,), 20, window)], 4)
    made = sequence(cache, range(10))
    for start in range(10, 40):
        cache.grow(made, start, start + 1)
        first = max(0, start - window + 1) // 4
        assert -1 not in made.blocks[0]
        assert -1 not in made.blocks[1][first:]
        assert [block != -1 for block in made.blocks[1]] == sorted(block != -1 for block in made.blocks[1])
    assert cache.pools[1].size - cache.pools[1].available <= -(-(window - 1) // 4) + 1
    cache.register(made, 10)
    cache.free(made)
    assert [pool.available for pool in cache.pools] == [20, 20]


def test_a_hit_needs_only_the_window():
    cache = BlockCache([CacheGroup((0,), 20), CacheGroup((1,), 20, 5)], 4)
    made = sequence(cache, range(21))
    pool = cache.pools[1]
    other = Sequence(1, range(30), SamplingParams())
    other.root = made.root
    assert cache.match(other) == 5
    pool.forget(made.blocks[1][2])
    assert cache.match(other) == 5
    pool.forget(made.blocks[1][4])
    assert cache.match(other) == 4
    pool.forget(made.blocks[1][3])
    assert cache.match(other) == 2  # needs block 1
    cache.claim(other, 2)
    assert (other.blocks[1][0], other.computed) == (-1, 8)
    assert other.blocks[1][1] == made.blocks[1][1]


def test_capacity():
    assert BlockCache([CacheGroup((0,), 5)], 4).capacity == 20
    assert BlockCache([CacheGroup((0,), 5), CacheGroup((1,), 3, 9)], 4).capacity == 20
    assert BlockCache([CacheGroup((0,), 5), CacheGroup((1,), 2, 9)], 4).capacity == 8
    assert BlockCache([CacheGroup((0,), 3, 9)], 4).capacity is None


@pytest.mark.parametrize("group", [CacheGroup((0,), 0), CacheGroup((0,), 1, 0), None])
def test_groups_that_cannot_work(group):
    with pytest.raises(UsageError, match="at least"):
        BlockCache([group] if group else [], 4)


def test_keys_depend_on_all_tokens_before():
    cache = BlockCache([CacheGroup((0,), 20)], 1)
    made = sequence(cache, [5, 5, 5, 5])
    assert len(set(made.hashes)) == 4
    assert all(a != b for a, b in pairwise(made.hashes))
