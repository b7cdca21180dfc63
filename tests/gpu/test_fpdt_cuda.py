"""Attention over chunks whose keys and values lie in host memory, on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from deepspeed.accelerator.cuda import CUDA_Accelerator
from deepspeed.sequence.fpdt_layer import FPDT_Attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=str(CUDA_Accelerator.why_unavailable())),
]

HEADS, KEY_HEADS, WIDTH = 8, 2, 64
HIDDEN = HEADS * WIDTH


@pytest.fixture
def group():
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([dist.get_rank()])
    if mine:
        dist.destroy_process_group()


def attention(group, chunk):
    torch.manual_seed(0)
    config = SimpleNamespace(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, kv_channels=WIDTH
    )
    shapes = ((HIDDEN + 2 * KEY_HEADS * WIDTH, HIDDEN), (HIDDEN, HIDDEN))
    first, second = (torch.nn.Parameter(torch.randn(each, device="cuda", dtype=torch.bfloat16) / 32) for each in shapes)
    return FPDT_Attention(config, first, None, second, None, group, return_bias=False, chunk_size=chunk), first, second


def whole(hidden, first, second):
    sizes = [count * WIDTH for count in (HEADS, KEY_HEADS, KEY_HEADS)]
    split = F.linear(hidden, first).split(sizes, -1)
    query, key, value = (each.unflatten(-1, (-1, WIDTH)).permute(1, 2, 0, 3) for each in split)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return F.linear(out.permute(2, 0, 1, 3).flatten(2), second)


@pytest.mark.parametrize("offload", [True, False])
def test_the_same_numbers_as_whole_attention(group, offload):
    made, first, second = attention(group, chunk=512)
    hidden = torch.randn(2048, 1, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    flow = torch.randn_like(hidden)
    leaves = [each.detach().float().requires_grad_() for each in (hidden, first, second)]
    expected = whole(*leaves)
    wanted = torch.autograd.grad(expected, leaves, flow.float())
    out = made(hidden, None, None, None, cpu_offloading=offload)
    found = torch.autograd.grad(out, [hidden, first, second], flow)
    for mine, theirs in zip((out, *found), (expected, *wanted), strict=True):
        distance = (mine.float() - theirs).norm() / theirs.norm()
        assert distance < 1e-2, distance


def test_the_device_holds_a_few_chunks(group):
    """Beside input and output, what the forward of 64 chunks takes is what a few of them take."""
    length, chunk = 65_536, 1024
    made, *_ = attention(group, chunk)
    hidden = torch.randn(length, 1, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    unit = length * HIDDEN * 2

    def peak(offload):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = made(hidden, None, None, None, cpu_offloading=offload)
        torch.cuda.synchronize()
        forward = (torch.cuda.max_memory_allocated() - before) / unit
        out.float().sum().backward()
        torch.cuda.synchronize()
        backward = (torch.cuda.max_memory_allocated() - before) / unit
        hidden.grad = None
        return forward, backward

    away, kept = peak(offload=True), peak(offload=False)
    assert away[0] < 1.4, (away, kept)  # the output is 1
    assert kept[0] > away[0] + 1, (away, kept)  # queries, keys and values of all chunks
