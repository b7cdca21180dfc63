"""Ops by their builders on a GPU: a raised flag there skips the update without the host looking at it."""

from __future__ import annotations

import pytest
import torch

from deepspeed.ops.op_builder import FusedAdamBuilder, FusedLionBuilder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("raised", [0, 1])
def test_adam_and_lion_with_a_flag_on_the_device(raised):
    torch.manual_seed(0)
    grad, value = torch.randn(2, 300, device="cuda")
    flag = torch.tensor([raised], device="cuda", dtype=torch.int)
    param = torch.nn.Parameter(value.clone())
    param.grad = grad.clone()
    torch.optim.AdamW([param], lr=0.1, weight_decay=0.2).step()
    ours, first, second = value.clone(), torch.zeros_like(value), torch.zeros_like(value)
    lists = [[grad.clone()], [ours], [first], [second]]
    FusedAdamBuilder().load().multi_tensor_adam(2048, flag, lists, 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.2)
    torch.testing.assert_close(ours, value if raised else param.data)
    assert bool(first.any()) is not bool(raised)
    lion, momentum = value.clone(), torch.zeros_like(value)
    FusedLionBuilder().load().multi_tensor_lion(2048, flag, [[grad], [lion], [momentum]], 0.1, 0.9, 0.99, 1, 0.0)
    torch.testing.assert_close(lion, value if raised else value - 0.1 * grad.sign())
