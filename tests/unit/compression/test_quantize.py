"""`Quantizer`: parameters of a script's own are rounded in place, and lose bits by their periods."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.quantize import Quantizer
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.ops.quantizer.quantizer import round_groups


def parameter(start, target, period, *shape):
    made = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    made.start_bits, made.target_bits, made.q_period = start, target, period
    return made


def test_parameters_lose_bits_by_their_periods():
    plain, slow = parameter(4, 2, 2, 4, 8), parameter(4, 2, 2, 4, 8)
    bias, other = parameter(4, 2, 2, 8), nn.Parameter(torch.randn(4, 8))
    untouched = [bias.detach().clone(), other.detach().clone()]
    quantizer = Quantizer(q_groups=4)
    bits, switches = [], []
    for _ in range(7):
        values = torch.randn(4, 8)
        plain.data.copy_(values)
        slow.data.copy_(values)
        switches.append(quantizer.any_precision_switch())
        quantizer.quantize([[plain, bias], [slow, other]], False, True, {id(slow): (0.5, 1)})
        bits.append((plain.start_bits, slow.start_bits))
        assert torch.equal(plain, round_groups(values, plain.start_bits).values)
    assert bits == [(4, 4), *[(3, 3)] * 2, *[(2, 3)] * 4]
    assert switches == [True, True, False, True, *[False] * 3]
    assert (plain.q_period, slow.q_period) == (8, 12)
    assert torch.equal(bias, untouched[0])
    assert torch.equal(other, untouched[1])
    quantizer.quantize([[plain]], True, False)
    assert quantizer.qsteps == 7, "an overflow skips the step"


@pytest.mark.parametrize(("kind", "rounding"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_codes_are_those_of_the_type_and_the_rounding(kind, rounding):
    quantizer = Quantizer(q_groups=2, q_type=kind, q_rounding=rounding)
    values = torch.randn(2, 4096).to(torch.bfloat16) + 3
    found = quantizer.quantize_highbit(values, 4)
    nearest = round_groups(values, 4, asym=bool(kind)).values.to(torch.bfloat16)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, nearest) is not bool(rounding)
    assert all(row.unique().numel() <= 16 for row in found)
    inside = values.float() < 6  # the largest code around zero lies below the largest number
    assert float((found.float() - values.float())[inside].mean()) == pytest.approx(0, abs=0.03)
    assert found.float().std() > 0


def test_the_share_of_the_unrounded_weight_falls_and_begins_anew():
    weight = parameter(8, 7, 3, 2, 8)
    quantizer, shares = Quantizer(q_mixed_fp16=True, q_change_ratio=0.25), []
    for _ in range(4):
        values = torch.randn(2, 8)
        weight.data.copy_(values)
        quantizer.quantize([[weight]], False, False)
        shares.append(quantizer.quantize_real_ratio)
        rounded = round_groups(values.view(1, -1), weight.start_bits).values.view(2, 8)
        torch.testing.assert_close(weight.detach(), shares[-1] * values + (1 - shares[-1]) * rounded)
    assert shares == [0.75, 0.5, 1.0, 0.75]


def test_what_cannot_be_rounded_is_refused():
    with pytest.raises(UsageError, match="q_groups is 3, which does not divide 8 elements"):
        Quantizer(q_groups=3).quantize([[parameter(4, 2, 1, 2, 4)]], False, False)
    shard = parameter(4, 2, 1, 0)
    shard.ds_id, shard.ds_shape = 0, torch.Size((2, 4))
    with pytest.raises(UsageError, match=r"Quantizer.quantize looks at the values of weights, and this model has none"):
        Quantizer().quantize([[shard]], False, False)
