"""Data loaders on real ranks: the shares come from the process group, and fit together."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import torch
import torch.distributed as dist

from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader, build_dataloader
from tests.harness import shared_ranks


def gathered(value):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return everybody


def indices(batches):
    return [int(index) for batch in batches for index in batch]


@shared_ranks(2, 3)
def test_without_sizes_the_world_is_data_parallel():
    loader = DeepSpeedDataLoader(range(13), 2, True, dist.get_rank(), None, num_local_io_workers=0)
    for _ in range(2):
        shares = gathered(indices(loader))
        counts = Counter(index for share in shares for index in share)
        assert set(counts) == set(range(13))
        assert counts.total() == -(-13 // dist.get_world_size()) * dist.get_world_size()
        assert len(set(map(len, shares))) == 1


@shared_ranks(2)
def test_a_negative_local_rank_is_not_distributed():
    loader = DeepSpeedDataLoader(range(5), 2, True, -1, None, num_local_io_workers=0)
    assert gathered(sorted(indices(loader))) == [list(range(5))] * 2


@shared_ranks(2)
def test_the_rank_defaults_to_that_of_the_process():
    loader = DeepSpeedDataLoader(
        range(4), 2, True, 0, None, num_local_io_workers=0, data_parallel_world_size=2, shuffle=False
    )
    assert gathered(indices(loader)) == [[0, 2], [1, 3]]


@shared_ranks(2)
def test_model_parallel_ranks_of_one_data_parallel_rank_read_the_same():
    loader = build_dataloader(range(8), batch_size=2, data_parallel_rank=0, data_parallel_size=1)
    ours, theirs = gathered(indices(loader))
    assert ours == theirs
    assert sorted(ours) == list(range(8))


@shared_ranks(2)
def test_resumed_ranks_go_on_together():
    def build():
        return build_dataloader(range(11), batch_size=2, data_parallel_rank=dist.get_rank(), data_parallel_size=2)

    whole, first, second = RepeatingLoader(build()), build(), build()
    expected = [next(whole).tolist() for _ in range(12)]
    begun = RepeatingLoader(first)
    for _ in range(5):
        next(begun)
    ours, theirs = gathered(first.state_dict())
    assert ours == theirs
    second.load_state_dict(theirs if dist.get_rank() == 0 else ours)
    resumed = RepeatingLoader(second)
    assert [next(resumed).tolist() for _ in range(7)] == expected[5:]


@shared_ranks(2)
def test_workers_of_a_rank_with_a_process_group():
    loader = build_dataloader(
        torch.arange(8), batch_size=2, data_parallel_rank=dist.get_rank(), data_parallel_size=2, num_local_io_workers=1
    )
    assert sorted(chain(*gathered(indices(loader)))) == list(range(8))
