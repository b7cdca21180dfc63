"""Tokens between nodes: in two hops the same rows arrive, in fewer and larger messages between nodes."""

from __future__ import annotations

import copy
import random
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepspeed import comm
from deepspeed.moe import layer as moe_layer
from deepspeed.moe.exchange import exchange, swapped
from deepspeed.moe.layer import MoE
from deepspeed.parallel import ParallelLayout
from tests.distributed.moe.models import EXPERTS, TOKENS, WIDTH
from tests.harness import shared_ranks

NODE = 2


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4))
def test_swapping_back_gives_the_same(counts):
    rows = torch.arange(sum(map(sum, counts))).unsqueeze(1)
    turned = [list(column) for column in zip(*counts, strict=True)]
    there = swapped(rows, np.array(counts))
    assert torch.equal(swapped(there, np.array(turned)), rows)
    blocks = iter(rows.split([count for row in counts for count in row]))
    expected = [[next(blocks) for _ in row] for row in counts]
    assert torch.equal(there, torch.cat([row[place] for place in range(3) for row in expected]))


class Wire:
    """(messages, bytes) that this rank sent to ranks of other nodes."""

    def __init__(self, patch) -> None:
        self.sent: list[tuple[int, int]] = []
        plain = comm.all_to_all_single

        def counted(output, tensor, comes=None, goes=None, group=None, **kwargs):
            others = dist.get_process_group_ranks(group)
            goes_ = goes or [len(tensor) // len(others)] * len(others)
            row = tensor[0].numel() * tensor.element_size() if len(tensor) else 0
            here = dist.get_rank() // NODE
            away = [number for rank, number in zip(others, goes_, strict=True) if rank // NODE != here]
            if away and tensor.is_floating_point():
                self.sent.append((len(away), sum(away) * row))
            return plain(output, tensor, comes, goes, group=group, **kwargs)

        patch.setattr(comm, "all_to_all_single", counted)


def layouts():
    """Two nodes of two ranks, and one of four."""
    return ParallelLayout.build(ranks_per_node=NODE), ParallelLayout.build(ranks_per_node=4)


def ran(layer, tokens):
    given_ = tokens.clone().requires_grad_()
    out = layer(given_)[0]
    out.square().sum().backward()
    return [out.detach(), given_.grad, *(param.grad for param in layer.parameters())]


@shared_ranks(4)
def test_the_same_rows_arrive():
    several, one = layouts()
    wide, flat = several.experts(4).ep, one.experts(4).ep
    assert wide.meet_nodes()
    assert not flat.meet_nodes()
    assert not several.experts(2).ep.meet_nodes()
    assert [axis.ranks for axis in wide.nodes] == [
        (dist.get_rank() % 2, dist.get_rank() % 2 + 2),
        (dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1),
    ]
    drawn = random.Random(0)
    for case in range(6):
        most = (0, 1, 3)[case % 3]
        goes = [[drawn.randint(0, most) for _ in range(4)] for _ in range(4)]
        if case == 5:  # a rank that sends nothing and one that gets nothing
            goes = [[0 if rank == 1 or to == 2 else n for to, n in enumerate(row)] for rank, row in enumerate(goes)]
        mine = goes[dist.get_rank()]
        comes = [goes[rank][dist.get_rank()] for rank in range(4)]
        rows = torch.randn(sum(mine), 3)
        flow = torch.randn(sum(comes), 3)
        found = []
        for axis in (wide, flat):
            leaf, beside = rows.clone().requires_grad_(), mock.Mock()
            came = exchange(leaf, axis, comes, mine, beside)
            came.backward(flow)
            beside.assert_called_once_with()
            found.append((came.detach(), leaf.grad))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), case
    several.close()
    one.close()


@shared_ranks(4)
def test_layers_send_fewer_and_larger_messages():
    torch.manual_seed(dist.get_rank())
    for k, drops in ((1, True), (2, True), (2, False)):
        several, one = layouts()
        expert = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, WIDTH))
        options = {"min_capacity": 1, "top2_2nd_expert_sampling": False, "use_rts": False}
        layer = MoE(WIDTH, expert, EXPERTS, 4, k=k, drop_tokens=drops, use_residual=True, **options)
        plain, tokens = copy.deepcopy(layer), torch.randn(TOKENS, WIDTH)
        with mock.patch.object(moe_layer, "log_dist") as told:
            layer.join(several)
            layer.join(several)
        told.assert_called_once()
        assert "tokens travel in two hops" in told.call_args[0][0]
        plain.join(one)
        with pytest.MonkeyPatch.context() as patch:
            wire = Wire(patch)
            found = ran(layer, tokens)
            hops, wire.sent = wire.sent, []
            expected = ran(plain, tokens)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        assert [count for count, _ in hops] == [1] * 4  # there and back, in forward and backward
        assert [count for count, _ in wire.sent] == [2] * 4
        total = torch.tensor([sum(size for _, size in each) for each in (hops, wire.sent)])
        dist.all_reduce(total)
        assert total[0] == total[1]
        several.close()
        one.close()
