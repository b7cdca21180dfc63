"""Inputs that a plan makes up give each kind of model of Transformers a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.planning.sources import example_of

transformers = pytest.importorskip("transformers")
BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "vocab_size": 128,
}
WHISPER = {
    "d_model": 32,
    **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 1), ("ffn_dim", 64))},
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_source_positions": 50,
    "vocab_size": 128,
    **{f"{name}_token_id": 1 for name in ("pad", "bos", "eos", "decoder_start")},
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
KINDS: list[tuple[str, str, dict[str, Any]]] = [
    ("bert", "BertForMaskedLM", BERT),
    ("bert", "BertForSequenceClassification", BERT),
    ("bert", "BertForTokenClassification", BERT),
    ("bert", "BertForQuestionAnswering", BERT),
    ("resnet", "ResNetForImageClassification", RESNET),
    ("whisper", "WhisperForConditionalGeneration", WHISPER),
]


@pytest.mark.parametrize(("kind", "name", "sizes"), KINDS, ids=[name for _, name, _ in KINDS])
def test_a_model_gets_inputs_and_labels(kind, name, sizes):
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(kind, **sizes)).bfloat16()
    loss = example_of(model, None, 2, 16).run(model)
    loss.backward()
    assert torch.isfinite(loss)


def test_inputs_of_sound_are_asked_for():
    model = torch.nn.Linear(2, 2)
    model.config, model.main_input_name = transformers.Wav2Vec2Config(), "input_values"
    with pytest.raises(UsageError, match="Define example_batch"):
        example_of(model, None, 2, 16)
