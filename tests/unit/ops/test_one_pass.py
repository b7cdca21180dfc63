"""Steps over host memory: factors, gradients and copies from elsewhere, and where states lie."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.ops import batch_rule
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import ONE_PASS, DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.ops.one_pass import OnePass

CPU = (DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad)
SHAPES = [(33,), (4, 70), (), (0,), (300,)]


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(cls, shapes=SHAPES, **arguments):
    params = [nn.Parameter(normal(shape, seed)) for seed, shape in enumerate(shapes)]
    return params, cls(params, lr=1e-2, weight_decay=0.1, **arguments)


def assert_same(left, right):
    for mine, theirs in zip(left, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [None, 16, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cls", CPU)
def test_a_one_pass_is_a_step_with_scaled_gradients_and_a_copy(cls, dtype, bits):
    params, optimizer = made(cls, moment_bits=bits)
    plain, beside = made(cls, moment_bits=bits)
    for step in range(3):
        grads = [normal(p.shape, 50 + 10 * step + i).to(dtype) for i, p in enumerate(params)]
        outs = {param: torch.empty(param.numel(), dtype=dtype) for param in params[1:]}
        optimizer.one_pass = OnePass(0.25, {p: g.flatten() for p, g in zip(params, grads, strict=True)}, outs)
        optimizer.step()
        for param, grad in zip(plain, grads, strict=True):
            param.grad = grad.float() * 0.25
        beside.step()
        assert_same(params, plain)
        for param, out in outs.items():
            assert torch.equal(out.view(param.shape), param.detach().to(dtype))
    assert all(param.grad is None for param in params)


def test_parameters_in_host_memory_are_updated_where_a_device_has_kernels(monkeypatch):
    params, optimizer = made(FusedAdam, moment_bits=8)
    plain, beside = made(FusedAdam, moment_bits=8)
    for one, other in zip(params, plain, strict=True):
        one.grad = other.grad = torch.ones_like(one)
    beside.step()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(batch_rule, "op", lambda _name: ONE_PASS.triton)
    optimizer.step()
    assert_same(params, plain)


@pytest.mark.parametrize("cls", CPU)
def test_what_is_not_given_comes_from_the_parameter(cls):
    params, optimizer = made(cls, [(8,), (8,), (8,)])
    plain, beside = made(cls, [(8,), (8,), (8,)])
    params[0].grad = normal(8, 1)
    optimizer.one_pass = OnePass(0.5, {params[1]: normal(8, 2)})
    optimizer.step()
    plain[0].grad, plain[1].grad = normal(8, 1) * 0.5, normal(8, 2) * 0.5
    beside.step()
    assert_same(params, plain)
    assert params[2] not in optimizer.state


@pytest.mark.parametrize("cls", CPU)
def test_a_step_may_be_taken_for_some_parameters_by_another_thread(cls):
    params, optimizer = made(cls, [(40,), (40,)])
    plain, beside = made(cls, [(40,), (40,)])
    for one, other in zip(params, plain, strict=True):
        one.grad, other.grad = normal(40, 3), normal(40, 3)
    group = optimizer.param_groups[0]

    def tiles():
        for param in params:
            group["params"] = [param]
            optimizer.step()

    worker = threading.Thread(target=tiles)
    worker.start()
    worker.join()
    beside.step()
    assert_same(params, plain)


@pytest.mark.parametrize("name", ["grads", "outs"])
@pytest.mark.parametrize("wrong", [torch.zeros(5), torch.zeros(6, dtype=torch.int32), torch.zeros(12)[::2]])
def test_a_tensor_that_does_not_fit_is_refused_before_anything_changes(name, wrong):
    params, optimizer = made(DeepSpeedCPUAdam, [(3,), (2, 3)])
    for param in params:
        param.grad = torch.ones_like(param)
    before = copy.deepcopy(params)
    optimizer.one_pass = OnePass(**{name: {params[1]: wrong}})
    with pytest.raises(UsageError, match=rf"OnePass.{name} .*shape \(2, 3\).*6 elements"):
        optimizer.step()
    assert_same(params, before)
    assert not optimizer.state


def test_an_optimizer_for_devices_takes_no_one_pass():
    optimizer = FusedAdam([nn.Parameter(torch.ones(2))])
    optimizer.one_pass = OnePass()
    with pytest.raises(UsageError, match="FusedAdam has a one_pass"):
        optimizer.step()


@pytest.mark.parametrize("bits", [None, 16, 8])
@pytest.mark.parametrize("cls", CPU)
def test_states_lie_where_the_layout_says(cls, bits):
    params, optimizer = made(cls, moment_bits=bits)
    given = {}

    def new_state(param, dtype, name):
        numel = next(n for key, kind, n in optimizer.state_layout(param) if (key, kind) == (name, dtype))
        given[param, name] = torch.zeros(numel, dtype=dtype)
        return given[param, name]

    optimizer.new_state = new_state
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param in params:
        layout = optimizer.state_layout(param)
        assert {"step", *(name for name, _, _ in layout)} == set(optimizer.state[param])
        for name, dtype, numel in layout:
            held = optimizer.state[param][name]
            assert (held.dtype, held.numel()) == (dtype, numel)
            assert held.data_ptr() == given[param, name].data_ptr()


def test_memory_of_another_size_is_refused():
    params, optimizer = made(DeepSpeedCPUAdam, [(6,)])
    params[0].grad = torch.ones(6)
    optimizer.new_state = lambda param, dtype, name: torch.zeros(5, dtype=dtype)
    with pytest.raises(UsageError, match=r"new_state gave 5 elements .* for exp_avg .* says 6"):
        optimizer.step()


@pytest.mark.parametrize("cls", CPU)
@pytest.mark.parametrize("bits", [7, 0, True, "8"])
def test_other_widths_are_refused(cls, bits):
    with pytest.raises(ValueError, match=f"{cls.__name__}: moment_bits is .*must be 8"):
        made(cls, moment_bits=bits)


def test_a_step_with_a_one_pass_can_be_taken_back():
    params, optimizer = made(DeepSpeedCPUAdam, moment_bits=8)
    before = [param.detach().clone() for param in params]
    for _ in range(2):
        optimizer.one_pass = OnePass(2.0, {param: torch.ones_like(param) for param in params})
        states = copy.deepcopy([optimizer.state.get(param) for param in params])
        before = [param.detach().clone() for param in params]
        optimizer.step_subgroup(0)
        optimizer.rollback_subgroup(0)
        assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
        for param, state in zip(params, states, strict=True):
            for key, value in (state or {}).items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[param][key]))
        optimizer.step()
