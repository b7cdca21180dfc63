"""Libraries are used before a model uses them: in order, whatever fails, with numbers that mean nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from deepspeed.ops import precompile
from deepspeed.ops.precompile import attention, load_libraries, product, product8

CPU = torch.device("cpu")


def test_uses_run_in_order_and_one_that_fails_stops_none():
    seen = []

    def fails(device):
        raise RuntimeError("no kernel for this device")

    load_libraries(CPU, [lambda device: seen.append(device), fails, lambda device: seen.append("last")])
    assert seen == [CPU, "last"]


@pytest.mark.parametrize(
    "use",
    [
        partial(product, 48, 8192, torch.float32),
        partial(product, 8192, 48, torch.bfloat16),
        partial(attention, 4, 16, torch.float32),
        partial(attention, 3, 20, torch.bfloat16),
        partial(product8, 48, 8192, torch.bfloat16),
    ],
)
def test_what_is_used_computes_on_any_device(use, monkeypatch):
    monkeypatch.setattr(precompile, "_ROWS", 16)
    monkeypatch.setattr(precompile, "_MOST", 64)  # a processor may have no kernels for bf16
    before = torch.get_rng_state()
    for found in use(CPU):
        assert not found.any()
    assert torch.equal(torch.get_rng_state(), before), "the numbers of a run do not change"
