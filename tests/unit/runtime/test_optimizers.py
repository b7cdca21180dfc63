"""From the optimizer section to the object: the class chosen, its arguments, Muon's halves, errors with their key."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from deepspeed.config.optimizer import OptimizerConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.muon import MuonWithAuxAdam, tag_attention_heads
from deepspeed.precision.policy import Precision
from deepspeed.runtime.step.optimizers import (
    TESTED_WITH_ZERO,
    build_optimizer,
    hold_states,
    is_tested_with_zero,
    require_tested,
)


def build(kind, params=None, parameters=None, **arguments):
    section = OptimizerConfig(type=kind, params=params or {})
    parameters = [nn.Parameter(torch.ones(2, 2))] if parameters is None else parameters
    return build_optimizer(section, parameters, **arguments)


@pytest.mark.parametrize(
    ("kind", "params", "offloaded", "expected"),
    [
        ("Adam", {}, False, FusedAdam),
        ("adamw", {}, False, FusedAdam),
        ("ADAM", {}, True, DeepSpeedCPUAdam),
        ("AdamW", {}, True, DeepSpeedCPUAdam),
        ("Adam", {"torch_adam": True}, False, torch.optim.AdamW),
        ("Adam", {"torch_adam": True}, True, torch.optim.AdamW),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, False, torch.optim.Adam),
        ("AdamW", {"torch_adam": True, "adam_w_mode": False}, False, torch.optim.AdamW),
        ("Adagrad", {}, False, torch.optim.Adagrad),
        ("adagrad", {}, True, DeepSpeedCPUAdagrad),
        ("Lamb", {}, False, FusedLamb),
        ("Lamb", {}, True, FusedLamb),
        ("lion", {}, False, FusedLion),
        ("Lion", {}, True, DeepSpeedCPULion),
        ("SGD", {"lr": 0.1}, False, torch.optim.SGD),
        ("RMSprop", {}, True, torch.optim.RMSprop),
        ("NAdam", {}, False, torch.optim.NAdam),
    ],
)
def test_class(kind, params, offloaded, expected):
    assert type(build(kind, params, offloaded=offloaded)) is expected


def test_adam_decays_like_adamw_unless_told():
    assert build("Adam").adam_w_mode is True
    assert build("Adam", {"adam_w_mode": False}).adam_w_mode is False
    assert build("AdamW", {"adam_w_mode": False}).adam_w_mode is True
    assert build("Adam", {"adam_w_mode": False}, offloaded=True).adam_w_mode is False


def test_arguments_arrive():
    numbers = {"lr": 0.5, "betas": [0.1, 0.2], "eps": 0.3, "weight_decay": 0.4, "bias_correction": False}
    for offloaded in (False, True):
        group = build("Adam", numbers, offloaded=offloaded).param_groups[0]
        assert {key: group[key] for key in numbers} == {**numbers, "betas": (0.1, 0.2)}
    assert build("Adam", {"set_grad_none": False}).set_grad_none is False
    lamb = build("Lamb", {"max_coeff": 5.0, "min_coeff": 0.5, "eps_inside_sqrt": True})
    assert (lamb.param_groups[0]["max_coeff"], lamb.eps_inside_sqrt) == (5.0, True)
    assert build("SGD", {"lr": 0.1, "momentum": 0.9}).param_groups[0]["momentum"] == 0.9
    assert build("Adam", {"torch_adam": True, "foreach": False}).param_groups[0]["foreach"] is False


def test_dtype_of_the_moments():
    for kind in ("Adam", "Adagrad", "Lion"):
        assert build(kind, offloaded=True).fp32_optimizer_states is True
        assert build(kind, {"fp32_optimizer_states": False}, offloaded=True).fp32_optimizer_states is False
        assert (
            build(kind, {"fp32_optimizer_states": True}, offloaded=True, bf16_states=True).fp32_optimizer_states
            is False
        )
        build(kind, {"fp32_optimizer_states": False})  # only offloaded ones choose


def test_defaults_may_be_said():
    """Values are checked by the kind of the default: that of every class of torch.optim passes."""
    for kind in ("ASGD", "Adafactor", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"):
        known = inspect.signature(getattr(torch.optim, kind)).parameters
        given = {key: each.default for key, each in known.items() if each.default is not each.empty}
        assert type(build(kind, given, [nn.Parameter(torch.ones(2, 2))])).__name__ == kind


def test_what_a_class_does_anyway_may_be_said():
    build("Adam", {"set_grad_none": True}, offloaded=True)
    build("Adam", {"torch_adam": True, "bias_correction": True, "set_grad_none": True})
    build("Adam", {"foreach": None, "amsgrad": False})


def test_groups():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [first], "lr": 0.5}, {"params": [second], "weight_decay": 0.25}]
    found = build("Adam", {"lr": 0.1, "weight_decay": 0.0}, iter(groups)).param_groups
    assert [(group["lr"], group["weight_decay"]) for group in found] == [(0.5, 0.0), (0.1, 0.25)]


@pytest.mark.parametrize(
    ("kind", "params", "offloaded", "path", "text"),
    [
        ("sgd", {}, False, "optimizer.type", "'sgd'.*exact name of a torch.optim class"),
        ("Optimizer", {}, False, "optimizer.type", "'Optimizer'"),
        ("lr_scheduler", {}, False, "optimizer.type", "'lr_scheduler'"),
        ("Adam", {"momentum": 0.9}, False, "optimizer.params.momentum", "is 0.9: FusedAdam.* takes only lr, "),
        ("Adam", {"set_grad_none": False}, True, "optimizer.params.set_grad_none", "DeepSpeedCPUAdam"),
        ("Adam", {"torch_adam": True, "bias_correction": False}, False, "optimizer.params.bias_correction", "AdamW"),
        ("Adam", {"adam_w_mode": "yes"}, False, "optimizer.params.adam_w_mode", "'yes'.*true or false"),
        ("Adam", {"lr": -1}, False, "optimizer.params", "FusedAdam.*lr is -1"),
        ("Adam", {"lr": "1e-3"}, False, "optimizer.params.lr", "'1e-3'; it must be a number"),
        ("Adam", {"weight_decay": "0.1"}, True, "optimizer.params.weight_decay", "'0.1'; it must be a number"),
        ("Adam", {"betas": None}, False, "optimizer.params.betas", "None; it must be a list of 2 numbers"),
        ("Adam", {"betas": [0.9, "x"]}, False, "optimizer.params.betas", "it must be a list of 2 numbers"),
        ("Adam", {"bias_correction": None}, False, "optimizer.params.bias_correction", "None; it must be true or"),
        ("Lion", {"fp32_optimizer_states": 3}, False, "optimizer.params.fp32_optimizer_states", "3; it must be true"),
        ("Lamb", {"eps_inside_sqrt": "no"}, False, "optimizer.params.eps_inside_sqrt", "'no'; it must be true"),
        ("SGD", {"momentum": "0.9"}, False, "optimizer.params.momentum", "'0.9'; it must be a number"),
        ("Muon", {"muon_lr": "0.1"}, False, "optimizer.params.muon_lr", "'0.1'; it must be a number"),
        ("Muon", {"betas": []}, False, "optimizer.params.betas", "it must be a list of 2 numbers"),
        ("Adam", {"amsgrad": True}, False, "optimizer.params", "AMSGrad"),
        ("SGD", {"lr": 0.1, "nesterov": True}, False, "optimizer.params", "SGD.*[Nn]esterov"),
        ("Muon", {"nesterov": True}, False, "optimizer.params.nesterov", "no such parameter"),
        ("Muon", {"ns_method": "x"}, False, "optimizer.params", "ns_method is 'x'"),
        ("OneBitAdam", {"freeze_step": -1}, False, "optimizer.params", "freeze_step is -1; expected a whole number"),
        ("ZeroOneAdam", {"var_update_scaler": 0}, False, "optimizer.params", "var_update_scaler is 0.* at least 1"),
        ("ZeroOneAdam", {"var_freeze_step": 2.5}, False, "optimizer.params", "var_freeze_step is 2.5; expected a wh"),
        ("OneBitLamb", {"coeff_beta": 2.0}, False, "optimizer.params", r"coeff_beta is 2.0; expected .* \[0, 1\)"),
        ("OneBitLamb", {"factor_min": 5.0}, False, "optimizer.params", "factor_min is 5.0 and factor_max 4.0"),
        ("Muon", {"per_head_muon": True}, False, "optimizer.params.per_head_muon", "muon_num_heads"),
    ],
)
def test_errors_name_the_key(kind, params, offloaded, path, text):
    param = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(DeepSpeedConfigError, match=text) as caught:
        build(kind, params, [param], offloaded=offloaded, named_parameters=[("layer.weight", param)])
    assert caught.value.path == path


def test_no_type():
    with pytest.raises(DeepSpeedConfigError, match="missing"):
        build_optimizer(OptimizerConfig(), [nn.Parameter(torch.ones(1))])


def test_mup(monkeypatch):
    monkeypatch.setitem(sys.modules, "mup", None)
    with pytest.raises(DeepSpeedConfigError, match="pip install mup") as caught:
        build("MuAdam")
    assert caught.value.path == "optimizer.type"
    fake = ModuleType("mup")
    fake.MuSGD = lambda params, impl=torch.optim.SGD, **kwargs: impl(params, **kwargs)
    monkeypatch.setitem(sys.modules, "mup", fake)
    made = build("musgd", {"lr": 0.25, "momentum": 0.5})
    assert (type(made), made.param_groups[0]["momentum"]) == (torch.optim.SGD, 0.5)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 4)
        self.q_proj = nn.Linear(4, 4)
        self.mlp = nn.Linear(4, 8)
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.LayerNorm(8)
        self.LM_head = nn.Linear(8, 5, bias=False)
        self.config = {"n_head": 2}


def names(model, group):
    known = {id(param): name for name, param in model.named_parameters()}
    return [known[id(param)] for param in group["params"]]


def muon(model, params=None, parameters=None, **arguments):
    parameters = list(model.parameters()) if parameters is None else parameters
    return build("muon", params, parameters, named_parameters=model.named_parameters(), **arguments)


def test_muon_takes_the_matrices_of_hidden_layers():
    model = Model()
    optimizer = muon(model)
    assert type(optimizer) is MuonWithAuxAdam
    matrices, others = optimizer.param_groups
    assert names(model, matrices) == ["q_proj.weight", "mlp.weight", "conv.weight"]
    assert sorted(names(model, others)) == sorted(
        ["embed_tokens.weight", "q_proj.bias", "mlp.bias", "conv.bias", "norm.weight", "norm.bias", "LM_head.weight"]
    )
    assert (matrices["lr"], matrices["momentum"], matrices["ns_method"]) == (0.02, 0.95, "gram")
    assert (others["lr"], others["betas"], others["eps"]) == (3e-4, (0.9, 0.95), 1e-10)


def test_muon_marks_decide():
    model = Model()
    model.mlp.weight.use_muon = False
    model.embed_tokens.weight.use_muon = True
    assert names(model, muon(model).param_groups[0]) == ["embed_tokens.weight", "q_proj.weight", "conv.weight"]
    group = {"params": list(model.mlp.parameters())[:1], "use_muon": True}
    assert [each["use_muon"] for each in muon(model, parameters=[group]).param_groups] == [True]


def test_muon_rates():
    def rates(params):
        return [group["lr"] for group in muon(Model(), params).param_groups]

    assert rates({"lr": 0.5}) == [0.5, 0.5]
    assert rates({"lr": 0.5, "muon_lr": 0.25}) == [0.25, 0.5]
    assert rates({"muon_lr": 0.25, "adam_lr": 0.125}) == [0.25, 0.125]


def test_muon_groups_win():
    model = Model()
    groups = [
        {"params": model.mlp.parameters(), "lr": 0.5, "betas": [0.5, 0.6], "momentum": 0.7, "name": "mlp"},
        {"params": [model.norm.weight], "weight_decay": 0.3},
    ]
    numbers = {
        "muon_lr": 0.25,
        "adam_lr": 0.125,
        "betas": [0.1, 0.2],
        "momentum": 0.9,
        "weight_decay": 0.0,
        "eps": 1e-3,
    }
    first, second, third = muon(model, numbers, groups).param_groups
    assert (first["use_muon"], first["lr"], first["momentum"], first["name"]) == (True, 0.5, 0.7, "mlp")
    assert "betas" not in first
    assert (second["use_muon"], second["lr"], second["betas"], second["eps"]) == (False, 0.5, (0.5, 0.6), 1e-3)
    assert "momentum" not in second
    assert (third["use_muon"], third["lr"], third["weight_decay"]) == (False, 0.125, 0.3)


def test_muon_refuses_text_for_a_mark():
    group = {"params": [nn.Parameter(torch.ones(2, 2))], "use_muon": "false"}
    with pytest.raises(DeepSpeedConfigError, match="use_muon of a parameter group is 'false'"):
        build("Muon", parameters=[group])


def test_muon_needs_names():
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    with pytest.raises(DeepSpeedConfigError, match=r"\(2, 2\) has no name.*use_muon"):
        build("Muon", {}, [weight, bias])
    assert len(build("Muon", {}, [("layer.weight", weight), ("layer.bias", bias)]).param_groups) == 2
    weight.use_muon = True
    assert len(build("Muon", {}, [weight, bias]).param_groups) == 2


def test_muon_sees_the_shape_of_a_sharded_parameter():
    weight = nn.Parameter(torch.empty(0))
    weight.ds_shape = torch.Size((4, 4))
    assert build("Muon", {}, [weight], named_parameters=[("layer.weight", weight)]).param_groups[0]["use_muon"]


@pytest.mark.parametrize(
    ("params", "offloaded", "expected"),
    [
        ({}, False, type(None)),
        ({}, True, DeepSpeedCPUAdam),
        ({"torch_adam": True}, False, torch.optim.AdamW),
        ({"torch_adam": True, "adam_w_mode": False}, False, torch.optim.Adam),
    ],
)
def test_the_adam_half_of_muon(params, offloaded, expected):
    model = Model()
    optimizer = muon(model, params, offloaded=offloaded)
    assert type(optimizer._adam) is expected
    assert optimizer.adam_w_mode is params.get("adam_w_mode", True)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_heads_of_muon():
    model = Model()
    tag_attention_heads(model)
    whole, heads, _ = muon(model, {"per_head_muon": True}).param_groups
    assert names(model, heads) == ["q_proj.weight"]
    assert (heads["num_heads"], "num_heads" in whole) == (2, False)
    assert len(muon(model).param_groups) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_moments_that_would_be_narrow_are_refused(dtype):
    key = {torch.float16: "fp16.fp16_", torch.bfloat16: "bf16.bf16_"}[dtype] + "master_weights_and_grads"
    narrow = Precision(param=dtype, master=dtype)
    params = [nn.Parameter(torch.ones(2, 2))]
    mine = FusedAdam(params)
    hold_states(mine, narrow)
    assert mine.state_dtype == torch.float32
    muon = MuonWithAuxAdam([{"params": params, "use_muon": False}], adam_optimizer=torch.optim.AdamW)
    for foreign in (torch.optim.AdamW(params), muon):
        with pytest.raises(DeepSpeedConfigError, match=f"{key}: {type(foreign).__name__} would hold") as caught:
            hold_states(foreign, narrow)
        assert caught.value.path == key
        hold_states(foreign, Precision(param=dtype))
        hold_states(foreign, Precision(param=dtype, master=dtype, state=dtype))


def test_tested_with_zero():
    param = nn.Parameter(torch.ones(2, 2))

    class Mine(torch.optim.AdamW):
        pass

    assert all(is_tested_with_zero(build(kind, {}, [param])) for kind in ("Adam", "Adagrad", "Lion"))
    assert not is_tested_with_zero(Mine([param]))
    assert not is_tested_with_zero(build("Lamb"))
    assert not is_tested_with_zero(torch.optim.SGD([param]))
    assert len(TESTED_WITH_ZERO) == 12
    apex = type("FusedAdam", (torch.optim.SGD,), {"__module__": "apex.optimizers.fused_adam"})
    assert is_tested_with_zero(apex([param]))


def test_an_allowed_optimizer_of_whole_parameters_warns(caplog):
    own = type("OwnAdafactor", (torch.optim.Adafactor,), {})  # whatever was told before
    with caplog.at_level("WARNING", logger="deepspeed"):
        for kind in (torch.optim.SGD, own):
            require_tested(kind([nn.Parameter(torch.ones(2, 2))]), allowed=True)
    (line,) = [each.getMessage() for each in caplog.records]
    assert "OwnAdafactor computes means over rows and columns" in line
    assert "change with the number of ranks" in line
