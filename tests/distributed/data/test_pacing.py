"""Curriculum and layer drop in training: every stage, pipelines and tensor parallelism against one process."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

import deepspeed
from deepspeed.data.dynamic_batching import (
    batch_by_seqlens,
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed,
)
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.pipe import PipelineModule
from tests.harness import shared_ranks, store_path

pytestmark = pytest.mark.usefixtures("with_transformers")

LENGTH, STEPS = 16, 4
CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 4,
    "max_difficulty": LENGTH,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 2},
}
LENGTHS = [6, 10, 12, 16]
DROP = {"enabled": True, "theta": 0.4, "gamma": 2.0, "drop_blocks": True}


def llama(layers: int = 4) -> nn.Module:
    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=23, num_hidden_layers=layers, max_position_embeddings=LENGTH, use_cache=False, **sizes
        )
    )


def config(stage: int = 0, **more) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def tokens(step: int, rows: int) -> torch.Tensor:
    return torch.randint(23, (rows, LENGTH), generator=torch.Generator().manual_seed(step))


def plain(dropped: list[frozenset[int]], thetas: list[float], lengths: list[int], rows: int) -> list[torch.Tensor]:
    """The weights after each step of one process, which skips what it is told."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    place = {"step": 0}
    blocks = model.model.layers

    def residual(number: int):
        def hook(_, args, kwargs, out):
            hidden = args[0] if args else kwargs["hidden_states"]
            if number in dropped[place["step"]]:
                return hidden
            return hidden + (out - hidden) / (1 - (number + 1) / len(blocks) * (1 - thetas[place["step"]]))

        return hook

    for number, block in enumerate(blocks):
        block.register_forward_hook(residual(number), with_kwargs=True)
    found = []
    for step in range(STEPS):
        place["step"] = step
        batch = tokens(step, rows)[:, : lengths[step]]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    return found


def weights(engine) -> torch.Tensor:
    state = engine.module_state_dict()
    return torch.cat([state[name].flatten().float() for name, _ in llama().named_parameters()])


def train(engine, first: int, stop: int, rows: int, rank: int) -> list[tuple[frozenset[int], float]]:
    chosen = []
    for step in range(first, stop):
        batch = tokens(step, rows)[2 * rank : 2 * rank + 2]
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        pacing = engine._parts.pacing
        chosen.append((pacing.block_drop.dropped, engine.get_pld_theta()))
        engine.step()
    return chosen


@shared_ranks(2)
def test_blocks_are_dropped_at_every_stage_and_a_resumed_run_drops_the_same():
    folder, rank = Path(store_path()).parent / "saved", dist.get_rank()
    for stage in (0, 1, 2, 3):
        settings = config(stage, progressive_layer_drop=DROP, curriculum_learning={**CURRICULUM, "cut_batches": True})
        engine, *_ = deepspeed.initialize(model=llama(), config=settings)
        chosen = train(engine, 0, 2, 4, rank)
        engine.save_checkpoint(folder, tag=str(stage))
        chosen += train(engine, 2, STEPS, 4, rank)
        expected = plain([each for each, _ in chosen], [theta for _, theta in chosen], LENGTHS, 4)
        assert len({each for each, _ in chosen}) > 1, "some are dropped, and not always the same"
        assert chosen[0] == (frozenset(), 1.0)
        torch.testing.assert_close(weights(engine), expected[-1])
        again, *_ = deepspeed.initialize(model=llama(), config=settings)
        again.load_checkpoint(folder, tag=str(stage))
        assert train(again, 2, STEPS, 4, rank) == chosen[2:]
        assert torch.equal(weights(again), weights(engine))
        engine.destroy()
        again.destroy()


@shared_ranks(2)
def test_tensor_parallelism_and_pipelines_see_the_same_blocks_and_lengths():
    settings = config(progressive_layer_drop=DROP, curriculum_learning={**CURRICULUM, "cut_batches": True})
    engine, *_ = deepspeed.initialize(model=llama(), config={**settings, "tensor_parallel": {"autotp_size": 2}})
    chosen = train(engine, 0, STEPS, 2, 0)
    expected = plain([each for each, _ in chosen], [theta for _, theta in chosen], LENGTHS, 2)
    torch.testing.assert_close(weights(engine), expected[-1])
    engine.destroy()
    whole = llama()
    engine, *_ = deepspeed.initialize(model=PipelineModule(copy.deepcopy(whole), num_stages=2), config=settings)
    dropped = []
    for step in range(STEPS):
        batch = tokens(step, 2)
        engine.train_batch(iter([{"input_ids": batch, "labels": batch}]))
        dropped.append(engine._parts.pacing.block_drop.dropped)
    assert dropped == [each for each, _ in chosen]
    state = engine.module_state_dict()
    names = dict(whole.named_parameters())
    at = 0
    for name, param in names.items():
        part = expected[-1][at : at + param.numel()].view_as(param)
        at += param.numel()
        if name in state:
            torch.testing.assert_close(state[name], part)


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        found = tokens(number, 1)[0, : 3 + number * 7 % 13]
        return {"input_ids": found, "labels": found}


def padded(sample: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    return {name: nn.functional.pad(each, (0, length - len(each))) for name, each in sample.items()}


@shared_ranks(2)
def test_a_pipeline_trains_on_packs_as_one_process_does():
    texts = Texts()
    lengths = [len(texts[number]["input_ids"]) for number in range(len(texts))]
    section = {"dynamic_batching": {"enabled": True, "max_tokens": 40}, "num_workers": 0}
    settings = config(data_efficiency={"data_sampling": section}, gradient_accumulation_steps=2)
    settings["train_micro_batch_size_per_gpu"] = 1
    engine, *_ = deepspeed.initialize(model=PipelineModule(llama(), num_stages=2, dynamic_shape=True), config=settings)
    loader, schedule, _ = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
        Texts(), engine, lengths, sample_padding_fn=padded, dataloader_collate_fn=default_collate
    )
    engine.set_dataloader(loader)
    engine.lr_scheduler = schedule
    packs, sizes, longest = batch_by_seqlens(
        lengths, 40, effective_batch_size=2, required_microbatches_of_same_size=True
    )
    model, data = llama(), Texts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.5 * sizes[step] / 2
        losses = []
        for _, samples in packs[2 * step : 2 * step + 2]:
            batch = default_collate([padded(data[each], longest[step]) for each in samples])
            losses.append(model(**batch).loss)
        loss = sum(losses) / 2
        loss.backward()
        torch.testing.assert_close(engine.train_batch().cpu().view(()), loss.detach())
        optimizer.step()
        optimizer.zero_grad()


@shared_ranks(1)
def test_dropped_blocks_cost_nothing():
    settings = config(progressive_layer_drop={**DROP, "theta": 0.1, "gamma": 50.0})
    engine, *_ = deepspeed.initialize(model=llama(), config=settings)
    flops = []
    for step in range(6):
        batch = tokens(step, 2)
        with FlopCounterMode(display=False) as counter:
            engine.backward(engine(input_ids=batch, labels=batch).loss)
        flops.append((len(engine._parts.pacing.block_drop.dropped), counter.get_total_flops()))
        engine.step()
    dropped, whole = max(flops), flops[0]
    assert whole[0] == 0
    assert dropped[0] > 1
    with FlopCounterMode(display=False) as counter:
        batch = tokens(0, 2)
        llama(4 - dropped[0])(input_ids=batch, labels=batch).loss.backward()
    assert dropped[1] == pytest.approx(counter.get_total_flops(), rel=0.02)
    engine.eval()
    assert engine(input_ids=batch).logits.shape == (2, LENGTH, 23)


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 1), []

    def forward(self, x, curriculum_seqlen=None, progressive_layer_drop=False, pld_theta=None):
        self.seen.append((curriculum_seqlen, progressive_layer_drop, pld_theta))
        return self.layer(x).mean()


@shared_ranks(1)
def test_a_model_that_wants_it_gets_length_and_theta():
    pld = {"enabled": True, "theta": 0.5, "gamma": 0.1}
    settings = config(curriculum_learning=CURRICULUM, progressive_layer_drop=pld, gradient_accumulation_steps=2)
    engine, *_ = deepspeed.initialize(model=Told(), config=settings)
    for _ in range(6):
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
    lengths, told, thetas = zip(*engine.module.seen, strict=True)
    assert (lengths, set(told)) == ((6, 6, 10, 10, 12, 12), {True})
    assert thetas[2:4] == (pytest.approx(0.5 * 2.718281828**-0.1 + 0.5),) * 2
    assert engine.curriculum_scheduler_legacy.get_current_difficulty() == 12
    assert (engine.pld_theta(), engine.curriculum_enabled_legacy()) == (0.5, True)
    engine.eval()
    engine(torch.ones(2, 4))
    assert engine.module.seen[-1] == (None, False, None)
    own = {**CURRICULUM, "schedule_type": "custom", "schedule_config": {}}
    engine, *_ = deepspeed.initialize(model=Told(), config=config(curriculum_learning=own))
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 5 * step})
    engine(torch.ones(2, 4))
    assert engine.module.seen[-1][0] == 5
    with pytest.raises(UsageError, match="'other' is no metric with schedule_type custom; those are seqlen"):
        engine.set_custom_curriculum_learning_schedule({"other": len})


@shared_ranks(1)
def test_what_would_have_no_effect_is_refused():
    for section, said in (
        ({"curriculum_learning": CURRICULUM}, "Set curriculum_learning.cut_batches to true"),
        ({"progressive_layer_drop": {"enabled": True}}, "Set progressive_layer_drop.drop_blocks to true"),
        ({"progressive_layer_drop": {**DROP, "blocks": ["model.rows"]}}, "no list of modules 'model.rows'.*layers"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=said):
            deepspeed.initialize(model=llama(), config=config(**section))
