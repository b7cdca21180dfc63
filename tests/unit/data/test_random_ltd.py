"""What layers that drop tokens are called with: masks of all forms follow the kept tokens, however they are given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.data.random_ltd import RandomLayerTokenDrop, RandomLTDScheduler
from deepspeed.errors import UsageError

LENGTH, KEPT = 12, 8


class Layer(nn.Module):
    def forward(self, hidden_states, other=None, attention_mask=None, position_ids=None, **rest):
        scores = hidden_states @ hidden_states.transpose(1, 2)
        if attention_mask is not None:
            scores = scores + (attention_mask[:, None] if attention_mask.dim() == 2 else attention_mask[:, 0])
        return scores.softmax(-1) @ hidden_states + (1 if position_ids is None else 1 + position_ids[..., None])


def dropping(kind):
    layer = RandomLayerTokenDrop(Layer())
    ramp = {"min_value": KEPT, "max_value": LENGTH, "schedule_config": {"require_steps": 9, "seq_per_step": 4}}
    section = {
        "total_layer_num": 4,
        "random_ltd_layer_num": 1,
        "random_ltd_layer_id": [1],
        "model_mask_name": "attention_mask",
        "model_type": kind,
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {"schedule_type": "fixed_linear", **ramp},
    }
    layer.init_config(RandomLTDScheduler(section), 1)
    return layer


def masks():
    padding = torch.zeros(2, LENGTH)
    padding[0, 7:] = -1e9
    causal = torch.full((LENGTH, LENGTH), -1e9).triu(1)
    return {"none": None, "rows": padding, "columns": padding[:, None, None], "square": causal + padding[:, None, None]}


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("form", list(masks()))
def test_masks_follow_the_kept_tokens(kind, form):
    layer, mask, hidden = dropping(kind), masks()[form], torch.randn(2, LENGTH, 4)
    places = torch.arange(LENGTH)[None].float()
    found = layer(hidden, attention_mask=mask, position_ids=places)
    assert torch.equal(layer(hidden, None, mask, places), found)
    assert torch.equal(layer(hidden, None, mask, position_ids=places), found)
    for row in range(2):  # as the layer computes of the kept tokens alone
        kept = (found[row] != hidden[row]).any(-1).nonzero().flatten()
        assert len(kept) == KEPT
        part = None if mask is None else mask.expand(2, *mask.shape[1:])[row : row + 1]
        if part is not None and kind == "decoder" and form == "square":
            part = part[..., :KEPT, :KEPT]
        elif part is not None and not (kind == "decoder" and form == "columns"):
            part = part[..., kept]
            part = part[:, :, kept] if form == "square" else part
        elif part is not None:
            part = part[..., :KEPT]
        expected = Layer()(hidden[row : row + 1, kept], attention_mask=part, position_ids=places[:, kept])
        torch.testing.assert_close(found[row, kept], expected[0])


def test_masks_that_cannot_follow_are_refused():
    layer, hidden = dropping("encoder"), torch.ones(2, LENGTH, 4)
    with pytest.raises(UsageError, match="Layer was called without such an argument"):
        layer(hidden)
    with pytest.raises(UsageError, match=r"with attention_mask of object, which cannot follow.*'sdpa'"):
        layer(hidden, attention_mask=object())
