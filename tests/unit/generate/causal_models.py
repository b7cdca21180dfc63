"""Every causal model of Transformers, as small as its config allows, and what becomes of it in `LLM`."""

from __future__ import annotations

import re
from typing import Any

import torch

from deepspeed.errors import UsageError
from deepspeed.generate.llm import LLM
from deepspeed.generate.params import SamplingParams
from tests.unit.generate.families import VOCABULARY, greedy_of, prompts_of, small_cache

PAGES = "the interface of Transformers, over the pages, in graphs"
CACHE = "of the model itself, over the pages, without graphs"
_SIZES = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input max_position_embeddings n_positions n_ctx",
    64: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_inner d_ff dim_ff ffn_hidden_size",
    32: "hidden_size d_model n_embd emb_dim moe_intermediate_size shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size expert_ffn_hidden_size",
    16: "kv_lora_rank q_lora_rank",
    8: "head_dim dim_head qk_rope_head_dim qk_nope_head_dim v_head_dim",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts rotary_dim",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_experts_per_tok num_experts_per_token top_k moe_k",
    1: "n_group topk_group n_shared_experts first_k_dense_replace bos_token_id",
    0: "pad_token_id",
}
_ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}
_BOTH = ["sliding_attention", "full_attention"]
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_GEMMA4 = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_GEMMA4 |= {"vocab_size": VOCABULARY, "intermediate_size": 64, "num_kv_shared_layers": 2}
_GEMMA4 |= {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_SHARED = {"num_hidden_layers": 4, "layer_types": _BOTH * 2, "num_kv_shared_layers": 2}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA,
    "blt": {"hidden_size": 32, "encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(_BOTH, _ROPE)},
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": _ROPE,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "gemma3n_text": {**_SHARED, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_assistant": {"text_config": _GEMMA4},
    "gemma4_text": _SHARED,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _MAMBA,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": {**_INDEXER, "ple_embed_dim": 8}},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"axial_pos_embds": False},
    "xmod": {"languages": ["en"], "default_language": "en"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
_NO_DEFAULT = ("gemma4_assistant",)
_WITHOUT = {"gemma3n": "other libraries (timm) to be built"}
_REASONS = {
    r"layers of the type '(\w+)'": "layers of the type `{}`",
    "layers that keep a state": "layers that keep a state",
    "attention is not causal": "attention that is not causal, or has a mask of its own",
    "runs more than once": "attention that runs more than once in a layer",
    "that a paged cache can hold": "attention that keeps nothing in a cache of Transformers",
    "few tokens failed": "other inputs than the ids of one text",
}


def causal_kinds() -> list[str]:
    """The `model_type` of each."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _sizes(config: Any) -> dict[str, Any]:
    """Small values for what a config has."""
    own, found = vars(config), {}
    for size, names in _SIZES.items():
        for name in names.split():
            value = own.get(config.attribute_map.get(name, name))
            if isinstance(value, int) and not isinstance(getattr(type(config), name, None), property):
                found[name] = size
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if len(own.get(name) or ()) > 2:
            found[name] = (list(dict.fromkeys(own[name])) * 2)[:2]
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            found[name] = {"model_type": part.model_type, **_sizes(part)}
    if "kv_lora_rank" in own:
        found["num_key_value_heads"] = 4
    if hasattr(config, "is_decoder"):
        found["is_decoder"] = True
    return found


def small_model(kind: str) -> Any:
    """A model in float32 whose tokens differ much from each other, and that never ends by itself."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    own = _OWN.get(kind, {})
    sizes = _sizes(AutoConfig.for_model(kind, **(own if kind in _NO_DEFAULT else {})))
    for name, value in own.items():
        sizes[name] = {**sizes[name], **value} if isinstance(sizes.get(name), dict) else value
    config = AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    if "text_encoder" in config.sub_configs:  # the part that generates has no name of its own
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config.decoder).eval()
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for param in model.parameters():
        if param.dim() > 1:
            param.data.mul_(4)
    for each in (model.config, model.config.get_text_config()):
        each.eos_token_id = None
    if model.generation_config is not None:
        model.generation_config.update(eos_token_id=None, forced_eos_token_id=None, pad_token_id=0)
    return model


def outcome(kind: str) -> str:
    """How a model generates Transformers' own tokens, or why it is refused."""
    if kind in _WITHOUT:
        return _WITHOUT[kind]
    model = small_model(kind)
    prompts = prompts_of(3, 4, 5, 13)
    try:
        with LLM(model, small_cache()) as llm:
            how = PAGES if "interface" in llm.stats()["entry"] else CACHE
            found = llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0), progress=False)
    except UsageError as error:
        assert "cannot be served" in str(error)
        for pattern, reason in _REASONS.items():
            if (match := re.search(pattern, str(error))) is not None:
                return reason.format(*match.groups())
        raise
    assert [each.token_ids for each in found] == [greedy_of(model, prompt, 6) for prompt in prompts]
    return how
