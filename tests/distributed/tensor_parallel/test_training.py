"""Training of ranks that share layers, with everything that goes with it, against the model in one piece."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn

import deepspeed
from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.errors import UsageError
from deepspeed.tensor_parallel import GroupMembers, build, split, splits_of
from deepspeed.tensor_parallel.apply import GatherReplacedLayerParams
from tests.distributed.tensor_parallel.families import assert_close, make, parameters, start, tokens, whole
from tests.distributed.tensor_parallel.training import momentum, train, zero
from tests.harness import ranks, shared_ranks


@shared_ranks(4, timeout=300)
def test_stages_accumulation_and_clipping():
    for stage, accumulation, name in [(0, 1, "one key"), (1, 2, "qwen3"), (2, 2, "one key"), (3, 2, "qwen3")]:
        model, plain = make(name)
        options = {"vocab_parallel_lm_head": True, "tp_overlap_comm": stage % 2 == 1}
        sections = momentum(gradient_accumulation_steps=accumulation, gradient_clipping=0.5, **zero(stage))
        engine = start(model, 2, tensor_parallel=options, **sections)
        train(engine, plain, accumulation, clip=0.5)
        engine.destroy()


@shared_ranks(4, timeout=300)
def test_an_embedding_that_is_tied_to_nothing():
    for stage, options in ((0, {}), (1, {"sequence_parallel": True}), (3, {"vocab_parallel_lm_head": True})):
        model, plain = make("llama")
        assert plain.lm_head.weight is not plain.model.embed_tokens.weight
        rows = plain.model.embed_tokens.num_embeddings
        engine = start(
            model, 2, tensor_parallel={"vocab_parallel_embedding": True, **options}, **momentum(**zero(stage))
        )
        assert splits_of(model)["model.embed_tokens.weight"].size(0) == -(-rows // 2)
        train(engine, plain, steps=2)
        engine.destroy()


@shared_ranks(4, timeout=300)
def test_adamw():
    """With an epsilon that keeps the first steps smooth: else those of the smallest gradients have any sign."""
    for stage, name, tp in ((0, "llama", 4), (3, "gpt2", 2)):
        model, plain = make(name)
        params = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
        engine = start(
            model, tp, optimizer={"type": "AdamW", "params": params}, zero_optimization=zero(stage)["zero_optimization"]
        )
        train(engine, plain, optimizer=lambda trained, params=params: torch.optim.AdamW(trained, **params))
        engine.destroy()


@shared_ranks(2, timeout=300)
def test_split_sequences():
    for name, stage in (("one key", 1), ("qwen3", 3), ("gpt-neox", 0)):
        model, plain = make(name)
        engine = start(model, 2, tensor_parallel={"sequence_parallel": True}, **momentum(**zero(stage)))
        widths = []
        block = model.get_submodule("gpt_neox" if name == "gpt-neox" else "model").layers[1]
        block.register_forward_pre_hook(
            lambda _, args, kwargs, seen=widths: seen.append((*args, kwargs.get("hidden_states"))[0].shape[1]),
            with_kwargs=True,
        )
        train(engine, plain, steps=2)
        assert widths == [4, 4], "half of a sequence of 8"
        with pytest.raises(UsageError, match="sequences of 7 tokens do not divide by 2"):
            engine(input_ids=tokens(2, 7))
        engine.destroy()
    with pytest.raises(UsageError, match=r"sequence_parallel: model\.decoder\.layers\.0\S* is no child of a block"):
        start(make("opt")[0], 2, tensor_parallel={"sequence_parallel": True})


@shared_ranks(2, timeout=300)
def test_a_pass_between_forward_and_backward_changes_nothing():
    """An evaluation sees whole sequences; blocks that are computed again, and sums of gradients, split ones."""
    for reentrant in (None, False, True):
        model, plain = make("llama")
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        engine = start(model, 2, tensor_parallel={"sequence_parallel": True})
        engine.train()
        loss = engine(input_ids=tokens(), labels=tokens()).loss
        engine.eval()
        aside = engine(input_ids=tokens(), labels=tokens()).loss  # with a backward of its own
        engine.backward(loss)
        plain(input_ids=tokens(), labels=tokens()).loss.backward()
        expected = {name: param.grad for name, param in plain.named_parameters()}
        assert_close(whole(engine, {name: param.grad for name, param in model.named_parameters()}), expected)
        engine.train()
        with torch.no_grad():
            engine(input_ids=tokens(), labels=tokens())
        engine.zero_grad()
        aside.backward()
        assert_close(whole(engine, {name: param.grad for name, param in model.named_parameters()}), expected)
        engine.destroy()


@shared_ranks(2, timeout=300)
def test_16_bits():
    for stage, precision in [(2, {"bf16": {"enabled": True}}), (3, {"fp16": {"enabled": True, "loss_scale": 64.0}})]:
        model, plain = make("llama")
        engine = start(model, 2, **momentum(**precision, **zero(stage)))
        train(engine, plain, tolerance=2e-2)
        engine.destroy()


@shared_ranks(2, timeout=300)
def test_an_overflow_of_one_rank_is_one_of_all():
    for stage in (0, 2):
        model, _ = make("llama")
        engine = start(model, 2, **momentum(fp16={"enabled": True, "initial_scale_power": 4}, **zero(stage)))
        if dist.get_rank() == 1:
            model.model.layers[0].mlp.up_proj.weight.register_hook(lambda grad: grad * float("inf"))
        before = parameters(engine)
        for _ in range(2):
            engine.backward(engine(input_ids=tokens(), labels=tokens()).loss)
            engine.step()
        assert engine.skipped_steps == 2
        assert_close(parameters(engine), {name: value.float() for name, value in before.items()}, 1e-7)
        engine.destroy()


@ranks(4, timeout=300)
def test_adapters():
    import peft

    targets = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
    for stage, name in ((0, "llama"), (3, "one key")):
        model, _ = make(name)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        plain = copy.deepcopy(model)
        engine = start(model, 2, **momentum(**zero(stage)))
        names = splits_of(engine.module)
        assert any("q_proj.lora_B" in name for name in names)
        assert any("o_proj.lora_A" in name for name in names)
        assert not any("q_proj.lora_A" in name or "o_proj.lora_B" in name for name in names)
        train(engine, plain, steps=2)
        engine.destroy()


@shared_ranks(2, timeout=300)
def test_adapters_of_embeddings_and_output_layers():
    """The embedding may have a padding token, and may be tied; logits of an output layer with an adapter are whole."""
    import peft

    for name, targets, split_head in (
        ("llama", ["embed_tokens", "q_proj"], None),
        ("opt", ["embed_tokens"], True),
        ("llama", ["lm_head"], True),
    ):
        model, _ = make(name)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
        plain = copy.deepcopy(model)
        engine = start(model, 2, tensor_parallel={"vocab_parallel_lm_head": split_head}, **momentum())
        head = "lm_head.base_layer" if targets == ["lm_head"] else "lm_head"
        assert splits_of(engine.module)[f"base_model.model.{head}.weight"].dim == 0
        train(engine, plain, steps=2)
        engine.destroy()


@shared_ranks(2)
def test_a_model_that_a_script_has_split():
    section = TPTrainingConfig(autotp_size=2, partition_config={"layer_specs": RULES})
    torch.manual_seed(0)
    model = Blocks()
    plain = copy.deepcopy(model)
    split(model, GroupMembers(dist.group.WORLD), section)
    parts = [param.detach().clone() for param in model.parameters()]
    with GatherReplacedLayerParams(model.parameters(), model):
        assert_close(dict(model.named_parameters()), dict(plain.named_parameters()))
        model.second.weight.data += 1
    parts[2] += 1
    assert all(torch.equal(found, wanted) for found, wanted in zip(model.parameters(), parts, strict=True))
    with torch.no_grad():
        model.second.weight -= 1
        plain.second.weight.copy_(plain.second.weight + 1 - 1)
    engine = start(model, 2, **momentum())
    inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    for _ in range(2):
        engine.backward(engine(inputs))
        engine.step()
        optimizer.zero_grad()
        plain(inputs).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        optimizer.step()
        assert float(engine.get_global_grad_norm()) == pytest.approx(float(norm), rel=1e-5)
    assert_close(parameters(engine), {name: param.detach() for name, param in plain.named_parameters()})
    alone = Blocks()
    split(alone, GroupMembers([dist.new_group([rank]) for rank in range(2)][dist.get_rank()]), section, required=False)
    with pytest.raises(UsageError, match="no layer of Blocks can be split"):
        start(alone, 2)


@shared_ranks(4)
def test_a_script_and_the_config_disagree_about_ranks():
    model = Blocks(16)
    section = TPTrainingConfig(autotp_size=4, partition_config={"layer_specs": RULES})
    split(model, GroupMembers(dist.group.WORLD), section)
    with pytest.raises(UsageError, match=r"over the ranks \[0, 1, 2, 3\], but the tensor-parallel ranks of this one"):
        start(model, 2)


@shared_ranks(2, timeout=300)
def test_groups_frozen_layers_and_generation():
    model, plain = make("llama")
    for one in (model, plain):
        one.model.layers[0].requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": trained[:3]}, {"params": trained[3:]}]
    seen = []
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    config = {
        "train_batch_size": 4,  # which counts both ranks as data-parallel ones
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True},
        **zero(1),
    }
    made = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=config)
    assert engine.train_batch_size() == 2
    train(engine, plain)
    assert len(seen) == 3, "hooks that were there go on"
    assert isinstance(model.model.layers[1].mlp.down_proj, nn.Linear)
    engine.eval()
    plain.eval()
    prompt = tokens(1, 5)
    found = engine.module.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(found, plain.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0))
    with torch.no_grad():
        assert engine(input_ids=prompt, labels=prompt).logits.shape[-1] == 50, "whole in eval mode"


class Blocks(nn.Module):
    """No model of a library: two layers by rules, one that has none."""

    def __init__(self, inner=12):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, inner), nn.Linear(inner, 8), nn.Linear(8, 1)

    def forward(self, inputs):
        return self.last(inputs + self.second(torch.relu(self.first(inputs)))).square().mean()


RULES = [
    {"patterns": [r"first\.weight"], "partition_type": "column"},
    {"patterns": [r"second\.weight"], "partition_type": "row"},
    {"patterns": [r"last\.weight"], "partition_type": "skip"},
]


@shared_ranks(2)
def test_a_model_of_nobody():
    torch.manual_seed(0)
    model = Blocks()
    plain = copy.deepcopy(model)
    inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    engine = start(model, 2, tensor_parallel={"partition_config": {"layer_specs": RULES, "strict_mode": True}})
    assert model.first.weight.shape == (6, 8)
    assert model.second.weight.shape == (8, 6)
    for _ in range(2):
        loss, expected = engine(inputs), plain(inputs)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
        engine.backward(loss)
        engine.step()
        expected.backward()
        with torch.no_grad():
            for param in plain.parameters():
                param -= 0.5 * param.grad
                param.grad = None
    assert_close(parameters(engine), {name: param.detach() for name, param in plain.named_parameters()})


@shared_ranks(2)
def test_what_cannot_be_split_is_an_error_on_all_ranks():
    uneven = {"partition_config": {"layer_specs": RULES}}
    with pytest.raises(UsageError, match=r"first has 7 outputs \(dim 0 of its weight\).*does not come out even"):
        start(Blocks(7), 2, tensor_parallel=uneven)
    with pytest.raises(UsageError, match="strict_mode: no rule matches 1 layers: last"):
        start(Blocks(), 2, tensor_parallel={"partition_config": {"layer_specs": RULES[:2], "strict_mode": True}})
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "vocab_size": 50}
    more = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=4))
    with pytest.raises(
        UsageError, match=r"self_attn\.q_proj is of an attention with 2 query heads and 4 key-value heads"
    ):
        start(more, 2)
    with pytest.raises(UsageError, match="no layer of Blocks can be split"):
        start(Blocks(), 2)
    engine = start(Blocks(), 2, tensor_parallel=uneven)
    with pytest.raises(UsageError, match=r"ranks \[0, 1\] .* those of rank 1 are not those of rank 0"):
        engine(torch.full((2, 8), float(dist.get_rank())))
    with pytest.raises(UsageError, match="split already"):
        start(engine.module, 2, tensor_parallel=uneven)
    other = Blocks()
    assert deepspeed.tp_model_init(other, tp_size=2, dtype=torch.bfloat16) is other
    with pytest.raises(UsageError, match=r"dtype=torch.bfloat16, but fp16.enabled"):
        start(other, 2, tensor_parallel=uneven, fp16={"enabled": True})
    deepspeed.tp_model_init(other, tp_size=4, dtype=torch.float32)
    with pytest.raises(UsageError, match="autotp_size is 2, but tp_model_init was called with tp_size=4"):
        start(other, 2, tensor_parallel=uneven)


@shared_ranks(2)
def test_ranks_on_two_nodes_are_told():
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "log_dist", lambda message, **_: told.append(message))
        for local, expected in (("2", 0), ("1", 1)):
            patch.setenv("LOCAL_WORLD_SIZE", local)
            start(make("llama")[0], 2).destroy()
            assert len([message for message in told if "lie on 2 nodes of 1 ranks" in message]) == expected
