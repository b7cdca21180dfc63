"""Random layer token drop: converted models at every stage, resuming, the saving, the schedules by layer tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import deepspeed
from deepspeed.config.data import RandomLTDConfig
from deepspeed.data.random_ltd import (
    RandomLayerTokenDrop,
    RandomLTDScheduler,
    convert_to_random_ltd,
    join_layers,
    remove_random_ltd_state_dict,
    save_without_random_ltd,
)
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.pipe import PipelineModule
from tests.harness import shared_ranks, store_path

pytestmark = pytest.mark.usefixtures("with_transformers")

LENGTH = 16
LTD = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "model_mask_name": "attention_mask",
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 4,
        "max_value": LENGTH,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 6, "seq_per_step": 4},
    },
}


def llama(layers: int = 4) -> nn.Module:
    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=23, num_hidden_layers=layers, use_cache=False, **sizes))


def build(stage: int = 0, ltd: dict | None = None, model: nn.Module | None = None, **more):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "data_efficiency": {"data_routing": {"random_ltd": {**LTD, **(ltd or {})}}},
        **more,
    }
    model = convert_to_random_ltd(llama(), LlamaDecoderLayer) if model is None else model
    return deepspeed.initialize(model=model, config=config)[0]


def tokens(step: int, rows: int = 4) -> torch.Tensor:
    return torch.randint(23, (rows, LENGTH), generator=torch.Generator().manual_seed(step))


def train(engine, first: int, stop: int) -> list[int]:
    kept = []
    for step in range(first, stop):
        batch = tokens(step)[2 * dist.get_rank() :][:2]
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        kept.append(engine.random_ltd_scheduler.get_current_seq())
        engine.step()
    return kept


def weights(engine) -> torch.Tensor:
    return torch.cat([each.flatten().float() for each in engine.module_state_dict().values()])


@shared_ranks(1, 2)
def test_every_stage_trains_alike_and_resumes_bit_equal():
    folder, found = Path(store_path()).parent / "saved", []
    for stage in (0, 1, 2, 3) if dist.get_world_size() > 1 else (0,):
        engine = build(stage)
        assert train(engine, 0, 3) == [4, 4, 8]
        engine.save_checkpoint(folder, tag=str(stage))
        assert train(engine, 3, 8) == [8, 12, 12, 16, 16]
        again = build(stage)
        again.load_checkpoint(folder, tag=str(stage))
        train(again, 3, 8)
        assert torch.equal(weights(again), weights(engine))
        size = 2 * dist.get_world_size()
        total = sum(size * (2 * kept + 2 * LENGTH) for kept in (4, 4, 8, 8, 12, 12, 16, 16))
        scheduler = again.random_ltd_scheduler
        assert scheduler.consumed_layer_tokens == scheduler.get_total_layer_tokens(8) == total
        found.append(weights(engine))
        engine.destroy()
        again.destroy()
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


@shared_ranks(1)
def test_dropped_tokens_cost_nothing_and_come_out_as_they_went_in():
    engine = build()
    layer = engine.module.model.layers[1]
    seen = {}
    layer.register_forward_hook(lambda _, args, out: seen.update(into=args[0], out=out))
    batch = tokens(0, 2)
    with FlopCounterMode(display=False) as counter:
        engine.backward(engine(input_ids=batch, labels=batch).loss)
    changed = (seen["into"] != seen["out"]).any(-1).sum(-1)
    assert changed.tolist() == [4, 4]

    def flops(layers: int, length: int) -> int:
        with FlopCounterMode(display=False) as each:
            llama(layers)(input_ids=batch[:, :length], labels=batch[:, :length]).loss.backward()
        return each.get_total_flops()

    saved = 2 * (flops(4, LENGTH) - flops(3, LENGTH)) - 2 * (flops(4, 4) - flops(3, 4))
    assert counter.get_total_flops() == pytest.approx(flops(4, LENGTH) - saved, rel=0.02)
    whole = llama()
    plain = save_without_random_ltd(engine.module)
    whole.load_state_dict(plain)
    engine.eval()
    torch.testing.assert_close(engine(input_ids=batch).logits, whole(input_ids=batch).logits)


class Block(nn.Module):
    """A layer whose work is that of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.layer(hidden_states)


def test_the_work_of_a_training_is_that_of_its_layer_tokens():
    model = convert_to_random_ltd(nn.Sequential(*(Block() for _ in range(4))), Block).train()
    scheduler = join_layers(model, RandomLTDConfig.model_validate(LTD), 2)
    with FlopCounterMode(display=False) as counter:
        for step in range(8):
            scheduler.update_seq(step)
            scheduler.draw = (step, 0)
            model(torch.ones(2, LENGTH, 8, requires_grad=True)).sum().backward()
    forward_and_backward = 3 * 2 * 8 * 8
    published = scheduler.get_total_layer_tokens(8) * forward_and_backward
    assert counter.get_total_flops() == pytest.approx(published, rel=0.02)
    assert published < 0.85 * 8 * 4 * 2 * LENGTH * forward_and_backward


def plain(steps: int) -> dict[str, torch.Tensor]:
    """The weights of one process that keeps the same tokens, under the names of the model that was not converted."""
    model = convert_to_random_ltd(llama(), LlamaDecoderLayer).train()
    scheduler = join_layers(model, RandomLTDConfig.model_validate(LTD), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        scheduler.update_seq(step)
        scheduler.draw = (step, 0)
        batch = tokens(step, 2)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return save_without_random_ltd(model)


@shared_ranks(2)
def test_tensor_parallelism_and_pipelines_drop_the_same_tokens():
    expected = plain(4)
    engine = build(tensor_parallel={"autotp_size": 2})
    for step in range(4):
        batch = tokens(step, 2)
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
    found = remove_random_ltd_state_dict(engine.module_state_dict())
    assert found.keys() >= dict(llama().named_parameters()).keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])
    engine.destroy()
    staged = PipelineModule(convert_to_random_ltd(llama(), LlamaDecoderLayer), num_stages=2)
    engine = build(model=staged)
    for step in range(4):
        batch = tokens(step, 2)
        engine.train_batch(iter([{"input_ids": batch, "labels": batch}]))
    found = remove_random_ltd_state_dict(engine.module_state_dict())
    assert len(found) > 10
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])


@shared_ranks(1)
def test_the_learning_rate_follows_layer_tokens():
    step = 2 * (2 * 4 + 2 * LENGTH)
    schedule = {"enabled": True, "total_layer_tokens": 10 * step, "warmup_layer_tokens": 2 * step}
    engine = build(ltd={"layer_token_lr_schedule": schedule})
    rates = []
    for number in range(3):
        rates.append(engine.get_lr()[0])
        train(engine, number, number + 1)
    consumed = [0, step, 2 * step, 2 * step + 2 * (2 * 8 + 2 * LENGTH)]
    assert rates == pytest.approx([0, 0.25, 0.5])
    assert engine.get_lr()[0] == pytest.approx(0.5 * (10 * step - consumed[3]) / (8 * step))
    with pytest.raises(DeepSpeedConfigError, match="WarmupLR sets the learning rate, too"):
        build(ltd={"layer_token_lr_schedule": schedule}, scheduler={"type": "WarmupLR", "params": {}})


@shared_ranks(1)
def test_what_does_not_fit_is_named():
    with pytest.raises(DeepSpeedConfigError, match=r"layer_id has 7; numbers are below total_layer_num \(4\)"):
        build(ltd={"random_ltd_layer_id": [1, 7]})
    with pytest.raises(DeepSpeedConfigError, match=r"names \[1, 7\], and 1 layers of LlamaForCausalLM"):
        build(ltd={"random_ltd_layer_id": [1, 7], "total_layer_num": 8})
    with pytest.raises(UsageError, match="has no layer of Conv2d"):
        convert_to_random_ltd(llama(), nn.Conv2d)
    encoder = RandomLayerTokenDrop(nn.Linear(4, 4))
    encoder.init_config(RandomLTDScheduler({**LTD, "model_type": "encoder"}), 1)
    with pytest.raises(UsageError, match="was called without such an argument"):
        encoder(torch.ones(2, LENGTH, 4))
