"""Tokens around a layer: sampled without repeats, gathered, put back; masks."""

from __future__ import annotations

import pytest
import torch

from deepspeed.ops.op_builder import RandomLTDBuilder

OPS = RandomLTDBuilder().load()


@pytest.mark.parametrize("batch_first", [True, False])
def test_gather_and_scatter_with_gradients(batch_first):
    hidden = torch.randn(2, 6, 3, dtype=torch.double)
    hidden = (hidden if batch_first else hidden.transpose(0, 1).contiguous()).requires_grad_()
    index = torch.tensor([[0, 2, 5], [1, 3, 4]], dtype=torch.int32)

    def run(value):
        _, part = OPS.GatherTokens.apply(value, index, batch_first)
        return OPS.ScatterTokens.apply(value, part * part, index, batch_first)

    assert torch.autograd.gradcheck(run, hidden)
    rows = run(hidden) if batch_first else run(hidden).transpose(0, 1)
    plain = hidden if batch_first else hidden.transpose(0, 1)
    assert torch.equal(rows[0, [0, 2, 5]], plain[0, [0, 2, 5]] ** 2)
    assert torch.equal(rows[1, [0, 2, 5]], plain[1, [0, 2, 5]])
    part = OPS.token_gather(hidden.detach(), index, batch_first)
    assert torch.equal(
        OPS.token_scatter_(torch.zeros_like(hidden), part, index, batch_first).count_nonzero(), torch.tensor(18)
    )


def test_samples_have_no_repeats_and_masks_follow():
    causal = torch.ones(3, 1, 8, 8).tril()
    index, corner = OPS.gpt_sample_tokens(5, 8, 3, layers=4, attn_mask=causal)
    assert (index.shape, index.dtype, corner.shape) == ((4, 3, 5), torch.int32, (3, 1, 5, 5))
    assert bool((index.diff(dim=-1) > 0).all())
    padding = torch.arange(24).view(3, 1, 1, 8)
    index, masks = OPS.bert_sample_tokens(5, 8, 3, layers=2, attn_mask=padding)
    assert torch.equal(masks[1, 2, 0, 0], padding[2, 0, 0, index[1, 2].long()])
    square = torch.arange(64).view(1, 1, 8, 8)
    kept = index[0, 0].long()
    assert torch.equal(OPS.mask_gather_bert(square, index)[0, 0, 0], square[0, 0][kept][:, kept])
    counts = torch.stack([OPS.gpt_sample_tokens(2, 4, 1)[0].flatten() for _ in range(600)]).flatten().bincount()
    assert bool((counts > 230).all())
    assert OPS.token_sort_(torch.tensor([[3, 1]]), 4).tolist() == [[1, 3]]
