"""Attention over sequences that ranks share, against torch's attention over the whole, and the bytes that it sends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from torch.nn.functional import scaled_dot_product_attention

from deepspeed import comm
from deepspeed.comm.records import CollectiveFinished
from deepspeed.errors import LayoutError, UsageError
from deepspeed.parallel import ParallelLayout
from deepspeed.sequence.inputs import TokenOrder
from deepspeed.sequence.layer import DistributedAttention, apply_rotary_pos_emb
from deepspeed.sequence.ring import Ring, ring_attention
from deepspeed.transformers.attention import SequenceInfo, attention_mask
from deepspeed.utils import groups
from tests.harness import shared_ranks

BATCH, LENGTH, WIDTH = 2, 16, 4


def whole_tensors(queries, keys, dtype=torch.float32):
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = [(BATCH, LENGTH, heads, WIDTH) for heads in (queries, keys, keys)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def local_attention(query, key, value, causal=True):
    """torch's attention, over [batch, length, heads, width]."""
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True).transpose(1, 2)


def gradients(out, tensors, grad):
    return torch.autograd.grad(out, tensors, grad)


def close(found, expected, **near):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **(near or {"atol": 1e-5, "rtol": 1e-5}))


@shared_ranks(2, 4, timeout=400)
def test_ulysses():
    """Even heads, uneven heads, key heads fewer than ranks, of either kind of batch."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    part = slice(rank * LENGTH // size, (rank + 1) * LENGTH // size)
    for queries, keys in ((4, 4), (4, 2), (6, 3), (5, 5), (8, 2), (6, 2), (4, 1), (12, 6)):
        tensors = whole_tensors(queries, keys)
        expected = local_attention(*tensors)
        grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7))
        wanted = [each[:, part] for each in gradients(expected, tensors, grad)]
        for batch_dim in (0, 1):
            mine = [tensor.detach()[:, part].clone().requires_grad_() for tensor in tensors]
            attention = DistributedAttention(of_layout(batch_dim), group, num_kv_heads=keys)
            given = [tensor.transpose(0, 1) if batch_dim else tensor for tensor in mine]
            out = attention(*given, batch_dim)
            out = out.transpose(0, 1) if batch_dim else out
            close([out, *gradients(out, mine, grad[:, part])], [expected[:, part], *wanted])


def of_layout(batch_dim, causal=True):
    if batch_dim == 0:
        return lambda *tensors: local_attention(*tensors, causal=causal)
    return lambda *tensors: local_attention(*(each.transpose(0, 1) for each in tensors), causal=causal).transpose(0, 1)


@shared_ranks(2)
def test_parts_of_unequal_lengths():
    """Padded on the way; queries may be shared out in another way than keys."""
    group, rank = dist.group.WORLD, dist.get_rank()
    tensors = whole_tensors(4, 2)
    expected = local_attention(*tensors, causal=False)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7))
    wanted = gradients(expected, tensors, grad)
    for border, border_of_keys, batch_dim in ((9, 9, 0), (8, 5, 1), (1, 15, 0)):
        borders = [border, border_of_keys, border_of_keys]
        parts = [(slice(0, each), slice(each, LENGTH))[rank] for each in borders]
        mine = [t.detach()[:, part].clone().requires_grad_() for t, part in zip(tensors, parts, strict=True)]
        attention = DistributedAttention(of_layout(batch_dim, causal=False), group)
        given = [tensor.transpose(0, 1) if batch_dim else tensor for tensor in mine]
        for _ in range(2):
            out = attention(*given, batch_dim)
            out = out.transpose(0, 1) if batch_dim else out
            of_parts = [each[:, part] for each, part in zip(wanted, parts, strict=True)]
            close([out, *gradients(out, mine, grad[:, parts[0]])], [expected[:, parts[0]], *of_parts])


@shared_ranks(2)
def test_parts_that_become_unequal():
    group, rank = dist.group.WORLD, dist.get_rank()
    tensors = whole_tensors(4, 2)
    expected = local_attention(*tensors, causal=False)
    attention = DistributedAttention(of_layout(0, causal=False), group)
    for border in (LENGTH // 2, LENGTH // 2, 3, LENGTH // 2):
        part = (slice(0, border), slice(border, LENGTH))[rank]
        close([attention(*(tensor[:, part] for tensor in tensors), 0)], [expected[:, part]])


@shared_ranks(1)
def test_one_rank():
    tensors = whole_tensors(4, 2)
    with Wire() as wire:
        out = DistributedAttention(local_attention, dist.group.WORLD)(*tensors, 0)
        found = [out, *gradients(out, tensors, torch.ones_like(out))]
    expected = local_attention(*tensors)
    close(found, [expected, *gradients(expected, tensors, torch.ones_like(expected))])
    assert wire.bytes == {}


@shared_ranks(2, timeout=400)
def test_ulysses_neighbours():
    group, rank = dist.group.WORLD, dist.get_rank()
    part = slice(rank * LENGTH // 2, (rank + 1) * LENGTH // 2)
    tensors = [tensor.detach() for tensor in whole_tensors(4, 4)]
    mine = [tensor[:, part] for tensor in tensors]
    # rotary embeddings of the whole sequence, [length, 1, 1, width]
    angles = torch.arange(LENGTH * WIDTH).view(LENGTH, 1, 1, WIDTH) / 10.0
    turned = [apply_rotary_pos_emb(t, *(x.permute(1, 0, 2, 3) for x in (angles.cos(), angles.sin()))) for t in tensors]
    expected = local_attention(turned[0], turned[1], tensors[2])[:, part]
    found = DistributedAttention(local_attention, group)(*mine, 0, (angles.cos(), angles.sin()))
    close([found], [expected])
    # an argument of the local attention; tensors of different dtypes
    found = DistributedAttention(local_attention, group)(*mine, 0, None, causal=False)
    close([found], [local_attention(*tensors, causal=False)[:, part]])
    mixed = DistributedAttention(lambda q, k, v: q + k.float() * v, group)(mine[0], mine[1].bfloat16(), mine[2], 0)
    close([mixed], [mine[0] + mine[1].bfloat16().float() * mine[2]])
    with pytest.raises(UsageError, match="four dims"):
        DistributedAttention(local_attention, group)(mine[0][0], *mine[1:], 0)
    with pytest.raises(UsageError, match="scatter_idx is 2 and gather_idx is 2"):
        DistributedAttention(local_attention, group, 2, 2)
    with pytest.raises(UsageError, match="Swap them"):
        DistributedAttention(local_attention, group, 0, 2)
    with pytest.raises(UsageError, match="num_kv_heads is 3, but the keys have 4"):
        DistributedAttention(local_attention, group, num_kv_heads=3)(*mine, 0)
    with pytest.raises(UsageError, match="batch_dim_idx is 2"):
        DistributedAttention(local_attention, group)(*mine, 2)
    with pytest.raises(LayoutError, match="1 attention heads cannot be shared out over 2"):
        DistributedAttention(local_attention, group)(*(each[:, :, :1] for each in mine), 0)


@shared_ranks(2, 4, timeout=400)
def test_ring():
    """Causal and not, packed, padded, with a window, in 16 bits; key heads fewer than query heads."""
    layout = ParallelLayout.build(sp=dist.get_world_size())
    axis = layout["sp"]
    order = TokenOrder(1, axis.size)
    mine = order.of_rank(LENGTH, axis.rank)
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(BATCH, LENGTH)
    present = torch.arange(LENGTH).expand(BATCH, LENGTH) < 11
    plain = SequenceInfo(LENGTH)
    cases = [
        (plain, True, None, torch.float32),
        (plain, False, None, torch.float32),
        (plain, True, 3, torch.float32),
        (SequenceInfo.of(LENGTH, positions, None), True, None, torch.float32),
        (SequenceInfo.of(LENGTH, None, present), False, None, torch.float32),
        (plain, True, None, torch.bfloat16),
    ]
    at = torch.arange(LENGTH)
    for whole, causal, window, dtype in cases:
        tensors = whole_tensors(4, 2, dtype)
        seen = attention_mask(whole, at, at, causal=causal, window=window)
        heads = [tensor.transpose(1, 2) for tensor in tensors]
        expected = scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
        grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7)).to(dtype)
        wanted = [each[:, mine] for each in gradients(expected, tensors, grad)]
        own = [tensor.detach()[:, mine].clone().requires_grad_() for tensor in tensors]
        ring = Ring(axis, order, whole, WIDTH**-0.5, causal, window)
        out = ring_attention(*(tensor.transpose(1, 2) for tensor in own), ring)
        found = [out, *gradients(out, own, grad[:, :, mine])]
        near = {} if dtype == torch.float32 else {"atol": 5e-2, "rtol": 5e-2}
        close(found, [expected[:, :, mine], *wanted], **near)
    layout.close()


class Wire:
    """Bytes of the operations of a block, as the dispatcher counts them."""

    def __enter__(self):
        self.bytes = {}
        self._subscription = comm.dispatcher.events.subscribe(CollectiveFinished, self._note)
        return self

    def _note(self, event):
        self.bytes[event.op] = self.bytes.get(event.op, 0) + event.bytes

    def __exit__(self, *exc):
        self._subscription.close()


@shared_ranks(4, timeout=400)
def test_bytes_on_the_wire():
    """The formulas of docs/sequence_parallel.md, for one layer."""
    group, size = dist.group.WORLD, dist.get_world_size()
    part, each = LENGTH // size, 4
    for queries, keys, sent_keys in ((8, 4, 4), (8, 2, 4)):  # two key heads go to two ranks each
        tensors = [t.detach()[:, :part].clone().requires_grad_() for t in whole_tensors(queries, keys)]
        attention = DistributedAttention(local_attention, group)
        with Wire() as first:
            attention(*tensors, 0)
        attention._equal_parts = True  # as after the first forward on a device
        with Wire() as forward:
            out = attention(*tensors, 0)
        with Wire() as backward:
            out.sum().backward()
        assert first.bytes.keys() == {"all_gather_into_tensor", "all_to_all_single"}, "lengths are compared"
        expected = BATCH * part * WIDTH * (2 * queries + 2 * sent_keys) * each
        assert forward.bytes == backward.bytes == {"all_to_all_single": expected}
    layout = ParallelLayout.build(sp=size)
    tensors = [t.detach()[:, :part].transpose(1, 2).clone().requires_grad_() for t in whole_tensors(8, 2)]
    ring = Ring(layout["sp"], TokenOrder(1, size), SequenceInfo(LENGTH), 0.5, True)
    with Wire() as forward:
        out = ring_attention(*tensors, ring)
    with Wire() as backward:
        out.sum().backward()
    moved = 2 * BATCH * part * WIDTH * 2 * each  # keys and values of a part
    # a batch of sends and receives counts what goes and what comes
    assert forward.bytes == {"batch_isend_irecv": 2 * (size - 1) * moved}
    assert backward.bytes == {"batch_isend_irecv": 2 * (2 * size - 1) * moved}
    layout.close()


@shared_ranks(4, timeout=400)
def test_the_state_of_the_process():
    with pytest.raises(LayoutError, match="no sequence-parallel groups yet"):
        parallel_state_sp.get_sequence_parallel_group()
    with pytest.raises(LayoutError, match="3"):
        parallel_state_sp.initialize_sequence_parallel(3)
    parallel_state_sp.initialize_sequence_parallel(2)
    rank = dist.get_rank()
    group = parallel_state_sp.get_sequence_parallel_group()
    assert dist.get_process_group_ranks(group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert parallel_state_sp.get_sequence_parallel_rank() == rank % 2
    assert parallel_state_sp.get_sequence_parallel_world_size() == 2
    assert parallel_state_sp.get_sequence_data_parallel_world_size() == 4
    assert parallel_state_sp.get_sequence_data_parallel_rank() == rank
    assert parallel_state_sp.get_sequence_data_parallel_group().size() == 4
    assert parallel_state_sp.get_model_parallel_world_size() == 1
    assert parallel_state_sp.get_model_parallel_rank() == 0
    assert parallel_state_sp.get_model_parallel_group().size() == 1
    parallel_state_sp.initialize_sequence_parallel(2)
    assert parallel_state_sp.get_sequence_parallel_group() is group
    assert groups._get_sequence_parallel_group() is group
