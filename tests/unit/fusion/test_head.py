"""The head with its loss: what models and scripts do with it beside a plain training step."""

import copy
import io
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.fusion.build import find, put

transformers = pytest.importorskip("transformers")

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 31}
IDS = torch.arange(18).view(2, 9)


class OwnLoss(transformers.LlamaForCausalLM):
    """A subclass with a method in place of the property."""

    def loss_function(self, logits, labels, vocab_size, **kwargs):
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


def model_of(kind=transformers.LlamaForCausalLM):
    torch.manual_seed(0)
    return kind(transformers.LlamaConfig(**SHAPE)).train()


@pytest.fixture
def pair():
    """(a model whose loss is fused, the same without)."""
    model = model_of()
    plain = copy.deepcopy(model)
    with ExitStack() as undo:
        put(list(find(model, ("loss",))), undo)
        yield model, plain


def test_a_copy_has_a_head_of_its_own(pair):
    model, plain = (copy.deepcopy(each) for each in pair)
    with torch.no_grad():
        for param in (*model.parameters(), *plain.parameters()):
            param.mul_(2)
    losses = [each(input_ids=IDS, labels=IDS).loss for each in (model, plain)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(model.lm_head.weight.grad, plain.lm_head.weight.grad)
    assert all(param.grad is None for param in pair[0].parameters())


def test_a_model_is_pickled(pair):
    model, plain = pair
    with io.BytesIO() as file:
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    torch.testing.assert_close(loaded(input_ids=IDS, labels=IDS).loss, plain(input_ids=IDS, labels=IDS).loss)


def test_the_loss_of_a_subclass_comes_back():
    model = model_of(OwnLoss)
    expected = model(input_ids=IDS, labels=IDS).loss
    with ExitStack() as undo:
        put(list(find(model, ("loss",))), undo)
        torch.testing.assert_close(model(input_ids=IDS, labels=IDS).loss, expected)
    assert not {"loss_function", "_loss_function"} & set(model.__dict__)
    assert torch.equal(model(input_ids=IDS, labels=IDS).loss, expected)


@pytest.mark.parametrize(
    "given", [{"labels": IDS, "logits_to_keep": 4}, {"labels": torch.cat((IDS, IDS), 1)}, {"labels": IDS[:1]}]
)
def test_labels_of_another_number_than_logits_are_an_error(pair, given):
    with pytest.raises(UsageError, match=r"labels for logits of \d+ tokens"):
        pair[0](input_ids=IDS, **given)


def test_some_logits_with_their_labels(pair):
    given = {"labels": IDS, "logits_to_keep": 4, "shift_labels": IDS[:, -4:].contiguous()}
    torch.testing.assert_close(*(each(input_ids=IDS, **given).loss for each in pair))


def test_a_batch_in_which_no_label_counts_has_gradients_of_zero(pair):
    for each in pair:
        loss = each(input_ids=IDS, labels=torch.full_like(IDS, -100)).loss
        assert loss.isnan()
        loss.backward()
        assert all(param.grad.eq(0).all() for param in each.parameters())
