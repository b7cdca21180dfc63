"""LoRA over sequences that ranks share; the engine's own loader; pretended ranks."""

from __future__ import annotations

import json
import os

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.clients.sequences import LENGTH, VOCABULARY, Case, batches, build, family
from tests.harness import ROOT, ranks

EXAMPLE = ROOT / "examples/long_sequences"


def adapted():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(family("llama"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    torch.manual_seed(3)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.02)
    return model


@pytest.mark.parametrize("stage", [0, 3])
@ranks(2, timeout=400)
def test_lora(stage):
    case = Case("llama", stage, "auto", data="padded")
    model = adapted()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    expected = []
    for batch in batches(case):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    engine = build(case, model=adapted())
    found = []
    for batch in batches(case):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    assert found == pytest.approx(expected, abs=1e-5)
    engine.destroy()


@ranks(4, timeout=400)
def test_ranks_that_share_sequences_get_the_same_samples():
    rows = [{"input_ids": torch.full((LENGTH,), number), "labels": torch.arange(LENGTH)} for number in range(8)]
    case = Case("llama", 1, "ulysses", sp=2)
    engine = build(case)
    seen = []
    for batch in engine.deepspeed_io(rows, batch_size=2):
        seen.append(batch["input_ids"][:, 0].tolist())
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
    assert (engine.train_batch_size(), engine.dp_world_size, engine.sequence_parallel_size) == (4, 2, 2)
    everyone = [None] * 4
    dist.all_gather_object(everyone, seen)
    assert everyone[0] == everyone[1] != everyone[2] == everyone[3]
    assert sorted(number for part in (everyone[0], everyone[2]) for rows in part for number in rows) == list(range(8))
    engine.destroy()


@pytest.mark.parametrize("attention", ["auto", "ring"])
@ranks(1, init=False)
def test_pretended_ranks(attention):
    os.environ |= {"WORLD_SIZE": "64", "LOCAL_SIZE": "8"}
    dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    case = Case("llama", 3, attention, sp=8)
    engine = build(case)
    assert engine.dp_world_size == 8
    ids = torch.arange(2 * 32).view(2, 32) % VOCABULARY
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


@ranks(2, timeout=400)
def test_the_example():
    """The same losses with its config as without sequence parallelism."""
    from examples.long_sequences.train import train

    config = json.loads((EXAMPLE / "ds_config.json").read_text())
    options = {"steps": 3, "width": 16, "length": 32}
    shared = train(config, **options)
    alone = {name: value for name, value in config.items() if not name.startswith("sequence_parallel")}
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = "0"
    os.environ["WORLD_SIZE"] = "1"
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    assert shared == pytest.approx(train(alone, **options), abs=1e-4)
