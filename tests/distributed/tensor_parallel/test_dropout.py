"""Dropout: equal on all ranks where they hold the same, different on what is split, and the shared state goes on."""

from __future__ import annotations

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.tensor_parallel.families import parameters, start, tokens
from tests.distributed.tensor_parallel.training import zero
from tests.harness import shared_ranks

RATE = 0.2
_EAGER = {"vocab_size": 50, "attn_implementation": "eager"}
_ONE = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 47, **_EAGER}
_GPT = {"n_embd": 24, "n_layer": 1, "n_head": 3, "n_inner": 47, "n_positions": 32, **_EAGER}
_GPT |= {"attn_pdrop": RATE, "resid_pdrop": RATE, "embd_pdrop": RATE}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 47, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0, **_EAGER}
_BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 47,
    "decoder_ffn_dim": 47,
    **_EAGER,
}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32}
_BART |= {"dropout": RATE, "attention_dropout": RATE, "activation_dropout": RATE, "forced_eos_token_id": None}
_OPT = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "ffn_dim": 48, "word_embed_proj_dim": 32}


def with_adapters(model, *targets, **options):
    given = peft.LoraConfig(r=2, target_modules=list(targets), lora_dropout=RATE, init_lora_weights=False, **options)
    return peft.get_peft_model(model, given)


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_ONE, attention_dropout=RATE))


MODELS = {
    "gpt2": lambda: with_adapters(hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT)), "c_attn", "c_proj", fan_in_fan_out=True),
    "opt": lambda: with_adapters(
        hf.OPTForCausalLM(
            hf.OPTConfig(**_OPT, **_EAGER, max_position_embeddings=32, dropout=RATE, attention_dropout=RATE)
        ),
        *("q_proj", "out_proj", "fc1", "fc2"),
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5, dropout_rate=RATE)),
    "t5 with adapters": lambda: with_adapters(
        hf.T5ForConditionalGeneration(hf.T5Config(**_T5, dropout_rate=RATE)), "q", "o", "wi", "wo"
    ),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_BART)),
    "llama": lambda: with_adapters(llama(), "q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"),
    "neox": lambda: hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(**{**_ONE, "intermediate_size": 46}, attention_dropout=RATE, hidden_dropout=RATE)
    ),
}


class Recorder:
    """Records each dropout: its input and its mask."""

    def __init__(self, monkeypatch):
        self.seen = []
        self.plain = F.dropout
        monkeypatch.setattr(F, "dropout", self)

    def __call__(self, input, p=0.5, training=True, inplace=False):
        if not training or p == 0:
            return input
        mask = self.plain(torch.ones_like(input), p)
        self.seen.append((input.detach().clone(), mask))
        return input * mask

    def take(self):
        taken, self.seen = self.seen, []
        return taken


def both(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def judge(seen):
    """How many dropouts were of the same input on both ranks; their masks are the same, those of others are not."""
    found = both(seen)
    alike = 0
    for (first, mask), (second, other) in zip(*found, strict=True):
        if first.shape == second.shape and torch.equal(first, second):
            alike += 1
            assert torch.equal(mask, other), f"{tuple(first.shape)} is whole, and ranks dropped different elements"
        else:
            same = mask.shape == other.shape and torch.equal(mask, other)
            assert not same, f"{tuple(first.shape)} is split, and ranks dropped the same elements"
    return alike


def again(seen, before):
    """Whether everything that was computed again was dropped as before."""
    return all(any(x.shape == y.shape and torch.equal(x, y) and torch.equal(m, n) for y, n in before) for x, m in seen)


@shared_ranks(2, timeout=300)
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    hf.logging.set_verbosity_error()
    with pytest.MonkeyPatch.context() as patch:
        train(name, Recorder(patch))


def train(name, recorder):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    torch.manual_seed(dist.get_rank())  # a script that seeds every rank differently
    sections = {"neox": {"tensor_parallel": {"sequence_parallel": True}}, "opt": zero(3)}.get(name, {})
    engine = start(model, 2, **sections)
    for step in range(5):
        if step == 3:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            if isinstance(model, peft.PeftModel):
                model.enable_input_require_grads()
        batch = tokens(2, 8, step)
        loss = engine(input_ids=batch, labels=batch).loss
        seen = recorder.take()
        alike = judge(seen)
        assert 0 < alike < len(seen)
        assert len(set(both(loss.item()))) == 1
        engine.backward(loss)
        computed_again = recorder.take()
        assert bool(computed_again) == (step >= 3)
        assert again(computed_again, seen)
        engine.step()
    parameters(engine)  # asserts that whole ones are the same on both ranks
    engine.eval()
    state = torch.get_rng_state()
    with torch.no_grad():
        engine(input_ids=batch, labels=batch)
    assert not recorder.take()
    assert torch.equal(torch.get_rng_state(), state), "eval draws nothing"


class Feeding(nn.Module):
    """A split pair of unequal parts, of which the first half may be computed again alone."""

    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj, self.drop = nn.Linear(8, 7), nn.Linear(7, 8), nn.Dropout(0.5)
        self.recompute = self.fail = False

    def half(self, x):
        return self.drop(torch.relu(self.up_proj(x)))

    def forward(self, x):
        hidden = checkpoint(self.half, x, use_reentrant=False) if self.recompute else self.half(x)
        if self.fail:
            raise ValueError("between split layers")
        return x + self.drop(self.down_proj(hidden))


@shared_ranks(2)
def test_what_ends_between_split_layers():
    """A recomputation that ends there draws as before, and a forward that fails there leaves the shared state."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Feeding() for _ in range(3)))
    engine = start(model, 2)
    x = torch.randn(4, 8)
    found = []
    for recompute in (False, True, True):
        torch.manual_seed(1)
        for part in model:
            part.recompute = recompute
        loss = engine(x).square().mean()
        found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
        found[-1].append(torch.rand(1))
        assert len(set(both((loss.item(), found[-1][-1].item())))) == 1
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))
    model[1].fail = True
    with pytest.raises(ValueError, match="between split layers"):
        engine(x)
    assert len(set(both(torch.rand(1).item()))) == 1


class Literal(nn.Module):
    """The rate is in the code alone, or is set after `initialize`."""

    def __init__(self, rate=None):
        super().__init__()
        self.up_proj, self.down_proj, self.rate = nn.Linear(8, 8), nn.Linear(8, 8), rate
        self.late = nn.Dropout(0.0)

    def forward(self, x):
        hidden = torch.relu(self.up_proj(x))
        hidden = F.dropout(hidden, 0.1, self.training) if self.rate is None else self.late(hidden)
        return x + self.down_proj(hidden)


@shared_ranks(2)
@pytest.mark.parametrize("rate", [None, 0.0])
def test_rates_in_code_and_rates_that_are_set_later(rate):
    torch.manual_seed(0)
    model = nn.Sequential(*(Literal(rate) for _ in range(3))).train()
    engine = start(model, 2, **zero(3))
    x = torch.randn(64, 8)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        for step in range(3):
            if step == 1:
                for part in model:
                    part.late.p = 0.1
            loss = engine(x).square().mean()
            seen = recorder.take()
            assert len(seen) == (0 if rate == 0.0 and step == 0 else 3)
            assert judge(seen) == 0, "all of them are of split activations"
            engine.backward(loss)
            engine.step()
    assert len(set(both(torch.rand(1).item()))) == 1
    parameters(engine)  # asserts that whole ones are the same on both ranks
