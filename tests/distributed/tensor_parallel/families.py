"""Small models of many families, and what they are compared with."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import transformers as hf

import deepspeed
from deepspeed.tensor_parallel import splits_of

VOCABULARY = 50
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
_GATED = {**_SIZES, "intermediate_size": 48, "max_position_embeddings": 32}
_GROUPED = {**_GATED, "num_key_value_heads": 2}
_BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
_GPT |= {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
_FALCON = {**_SIZES, "bias": True}
_LATENT = {**_GATED, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "kv_lora_rank": 12}
_LATENT |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8, "num_experts_per_tok": 2, "topk_group": 1}
_LATENT |= {"first_k_dense_replace": 1, "n_shared_experts": 1, "head_dim": 4}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
_T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}

FAMILIES = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED)),
    "one key": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GATED, num_key_value_heads=1, **_BIASED)),
    "uneven": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(
            **{**_GATED, "hidden_size": 40, "num_attention_heads": 5, "intermediate_size": 51, "vocab_size": 51},
            num_key_value_heads=5,
            tie_word_embeddings=True,
        )
    ),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_GROUPED)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_GROUPED)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GROUPED, head_dim=8)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**_GROUPED, head_dim=8)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**_GATED, num_key_value_heads=4)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_GROUPED, pad_token_id=0)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT)),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_GATED)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**_SIZES, max_position_embeddings=32, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)
    ),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=50)),
    "falcon": lambda: hf.FalconForCausalLM(hf.FalconConfig(**_SIZES)),
    "falcon with alibi": lambda: hf.FalconForCausalLM(hf.FalconConfig(**_FALCON, alibi=True, multi_query=False)),
    "falcon with groups": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**{**_SIZES, "num_attention_heads": 8}, num_kv_heads=4, new_decoder_architecture=True)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_GROUPED, num_local_experts=4)),
    "gpt-oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**_GROUPED, head_dim=8, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0)
    ),
    "cohere with norms of heads": lambda: hf.CohereForCausalLM(
        hf.CohereConfig(**_GROUPED, use_qk_norm=True, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    ),
    "persimmon": lambda: hf.PersimmonForCausalLM(hf.PersimmonConfig(**_GATED)),
    "codegen": lambda: hf.CodeGenForCausalLM(
        hf.CodeGenConfig(**{**_GPT, "n_embd": 64, "n_head": 16}, rotary_dim=4)  # four runs of heads on four ranks
    ),
    "gpt-j": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**_GPT, rotary_dim=4)),
    "mpt": lambda: hf.MptForCausalLM(
        hf.MptConfig(d_model=32, n_layers=2, n_heads=4, vocab_size=VOCABULARY, max_seq_len=32)
    ),
    "bigcode": lambda: hf.GPTBigCodeForCausalLM(hf.GPTBigCodeConfig(**_GPT)),
    "bigcode with many keys": lambda: hf.GPTBigCodeForCausalLM(hf.GPTBigCodeConfig(**_GPT, multi_query=False)),
    "modernbert": lambda: hf.ModernBertForMaskedLM(
        hf.ModernBertConfig(**_GATED, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    ),
    "deepseek": lambda: hf.DeepseekV2ForCausalLM(hf.DeepseekV2Config(**_LATENT, q_lora_rank=16)),
    "deepseek with five heads": lambda: hf.DeepseekV2ForCausalLM(
        hf.DeepseekV2Config(
            **{**_LATENT, "hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5}, q_lora_rank=None
        )
    ),
    "deepseek-v3": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**_LATENT, q_lora_rank=16, n_group=2)),
    "ctrl": lambda: hf.CTRLLMHeadModel(
        hf.CTRLConfig(**{name: value for name, value in _GPT.items() if name != "attn_pdrop"}, dff=48)
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5)),
    "t5 with gates": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(**{**_T5, "num_heads": 5}, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    ),
    "bert": lambda: hf.BertForMaskedLM(
        hf.BertConfig(**_GATED, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ),
}


def make(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Two equal models of a family: one to split, one to compare with."""
    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = FAMILIES[name]().train()
    return model, copy.deepcopy(model)


def tokens(samples: int = 2, length: int = 8, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(seed))


def start(model: torch.nn.Module, tp: int, **sections) -> deepspeed.DeepSpeedEngine:
    parallel = {"autotp_size": tp, **sections.pop("tensor_parallel", {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "tensor_parallel": parallel,
        **sections,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def whole(engine: deepspeed.DeepSpeedEngine, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What ranks hold of tensors by name, put together."""
    splits, axis = splits_of(engine.module), engine._parts.layout["tp"]
    found = {}
    for name, value in values.items():
        parts = [None] * axis.size
        dist.all_gather_object(parts, value, group=axis.group)
        if name in splits:
            found[name] = splits[name].join(parts)
            holders = map(splits[name].first_holder, range(axis.size))
            assert all(torch.equal(part, parts[first]) for part, first in zip(parts, holders, strict=True)), name
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs between ranks"
            found[name] = value
    return found


def parameters(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """The whole parameters, of any stage."""
    local = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            local[name] = param.detach().clone()
    return whole(engine, local)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(value.abs().max().item(), 1e-2)
        worst = (found[name].float() - value).abs().max().item() / scale
        assert worst < tolerance, f"{name}: {worst}"
