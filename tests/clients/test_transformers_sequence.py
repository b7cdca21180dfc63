"""Models of Transformers over sequences that ranks share, against the same training of whole sequences."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

from deepspeed.errors import LayoutError, UsageError
from deepspeed.sequence.auto_sp import auto_wrap_model_for_sp
from tests.clients.sequences import LENGTH, Case, batches, build, family, plain_training, training, values
from tests.closeness import Training, assert_same_training
from tests.harness import ranks

TWO = [
    Case("llama", 0, "ulysses"),
    Case("llama", 3, "auto", data="packed"),
    Case("qwen2", 1, "ring", accumulation=2, clip=0.3),
    Case("mistral", 3, "ring", data="padded"),
    Case("gpt_neox", 2, "ulysses", rows=1),
    Case("gpt2", 1, "auto", data="packed"),
    Case("bert", 0, "auto", data="padded"),
    Case("qwen3", 3, "ulysses", data="padded", checkpoints=True),
    Case("llama", 0, "ring", data="half", checkpoints=True, rows=1),
    Case("llama", 1, "ulysses", dtype="bf16"),
    Case("qwen2", 0, "ulysses", data="left"),
    Case("qwen2", 1, "ring", data="left"),
]
FOUR = [
    Case("llama", 3, "auto", options={"num_attention_heads": 4, "num_key_value_heads": 2}),
    Case("mistral", 1, "ring", options={"sliding_window": 5}, data="packed"),
    Case("qwen2", 0, "ulysses", options={"num_attention_heads": 6, "num_key_value_heads": 2}, data="half"),
    Case("llama", 3, "ulysses", sp=2, clip=0.3, accumulation=2),
]


def compare(cases):
    for case in cases:
        found, expected = training(case), plain_training(case)
        try:
            assert_same_training(found, expected)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@ranks(2, timeout=400)
def test_two_ranks():
    compare(TWO)


@ranks(4, timeout=400)
def test_four_ranks():
    compare(FOUR)


def registered(model, size, **options):
    given = {"core_attn_implementation": "sdpa", "sequence_parallel_size": size, "micro_batch_size": 2, **options}
    return UlyssesSPAttentionHF.register_with_transformers(model, **given)


def adapted(batches, mpu, device="cpu"):
    return UlyssesSPDataLoaderAdapter(
        batches,
        sp_rank=mpu.get_sequence_parallel_rank(),
        sp_group=mpu.get_sequence_parallel_group(),
        sp_world_size=mpu.get_sequence_parallel_world_size(),
        device=device,
    )


def weighted(loss, shift_labels, group):
    """The loss over all parts as clients write it."""
    losses = torch.stack(torch.distributed.nn.functional.all_gather(loss, group=group))
    counts = torch.stack(torch.distributed.nn.functional.all_gather((shift_labels != -100).sum(), group=group))
    return (torch.where(counts > 0, losses, 0) * counts).sum() / counts.sum().clamp(min=1)


@pytest.mark.parametrize("stage", [0, 3])
@ranks(2, timeout=400)
def test_the_way_of_scripts(stage):
    """An mpu, a loader that gives every rank other samples, and a loss that the script puts together."""
    for data in ("whole", "padded", "packed", "half"):
        case = Case("llama", stage, None, data=data)
        model = family("llama")
        mpu = registered(model, 2)
        config = {"sequence_parallel_size": None, "sequence_parallel": {}}
        engine = build(case, model=model, mpu=mpu, **config)
        assert (engine.sequence_parallel_size, engine.dp_world_size) == (2, 1)
        before, losses, norms = values(model), [], []
        rank, data = dist.get_rank(), batches(case)
        loader = adapted([data[rank]], mpu)
        assert len(loader) == 2
        for batch in loader:
            assert "labels" not in batch
            assert batch["input_ids"].shape == (2, LENGTH // 2)
            labels = batch["shift_labels"]
            loss = weighted(engine(**batch, labels=labels).loss, labels, mpu.get_sequence_parallel_group())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(float(engine.get_global_grad_norm()))
        found = Training(before, values(model), losses, norms)
        engine.destroy()
        unregister()
        assert_same_training(found, plain_training(case))


def unregister():
    """Give Transformers its own function back, as a process that never registered has it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("sdpa", sdpa_attention_forward)
    AttentionMaskInterface.register("sdpa", sdpa_mask)


@ranks(2, timeout=400)
def test_scripts_and_their_neighbours():
    model = family("llama")
    whole = batches(Case("llama", 0, None, data="padded"))[0]
    expected = model.eval()(**whole).logits
    assert registered(model, 1) is None
    mpu = registered(model, 2, disable_in_eval=True)
    assert registered(model, 2, disable_in_eval=True) is mpu, "once more does not wrap what is wrapped"
    # eval with whole sequences; generation with a cache
    rows = whole["attention_mask"].bool()
    torch.testing.assert_close(model(**whole).logits[rows], expected[rows], atol=1e-5, rtol=1e-5)
    prompt = whole["input_ids"][:1, :5]
    tokens = model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True)
    unregister()
    assert torch.equal(tokens, model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True))
    # eval with parts of sequences
    registered(model, 2)
    (part, *_) = adapted([whole], mpu)
    mine = slice(dist.get_rank() * 8, dist.get_rank() * 8 + 8)
    found = model(**part).logits
    torch.testing.assert_close(found[rows[:, mine]], expected[:, mine][rows[:, mine]], atol=1e-5, rtol=1e-5)
    # what cannot be
    with pytest.raises(UsageError, match=r"sequence of 15 tokens .* pad_to_multiple_of"):
        next(iter(adapted([{"input_ids": whole["input_ids"][:, :15]}], mpu)))
    with pytest.raises(UsageError, match=r"input_ids of shape \[batch, length\]; found none, keys \['x'\]"):
        next(iter(adapted([{"x": 1}], mpu)))
    with pytest.raises(UsageError, match=r"attention mask of shape \(2, 1, 8, 8\)"):
        model(input_ids=part["input_ids"], attention_mask=torch.ones(2, 1, 8, 8, dtype=torch.bool))
    with pytest.raises(UsageError, match="'eager' cannot be used"):
        registered(family("llama").config, 2, core_attn_implementation="eager")
    with pytest.raises(UsageError, match="the model uses the attention 'sdpa', but core_attn_implementation is 'flash"):
        registered(model, 2, core_attn_implementation="flash_attention_2")
    with pytest.raises(UsageError, match="sequence of 17 tokens"):
        registered(model, 2, seq_length=17)
    registered(model, 2, seq_length=16, seq_length_is_variable=False)
    with pytest.raises(UsageError, match=r"rank . got 2 sequences of 4 tokens, expected 2 of 8"):
        model(input_ids=part["input_ids"][:, :4], position_ids=part["position_ids"][:, :4])


@ranks(2, timeout=400)
def test_loaders_end_together_and_keep_what_is_not_a_tensor():
    model = family("llama")
    mpu = registered(model, 2)
    ids = torch.arange(2 * LENGTH).view(2, LENGTH)
    batch = {"input_ids": ids, "labels": ids, "name": "x", "weight": torch.ones(2)}
    loader = adapted([batch] * (2 - dist.get_rank()), mpu)
    for _ in range(2):  # again from the beginning
        found = list(loader)
        assert len(found) == 2
        mine = slice(dist.get_rank() * 8, dist.get_rank() * 8 + 8)
        following = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
        assert torch.equal(found[0]["shift_labels"], following[:, mine])
        assert torch.equal(found[0]["position_ids"], torch.arange(LENGTH).expand(2, LENGTH)[:, mine])
        assert found[0]["name"] == "x"
        assert found[0]["weight"].shape == (2,)
    # the last batch of one of them is shorter, in rows and in tokens
    rows, length = (2, LENGTH) if dist.get_rank() == 0 else (1, 8)
    short = {"input_ids": ids[:rows, :length], "labels": ids[:rows, :length]}
    found = list(adapted([batch, short], mpu))
    assert [tuple(each["input_ids"].shape) for each in found] == [(2, 8), (2, 8), (2, 8), (1, 4)]
    assert torch.equal(found[3]["input_ids"], ids[:1, dist.get_rank() * 4 :][:, :4])
    assert model(**found[3]).logits.shape[:2] == (1, 4)
    with pytest.raises(UsageError, match=r"input_ids of shape \(2, 16\) and labels of shape \(2,\)"):
        next(iter(adapted([{"input_ids": ids, "labels": torch.ones(2).long()}], mpu)))


@ranks(2, timeout=400)
def test_what_the_engine_refuses_and_allows():
    case = Case("llama", 0, "ulysses")
    engine = build(case)
    whole = batches(case)[0]
    other = {name: value + dist.get_rank() for name, value in whole.items() if name == "input_ids"}
    with pytest.raises(UsageError, match=r"ranks \[0, 1\] share each sequence but were called with different ones"):
        engine(**other)
    with pytest.raises(UsageError, match="sequence of 15 tokens"):
        engine(input_ids=whole["input_ids"][:, :15])
    with pytest.raises(UsageError, match="called with pixel_values of shape"):
        engine(**whole, pixel_values=torch.ones(2, 3))
    with pytest.raises(UsageError, match="attention_mask of shape"):
        engine(**whole, attention_mask=torch.ones(2, 1, LENGTH, LENGTH))
    with pytest.raises(UsageError, match="without input_ids"):
        engine(labels=whole["labels"])
    # by position, in eval, without labels, without a single label, as a tuple
    plain = family("llama").eval()
    mine = slice(dist.get_rank() * 8, dist.get_rank() * 8 + 8)
    engine.eval()
    with torch.no_grad():
        torch.testing.assert_close(engine(whole["input_ids"]).logits, plain(whole["input_ids"]).logits[:, mine])
        nothing = torch.full_like(whole["labels"], -100)
        assert engine(input_ids=whole["input_ids"], labels=nothing).loss.item() == 0
        loss = engine(**whole, return_dict=False)[0]
        torch.testing.assert_close(loss, plain(**whole).loss)
        summed = engine(**whole, num_items_in_batch=torch.tensor(7)).loss
        torch.testing.assert_close(summed, plain(**whole, num_items_in_batch=torch.tensor(7)).loss)
    # the bare module sees what it is given, and can generate
    prompt = whole["input_ids"][:1, :5]
    assert torch.equal(
        engine.module.generate(prompt, max_new_tokens=3, do_sample=False),
        plain.generate(prompt, max_new_tokens=3, do_sample=False),
    )
    engine.destroy()
    assert engine.module.config._attn_implementation == "sdpa", "a destroyed engine leaves nothing behind"
    for kind, attention, options, error, message in (
        ("llama", "ring", {"attention_dropout": 0.1}, UsageError, "ring attention has no dropout"),
        ("llama", "ulysses", {"num_attention_heads": 1, "num_key_value_heads": 1}, LayoutError, "1 attention heads"),
        ("llama", "ulysses", {"attn_implementation": "eager"}, UsageError, "'eager' cannot be used .* sdpa"),
        (
            "gemma2",
            "ulysses",
            {"attn_implementation": "eager"},
            UsageError,
            r"to one of (flash_attention_\d(, |\.$))+$",
        ),
    ):
        with pytest.raises(error, match=message):
            build(Case(kind, 0, attention, options=options))(**whole)
    with pytest.raises(UsageError, match=r"GPTNeoForCausalLM computes attention by itself .* Remove sequence_parallel"):
        build(case, model=gpt_neo())
    for model, message in mixed():
        with pytest.raises(UsageError, match=message):
            build(case, model=model)
        with pytest.raises(UsageError, match=message):
            registered(model, 2)
    with pytest.raises(UsageError, match="needs a model of Transformers; Linear"):
        build(case, model=torch.nn.Linear(2, 2))
    script = build(Case("llama", 0, None))
    assert script(**whole).logits.shape[1] == LENGTH, "without the section the script shares sequences out"


def mixed():
    """Models whose tokens meet in convolutions and recurrences, too."""
    import transformers as t

    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
    yield t.Lfm2ForCausalLM(t.Lfm2Config(**sizes, layer_types=["conv", "full_attention"])), "layers of the type 'conv'"
    recurrent = t.RecurrentGemmaConfig(**sizes, lru_width=32, block_types=["recurrent", "attention"])
    yield t.RecurrentGemmaForCausalLM(recurrent), "layers of the type '(recurrent|linear_attention)'"


def gpt_neo():
    import transformers as t

    sizes = {"vocab_size": 40, "hidden_size": 16, "num_heads": 2, "num_layers": 1, "max_position_embeddings": 16}
    return t.GPTNeoForCausalLM(t.GPTNeoConfig(**sizes, attention_types=[[["global"], 1]]))


@ranks(2, timeout=400)
def test_attention_that_models_compute_themselves():
    """Families that call no attention function of Transformers are refused by name, in every way that there is."""
    for kind, name in (
        ("bloom", "BloomForCausalLM"),
        ("falcon", "FalconForCausalLM"),
        ("mpt", "MptForCausalLM"),
        ("gptj", "GPTJForCausalLM"),
        ("codegen", "CodeGenForCausalLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("mt5", "MT5ForConditionalGeneration"),
    ):
        for attention in ("ulysses", "ring", "auto"):
            with pytest.raises(UsageError, match=rf"^{name} computes attention by itself .* sequence_parallel_size"):
                build(Case(kind, 0, attention))
        plain = family(kind)
        assert plain.config._attn_implementation in ("eager", "sdpa"), "nothing stays behind"
        with pytest.raises(UsageError, match="computes attention by itself"):
            registered(plain, 2, core_attn_implementation=plain.config._attn_implementation)
        with pytest.raises(UsageError, match=r"by itself.*DistributedAttention inside of this one"):
            registered(plain.config, 2)
    with pytest.raises(UsageError, match="computes attention by itself"):
        auto_wrap_model_for_sp(family("falcon"), dist.group.WORLD)


@ranks(2, timeout=400)
def test_parts_drop_different_tokens():
    """Ranks with equal generators drop different elements of their parts, the same ones again in a recomputation."""
    torch.manual_seed(5)
    engine = build(Case("gpt2", 0, "ulysses", options={"resid_pdrop": 0.5}, checkpoints=True)).train()
    torch.manual_seed(5)
    seen = []
    dropout = engine.module.transformer.h[0].attn.resid_dropout
    dropout.register_forward_hook(lambda _, args, out: seen.append((out == 0) & (args[0] != 0)))
    engine.backward(engine(**batches(Case("gpt2", 0, None))[0]).loss)
    assert len(seen) == 2, "forward, and once more in backward"
    assert torch.equal(*seen)
    both = [torch.empty_like(seen[0]) for _ in range(2)]
    dist.all_gather(both, seen[0])
    assert not torch.equal(*both), "parts drop alike"
    state = torch.get_rng_state()
    both = [torch.empty_like(state) for _ in range(2)]
    dist.all_gather(both, state)
    assert torch.equal(*both), "what ranks draw outside of the model is still the same"


@ranks(2, timeout=400)
def test_checkpoints_of_any_number_of_sequence_ranks(tmp_path):
    """Saved by two ranks that share sequences, loaded where they do not, and the other way."""
    for stage in (1, 3):
        one, two = Case("llama", stage, "ulysses", rows=1, sp=1), Case("llama", stage, "ulysses", rows=2, sp=2)
        data = batches(two)

        def step(engine, case, at, data=data):
            rank = dist.get_rank() if case.sp == 1 else 0
            mine = {name: value[rank * case.rows :][: case.rows] for name, value in data[at].items()}
            loss = engine(**mine).loss
            engine.backward(loss)
            engine.step()

        ends = []
        for first, second in ((two, one), (one, two), (two, two)):
            engine = build(first)
            step(engine, first, 0)
            engine.save_checkpoint(tmp_path / f"{stage}-{len(ends)}")
            engine.destroy()
            engine = build(second)
            engine.load_checkpoint(tmp_path / f"{stage}-{len(ends)}")
            step(engine, second, 1)
            ends.append(values(engine.module))
            engine.destroy()
        for end in ends[:2]:
            for name, value in ends[2].items():
                torch.testing.assert_close(end[name], value, atol=1e-5, rtol=1e-5)
