"""Two-layer models of Transformers with random values, one for each family that is compared."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 128
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}
_WIDE = {**_LLAMA, "head_dim": 8}
_GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "sliding_window": 7},
    "qwen2": _LLAMA,
    "qwen3": _WIDE,
    "qwen3_moe": {**_WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {**_LLAMA, "num_local_experts": 4},
    "gemma2": {**_WIDE, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_WIDE, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "phi": _LLAMA,
    "phi3": {**_LLAMA, "pad_token_id": 0, "eos_token_id": 2},
    "gpt2": _GPT,
    "gpt_neox": _LLAMA,
    "gptj": {**_GPT, "rotary_dim": 4},
    "gpt_neo": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 5,
        "max_position_embeddings": 128,
    },
    "opt": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 64,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 32,
    },
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
    "mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "codegen": {**_GPT, "rotary_dim": 4},
    # It counts positions by its cache, so that no row may be padded.
    "blenderbot": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "forced_eos_token_id": None,
        "max_position_embeddings": 128,
    },
    "gpt_oss": {**_WIDE, "num_local_experts": 4, "sliding_window": 6, "rope_parameters": _ROPE},
    "deepseek_v3": {
        **_LLAMA,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}


def tiny(kind: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A model in float32 whose tokens differ much from each other, and that never ends by itself."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**FAMILIES[kind], **changes})
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, None, 0
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for param in model.parameters():
        if param.dim() > 1:
            param.data.mul_(4)
    model.generation_config.eos_token_id = None
    return model


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def small_cache(blocks: int | None = None, **keys: Any) -> dict[str, Any]:
    """A config with blocks of 4 tokens, and steps of few tokens, so that prompts are cut."""
    manager = {
        "block_size": 4,
        "max_context": 64,
        "max_ragged_batch_size": 10,
        "max_ragged_sequence_count": 8,
        "max_tracked_sequences": 8,
        **keys,
    }
    if blocks is not None:
        manager["memory_config"] = {"mode": "allocate", "size": blocks}
    return {"state_manager": manager}


def greedy_of(model: Any, prompt: list[int], new: int) -> list[int]:
    """What Transformers' own generate gives."""
    ids = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, pad_token_id=0
        )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def scores_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of a forward over a whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens], device=model.device)).logits[0]
        found: torch.Tensor = logits.float().log_softmax(-1).cpu()
    return found
