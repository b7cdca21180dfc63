"""What every optimizer class of the library does alike: groups, closures, skipped parameters, errors, state dicts."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.muon import Muon, MuonWithAuxAdam, SingleDeviceMuon

FUSED = (FusedAdam, FusedLion, FusedLamb)
CPU = (DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion)
MUON = (Muon, SingleDeviceMuon)


def aux(params, **arguments):
    """MuonWithAuxAdam with everything in its Adam half, which looks like the others."""
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    return MuonWithAuxAdam([{**arguments, "use_muon": False, **group} for group in groups])


EVERY = (*FUSED, *CPU, *MUON, aux)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(dtype=torch.float32):
    return [nn.Parameter(normal(*shape, seed=seed).to(dtype)) for seed, shape in enumerate([(4, 3), (2, 5), (3, 3)])]


def train(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        for place, param in enumerate(params):
            param.grad = normal(*param.shape, seed=100 + 10 * step + place).to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize(
    ("cls", "signature"),
    [
        (
            FusedAdam,
            "params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, adam_w_mode=True, "
            "weight_decay=0.0, amsgrad=False, set_grad_none=True",
        ),
        (
            DeepSpeedCPUAdam,
            "model_params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, weight_decay=0, "
            "amsgrad=False, adamw_mode=True, fp32_optimizer_states=True",
        ),
        (
            DeepSpeedCPUAdagrad,
            "model_params, lr=0.01, eps=1e-10, weight_decay=0, amsgrad=False, fp32_optimizer_states=True",
        ),
        (
            FusedLamb,
            "params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, eps_inside_sqrt=False, "
            "weight_decay=0.0, max_grad_norm=0.0, max_coeff=10.0, min_coeff=0.01, amsgrad=False",
        ),
        (FusedLion, "params, lr=0.001, betas=(0.9, 0.999), weight_decay=0.0, set_grad_none=True"),
        (DeepSpeedCPULion, "model_params, lr=0.001, betas=(0.9, 0.999), weight_decay=0, fp32_optimizer_states=True"),
        (Muon, "params, lr=0.02, weight_decay=0, momentum=0.95, ns_method='gram'"),
        (SingleDeviceMuon, "params, lr=0.02, weight_decay=0, momentum=0.95, ns_method='gram'"),
        (
            MuonWithAuxAdam,
            "param_groups, adam_optimizer=None, adam_optimizer_kwargs=None, adam_w_mode=True, fallback_to_inline=False",
        ),
    ],
)
def test_constructors(cls, signature):
    found = inspect.signature(cls).parameters.values()
    positional = [each for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert ", ".join(str(each.replace(annotation=each.empty)) for each in positional) == signature
    assert issubclass(cls, torch.optim.Optimizer)


@pytest.mark.parametrize("cls", EVERY)
def test_groups_have_their_own_numbers(cls):
    together, alone = parameters(), parameters()
    optimizer = cls([{"params": together[:1], "lr": 0.1}, {"params": together[1:2]}], lr=0.01)
    optimizer.add_param_group({"params": together[2:], "lr": 0.5, **({"use_muon": False} if cls is aux else {})})
    others = [cls([param], lr=lr) for param, lr in zip(alone, (0.1, 0.01, 0.5), strict=True)]
    train(optimizer, together, 2)
    for step in range(2):
        for place, (param, each) in enumerate(zip(alone, others, strict=True)):
            param.grad = normal(*param.shape, seed=100 + 10 * step + place)
            each.step()
    for left, right in zip(together, alone, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cls", EVERY)
def test_parameters_without_gradient_or_elements(cls):
    params = [*parameters(), nn.Parameter(torch.empty(0, 3))]
    before = params[1].detach().clone()
    optimizer = cls(params)
    for param in params:
        param.grad = torch.ones_like(param)
    params[1].grad = None
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state
    assert not torch.equal(params[0], parameters()[0])
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)
    optimizer.step()


@pytest.mark.parametrize("cls", EVERY)
def test_closure(cls):
    params = parameters()
    optimizer = cls(params)
    optimizer.zero_grad()

    def closure():
        loss = sum((param**2).sum() for param in params)
        loss.backward()
        return loss

    expected = sum((param.detach() ** 2).sum() for param in params)
    assert optimizer.step(closure) == expected
    assert sum((param.detach() ** 2).sum() for param in params) < expected


@pytest.mark.parametrize("cls", EVERY)
def test_wrong_gradients_and_parameters(cls):
    params = parameters()
    optimizer = cls(params)
    for param in params:
        param.grad = torch.ones_like(param)
    params[2].grad = torch.ones(3, 3).to_sparse()
    before = params[0].detach().clone()
    if not optimizer.takes_sparse:
        with pytest.raises(RuntimeError, match=r"sparse_coo gradient .*\(3, 3\)"):
            optimizer.step()
        assert torch.equal(params[0], before)
        assert not optimizer.state
    odd = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    odd.grad = torch.ones_like(odd)
    with pytest.raises(TypeError, match=r"torch.complex64"):
        cls([odd]).step()


@pytest.mark.parametrize("cls", CPU)
def test_cpu_classes_say_where_a_parameter_is(cls):
    param = nn.Parameter(torch.empty(2, 2, device="meta"))
    optimizer = cls([param])
    param.grad = torch.empty(2, 2, device="meta")
    with pytest.raises(RuntimeError, match=r"\(2, 2\) on meta"):
        optimizer.step()


@pytest.mark.parametrize("cls", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_training_goes_on_after_a_state_dict(cls, dtype):
    straight, stopped = parameters(dtype), parameters(dtype)
    optimizer = cls(straight, lr=0.01)
    train(optimizer, straight, 4)
    first = cls(stopped, lr=0.01)
    train(first, stopped, 2)
    saved = pickle.loads(pickle.dumps(first.state_dict()))
    second = cls(stopped, lr=1.0)
    second.load_state_dict(saved)
    assert second.param_groups[0]["lr"] == 0.01
    train(second, stopped, 2, first=2)
    assert all(torch.equal(left, right) for left, right in zip(straight, stopped, strict=True))


@pytest.mark.parametrize("cls", EVERY)
def test_hooks_see_the_states_that_are_loaded(cls):
    def change(optimizer, state_dict):
        changed = {index: {**state, "step": 77} for index, state in state_dict["state"].items()}
        return {**state_dict, "state": changed}

    params, steps = parameters(), []
    optimizer = cls(params)
    train(optimizer, params, 1)
    optimizer.register_load_state_dict_pre_hook(change)
    optimizer.register_load_state_dict_post_hook(
        lambda loaded: steps.extend(loaded.state[param]["step"] for param in params)
    )
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert steps == [77] * len(params)


@pytest.mark.parametrize("cls", EVERY)
def test_a_copy_goes_on_alike(cls):
    params = parameters()
    optimizer = cls(params)
    train(optimizer, params, 1)
    twin = copy.deepcopy(optimizer)
    twins = [param for group in twin.param_groups for param in group["params"]]
    for each, targets in ((optimizer, params), (twin, twins)):
        train(each, targets, 1, first=1)
    assert all(torch.equal(left, right) for left, right in zip(params, twins, strict=True))


def dtypes_of_moments(optimizer):
    values = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    assert values
    return {value.dtype for value in values}


@pytest.mark.parametrize("cls", EVERY)
@pytest.mark.parametrize(("dtype", "held"), [(torch.float16, torch.float32), (torch.float32, torch.bfloat16)])
def test_moments_are_held_as_told(cls, dtype, held):
    params = parameters(dtype)
    optimizer = cls(params, lr=0.01)
    assert optimizer.hold_states(held)
    train(optimizer, params, 2)
    assert dtypes_of_moments(optimizer) == {held}
    again = cls(parameters(dtype))
    again.hold_states(held)
    again.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    assert dtypes_of_moments(again) == {held}
    (first, *_), (copied, *_) = (list(each.state.values()) for each in (optimizer, again))
    assert all(torch.equal(value, copied[name]) for name, value in first.items() if torch.is_tensor(value))
    twin = copy.deepcopy(optimizer)
    twin.state.clear()
    twins = [param for group in twin.param_groups for param in group["params"]]
    train(twin, twins, 1)
    assert dtypes_of_moments(twin) == {held}


@pytest.mark.parametrize("cls", EVERY)
def test_moments_that_are_there_are_converted(cls):
    params = parameters(torch.bfloat16)
    optimizer = cls(params)
    train(optimizer, params, 1)
    before = [{k: v for k, v in state.items() if torch.is_tensor(v)} for state in optimizer.state.values()]
    optimizer.hold_states(torch.float64)
    assert dtypes_of_moments(optimizer) == {torch.float64}
    for old, state in zip(before, optimizer.state.values(), strict=True):
        assert all(torch.equal(state[name], value.double()) for name, value in old.items())


def test_moments_of_small_gradients_in_fp16():
    """In fp16 the square of the gradient is zero, and every step is too long."""
    param = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    optimizer = FusedAdam([param], lr=1e-3)
    optimizer.hold_states(torch.float32)
    for _ in range(5):
        param.grad = torch.full_like(param, 1e-4)
        optimizer.step()
    torch.testing.assert_close(param.detach().float(), torch.full((4,), -0.005), rtol=1e-2, atol=0)


def test_both_halves_of_muon_hold_their_moments_as_told():
    for adam, told in ((None, True), (FusedAdam, True), (torch.optim.AdamW, False)):
        matrix, vector = nn.Parameter(normal(4, 4).bfloat16()), nn.Parameter(normal(3).bfloat16())
        groups = [{"params": [matrix], "use_muon": True}, {"params": [vector], "use_muon": False}]
        optimizer = MuonWithAuxAdam(groups, adam_optimizer=adam)
        assert optimizer.hold_states(torch.float32) == told
        train(optimizer, [matrix, vector], 1)
        assert optimizer.state[matrix]["momentum_buffer"].dtype == torch.float32
        assert (optimizer.state[vector]["exp_avg"].dtype == torch.float32) == told


def test_a_copy_keeps_its_settings():
    param = nn.Parameter(torch.ones(2))
    assert copy.deepcopy(FusedAdam([param], adam_w_mode=False)).adam_w_mode is False
    assert copy.deepcopy(DeepSpeedCPULion([param], fp32_optimizer_states=False)).fp32_optimizer_states is False
    assert copy.deepcopy(FusedLion([param], set_grad_none=False)).set_grad_none is False


@pytest.mark.parametrize("cls", EVERY)
def test_schedulers_and_hooks(cls):
    params = parameters()
    optimizer = cls(params, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step == 0 else 1.0)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    before = [param.detach().clone() for param in params]
    train(optimizer, params, 1)
    assert all(torch.equal(left, right) for left, right in zip(params, before, strict=True))
    schedule.step()
    train(optimizer, params, 1)
    assert not any(torch.equal(left, right) for left, right in zip(params, before, strict=True))
    assert called == [1, 1]


@pytest.mark.parametrize("cls", FUSED)
@pytest.mark.parametrize("name", ["grads", "output_params", "grad_norms"])
def test_arguments_of_a_removed_path(cls, name):
    with pytest.raises(RuntimeError, match=f"{cls.__name__}.step was given {name}"):
        cls(parameters()).step(**{name: [torch.ones(1)]})


@pytest.mark.parametrize("cls", [FusedAdam, FusedLion])
def test_scale_is_the_engines(cls):
    with pytest.raises(RuntimeError, match="scale, grad_scaler"):
        cls(parameters()).step(scale=2.0, grad_scaler=object())


@pytest.mark.parametrize("cls", [FusedAdam, FusedLion])
def test_gradients_can_be_kept_as_zeros(cls):
    (param, *_) = parameters()
    param.grad = torch.ones_like(param)
    cls([param], set_grad_none=False).zero_grad()
    assert torch.equal(param.grad, torch.zeros_like(param))
    cls([param]).zero_grad(set_to_none=False)
    assert param.grad is not None
    cls([param]).zero_grad()
    assert param.grad is None


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, FusedLamb])
def test_no_amsgrad(cls):
    with pytest.raises(RuntimeError, match="AMSGrad"):
        cls(parameters(), amsgrad=True)


@pytest.mark.parametrize("cls", EVERY)
@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"weight_decay": -0.1}, {"lr": float("nan")}, {"lr": float("inf")}])
def test_numbers_out_of_range(cls, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        cls(parameters(), **wrong)


@pytest.mark.parametrize("cls", EVERY)
@pytest.mark.parametrize("wrong", [{"lr": "1e-3"}, {"lr": None}, {"weight_decay": "0.1"}, {"weight_decay": [0.1]}])
def test_what_is_no_number(cls, wrong):
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))} is .*; it must be a finite number"):
        cls(parameters(), **wrong)


@pytest.mark.parametrize("cls", [*FUSED, *CPU, *MUON])
def test_wrong_numbers_of_a_group(cls):
    first, second, third = parameters()
    for wrong in ({"lr": "1e-3"}, {"weight_decay": -1.0}, {"lr": float("inf")}):
        named = rf"group 1: {next(iter(wrong))} is .*; it must be"
        with pytest.raises(ValueError, match=named):
            cls([{"params": [first]}, {"params": [second], **wrong}])
        optimizer = cls([first])
        with pytest.raises(ValueError, match=named):
            optimizer.add_param_group({"params": [third], **wrong})


@pytest.mark.parametrize("cls", [*FUSED, *CPU, *MUON])
def test_wrong_widths_of_moments(cls):
    for wrong in ("8", 9, True, [8]):
        with pytest.raises(ValueError, match="moment_bits is"):
            cls(parameters(), moment_bits=wrong)


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam, FusedLamb, FusedLion, DeepSpeedCPULion])
@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, -0.1), (0.9,), (), None, 0.9, ("0.9", "0.99")])
def test_betas_out_of_range(cls, betas):
    with pytest.raises(ValueError, match="betas"):
        cls(parameters(), betas=betas)


@pytest.mark.parametrize("cls", CPU)
def test_the_keyword_of_client_libraries(cls):
    """Accelerate hands `adamw_mode` to every CPU optimizer."""
    params = parameters()
    train(cls([{"params": params, "weight_decay": 0.0}], lr=1e-3, weight_decay=0.1, adamw_mode=False), params, 1)
