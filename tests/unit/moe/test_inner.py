"""How stacked experts are cut along their inner width, and what cannot be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.moe.stacked_experts import inner_splits, set_local_width


class Made(nn.Module):
    def __init__(self, **shapes) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


def parts(module, **options):
    found = inner_splits("block.experts", module, 2, grouped=True, **options)
    return {name: (split.dim, split.parts[1]) for name, split in found.items()}


def refused(module, ranks=2, *, grouped=True):
    with pytest.raises(DeepSpeedConfigError) as found:
        inner_splits("block.experts", module, ranks, grouped=grouped)
    text = str(found.value)
    assert "block.experts cannot be split over tensor-parallel ranks" in text
    return text


def test_the_second_part_of_every_layout():
    straight = Made(gate_up_proj=(4, 12, 8), down_proj=(4, 8, 6))
    assert parts(straight) == {"gate_up_proj": (1, ((3, 6), (9, 12))), "down_proj": (2, ((3, 6),))}
    turned = Made(gate_up_proj=(4, 8, 12), down_proj=(4, 6, 8))
    assert parts(turned) == {"gate_up_proj": (2, ((3, 6), (9, 12))), "down_proj": (1, ((3, 6),))}
    turned.is_concatenated = False
    assert parts(turned)["gate_up_proj"] == (2, ((6, 12),))
    biased = Made(gate_up_proj=(4, 8, 12), down_proj=(4, 6, 8), gate_up_proj_bias=(4, 12), down_proj_bias=(4, 8))
    biased._apply_gate = lambda both: both[..., ::2] * both[..., 1::2]  # in turns, found by trying
    assert parts(biased)["gate_up_proj_bias"] == (1, ((6, 12),))
    assert "down_proj_bias" not in parts(biased)
    plain = Made(up_proj=(4, 8, 8), down_proj=(4, 8, 8))
    plain.is_transposed, plain.act_fn = True, torch.relu
    assert parts(plain) == {"up_proj": (2, ((4, 8),)), "down_proj": (1, ((4, 8),))}
    uneven = Made(gate_up_proj=(4, 10, 8), down_proj=(4, 8, 5))
    assert parts(uneven)["down_proj"] == (2, ((3, 5),))


def test_what_cannot_be_cut_is_an_error_that_says_why():
    sizes = {"gate_up_proj": (4, 12, 8), "down_proj": (4, 8, 6)}
    assert "it has the parameters weight; expected" in refused(Made(weight=(4, 8, 8)))
    assert "it has the parameters gate_up_proj, down_proj, scale; expected" in refused(Made(**sizes, scale=(4, 6)))
    assert "do not tell its inner width" in refused(Made(gate_up_proj=(4, 12, 8), down_proj=(4, 8, 5)))
    assert "do not tell its inner width" in refused(Made(up_proj=(4, 6, 8), down_proj=(4, 8, 6)))
    assert "its inner width is 6, which 7 ranks cannot share" in refused(Made(**sizes), 7)
    assert "leave expert_parallel.use_grouped_mm on" in refused(Made(**sizes, down_proj_bias=(4, 8)), grouped=False)
    normed, mixed = Made(**sizes), Made(**sizes)
    normed.has_post_expert_norm = True
    assert "its experts normalise their outputs" in refused(normed)
    mixed._apply_gate = lambda both: both.chunk(2, -1)[0].softmax(-1)
    assert "what Made computes between its products is not the same for parts" in refused(mixed)


def test_a_module_says_how_wide_its_experts_are_here():
    module = Made()
    module.intermediate_dim, module.hidden_dim = 6, 8
    set_local_width(module, 6, 3)
    assert (module.intermediate_dim, module.hidden_dim) == (3, 8)
