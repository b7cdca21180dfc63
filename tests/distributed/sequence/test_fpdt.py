"""Attention, perceptron and loss over chunks of a sequence that ranks share, against the whole on one rank."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.sequence.fpdt_layer import (
    FPDT_FFN,
    FPDT_Attention,
    FPDT_InputConstruct,
    FPDT_LogitsLoss,
)
from deepspeed.sequence.layer import apply_rotary_pos_emb
from tests.harness import shared_ranks

LENGTH, BATCH, HIDDEN, WIDTH = 32, 2, 16, 4


def shape(heads, key_heads):
    return SimpleNamespace(
        hidden_size=HIDDEN, num_attention_heads=heads, num_key_value_heads=key_heads, kv_channels=WIDTH
    )


def weights(heads, key_heads):
    torch.manual_seed(heads * 10 + key_heads)
    rows = (heads + 2 * key_heads) * WIDTH
    shapes = ((rows, HIDDEN), (rows,), (HIDDEN, heads * WIDTH), (HIDDEN,))
    return [torch.nn.Parameter(torch.randn(each) / 4) for each in shapes]


def turns():
    angles = torch.arange(LENGTH)[:, None] * 0.3 ** torch.arange(WIDTH)[None]
    return [each[:, None, None] for each in (angles.cos(), angles.sin())]


def whole_attention(hidden, parameters, heads, key_heads, rotary):
    """[length, batch, hidden] by torch's attention."""
    first, first_bias, second, second_bias = parameters
    sizes = [count * WIDTH for count in (heads, key_heads, key_heads)]
    split = F.linear(hidden, first, first_bias).split(sizes, -1)
    query, key, value = (each.unflatten(-1, (-1, WIDTH)) for each in split)  # [length, batch, heads, width]
    if rotary is not None:
        query, key = apply_rotary_pos_emb(query, *rotary), apply_rotary_pos_emb(key, *rotary)
    tensors = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    out = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=heads != key_heads)
    return F.linear(out.permute(2, 0, 1, 3).flatten(2), second, second_bias)


def order(chunk):
    """Which tokens this rank holds."""
    at = torch.arange(LENGTH)[None]
    args = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=chunk)
    return FPDT_InputConstruct(at, None, None, None, None, args, dist.get_world_size(), dist.get_rank()).generate()[0][
        0
    ]


def summed(grads):
    for grad in grads:
        dist.all_reduce(grad)
    return grads


def close(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@shared_ranks(1, 2, 4, timeout=400)
def test_attention_over_chunks():
    """Equal, fewer and single key heads; one chunk and many; in host memory and not; turned and not; bias beside it."""
    cases = [
        (4, 4, 32, True, True),
        (4, 4, 8, True, False),
        (8, 2, 16, True, True),
        (4, 1, 8, False, True),
        (6, 3, 4, True, True),
        (4, 2, 64, True, False),  # a sequence that is shorter than a chunk
    ]
    for heads, key_heads, chunk, offload, rotary in cases:
        if heads < dist.get_world_size():
            continue
        parameters = weights(heads, key_heads)
        torch.manual_seed(1)
        hidden, flow = torch.randn(LENGTH, BATCH, HIDDEN, requires_grad=True), torch.randn(LENGTH, BATCH, HIDDEN)
        emb = turns() if rotary else None
        expected = whole_attention(hidden, parameters, heads, key_heads, emb)
        wanted = torch.autograd.grad(expected, [hidden, *parameters], flow)
        mine = order(min(chunk, LENGTH))
        part = hidden.detach()[mine].requires_grad_()
        attention = FPDT_Attention(
            shape(heads, key_heads), *parameters, dist.group.WORLD, return_bias=False, chunk_size=chunk
        )
        out = attention(part, None, None, emb, cpu_offloading=offload)
        close([out], [expected[mine]])
        for _ in range(2):  # a second time through the same graph
            found = torch.autograd.grad(out, [part, *parameters], flow[mine], retain_graph=True)
            close([found[0], *summed(list(found[1:]))], [wanted[0][mine], *wanted[1:]])


class Live(TorchDispatchMode):
    """Counts bytes of tensors that are alive, apart for host memory."""

    def __init__(self, monkeypatch, given):
        """`given` tensors are there before, and are not counted."""
        super().__init__()
        self.device, self.host, self.peak = 0, 0, 0
        self._known = {each.untyped_storage()._cdata for each in given}
        self._on_host = False
        empty = get_accelerator().pin_empty

        def pin_empty(_, *size, **options):
            self._on_host = True
            made = empty(*size, **options)
            self._on_host = False
            return made

        exchange = comm.all_to_all_single

        def all_to_all_single(output, tensor, *arguments, **options):
            # The threads of gloo let go of what they sent when they please: they are given copies that nobody counts.
            with _disable_current_modes():
                landed = torch.empty_like(output)
                exchange(landed, tensor.clone(), *arguments, **options)
                output.copy_(landed)

        monkeypatch.setattr(type(get_accelerator()), "pin_empty", pin_empty)
        monkeypatch.setattr(comm, "all_to_all_single", all_to_all_single)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor):
                self._count(each, self._on_host)
        return found

    def _count(self, tensor, host):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._add(size, host)
        weakref.finalize(storage, self._forget, key, size, host)

    def _forget(self, key, size, host):
        self._known.discard(key)
        self._add(-size, host)

    def _add(self, size, host):
        if host:
            self.host += size
        else:
            self.device += size
            self.peak = max(self.peak, self.device)


@shared_ranks(2, timeout=400)
def test_what_lies_where(monkeypatch):
    """After forward the device holds the output alone; the host holds queries, keys, values, result, sums, context."""
    heads, key_heads = 4, 2
    parameters = weights(heads, key_heads)
    part = LENGTH // 2
    peaks = {}
    for chunk, offload in ((8, True), (8, False), (LENGTH, True)):
        hidden = torch.randn(part, BATCH, HIDDEN, requires_grad=True)
        attention = FPDT_Attention(
            shape(heads, key_heads), *parameters, dist.group.WORLD, return_bias=True, chunk_size=chunk
        )
        with Live(monkeypatch, [hidden, *parameters]) as live:
            out, bias = attention(hidden, None, None, None, cpu_offloading=offload)
            assert bias is parameters[3]
            unit = part * BATCH * WIDTH * 4  # bytes of one head of this rank's part
            own = 2 * unit  # of one head of the whole sequence, of which this rank has half of the heads
            kept = (2 * heads // 2 + 2 * key_heads // 2) * own + own // WIDTH * heads // 2 + heads * unit
            assert live.host == (kept if offload else 0)
            assert live.device == out.untyped_storage().nbytes() + (0 if offload else kept)
            peaks[chunk, offload] = live.peak
            out.sum().backward()
            peaks[chunk, offload] = live.peak
            del out
            assert live.host == 0
    assert peaks[8, True] < peaks[8, False]
    assert peaks[8, True] < peaks[LENGTH, True]


@shared_ranks(2, timeout=400)
def test_perceptron_loss_and_inputs():
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(LENGTH, BATCH, HIDDEN, requires_grad=True)
    parameters = [torch.randn(each, requires_grad=True) for each in ((24, HIDDEN), (24,), (HIDDEN, 24), (HIDDEN,))]
    w1, b1, w2, b2 = parameters
    expected = F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2)
    for add, chunk in ((True, 8), (False, 5), (False, 100)):
        out, bias = FPDT_FFN.apply(x, w1, b1, w2, b2, add, chunk)
        wanted = expected + b2
        close([out if add else out + bias], [wanted])
        flow = torch.randn_like(wanted)
        inputs = [x, *parameters]
        close(
            torch.autograd.grad(out if add else out + bias, inputs, flow),
            torch.autograd.grad(wanted, inputs, flow, retain_graph=True),
        )
    parts = x.detach().clone().requires_grad_()
    table = torch.randn(11, HIDDEN, requires_grad=True)
    args = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=8)
    labels = torch.randint(11, (BATCH, LENGTH))
    mask = torch.arange(LENGTH).expand(BATCH, LENGTH) % 3 > 0
    made = FPDT_InputConstruct(labels, labels, mask, None, torch.arange(LENGTH)[None], args, 2, rank).generate()
    mine = order(8)
    assert made[3] is None
    assert torch.equal(made[0], labels[:, mine])
    assert torch.equal(made[4][0], mine)
    assert mine.tolist()[:5] == [[0, 1, 2, 3, 8], [4, 5, 6, 7, 12]][rank]  # as DeepSpeed 0.19.8 cuts them
    losses = F.cross_entropy(F.linear(x, table).flatten(0, 1), labels.t().flatten(), reduction="none")
    losses = losses.view(LENGTH, BATCH)
    for chunks in (1, 3, 4):
        part = parts[mine]
        found = FPDT_LogitsLoss.apply(part, made[1], table, rank, 2, dist.group.WORLD, chunks)
        close([(found * made[2].t()).sum()], [(losses * mask.t()).sum()])
        grads = torch.autograd.grad((found * made[2].t()).sum(), [parts, table])
        close(summed(list(grads)), torch.autograd.grad((losses * mask.t()).sum(), [x, table], retain_graph=True))
    with pytest.raises(UsageError, match="of 2, but is rank"):
        FPDT_LogitsLoss.apply(part, made[1], table, rank + 1, 2, dist.group.WORLD, 1)


@shared_ranks(2)
def test_what_does_not_fit():
    group, parameters = dist.group.WORLD, weights(4, 2)
    hidden = torch.randn(LENGTH // 2, BATCH, HIDDEN)
    attention = FPDT_Attention(shape(4, 2), *parameters, group, chunk_size=12)
    with pytest.raises(
        UsageError, match="16 tokens on each of 2 sequence-parallel ranks cannot be cut into chunks of 12"
    ):
        attention(hidden)
    with pytest.raises(UsageError, match=r"a mask of shape \(2, 32\)"):
        attention(hidden, torch.ones(2, 32))
    with pytest.raises(UsageError, match="no inference_params"):
        attention(hidden, None, object())
    with pytest.raises(UsageError, match="gather_idx 1"):
        FPDT_Attention(shape(4, 2), *parameters, group, gather_idx=1)
    with pytest.raises(UsageError, match="32 rows; the heads of the config need 48"):
        FPDT_Attention(shape(4, 4), *parameters, group)
    with pytest.raises(UsageError, match=r"attention_dropout is 0\.1"):
        FPDT_Attention(SimpleNamespace(**vars(shape(4, 2)), attention_dropout=0.1), *parameters, group)
    tokens = torch.zeros(1, 12).long()
    with pytest.raises(UsageError, match="12 tokens cannot be cut into chunks of 8"):
        FPDT_InputConstruct(
            tokens, None, None, None, None, SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=8), 2, 0
        )
