"""Parts of verify mode in one process: formulas, fingerprints, random states, records."""

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.verify.copies import Fingerprint, flaw, sum_of_bits
from deepspeed.verify.formulas import FORMULAS, formula_of, updated
from deepspeed.verify.replay import record
from deepspeed.verify.sample import SampledUpdate, StepFacts

OPTIMIZERS = [
    lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.1),
    lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, maximize=True),
    lambda params: FusedAdam(params, lr=0.1, weight_decay=0.1, bias_correction=False),
    lambda params: DeepSpeedCPUAdam(params, lr=0.1, weight_decay=0.1, adamw_mode=False),
    lambda params: DeepSpeedCPULion(params, lr=0.1, weight_decay=0.1),
    lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1, weight_decay=0.1),
    lambda params: DeepSpeedCPUAdagrad(params, lr=0.1, weight_decay=0.1),
    lambda params: torch.optim.SGD(params, lr=0.1),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_formula_computes_what_its_optimizer_does_and_sees_what_it_does_not(make):
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(7, 5))
    optimizer = make([param])
    name, options = formula_of(optimizer, optimizer.param_groups[0])
    for step in range(1, 4):
        param.grad = torch.randn(7, 5)
        known = optimizer.state.get(param, {})
        moments = {key: known[key].clone() for key in FORMULAS[name].moments if known.get(key) is not None}
        before = param.detach().clone()
        results = updated(name, before, param.grad, moments, step, options)
        optimizer.step()
        after = {"parameter": param.detach(), **optimizer.state[param]}
        assert set(results) == {"parameter", *(key for key in FORMULAS[name].moments if after.get(key) is not None)}
        for key, result in results.items():
            eps = torch.finfo(torch.float32).eps
            assert not result.differs(after[key], eps).any(), (name, key)
            wrong = after[key].clone()
            wrong[3, 2] += 0.01 * (before - param.detach())[3, 2].abs() + 1e-3 * wrong[3, 2].abs()
            assert result.differs(wrong, eps).nonzero().tolist() == [[3, 2]]


def test_optimizers_without_a_formula():
    params = [nn.Parameter(torch.zeros(2))]
    for made in (torch.optim.Adam(params, amsgrad=True), torch.optim.RMSprop(params)):
        assert formula_of(made, made.param_groups[0]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("numel", [1, 5, 4096 * 3, 40001])
def test_a_fingerprint_finds_the_element_and_its_former_value(dtype, numel):
    whole = torch.randint(-100, 100, (numel + 1,)).to(dtype)
    for offset in (0, 1):
        tensor = whole[offset : offset + numel]
        for element in {0, numel // 2, numel - 1}:
            kept, total, old = Fingerprint.of(tensor), sum_of_bits(tensor), tensor[element].item()
            assert kept.same(Fingerprint.of(tensor))
            tensor[element] = -old if old else 3
            assert not kept.same(Fingerprint.of(tensor))
            assert sum_of_bits(tensor) != total
            found = kept.find(tensor, "x", 2, (numel + 9,), 4)
            assert (found.rank, found.element, found.found, found.expected) == (
                2,
                (element + 4,),
                tensor[element].item(),
                old,
            )
    kept = Fingerprint.of(whole)
    whole += 1
    assert "x" in str(kept.find(whole, "x", 0, tuple(whole.shape), 0))


def test_random_states_that_drawing_reaches():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    torch.randn(3001, generator=generator)
    torch.randperm(77, generator=generator)
    after = generator.get_state()
    assert flaw(before, before) is None
    assert flaw(before, after) is None
    assert flaw(before, torch.Generator().manual_seed(9).get_state()) is None
    torch.rand(30, generator=generator)
    bad = generator.get_state()
    bad[1001] ^= 4
    place, found, expected, count = flaw(before, bad)
    assert (place, found ^ expected, count) == (1001, 4, 1)
    counted = torch.tensor([7, 40]).view(torch.uint8)
    assert flaw(counted, torch.tensor([7, 44]).view(torch.uint8)) is None
    assert flaw(counted, torch.tensor([5, 44]).view(torch.uint8)) == (0, 5, 7, 1)
    assert flaw(counted, torch.tensor([7, 8]).view(torch.uint8)) == (8, 8, 40, 1)


def sample():
    before = {"parameter": torch.ones(4), "exp_avg": torch.zeros(4)}
    gradient = torch.full((4,), 2.0)
    options = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}
    after = {"parameter": torch.full((4,), 0.9), "exp_avg": torch.full((4,), 0.02)}
    total = torch.full((2, 4), 2.0, dtype=torch.float64)
    made = SampledUpdate("w", ((0, 2, 5), (2, 4, 6)), (5, 6), 1.0, 1e-6, 0.0, total, gradient, "lion", options)
    made.before, made.after = before, after
    return made


def test_the_first_difference_of_an_update():
    facts = StepFacts(3, applied=True)
    assert sample().judge(facts) is None
    wrong = sample()
    wrong.gradient[3] = 2.5
    assert str(wrong.judge(facts)) == (
        "rank 6: the reduced gradient of w[3] is 2.5, expected 2.0 by a plain sum over ranks"
    )
    wrong = sample()
    wrong.after["exp_avg"][1] = 0.5
    assert wrong.judge(facts).tensor == "exp_avg of w"
    wrong = sample()
    found = wrong.judge(StepFacts(3, applied=False))
    assert found.source == "a step that was not taken"
    assert StepFacts(3, norm=2.0, plain_norm=1.0).judge(0).expected == 1.0
    assert StepFacts(3, norm=4.0, clipping=1.0).factor == pytest.approx(0.25)


def test_a_record_is_repeated(tmp_path):
    good, bad = sample(), sample()
    bad.name, bad.after = "v", {**bad.after, "parameter": torch.full((4,), 1.1)}
    half = torch.full((2, 4), 1.0, dtype=torch.float64)
    facts = StepFacts(12, applied=True)
    for rank, samples in ((5, [good, bad]), (6, [])):
        record(str(tmp_path), rank, facts, samples, {"w": half, "v": half}, [])
    report = deepspeed.replay(tmp_path)
    assert (report.step, report.parameters) == (12, ("w", "v"))
    assert [(each.tensor, each.rank) for each in report.differences] == [("the updated v", 5)]
    assert "first difference: rank 5: the updated v[0]" in str(report)


def test_bad_input(tmp_path):
    with pytest.raises(UsageError, match="no recorded step"):
        deepspeed.replay(tmp_path)
    (tmp_path / "rank_0.pt").write_bytes(b"nothing")
    with pytest.raises(UsageError, match="no readable record"):
        deepspeed.replay(tmp_path)
    with pytest.raises(DeepSpeedConfigError, match=r"verify\.action: 'save'.*verify\.replay"):
        deepspeed.DeepSpeedConfig({"train_batch_size": 1, "verify": {"every": 1, "action": "save"}})
