"""Models that never were whole on a rank: constructed in shards, or without values and read part by part."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import init_empty_weights

import deepspeed
from deepspeed.checkpoint.formats.safetensors import TensorFile, save
from deepspeed.checkpoint.pretrained import read_parts, take_place
from deepspeed.errors import UsageError
from deepspeed.tensor_parallel import cuts_of, splits_of
from tests.distributed.tensor_parallel.families import FAMILIES, assert_close, make, parameters, start
from tests.distributed.tensor_parallel.training import momentum, train, zero
from tests.harness import ranks, shared_ranks, store_path


@ranks(4, timeout=300)
def test_built_in_shards():
    """Over all ranks, before anybody knew how layers are cut; tied and untied, with replicas and without."""
    for name, tp, options in (("qwen3", 2, {"vocab_parallel_lm_head": True}), ("one key", 4, {})):
        _, plain = make(name)
        with deepspeed.zero.Init():
            torch.manual_seed(0)
            model = FAMILIES[name]().train()
        assert all(param.numel() == 0 for param in model.parameters())
        engine = start(model, tp, tensor_parallel=options, **momentum(**zero(3)))
        train(engine, plain, steps=2)
        engine.destroy()
    with deepspeed.zero.Init():
        model = FAMILIES["llama"]()
    with pytest.raises(UsageError, match=r"zero_optimization\.stage is 1"):
        start(model, 2, **momentum(**zero(1)))


def written(model, parts=2):
    """A folder of this model, as `save_pretrained` writes it: several files and an index."""
    folder = Path(store_path()).parent / f"{Path(store_path()).name}-weights"
    if dist.get_rank() == 0:
        model.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) >= parts
    dist.barrier()
    return folder


@shared_ranks(2, timeout=300)
def test_a_rank_reads_its_part():
    for name in ("one key", "llama"):
        model, plain = make(name)
        folder = written(model)
        with init_empty_weights():
            empty = FAMILIES[name]()
        objects = {name: id(param) for name, param in empty.named_parameters()}
        assert deepspeed.tp_model_init(empty.train(), 2, torch.float32, checkpoint=str(folder)) is empty
        engine = start(empty, 2, tensor_parallel={"vocab_parallel_lm_head": True}, **momentum(**zero(1)))
        assert all(id(param) == objects[name] for name, param in empty.named_parameters())
        assert_close(parameters(engine), {key: value.detach() for key, value in plain.named_parameters()}, 1e-7)
        train(engine, plain, steps=2)
        engine.destroy()
        dist.barrier()


@shared_ranks(2, timeout=300)
def test_bytes_that_are_read():
    model, _ = make("llama")
    folder = written(model)
    with init_empty_weights():
        empty = FAMILIES["llama"]()
    deepspeed.tp_model_init(empty, 2, torch.float32, checkpoint=folder)
    engine = start(empty, 2, tensor_parallel={"vocab_parallel_lm_head": True})
    waiting = {param: [name] for name, param in empty.named_parameters()}
    read = read_parts(empty, waiting, folder, cuts_of(empty, dist.get_rank())).bytes
    cut = splits_of(empty)
    whole = sum(value.nbytes for name, value in model.named_parameters() if name not in cut)
    halves = sum(value.nbytes for name, value in model.named_parameters() if name in cut)
    assert read == whole + halves // 2
    engine.destroy()


@shared_ranks(1)
def test_folders_that_do_not_fit():
    model, _ = make("llama")
    folder = written(model)
    with init_empty_weights():
        empty = FAMILIES["llama"]()
    deepspeed.tp_model_init(empty, 1, torch.float32, checkpoint=folder)
    assert torch.equal(start(empty, 1).module.model.norm.weight, model.model.norm.weight), "also where nothing is cut"
    for path in folder.iterdir():
        path.unlink()
    for content, message in (
        ({}, "has no files of safetensors"),
        ({"other": torch.zeros(1)}, r"has no tensor model\.embed_tokens\.weight"),
        ({"model.embed_tokens.weight": torch.zeros(1)}, r"has the shape \(1,\) in its file"),
    ):
        with init_empty_weights():
            empty = FAMILIES["llama"]()
        if content:
            save(TensorFile(content), folder / "model.safetensors")
        deepspeed.tp_model_init(empty, 1, torch.float32, checkpoint=folder)
        with pytest.raises(UsageError, match=message):
            start(empty, 1)
    deepspeed.tp_model_init(empty, 1, torch.float32, checkpoint=folder / "nowhere")
    with pytest.raises(UsageError, match="which is no folder"):
        start(empty, 1)
    with torch.device("meta"):
        nothing = FAMILIES["llama"]()
        nothing.register_buffer("told_by_nobody", torch.ones(3))
    deepspeed.tp_model_init(nothing, 1, torch.float32, checkpoint=folder)
    with pytest.raises(UsageError, match="the buffer told_by_nobody is on the meta device"):
        take_place(nothing)
    with pytest.raises(UsageError, match="unknown arguments folder; it takes tp_group and checkpoint"):
        deepspeed.tp_model_init(nothing, 1, torch.float32, folder=folder)


@ranks(2, timeout=300)
def test_what_belongs_to_heads_is_read_with_them():
    """Sinks, norms with a row for each head, and fused weights in runs, with values that tell heads apart."""
    for name in ("gpt-oss", "cohere with norms of heads", "codegen", "bigcode with many keys"):
        _, plain = make(name)
        with torch.no_grad():
            for path, param in plain.named_parameters():
                if "norm" in path or "sinks" in path:
                    param.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(path)))
        folder = written(plain, parts=1)
        with init_empty_weights():
            empty = FAMILIES[name]()
        deepspeed.tp_model_init(empty.train(), 2, torch.float32, checkpoint=str(folder))
        engine = start(empty, 2, **momentum())
        assert_close(parameters(engine), {key: value.detach() for key, value in plain.named_parameters()}, 1e-7)
        train(engine, plain, steps=2)
        engine.destroy()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        dist.barrier()
