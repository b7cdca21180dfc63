"""Attention of images and text whose sequences ranks share, against the whole on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.sequence.auto_sp import (
    UlyssesSPViTAttention,
    auto_wrap_model_for_sp,
    detect_model_sp_info,
)
from deepspeed.sequence.layer import DistributedAttention
from tests.harness import shared_ranks

HIDDEN, PATCHES = 8, 6


def close(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def summed(grads):
    for grad in grads:
        dist.all_reduce(grad)
    return grads


class Attention(nn.Module):
    """Over [images, patches, hidden]; returns the weights, too, as Transformers' do, if it is asked to."""

    def __init__(self, pair):
        super().__init__()
        self.qkv, self.pair = nn.Linear(HIDDEN, 3 * HIDDEN), pair

    def forward(self, hidden, mask=None):
        query, key, value = self.qkv(hidden).chunk(3, -1)
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return (out, None) if self.pair else out


@shared_ranks(2, 3, timeout=400)
def test_attention_of_images():
    """With and without a class token; more images than ranks, as many, one; with a mask; unequal parts of patches."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    equal, unequal = [PATCHES] * size, [PATCHES - 1, *[PATCHES] * (size - 2), 2]
    for images, has_token, pair, masked, counts in (
        (4, True, True, False, equal),
        (3, False, False, False, equal),
        (1, True, False, True, equal),
        (4, True, False, False, unequal),
        (3, False, True, False, unequal),
        (1, True, False, True, unequal),
        (3, True, False, False, [PATCHES, *[0] * (size - 1)]),
    ):
        torch.manual_seed(images)
        attention = Attention(pair)
        first, length = int(has_token), sum(counts)
        whole = torch.randn(images, first + length, HIDDEN, requires_grad=True)
        mask = torch.rand(1, first + length, first + length) > 0.3 if masked else None
        expected = attention(whole, mask)
        expected = expected[0] if pair else expected
        weight = torch.randn_like(expected)
        begin = first + sum(counts[:rank])
        mine = slice(begin, begin + counts[rank])
        part = torch.cat([whole.detach()[:, :first], whole.detach()[:, mine]], 1).requires_grad_()
        found = UlyssesSPViTAttention(attention, group, has_token)(part, **({"mask": mask} if masked else {}))
        assert isinstance(found, tuple) == pair
        found = found[0] if pair else found
        close([found], [torch.cat([expected[:, :first], expected[:, mine]], 1)])
        # the loss of the token counts on one rank only, as that of a patch does
        own = torch.cat([weight[:, :first] * (rank == 0), weight[:, mine]], 1)
        grads = torch.autograd.grad((found * own).sum(), [part, *attention.parameters()])
        wanted = torch.autograd.grad((expected * weight).sum(), [whole, *attention.parameters()])
        close([grads[0][:, first:], *summed(list(grads[1:]))], [wanted[0][:, mine], *wanted[1:]])
        close(summed([grads[0][:, :first].contiguous()]), [wanted[0][:, :first]])
    with pytest.raises(UsageError, match=r"shape \(2, 3\)"):
        UlyssesSPViTAttention(attention, group)(torch.zeros(2, 3))


@pytest.mark.usefixtures("with_transformers")
@shared_ranks(2, timeout=400)
def test_models_of_transformers():
    """A Llama and an encoder of CLIP as they come: losses and gradients are those of the whole on one rank."""
    from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=40,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(shape)
    ids, at = torch.randint(40, (2, 16)), torch.arange(16)[None].expand(2, 16)
    whole = model(input_ids=ids, position_ids=at).logits
    weight = torch.randn_like(whole)
    expected = torch.autograd.grad((whole * weight).sum(), list(model.parameters()))
    names = set(model.state_dict())
    part = slice(rank * 8, rank * 8 + 8)
    assert auto_wrap_model_for_sp(model, group) is model
    assert set(model.state_dict()) == names
    found = model(input_ids=ids[:, part], position_ids=at[:, part], use_cache=False).logits
    close([found], [whole[:, part]])
    grads = torch.autograd.grad((found * weight[:, part]).sum(), list(model.parameters()))
    close(summed(list(grads)), expected)

    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4
    )
    clip = CLIPVisionModel(vision)
    encoder = next(module for module in clip.modules() if type(module).__name__ == "CLIPEncoder")
    hidden = torch.randn(4, 17, 16)
    whole = encoder(inputs_embeds=hidden).last_hidden_state
    auto_wrap_model_for_sp(clip, group)
    wrapped = [each for each in clip.modules() if isinstance(each, UlyssesSPViTAttention)]
    assert len(wrapped) == 2
    assert wrapped[0].has_cls_token
    mine = slice(1 + rank * 8, 9 + rank * 8)
    found = encoder(inputs_embeds=torch.cat([hidden[:, :1], hidden[:, mine]], 1)).last_hidden_state
    close([found], [torch.cat([whole[:, :1], whole[:, mine]], 1)])


def called(name, **members):
    return type(name, (nn.Module,), members)()


@pytest.mark.usefixtures("with_transformers")
@shared_ranks(1)
def test_what_is_found():
    outer = called("ViTAttention")
    outer.attention = called("ViTSelfAttention")
    model = nn.ModuleDict(
        {
            "vision_tower": nn.ModuleList([outer, called("CLIPAttention")]),
            "language_model": nn.ModuleList([called("LlamaAttention", forward=lambda self, q, k, v: q)]),
            "text_model": nn.ModuleList([called("CLIPAttention", forward=lambda self, q, k, v: q)]),
            "multi_modal_projector": nn.Linear(2, 2),
            "merger": nn.Linear(2, 2),
        }
    )
    info = detect_model_sp_info(model)
    assert [path for path, _ in info.vit_attn_modules] == ["vision_tower.0", "vision_tower.1"]
    assert [path for path, _ in info.llm_attn_modules] == ["language_model.0", "text_model.0"]
    assert info.vision_projection_module == ("multi_modal_projector", model["multi_modal_projector"])
    text = model["language_model"][0]
    auto_wrap_model_for_sp(model, dist.group.WORLD)
    assert isinstance(model["vision_tower"][0], UlyssesSPViTAttention)
    assert model["vision_tower"][0].attn is outer
    assert isinstance(model["language_model"][0], DistributedAttention)
    assert model["language_model"][0].local_attn is text
    with pytest.raises(UsageError, match="Linear has no attention"):
        auto_wrap_model_for_sp(nn.Linear(2, 2), dist.group.WORLD)
    hidden_only = nn.ModuleList([called("LlamaAttention", forward=lambda self, hidden_states: hidden_states)])
    with pytest.raises(UsageError, match="0 \\(LlamaAttention\\) is neither"):
        auto_wrap_model_for_sp(hidden_only, dist.group.WORLD)
