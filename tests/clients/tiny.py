"""Small random models, texts and a tokenizer made in memory, for client libraries."""

from __future__ import annotations

import random
from typing import Any

import torch

VOCABULARY = 48
WORDS = [f"w{number}" for number in range(VOCABULARY - 4)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def llama(seed: int = 0, **options: Any) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(**options))


def llama_config(**options: Any) -> Any:
    from transformers import LlamaConfig

    given = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**given, **options})


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def tokens(samples: int = 24, length: int = 8, seed: int = 1) -> list[dict[str, list[int]]]:
    """Samples as Trainer takes them: every row as long as the others, so that ranks see the same count of tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(SPECIAL), VOCABULARY, (samples, length), generator=generator).tolist()
    return [{"input_ids": row, "labels": row, "attention_mask": [1] * length} for row in rows]


def sentences(count: int, words: int = 7, seed: int = 2) -> list[str]:
    pick = random.Random(seed)
    return [" ".join(pick.choices(WORDS, k=words)) for _ in range(count)]
