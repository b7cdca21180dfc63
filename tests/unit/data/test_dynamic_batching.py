"""Packing by tokens, the scaled learning rate, one micro-batch count on all ranks."""

from __future__ import annotations

import random

import pytest
import torch

from deepspeed.data.dynamic_batching import (
    VariableBatchSizeLR,
    batch_by_seqlens,
    get_dataloader_and_lr_scheduler_for_variable_batch_size,
    scale_lr,
)
from deepspeed.errors import UsageError

LENGTHS = [3, 5, 9, 2, 8, 4, 4, 7, 1, 30]


def test_packs_are_those_of_deepspeed():
    assert batch_by_seqlens(LENGTHS, 12, effective_batch_size=4)[1:] == ([9], [9])
    assert batch_by_seqlens(LENGTHS, 12, sequence_picking_order="seqlen", effective_batch_size=2) == (
        [(0, [8, 3, 0, 5]), (0, [6, 1]), (1, [7]), (1, [4])],
        [6, 2],
        [5, 8],
    )
    assert batch_by_seqlens(LENGTHS, 12, max_batch_size=2, min_batch_size=2, effective_batch_size=2) == (
        [(0, [0, 1]), (0, [2, 3]), (1, [4, 5]), (1, [6, 7])],
        [4, 4],
        [9, 8],
    )
    same = batch_by_seqlens(LENGTHS, 12, required_microbatches_of_same_size=True, effective_batch_size=2)
    assert same == ([(0, [0, 2]), (0, [1, 3]), (1, [4, 6]), (1, [5, 7])], [4, 4], [9, 8])


def test_no_pack_is_too_long_and_no_sample_is_there_twice():
    chance = random.Random(0)
    for _ in range(300):
        lengths = [chance.randint(1, 40) for _ in range(chance.randint(20, 90))]
        tokens, size = chance.randint(40, 99), chance.randint(1, 3)
        order = chance.choice(["dataloader", "random", "seqlen"])
        packs, sizes, longest = batch_by_seqlens(
            lengths, tokens, sequence_picking_order=order, effective_batch_size=size, seed=1
        )
        used = [each for _, pack in packs for each in pack]
        assert len(used) == len(set(used)) == sum(sizes)
        assert all(sum(lengths[each] for each in pack) <= tokens for _, pack in packs)
        assert [number for number, _ in packs] == [number for number in range(len(sizes)) for _ in range(size)]
        assert longest == [max(lengths[e] for n, p in packs if n == b for e in p) for b in range(len(sizes))]


def test_ranks_share_the_micro_batches_and_a_loader_goes_on_where_it_was():
    data = [torch.full((length,), number) for number, length in enumerate(LENGTHS[:-1] * 4)]
    lengths = [len(each) for each in data]

    def build(rank=0, ranks=1, size=1):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        return get_dataloader_and_lr_scheduler_for_variable_batch_size(
            data,
            lengths,
            12,
            4,
            dataloader_rank=rank,
            dataloader_num_replicas=ranks,
            dataloader_batch_size=size,
            lr_scheduler_or_optimizer=optimizer,
            sequence_picking_order="random",
            seed=5,
        )

    whole = [[int(each[0]) for each in batch] for batch in build()[0]]
    assert len(whole) % 4 == 0
    parts = [[[int(each[0]) for each in batch] for batch in build(rank, 2)[0]] for rank in range(2)]
    assert [each for pair in zip(*parts, strict=True) for each in pair] == whole
    loader = build()[0]
    for _ in range(6):
        next(loader)
    again = build(1, 2)[0]
    again.load_state_dict(loader.state_dict())
    assert [[int(each[0]) for each in batch] for batch in again] == whole[7::2]
    assert [[int(each[0]) for each in batch] for batch in again] == parts[1], "the next epoch"
    schedule = build()[1]
    sizes = schedule.batch_sizes
    rates = []
    for _ in sizes:
        rates.append(schedule.get_last_lr()[0])
        schedule.step()
    assert rates == pytest.approx([0.1 * size / 4 for size in sizes])


@pytest.mark.parametrize(("method", "factor"), [("linear", 2.0), ("sqrt", 2.0**0.5), ("none", 1.0)])
def test_the_rate_of_a_schedule_is_scaled_and_resumes(method, factor):
    def build():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        inner = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return VariableBatchSizeLR(inner, 8, [8, 16], None, method)

    one = build()
    found = []
    for _ in range(4):
        found.append(one.get_lr()[0])
        one.step()
    assert found == pytest.approx([1, 0.5 * factor, 0.25, 0.125 * factor])
    other = build()
    other.load_state_dict(one.state_dict())
    one.step()
    other.step()
    assert other.get_lr() == one.get_lr()
    assert scale_lr(8, 16, 0.1, method) == pytest.approx(0.1 * factor)


def test_what_cannot_be_packed_is_named():
    with pytest.raises(UsageError, match="0 samples of at most 2 tokens make 0 micro-batches"):
        batch_by_seqlens([3, 4], 2)
    with pytest.raises(UsageError, match="sequence_picking_order is 'shuffle'"):
        batch_by_seqlens([3], 8, sequence_picking_order="shuffle")
    with pytest.raises(UsageError, match="lr_scaling_method is 'cubic'"):
        scale_lr(1, 2, method="cubic")
    with pytest.raises(UsageError, match="has 1 lengths, and the dataset 2 samples"):
        get_dataloader_and_lr_scheduler_for_variable_batch_size([1, 2], [1], 8, 1)
