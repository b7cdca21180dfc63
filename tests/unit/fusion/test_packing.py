"""Masks of models that count positions themselves: the same, and nobody looks through the positions for them."""

from __future__ import annotations

import copy
import inspect
from contextlib import ExitStack
from functools import wraps

import pytest
import torch
from torch import nn

from deepspeed.fusion.build import find, put
from deepspeed.transformers.replacement import Refused, Swap
from deepspeed.transformers.source import exchanged

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(18).view(2, 9)
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])


@pytest.fixture
def questions(monkeypatch):
    """How often positions are looked through."""
    from transformers import masking_utils

    found, original = [], masking_utils.find_packed_sequence_indices

    def asked(positions):
        found.append(positions)
        return original(positions)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", asked)
    return found


def model_of(family="LlamaConfig", **numbers):
    torch.manual_seed(0)
    config = getattr(transformers, family)(vocab_size=97, **SMALL, **numbers)
    return transformers.AutoModelForCausalLM.from_config(config).train()


@pytest.fixture
def pair():
    """(a model whose masks are replaced, the same without)."""
    model = model_of()
    plain = copy.deepcopy(model)
    with ExitStack() as undo:
        put(list(find(model, ("mask",))), undo)
        yield model, plain
    assert "forward" not in model.model.__dict__, "it is taken back"


def test_positions_of_its_own_are_not_looked_through(pair, questions):
    model, plain = pair
    found = model(input_ids=IDS, use_cache=False).logits
    assert questions == []
    expected = plain(input_ids=IDS, use_cache=False).logits
    assert len(questions) == 1, "the model asks by itself"
    assert torch.equal(found, expected)


@pytest.mark.parametrize("how", ["named", "in order"])
def test_positions_that_are_given_are(pair, questions, how):
    model, plain = (each.model for each in pair)

    def hidden(each):
        given = {"args": (IDS, None, PACKED)} if how == "in order" else {"input_ids": IDS, "position_ids": PACKED}
        return each(*given.pop("args", ()), **given, use_cache=False).last_hidden_state

    found = hidden(model)
    assert len(questions) == 1
    torch.testing.assert_close(found, hidden(plain))
    apart = model(input_ids=IDS, use_cache=False).last_hidden_state
    assert not torch.allclose(found, apart), "sequences that are packed do not see each other"


@pytest.mark.parametrize("given", ["padding", "cache", "hidden states"])
def test_everything_else_is_as_it_was(pair, given):
    model, plain = pair
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    keywords = {
        "padding": {"attention_mask": mask, "use_cache": False},
        "cache": {"use_cache": True},
        "hidden states": {"output_hidden_states": True, "use_cache": False},
    }[given]
    found, expected = (each(input_ids=IDS, **keywords) for each in (model, plain))
    torch.testing.assert_close(found.logits, expected.logits)
    if given == "cache":
        more = [each(input_ids=IDS[:, :1], past_key_values=out.past_key_values) for each, out in
                zip((model, plain), (found, expected), strict=True)]  # fmt: skip
        torch.testing.assert_close(more[0].logits, more[1].logits)
    if given == "hidden states":
        torch.testing.assert_close(found.hidden_states, expected.hidden_states)
    torch.testing.assert_close(
        model.generate(IDS[:1], max_new_tokens=3, do_sample=False),
        plain.generate(IDS[:1], max_new_tokens=3, do_sample=False),
    )


def test_what_the_model_takes_is_still_told(pair):
    model, plain = (inspect.signature(each.model.forward) for each in pair)
    assert model == plain


def test_a_question_after_a_failure_is_asked(pair, questions):
    model, _ = pair
    with pytest.raises(ValueError, match="exactly one"):
        model.model()
    model.model(input_ids=IDS, position_ids=PACKED, use_cache=False)
    assert len(questions) == 1


@pytest.mark.parametrize(
    ("family", "numbers"),
    [
        ("MistralConfig", {"sliding_window": 4, "num_key_value_heads": 2}),
        ("Gemma2Config", {"head_dim": 8, "sliding_window": 4, "num_key_value_heads": 2}),
        ("GPTNeoXConfig", {}),
    ],
)
def test_other_families(family, numbers, questions):
    model = model_of(family, **numbers)
    plain = copy.deepcopy(model)
    (finding,) = find(model, ("mask",))
    assert isinstance(finding.result, Swap)
    questions.clear()  # whether the mask is the same was tried
    with ExitStack() as undo:
        put([finding], undo)
        found = model(input_ids=IDS, use_cache=False).logits
    assert questions == []
    torch.testing.assert_close(found, plain(input_ids=IDS, use_cache=False).logits)


def test_a_model_that_somebody_wrapped_is_told():
    model = model_of()
    model.model.forward = lambda *args, **kwargs: None
    (finding,) = find(model, ("mask",))
    assert isinstance(finding.result, Refused)


def create_causal_mask(config, inputs_embeds, attention_mask, past_key_values, position_ids=None):
    return None


class Counted(nn.Module):
    def forward(self, x, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])
        return create_causal_mask(None, x, None, None, position_ids=position_ids)


class Guessed(nn.Module):
    """Its positions are of some other kind."""

    def forward(self, x, position_ids=None):
        if position_ids is None:
            position_ids = x.cumsum(-1)
        return create_causal_mask(None, x, None, None, position_ids=position_ids)


def hidden(function):
    store = {"inner": function}

    @wraps(function)
    def outer(*args, **kwargs):
        return store["inner"](*args, **kwargs)

    return outer


class Hidden(nn.Module):
    @hidden
    def forward(self, x, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])
        return create_causal_mask(None, x, None, None, position_ids=position_ids)


def test_which_code_is_recognised():
    kinds = (Counted, Guessed, Hidden, nn.Linear)
    found = [
        [type(each.result) for each in find(nn.Sequential(kind(*[2] * 2 * (kind is nn.Linear))), ("mask",))]
        for kind in kinds
    ]
    assert found == [[Swap], [], [Refused], []]


def test_decorators_call_what_is_put_in_their_place():
    def twice(function):
        @wraps(function)
        def outer(x):
            return 2 * function(x)

        return outer

    def inner(x):
        return x

    outer = twice(twice(inner))
    made = exchanged(outer, inner, lambda x: x + 1)
    assert (outer(1), made(1)) == (4, 8)
    assert exchanged(print, inner, inner) is None
