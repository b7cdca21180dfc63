"""A thread uses libraries before a model does: in order, whatever fails, and who forks can wait for it."""

from __future__ import annotations

import threading

import pytest
import torch

from deepspeed.ops import vendor_loading
from deepspeed.ops.vendor_loading import attention, load_vendor, product, product8, wait_for_vendor

CPU = torch.device("cpu")


def test_uses_run_in_order_in_a_thread_of_their_own_and_one_that_fails_stops_none():
    seen = []

    def fails(device):
        raise RuntimeError("no kernel for this device")

    uses = [lambda device: seen.append((device, threading.get_ident())), fails, lambda device: seen.append("last")]
    load_vendor(CPU, uses).result(timeout=60)
    (device, thread), last = seen
    assert (device, last) == (CPU, "last")
    assert thread != threading.get_ident()


def test_who_forks_waits_for_the_end():
    go, ended = threading.Event(), []
    first = load_vendor(CPU, [lambda device: go.wait(60), lambda device: ended.append("first")])
    second = load_vendor(CPU, [lambda device: go.wait(60), lambda device: ended.append("second")])
    assert not first.done()
    assert not second.done()
    go.set()
    wait_for_vendor()
    assert sorted(ended) == ["first", "second"]
    wait_for_vendor()


@pytest.mark.parametrize(
    "use",
    [
        product(48, 8192, torch.float32),
        product(8192, 48, torch.bfloat16),
        attention(4, 16, torch.float32),
        attention(3, 20, torch.bfloat16),
        product8(48, 8192, torch.bfloat16),
    ],
)
def test_what_is_used_computes_on_any_device(use, monkeypatch):
    monkeypatch.setattr(vendor_loading, "_ROWS", 16)
    monkeypatch.setattr(vendor_loading, "_MOST", 64)  # a processor may have no kernels for bf16
    before = torch.get_rng_state()
    for found in use(CPU):
        assert not found.any()
    assert torch.equal(torch.get_rng_state(), before), "the numbers of a run do not change"
