"""Keys and values in pages: kernels beside their references."""

import math

import pytest
import torch

from tests.unit.ops.model.interpreted import DEVICE, numbers

from deepspeed.ops.generate.pages import (  # isort: skip
    PageTarget,
    rotary_write,
    rotary_write_triton,
    write_pages,
    write_pages_triton,
)

E4M3 = torch.float8_e4m3fn
SLOTS = torch.tensor([3, -1, 22, 8, 0], device=DEVICE)
SCALES = (torch.tensor([0.5, 1.0, 4.0], device=DEVICE), torch.tensor([2.0], device=DEVICE))


def target(dtype, scales=(None, None)):
    pool = torch.zeros(6, 3, 4, 3, 16, device=DEVICE).to(dtype)
    return PageTarget(pool[:, 1], torch.zeros(6, 4, 3, 24, device=DEVICE).to(dtype), SLOTS, *scales)


def same(found, expected):
    for one, other in zip(
        (found.key_pages, found.value_pages), (expected.key_pages, expected.value_pages), strict=True
    ):
        assert other.float().abs().sum() > 0
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-3, atol=2e-3)


def states(dtype):
    """(query, key, value); for 8 bits of numbers that these have, because the interpreter rounds them wrongly."""
    wide, value = numbers(5, 6 + 3 + 3, 16), 300 * numbers(5, 3, 24)
    if dtype == E4M3:
        wide, value = wide.to(E4M3), value.clamp(-448, 448).to(E4M3).float() * 2  # some of them do not fit
    query, key, _ = wide.to(torch.float16).split([6, 3, 3], 1)
    return query, key, value.to(torch.float16)


def angles_of(dtype, angles):
    """cos and sin; for 8 bits of quarter turns."""
    turns = numbers(5, angles)
    if dtype == E4M3:
        turns = (turns * 4).round() * (math.pi / 2)
        return turns.cos().round(), turns.sin().round()
    return turns.cos(), turns.sin()


@pytest.mark.parametrize("dtype", [torch.float16, E4M3])
@pytest.mark.parametrize("scales", [(None, None), SCALES])
def test_write_pages(dtype, scales):
    _, key, value = states(dtype)
    found, expected = target(dtype, scales), target(dtype, scales)
    write_pages_triton(key, value, found)
    write_pages(key, value, expected)
    same(found, expected)
    one = value[2].float() / (1 if scales[1] is None else scales[1].item())
    written = expected.value_pages[22 // 4, 22 % 4].float()
    torch.testing.assert_close(written, one.clamp(-448, 448) if dtype == E4M3 else one, rtol=0.07, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, E4M3])
@pytest.mark.parametrize("angles", [16, 8])
def test_rotary_write(dtype, angles):
    cos, sin = angles_of(dtype, angles)
    found, expected = target(dtype, SCALES), target(dtype, SCALES)
    one = rotary_write_triton(*states(dtype), cos, sin, found)
    other = rotary_write(*states(dtype), cos, sin, expected)
    torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)
    assert not torch.equal(other, states(dtype)[0])
    same(found, expected)
