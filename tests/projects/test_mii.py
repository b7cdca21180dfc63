"""DeepSpeed-MII's pipeline, with its own scheduler and samplers, over our engine of version 2."""

from __future__ import annotations

import pytest
import torch

from tests.harness import ranks
from tests.projects.stand_ins import needs, stand_ins

pytestmark = [needs("mii"), pytest.mark.slow]

PROMPTS = ["w5 w9 w20", "w7 w8 w9 w10 w11 w12", "w40"]


def save_model(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=100, max_position_embeddings=128, eos_token_id=2)).eval()
    model.save_pretrained(folder)
    raw = Tokenizer(models.WordLevel({f"w{number}": number for number in range(100)}, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="w0", eos_token="w2")
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@ranks(1)
def test_its_pipeline_generates(tmp_path, monkeypatch):
    model, tokenizer = save_model(tmp_path)
    expected = []
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
        found = model.generate(tokens, max_new_tokens=8, do_sample=False)[0, tokens.shape[1] :]
        expected.append(tokenizer.decode(found))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)  # which it calls on machines without CUDA, too
    with stand_ins("shortuuid", "mii.legacy"):
        import mii

        pipe = mii.pipeline(
            str(tmp_path),
            inference_engine_config={
                "state_manager": {
                    "max_ragged_batch_size": 4,
                    "max_ragged_sequence_count": 4,
                    "memory_config": {"mode": "allocate", "size": 8},
                }
            },
        )
    done = pipe(PROMPTS, max_new_tokens=8, do_sample=False)
    assert [one.generated_text.split() for one in done] == [text.split() for text in expected]
    assert pipe.inference_engine.free_blocks.tolist() == [8]
    sampled = pipe(PROMPTS[0], max_new_tokens=4, top_p=0.9, temperature=0.5)
    assert sampled[0].generated_length == 4
    pipe.destroy()
