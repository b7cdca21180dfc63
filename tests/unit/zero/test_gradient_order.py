"""The order in which gradients leave: sums are right, operations equal on all ranks, what waits is bounded."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.zero.gradients.bucket_order import BucketOrder, pack_buckets


class Rank:
    """One rank's gradients, as numbers."""

    def __init__(self, buckets, sizes, budget):
        self.buckets = buckets
        self.waiting = {}
        self.sent = []
        self.most = 0
        self.order = BucketOrder(buckets, sizes, self._go, budget=budget)

    def _go(self, place):
        self.sent.append(
            (place, {each: self.waiting.pop(each) for each in self.buckets[place] if each in self.waiting})
        )

    def backward(self, arrivals, counts=None):
        self.order.expect(counts)
        for each, value in arrivals:
            self.waiting[each] = self.waiting.get(each, 0) + value
            self.order.arrive(each)
            self.most = max(self.most, self.order.waiting)
        self.order.rest()


@st.composite
def models(draw):
    count = draw(st.integers(1, 30))
    sizes = [draw(st.integers(1, 50)) for _ in range(count)]
    kinds = [draw(st.sampled_from("ab")) for _ in range(count)]
    unused = frozenset(draw(st.sets(st.integers(0, count - 1), max_size=3)))
    order = list(draw(st.permutations(range(count))))
    return order, sizes, kinds, draw(st.sampled_from([1, 40, 150])), unused


@settings(max_examples=200, deadline=None)
@given(models())
def test_every_parameter_is_in_one_bucket_of_its_kind_and_size(model):
    order, sizes, kinds, limit, unused = model
    buckets = pack_buckets(order, sizes, kinds, limit, unused=unused)
    assert sorted(each for bucket in buckets for each in bucket) == sorted(order)
    for bucket in buckets:
        assert len({kinds[each] for each in bucket}) == 1
        assert len(bucket) == 1 or sum(sizes[each] for each in bucket) <= limit
        assert len({each in unused for each in bucket}) == 1
    last = [max(order.index(each) for each in bucket) for bucket in buckets if not unused.issuperset(bucket)]
    assert last == sorted(last), "a bucket stands where its last member does"


@settings(max_examples=300, deadline=None)
@given(models(), st.data())
def test_sums_are_right_whatever_arrives_when(model, data):
    order, sizes, kinds, limit, _ = model
    buckets = pack_buckets(order, sizes, kinds, limit)
    budget = 2 * max(sum(sizes[each] for each in bucket) for bucket in buckets)
    ranks = [Rank(buckets, sizes, budget) for _ in range(data.draw(st.integers(1, 4)))]
    wanted = {}
    for rank in ranks:
        arrivals = data.draw(st.lists(st.tuples(st.sampled_from(order), st.integers(1, 9)), max_size=40))
        for each, value in arrivals:
            wanted[each] = wanted.get(each, 0) + value
        rank.backward(arrivals)
    assert len({tuple(place for place, _ in rank.sent) for rank in ranks}) == 1, "the same operations on all ranks"
    again = {rank.order.place_of(each) for rank in ranks for each in rank.order.late}
    got = {}
    for rank in ranks:
        late = {each: value for each, value in rank.waiting.items() if rank.order.place_of(each) in again}
        assert late == rank.waiting, "nothing is left behind that ranks do not agree to send"
        for sent in (*(values for _, values in rank.sent), late):
            for each, value in sent.items():
                got[each] = got.get(each, 0) + value
    assert got == wanted


@settings(max_examples=200, deadline=None)
@given(models(), st.sets(st.integers(0, 29)))
def test_what_waits_is_bounded_from_the_first_backward_on(model, unused):
    """Gradients come in the shared order, some of them never."""
    order, sizes, _, limit, _ = model
    kinds = ["a"] * len(order)
    buckets = pack_buckets(order, sizes, kinds, limit)
    budget = 2 * max(sum(sizes[each] for each in bucket) for bucket in buckets)
    rank = Rank(buckets, sizes, budget)
    arrivals = [(each, 1) for each in order if each not in unused]
    rank.backward(arrivals)
    assert rank.most <= budget + max(sizes)
    counts = rank.order.counts()
    absent = frozenset(each for each in order if each in unused)
    buckets = pack_buckets(order, sizes, kinds, limit, unused=absent)
    rank = Rank(buckets, sizes, budget)
    rank.backward(arrivals, counts)
    assert not rank.order.late
    assert not rank.order.forced
    assert not rank.order.blocked
    assert rank.most <= max(sum(sizes[each] for each in bucket) for bucket in buckets)


def test_a_parameter_that_arrives_twice_is_waited_for_the_next_time():
    rank = Rank([[0], [1]], [1, 1], 10)
    rank.backward([(0, 1), (1, 1), (0, 1)])
    assert rank.order.late == {0}
    counts = rank.order.counts()
    rank.order.late.clear()
    rank.waiting.clear()
    rank.backward([(0, 1), (1, 1), (0, 1)], counts)
    assert not rank.order.late
    assert rank.sent[-2:] == [(0, {0: 2}), (1, {1: 1})]


def test_buckets_leave_at_places_that_are_given():
    rank = Rank([[0], [1], [2]], [1, 1, 1], 1)
    rank.order.early = False
    rank.order.expect(None)
    rank.waiting = {0: 5}
    rank.order.arrive(0)
    assert rank.order.ready() == (1, 0)
    rank.order.launch_until(2)
    assert rank.sent == [(0, {0: 5}), (1, {})]
    rank.waiting[1] = 7
    rank.order.arrive(1)
    assert rank.order.late == {1}


@settings(max_examples=200, deadline=None)
@given(models(), st.data())
def test_buckets_that_are_packed_anew_inside_a_backward_lose_nothing(model, data):
    """Everything has arrived; nothing has left, or some of it, or all."""
    order, sizes, kinds, limit, unused = model
    rank = Rank(pack_buckets(order, sizes, kinds, limit), sizes, 0)
    old = rank.order
    old.early = False
    old.expect(None)
    rank.waiting = dict.fromkeys(data.draw(st.sets(st.sampled_from(order))), 1)
    wanted = dict(rank.waiting)
    for each in wanted:
        old.arrive(each)
    left = data.draw(st.sampled_from([0, 1, len(rank.buckets)]))
    old.launch_until(left)
    rank.buckets = pack_buckets(order[::-1], sizes, kinds, limit, unused=unused)
    new = BucketOrder(rank.buckets, sizes, rank._go, budget=0)
    new.take_over(old, running=True)
    rank.sent, sent = [], rank.sent
    new.rest()
    assert not rank.waiting
    assert not new.waiting
    assert {each for _, values in (*sent, *rank.sent) for each in values} == set(wanted)
    assert len(rank.sent) == (0 if len(sent) == len(old._buckets) else len(rank.buckets)), "all again, or nothing"


def test_the_last_parameters_leave_first_in_a_small_bucket():
    buckets = pack_buckets([3, 2, 1, 0], [10] * 4, "aaaa", limit=100, first=10)
    assert buckets == [[3], [2, 1, 0]]
