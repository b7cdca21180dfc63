"""Small models with experts of every family of Transformers, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


def qwen2_moe() -> nn.Module:
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=8))


def qwen3_moe() -> nn.Module:
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8, norm_topk_prob=True))


def deepseek_v2() -> nn.Module:
    own = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = hf.DeepseekV2Config(**{**SIZES, **LATENT, **own}, q_lora_rank=None, first_k_dense_replace=1)
    return hf.DeepseekV2ForCausalLM(config)


def deepseek_v3() -> nn.Module:
    own = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    groups = {"n_group": 2, "topk_group": 1, "q_lora_rank": 8, "first_k_dense_replace": 1}
    model = hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**{**SIZES, **LATENT, **own, **groups}))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape) / 4)
    return model


def olmoe() -> nn.Module:
    return hf.OlmoeForCausalLM(hf.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2))


def gpt_oss() -> nn.Module:
    config = hf.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=8)
    return hf.GptOssForCausalLM(config)


def llama4() -> nn.Module:
    own = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 24, "head_dim": 8}
    return hf.Llama4ForCausalLM(hf.Llama4TextConfig(**SIZES, **own, attention_chunk_size=32))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    made.__name__: made for made in (mixtral, qwen2_moe, qwen3_moe, deepseek_v2, deepseek_v3, olmoe, gpt_oss, llama4)
}


def model_of(family: str) -> nn.Module:
    """The same weights on every rank, large enough that experts differ."""
    torch.manual_seed(1)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if not name.endswith("norm.weight"):
                param.copy_(torch.randn(param.shape) / 5)
    return model
