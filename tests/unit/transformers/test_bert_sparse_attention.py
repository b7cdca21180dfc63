"""BERT and RoBERTa with sparse attention: with a dense pattern they compute what they did."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.ops.sparse_attention import (
    BertSparseSelfAttention,
    DenseSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseAttentionUtils,
)

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 30,
    "max_position_embeddings": 40,
    "attention_probs_dropout_prob": 0.0,
}


def made(kind, **options):
    torch.manual_seed(0)
    names = {"bert": ("BertConfig", "BertForMaskedLM"), "roberta": ("RobertaConfig", "RobertaForMaskedLM")}[kind]
    config = getattr(transformers, names[0])(**{**SIZES, **options})
    return getattr(transformers, names[1])(config).eval()


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_dense_pattern_changes_nothing(kind, attention):
    model, ids = made(kind, attn_implementation=attention), torch.randint(3, 30, (2, 21))
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    expected = [model(ids).logits, model(ids, attention_mask=mask).logits[mask.bool()]]
    sparse = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, 40, DenseSparsityConfig(2)
    )
    assert sparse is model
    assert sum(isinstance(each, BertSparseSelfAttention) for each in model.modules()) == 2
    torch.testing.assert_close(model(ids).logits, expected[0])
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], expected[1])


def test_a_window_forgets_what_is_far():
    model = made("bert")
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, 40, LocalSlidingWindowSparsityConfig(2, block=4, num_sliding_window_blocks=1, attention="bidirectional")
    )
    ids = torch.randint(3, 30, (1, 20))
    other = ids.clone()
    other[0, 0] = 1
    one, two = model(ids).logits, model(other).logits
    assert torch.equal(one[:, 4:], two[:, 4:])
    assert not torch.equal(one[:, 1:4], two[:, 1:4])


class _Outer(nn.Module):
    """The shape of models that are not Transformers': `attention.self` answers with one tensor."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Module()
        self.attention.self = nn.Module()
        for name in ("query", "key", "value"):
            setattr(self.attention.self, name, nn.Linear(16, 16))


def test_other_models_get_one_tensor_and_keep_their_weights():
    config, layer = transformers.BertConfig(**SIZES), _Outer()
    query = layer.attention.self.query
    SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(config, [layer])
    assert layer.attention.self.query is query
    hidden, mask = torch.randn(2, 20, 16), torch.zeros(2, 1, 1, 20)
    mask[..., -3:] = -10000.0
    assert layer.attention.self(hidden, mask).shape == (2, 20, 16)
    other = hidden.clone()
    other[:, -3:] += 1
    torch.testing.assert_close(layer.attention.self(hidden, mask)[:, :17], layer.attention.self(other, mask)[:, :17])


@pytest.mark.parametrize(("kind", "reserved"), [("bert", 0), ("roberta", 2)])
def test_longer_positions(kind, reserved):
    model = made(kind)
    table = (model.bert if kind == "bert" else model.roberta).embeddings
    before, known = table.position_embeddings.weight.clone(), 40 - reserved
    SparseAttentionUtils.extend_position_embedding(model, 90)
    after = table.position_embeddings.weight
    assert model.config.max_position_embeddings == len(after) == 90 + reserved
    assert torch.equal(after[:40], before)
    assert torch.equal(after[40:60], before[reserved : reserved + 20])
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(model, 90)
    assert model(torch.randint(3, 30, (1, 90))).logits.shape == (1, 90, 30)
    with pytest.raises(UsageError, match=f"max_position is {known}, and the model has 90 positions"):
        SparseAttentionUtils.extend_position_embedding(model, known)


def test_inputs_of_whole_blocks():
    ids, embeddings = torch.arange(10).view(2, 5), nn.Embedding(10, 3)
    pad = SparseAttentionUtils.pad_to_block_size
    added, tokens, mask, types, positions, embedded = pad(
        4, ids, torch.ones(2, 5), None, ids, embeddings(ids), 7, embeddings
    )
    assert added == 3
    assert tokens[:, 5:].tolist() == positions[:, 5:].tolist() == [[7, 7, 7]] * 2
    assert mask.tolist() == [[1.0] * 5 + [0.0] * 3] * 2
    assert types is None
    assert torch.equal(embedded, embeddings(tokens))
    assert torch.equal(SparseAttentionUtils.unpad_sequence_output(added, tokens), ids)
    assert pad(5, ids, None, None, None, None, 7, embeddings)[:2] == (0, ids)
    assert torch.equal(SparseAttentionUtils.unpad_sequence_output(0, ids), ids)
    with pytest.raises(UsageError, match="neither input_ids nor inputs_embeds"):
        pad(4, None, None, None, None, None, 7, embeddings)


def test_the_limit_of_a_tokenizer():
    tokenizer = type("Tokenizer", (), {"init_kwargs": {}})()
    assert SparseAttentionUtils.update_tokenizer_model_max_length(tokenizer, 4096).model_max_length == 4096
    assert tokenizer.init_kwargs == {"model_max_length": 4096}


def test_what_does_not_fit_is_refused():
    replace = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention
    with pytest.raises(UsageError, match=r"Linear has no encoder\.layer"):
        replace(nn.Linear(2, 2), 10)
    with pytest.raises(UsageError, match="is_decoder is true"):
        replace(made("bert", is_decoder=True), 40)
    with pytest.raises(UsageError, match="no module with position_embeddings"):
        SparseAttentionUtils.extend_position_embedding(nn.Linear(2, 2), 10)
    with pytest.raises(UsageError, match="hidden_size is 16 and num_attention_heads 3"):
        BertSparseSelfAttention(transformers.BertConfig(**{**SIZES, "num_attention_heads": 3}))
    decoder = made("bert", is_decoder=True)
    replace(decoder, 40, LocalSlidingWindowSparsityConfig(2))
    with pytest.raises(UsageError, match="use_cache=False"):
        decoder(torch.randint(3, 30, (1, 9)), use_cache=True)
    assert decoder(torch.randint(3, 30, (1, 60))[:, :40], use_cache=False).logits.shape == (1, 40, 30)
