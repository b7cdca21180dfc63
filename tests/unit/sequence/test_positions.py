"""Models that do not count positions from 0 on."""

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.sequence.inputs import SequenceInputs, TokenOrder

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11}
IDS = torch.full((1, 4), 3)


def inputs(kind, **numbers):
    config = getattr(transformers, f"{kind}Config")(**SMALL, **numbers)
    return SequenceInputs(transformers.AutoModelForMaskedLM.from_config(config) if kind == "Roberta" else
                  transformers.AutoModelForCausalLM.from_config(config), TokenOrder(2, 1), 1)  # fmt: skip


def test_positions_that_follow_from_padding_must_be_given():
    roberta = inputs("Roberta", intermediate_size=8)
    with pytest.raises(UsageError, match="RobertaForMaskedLM counts the positions of a sequence by its tokens"):
        roberta.part((), {"input_ids": IDS})
    given = roberta.part((), {"input_ids": IDS, "position_ids": torch.arange(2, 6)[None]}).arguments
    assert given["position_ids"].tolist() == [[4, 5]]


def test_positions_that_follow_from_the_mask_must_be_given_with_padding():
    opt = inputs("OPT", ffn_dim=8, word_embed_proj_dim=8)
    assert opt.part((), {"input_ids": IDS}).arguments["position_ids"].tolist() == [[2, 3]]
    assert opt.part((), {"input_ids": IDS, "attention_mask": torch.ones(1, 4)}).arguments["position_ids"].tolist()
    with pytest.raises(UsageError, match="OPTForCausalLM counts the positions of a sequence by its mask"):
        opt.part((), {"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1, 1]])})


def test_rotary_models_count_from_0_on():
    llama = inputs("Llama", intermediate_size=8)
    given = llama.part((), {"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1, 1]])}).arguments
    assert given["position_ids"].tolist() == [[2, 3]]
