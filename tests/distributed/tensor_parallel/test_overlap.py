"""Column layers that read one tensor: one sum of its gradient, beside a product, with the gradients of plain layers."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from deepspeed.parallel import ParallelLayout
from deepspeed.tensor_parallel import layers as tensor_layers
from deepspeed.tensor_parallel.layers import OverlappedInput
from tests.harness import shared_ranks

WIDTH = 6


class Story(TorchDispatchMode):
    """What happens, in order: products, and how sums begin and end."""

    def __init__(self):
        super().__init__()
        self.told = []
        self._plain = tensor_layers.comm.all_reduce

    def all_reduce(self, tensor, **options):
        self.told.append("begin")
        return Told(self._plain(tensor, **options), self.told)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            self.told.append("product")
        return function(*args, **(kwargs or {}))


class Told:
    def __init__(self, work, told):
        self.work, self.told = work, told

    def wait(self):
        self.told.append("end")
        self.work.wait()


def layers(rank):
    torch.manual_seed(0)
    whole = [torch.randn(8, WIDTH) for _ in range(3)]
    bias = torch.randn(8)
    mine = slice(rank * 4, rank * 4 + 4)
    weights = [each[mine].clone().requires_grad_() for each in whole]
    return whole, bias, weights, bias[mine].clone().requires_grad_(), mine


@shared_ranks(2)
def test_one_sum_beside_a_product():
    rank = dist.get_rank()
    axis = ParallelLayout.build(tp=2)["tp"]
    whole, bias, weights, own_bias, mine = layers(rank)
    x, flow = torch.randn(5, WIDTH, requires_grad=True), torch.randn(3, 5, 8)
    wanted = [each.clone().requires_grad_() for each in whole]
    outputs = [F.linear(x.tanh(), weight, bias if at == 0 else None) for at, weight in enumerate(wanted)]
    expected = torch.autograd.grad(outputs, [x, *wanted], list(flow))
    for again in (False, True):

        def region(hidden):
            gate = OverlappedInput(axis)
            found = [gate.linear(hidden, each, own_bias if at == 0 else None) for at, each in enumerate(weights)]
            gate.forget()
            return found

        inside = x.tanh()
        found = checkpoint(region, inside, use_reentrant=False) if again else region(inside)
        for out, theirs in zip(found, outputs, strict=True):
            torch.testing.assert_close(out, theirs[:, mine])
        with Story() as story, mock.patch.object(tensor_layers.comm, "all_reduce", story.all_reduce):
            grads = torch.autograd.grad(found, [x, *weights, own_bias], [each[:, mine] for each in flow])
        torch.testing.assert_close(grads[0], expected[0])
        for grad, theirs in zip(grads[1:4], expected[1:], strict=True):
            torch.testing.assert_close(grad, theirs[mine])
        torch.testing.assert_close(grads[4], flow[0][:, mine].sum(0))
        assert story.told.count("begin") == story.told.count("end") == 1
        between = story.told[story.told.index("begin") : story.told.index("end")]
        assert between == ["begin", "product"]


@shared_ranks(2)
def test_neighbours():
    """Another tensor, frozen weights, an input without gradient, 16 bits by autocast."""
    rank = dist.get_rank()
    axis = ParallelLayout.build(tp=2)["tp"]
    whole, _, weights, *_ = layers(rank)
    gate = OverlappedInput(axis)
    for frozen, trains_input in ((False, True), (True, True), (False, False)):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_(trains_input)
        for each in weights:
            each.requires_grad_(not frozen)
        hidden = x * 2
        first = gate.linear(hidden, weights[0], None)
        second = gate.linear(hidden, weights[1], None)
        third = gate.linear(hidden * 1, weights[2], None)
        total = first.sum() + second.sum() + third.sum()
        inputs = [*([x] if trains_input else []), *([] if frozen else weights)]
        grads = list(torch.autograd.grad(total, inputs))
        if trains_input:
            expected = 2 * sum(each.sum(0) for each in whole)
            torch.testing.assert_close(grads.pop(0), expected.expand(4, WIDTH))
        for grad in grads:
            torch.testing.assert_close(grad, (x.detach() * 2).sum(0).expand(4, WIDTH))
        gate.forget()
    for each in weights:
        each.requires_grad_(True)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = gate.linear(x * 1, weights[0], None)
    assert out.dtype is torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), [x, weights[0]])
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]
    torch.testing.assert_close(grads[0], whole[0].sum(0).expand(4, WIDTH), atol=0.1, rtol=0.05)
