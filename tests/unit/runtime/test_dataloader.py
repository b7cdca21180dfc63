"""Data loaders in one process: order, shares of ranks, epochs, resuming, workers, repetition."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import FeatureUnavailable, LayoutError
from deepspeed.runtime import dataloader
from deepspeed.runtime.dataloader import (
    DeepSpeedDataLoader,
    RankOrder,
    RepeatingLoader,
    build_dataloader,
    default_workers,
)

totals = st.integers(0, 40)
few = st.integers(1, 5)
steady = settings(deadline=None, max_examples=50)


class Numbers(Dataset):
    def __init__(self, total):
        self.total = total

    def __len__(self):
        return self.total

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __init__(self, total):
        self.total = total
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return iter(range(self.total))


class Randomly(Numbers):
    """Adds what the worker draws, as an augmentation would."""

    def __getitem__(self, index):
        return torch.randint(1 << 30, ()).item()


def loader(total=10, batch_size=2, rank=0, size=1, dataset=None, **options):
    dataset = Numbers(total) if dataset is None else dataset
    options.setdefault("num_local_io_workers", 0)
    return build_dataloader(dataset, batch_size=batch_size, data_parallel_rank=rank, data_parallel_size=size, **options)


def samples(batches):
    return [int(index) for batch in batches for index in batch]


def taken(iterator, count):
    return [batch.tolist() for batch in itertools.islice(iterator, count)]


class TestShares:
    @steady
    @given(totals, few, few, st.integers(0, 3))
    def test_without_drop_last_every_sample_comes_and_only_padding_twice(self, total, batch_size, size, epoch):
        loaders = [loader(total, batch_size, rank, size) for rank in range(size)]
        for one in loaders:
            one.set_epoch(epoch)
        passes = [list(one) for one in loaders]
        counts = Counter(index for one in passes for index in samples(one))
        assert set(counts) == set(range(total))
        assert counts.total() == -(-total // size) * size
        assert counts.total() - total < size
        assert {len(one) for one in passes} == {len(loaders[0])} == {math.ceil(math.ceil(total / size) / batch_size)}

    @steady
    @given(totals, few, few, st.integers(0, 3))
    def test_with_drop_last_no_sample_comes_twice_and_batches_are_whole(self, total, batch_size, size, epoch):
        loaders = [loader(total, batch_size, rank, size, drop_last=True) for rank in range(size)]
        for one in loaders:
            one.set_epoch(epoch)
        passes = [list(one) for one in loaders]
        counts = Counter(index for one in passes for index in samples(one))
        assert set(counts.values()) <= {1}
        assert counts.total() == total - total % (batch_size * size)
        assert all(len(batch) == batch_size for one in passes for batch in one)
        assert {len(one) for one in passes} == {len(loaders[0])}

    @steady
    @given(st.integers(1, 40), few, st.integers(0, 5), st.booleans(), st.integers(0, 9))
    def test_the_order_is_that_of_torch(self, total, size, epoch, shuffle, seed):
        for rank in range(size):
            theirs = DistributedSampler(Numbers(total), size, rank, shuffle, seed)
            ours = RankOrder(Numbers(total), ranks=size, rank=rank, shuffle=shuffle, seed=seed)
            theirs.set_epoch(epoch)
            ours.set_epoch(epoch)
            # torch repeats the whole order when ranks outnumber samples, which is the same order of padding
            assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)

    @steady
    @given(totals, few, few, st.booleans())
    def test_a_stream_is_shared_out_alike(self, total, batch_size, size, drop_last):
        loaders = [
            loader(batch_size=batch_size, rank=rank, size=size, dataset=Stream(total), drop_last=drop_last)
            for rank in range(size)
        ]
        passes = [list(one) for one in loaders]
        counts = Counter(index for one in passes for index in samples(one))
        if drop_last:
            assert set(counts.values()) <= {1}
            assert counts.total() == total - total % (batch_size * size)
        else:
            assert set(counts) == set(range(total))
            assert counts.total() == -(-total // size) * size
        assert len({len(one) for one in passes}) == 1

    def test_a_stream_that_shares_itself_out(self):
        one = loader(batch_size=2, rank=1, size=2, dataset=Stream(4), shard_iterable=False)
        assert samples(one) == [0, 1, 2, 3]

    def test_an_iterable_that_is_no_torch_dataset(self):
        class Lines:
            def __iter__(self):
                return iter(range(5))

            def __len__(self):
                return 5

        one = loader(batch_size=2, rank=1, size=2, dataset=Lines())
        assert samples(one) == [1, 3, 4]
        assert len(one) == 2

    def test_a_stream_without_a_length(self):
        one = loader(dataset=Stream(5))
        with pytest.raises(TypeError, match="Stream"):
            len(one)

    def test_a_loader_without_batches_says_so(self, monkeypatch):
        said = []
        monkeypatch.setattr(dataloader.logger, "warning", lambda text, *values: said.append(text % values))
        one = loader(3, 2, 0, 2, drop_last=True)
        assert list(one) == []
        assert said == ["the data loader has no batch: 3 samples, 2 ranks with a batch size of 2, drop_last True"]


class TestEpochs:
    def test_each_pass_has_another_order_and_a_rerun_the_same(self):
        def run():
            one = loader(20)
            return [samples(one) for _ in range(4)]

        first = run()
        assert len(set(map(tuple, first))) == 4
        assert all(sorted(order) == list(range(20)) for order in first)
        assert run() == first

    def test_seeds_differ(self):
        assert samples(loader(20, seed=1)) != samples(loader(20, seed=2))

    @pytest.mark.parametrize("route", ["eval", "predict"])
    def test_other_routes_keep_the_order(self, route):
        one = loader(9, 2, 1, 2, route=route)
        assert samples(one) == samples(one) == [1, 3, 5, 7, 0]

    def test_a_pass_left_midway_counts(self):
        whole = loader(20)
        orders = [samples(whole) for _ in range(3)]
        one = loader(20)
        next(iter(one))
        assert samples(one) == orders[1]
        assert samples(one) == orders[2]

    def test_asking_for_an_iterator_twice_changes_nothing(self):
        one = loader(20)
        iter(one)
        assert samples(one) == samples(loader(20))

    def test_next_without_iter_and_after_the_end(self):
        one = loader(4)
        assert len(samples([next(one), next(one)])) == 4
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(one)
        assert len(list(one)) == 2

    def test_scripts_may_set_the_epoch_here_or_on_the_sampler(self):
        plain = loader(20)
        orders = [samples(plain) for _ in range(6)]
        one = loader(20)
        assert samples(one) == orders[0]
        one.data_sampler.set_epoch(4)
        assert samples(one) == orders[4]
        assert samples(one) == orders[5]
        one.set_epoch(2)
        assert samples(one) == orders[2]
        for epoch in range(3):  # the usual loop of scripts
            one.data_sampler.set_epoch(epoch)
            assert samples(one) == orders[epoch]

    def test_an_iterable_dataset_hears_of_the_epoch(self):
        dataset = Stream(4)
        one = loader(dataset=dataset)
        list(one), list(one)
        assert dataset.epochs == [0, 1]

    def test_passes_leave_the_random_state_of_the_program_alone(self):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        list(loader(20))
        assert torch.equal(torch.get_rng_state(), before)


class TestResume:
    @steady
    @given(st.integers(1, 30), few, st.integers(1, 3), st.booleans(), st.integers(0, 25))
    def test_continues_at_the_exact_sample(self, total, batch_size, size, drop_last, stop):
        for rank in range(size):
            whole = loader(total, batch_size, rank, size, drop_last=drop_last, seed=3)
            if len(whole) == 0:
                continue
            expected = taken(RepeatingLoader(whole), stop + 12)
            first = loader(total, batch_size, rank, size, drop_last=drop_last, seed=3)
            taken(RepeatingLoader(first), stop)
            second = loader(total, batch_size, rank, size, drop_last=drop_last, seed=99)
            second.load_state_dict(first.state_dict())
            assert taken(RepeatingLoader(second), 12) == expected[stop:]

    @steady
    @given(st.integers(0, 30), few, few, few, few, st.integers(0, 9))
    def test_an_epoch_may_be_finished_with_other_sizes(self, total, batch_a, size_a, batch_b, size_b, stop):
        first = [loader(total, batch_a, rank, size_a) for rank in range(size_a)]
        if stop >= len(first[0]):
            return
        begun = [taken(iter(one), stop) for one in first]
        state = first[0].state_dict()
        assert all(one.state_dict() == state for one in first)
        rest = []
        for rank in range(size_b):
            one = loader(total, batch_b, rank, size_b)
            one.load_state_dict(state)
            rest.append(list(one))
        used = Counter(itertools.chain(*map(samples, begun)))
        finished = Counter(itertools.chain(*map(samples, rest)))
        assert set(used + finished) == set(range(total))
        assert (used + finished).total() - total < size_b
        assert len({len(one) for one in rest}) == 1

    def test_the_state_is_plain_and_the_same_on_every_rank(self):
        states = []
        for rank in range(2):
            one = loader(20, 2, rank, 2, seed=5)
            list(one)
            taken(iter(one), 3)
            states.append(one.state_dict())
        assert states == [{"epoch": 1, "samples": 12, "seed": 5}] * 2

    def test_after_the_last_batch_the_next_epoch_is_saved(self):
        one = loader(4)
        taken(iter(one), 2)
        assert one.state_dict() == {"epoch": 1, "samples": 0, "seed": 0}
        list(one)
        assert one.state_dict() == {"epoch": 2, "samples": 0, "seed": 0}

    def test_a_loop_under_way_continues_at_the_loaded_place(self):
        whole = loader(20)
        order = [batch.tolist() for batch in whole]
        one = loader(20)
        repeating = RepeatingLoader(one)
        taken(repeating, 7)
        one.load_state_dict({"epoch": 0, "samples": 4, "seed": 0})
        assert taken(repeating, 3) == order[2:5]
        one.load_state_dict({"epoch": 0, "samples": 0, "seed": 0})
        assert [batch.tolist() for batch in one] == order

    def test_a_length_is_that_of_a_whole_epoch(self):
        one = loader(20)
        one.load_state_dict({"epoch": 0, "samples": 14, "seed": 0})
        assert len(one) == 10
        assert len(list(one)) == 3
        assert len(list(one)) == 10

    def test_loading_then_the_usual_set_epoch_keeps_the_place(self):
        one = loader(20)
        one.load_state_dict({"epoch": 3, "samples": 16, "seed": 0})
        one.data_sampler.set_epoch(3)
        assert len(list(one)) == 2

    @pytest.mark.parametrize("stop", [0, 1, 3, 4, 5])
    def test_streams(self, stop):
        expected = taken(RepeatingLoader(loader(dataset=Stream(7))), 20)
        first = loader(dataset=Stream(7))
        taken(RepeatingLoader(first), stop)
        second = loader(dataset=Stream(7))
        second.load_state_dict(first.state_dict())
        assert taken(RepeatingLoader(second), 10) == expected[stop : stop + 10]

    def test_a_stream_needs_whole_batches(self):
        with pytest.raises(ValueError, match=r"after 5 samples: they are not whole batches of 2 on 1 ranks"):
            loader(dataset=Stream(7)).load_state_dict({"epoch": 0, "samples": 5, "seed": 0})

    def test_custom_samplers(self):
        sampler = DistributedSampler(Numbers(20), 2, 1)
        expected = taken(RepeatingLoader(loader(20, 2, 1, 2, data_sampler=sampler)), 18)
        sampler = DistributedSampler(Numbers(20), 2, 1)
        second = loader(20, 2, 1, 2, data_sampler=sampler)
        second.load_state_dict({"epoch": 1, "samples": 12, "seed": 0})
        assert taken(RepeatingLoader(second), 10) == expected[8:18]
        with pytest.raises(ValueError, match=r"7 samples: they do not divide by the 2 data-parallel ranks"):
            second.load_state_dict({"epoch": 1, "samples": 7, "seed": 0})

    def test_a_foreign_state(self):
        with pytest.raises(ValueError, match=r"has no samples, seed; it has \['epoch'\]"):
            loader().load_state_dict({"epoch": 1})


class TestOptions:
    def test_a_custom_sampler_is_kept(self):
        sampler = [3, 1, 2]
        one = loader(10, 2, 0, 2, data_sampler=sampler)
        assert one.data_sampler is sampler
        assert samples(one) == samples(one) == [3, 1, 2]
        assert len(one) == 2

    def test_a_custom_sampler_that_has_begun_at_another_epoch(self):
        sampler = DistributedSampler(Numbers(20), 1, 0)
        sampler.set_epoch(3)
        one = loader(20, data_sampler=sampler)
        list(one)
        assert one.state_dict()["epoch"] == 4

    def test_a_sampler_for_a_stream(self):
        with pytest.raises(ValueError, match=r"RandomSampler.*which has no indices"):
            loader(dataset=Stream(3), data_sampler=RandomSampler(Numbers(3)))

    def test_collate(self):
        assert list(loader(4, route="eval", collate_fn=tuple)) == [(0, 1), (2, 3)]

    def test_lists_and_tensors(self):
        assert samples(loader(dataset=[5, 6, 7], route="eval")) == [5, 6, 7]
        assert samples(loader(dataset=torch.arange(3), route="eval")) == [0, 1, 2]

    def test_the_timer_starts_with_each_training_batch(self):
        class Timer:
            started = 0

            def start(self):
                self.started += 1

        timer = Timer()
        one = loader(6, tput_timer=timer)
        taken(iter(one), 2)
        assert timer.started == 2
        taken(iter(loader(6, route="eval", tput_timer=timer)), 2)
        assert timer.started == 2

    def test_batches_may_be_post_processed(self):
        one = loader(4, route="eval")
        one.post_process_func = lambda batch, state: (batch.tolist(), state["samples"])
        assert list(one) == [([0, 1], 2), ([2, 3], 0)]

    def test_an_unknown_route(self):
        with pytest.raises(ValueError, match="route is 'test'; it must be one of train, eval, predict"):
            loader(route="test")

    @pytest.mark.parametrize("size", [0, -1, 2.0, True, None])
    def test_a_wrong_batch_size(self, size):
        with pytest.raises(ValueError, match="must be a positive integer"):
            loader(batch_size=size)

    def test_wrong_ranks(self):
        with pytest.raises(LayoutError, match="data_parallel_rank 2 of 2"):
            loader(rank=2, size=2)
        with pytest.raises(LayoutError, match="without data_parallel_world_size"):
            DeepSpeedDataLoader([1], 1, False, 0, None, data_parallel_rank=0)

    def test_curriculum_is_refused_not_ignored(self):
        with pytest.raises(FeatureUnavailable, match="curriculum_learning"):
            DeepSpeedDataLoader([1], 1, False, 0, None, deepspeed_dataloader_config={"curriculum_learning": {}})

    @pytest.mark.parametrize("local_rank", [-1, 0])
    def test_without_process_groups_the_loader_has_everything(self, local_rank):
        one = DeepSpeedDataLoader(Numbers(5), 2, True, local_rank, None, num_local_io_workers=0)
        assert sorted(samples(one)) == list(range(5))
        assert one.pin_memory == (get_accelerator().device_name() != "cpu")


class TestWorkers:
    def test_the_same_batches_as_without_and_read_ahead_does_not_count(self):
        alone = taken(RepeatingLoader(loader(12, 2)), 9)
        one = loader(12, 2, num_local_io_workers=2)
        repeating = RepeatingLoader(one)
        assert taken(repeating, 4) == alone[:4]
        assert one.state_dict() == {"epoch": 0, "samples": 8, "seed": 0}
        other = loader(12, 2, num_local_io_workers=1)
        other.load_state_dict(one.state_dict())
        assert taken(RepeatingLoader(other), 5) == alone[4:]

    def test_what_workers_draw_is_the_same_on_a_rerun_and_differs_by_epoch_and_rank(self):
        def draw(rank):
            one = loader(4, 2, rank, 2, dataset=Randomly(4), num_local_io_workers=1)
            return [tuple(samples(one)) for _ in range(2)]

        first, second = draw(0), draw(1)
        assert draw(0) == first
        assert len({*first, *second}) == 4

    @pytest.mark.parametrize(
        ("cores", "local", "device", "streams", "expected"),
        [
            (16, "8", "cuda", False, 1),
            (16, "2", "cuda", False, 2),
            (16, "", "cuda", False, 2),
            (2, "4", "cuda", False, 0),
            (16, "2", "cuda", True, 0),
            (16, "2", "cpu", False, 0),
        ],
    )
    def test_default(self, monkeypatch, cores, local, device, streams, expected):
        class Accelerator:
            def device_name(self):
                return device

        monkeypatch.setattr(dataloader, "get_accelerator", Accelerator)
        monkeypatch.setattr(dataloader.os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
        monkeypatch.setenv("LOCAL_SIZE", local)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        assert default_workers(streams) == expected


class TestRepeating:
    @pytest.mark.parametrize("make", [lambda: [1, 2, 3], lambda: lambda: (i for i in (1, 2, 3)), lambda: range(1, 4)])
    def test_lists_and_factories(self, make):
        repeating = RepeatingLoader(make())
        assert iter(repeating) is repeating
        assert list(itertools.islice(repeating, 7)) == [1, 2, 3, 1, 2, 3, 1]

    def test_length(self):
        assert len(RepeatingLoader([1, 2, 3])) == 3

    @pytest.mark.parametrize("make", [list, lambda: loader(0), lambda: list])
    def test_nothing_is_an_error_and_not_an_endless_loop(self, make):
        with pytest.raises(ValueError, match="gave no batch"):
            next(RepeatingLoader(make()))

    def test_a_generator_is_used_up(self):
        repeating = RepeatingLoader(i for i in (1, 2))
        assert [next(repeating), next(repeating)] == [1, 2]
        with pytest.raises(ValueError, match="a whole pass over the generator gave no batch, after 1 passes"):
            next(repeating)

    def test_something_that_cannot_be_iterated(self):
        with pytest.raises(TypeError, match="got a int"):
            RepeatingLoader(3)

    def test_a_deepspeed_loader_goes_on_to_the_next_epoch(self):
        one = loader(20)
        orders = [batch.tolist() for _ in range(2) for batch in one]
        assert taken(RepeatingLoader(loader(20)), 20) == orders

    def test_a_torch_loader_with_a_distributed_sampler_is_told_the_epoch(self):
        sampler = DistributedSampler(Numbers(20), 1, 0)
        repeating = RepeatingLoader(DataLoader(Numbers(20), 10, sampler=sampler))
        first, second = taken(repeating, 2), taken(repeating, 2)
        assert sampler.epoch == 1
        assert first != second
        assert sorted(itertools.chain(*second)) == list(range(20))

    def test_a_plain_torch_loader(self):
        repeating = RepeatingLoader(DataLoader(Numbers(4), 2))
        assert taken(repeating, 3) == [[0, 1], [2, 3], [0, 1]]

    def test_a_loader_that_takes_the_epoch_itself(self):
        class Own(list):
            heard = ()

            def set_epoch(self, epoch):
                self.heard = (*self.heard, epoch)

        own = Own([1])
        list(itertools.islice(RepeatingLoader(own), 3))
        assert own.heard == (1, 2)
