"""Models that were built without values: a rank reads its own experts and nothing of the others'."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.checkpoint.formats.safetensors import TensorFile, open_file, save
from deepspeed.checkpoint.pretrained import read_parts, values_from
from deepspeed.errors import UsageError
from deepspeed.moe.placement import cuts_of_experts
from tests.distributed.moe.test_auto import Case, compare, config
from tests.distributed.moe.test_expert_checkpoints import shared_folder
from tests.harness import ranks

pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")


def empty(family):
    from tests.distributed.moe.families import FAMILIES

    with accelerate.init_empty_weights():
        return FAMILIES[family]().train()


def written(family, folder):
    """(the model, its folder as `save_pretrained` writes it)."""
    from tests.distributed.moe.families import model_of

    model = model_of(family)
    if dist.get_rank() == 0:
        model.save_pretrained(folder / family, max_shard_size="20KB")
    dist.barrier()
    return model, folder / family


@ranks(2)
def test_a_rank_reads_its_experts():
    """Experts apart in files (Mixtral, DeepSeek with a bias of its router), and stacked (gpt-oss)."""
    folder = shared_folder("slices")
    for case in (Case("mixtral", 1), Case("deepseek_v3", 3), Case("gpt_oss", 0)):
        plain, place = written(case.family, folder)
        model = values_from(empty(case.family), place)
        compare(case, model, plain)
        check_bytes(model, plain, place)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def check_bytes(model, plain, place):
    """Half of the experts' bytes and all others; and where an expert has tensors of its own, none of the others'."""
    cuts = cuts_of_experts(model)
    parts = {name: value[: len(value) // 2] if name in cuts else value for name, value in plain.named_parameters()}
    waiting = {torch.nn.Parameter(value.detach().clone()): [name] for name, value in parts.items()}
    read = read_parts(model, waiting, place, cuts)
    buffers = sum(value.nbytes for name, value in plain.named_buffers() if name in plain.state_dict())
    assert read.bytes == sum(value.nbytes for value in parts.values()) + buffers
    half = cuts[next(iter(cuts))][0].total // 2
    theirs = {str(number) for number in range(2 * half)} - {str(dist.get_rank() * half + at) for at in range(half)}
    numbers = {found[1] for name in read.tensors if (found := re.search(r"experts\.(\d+)\.", name))}
    assert not numbers & theirs


@ranks(1)
def test_folders_that_do_not_fit():
    folder = shared_folder("unfit")
    _, place = written("mixtral", folder)
    found = {
        name: value.clone() for file in place.glob("*.safetensors") for name, value in open_file(file).tensors.items()
    }
    for file in place.iterdir():
        file.unlink()
    lost = next(name for name in found if name.endswith("experts.2.w1.weight"))
    for changed, message in (
        (
            {name: value for name, value in found.items() if name != lost},
            r"gate_up_proj cannot be made of .*w1\.weight",
        ),
        ({name: value for name, value in found.items() if ".experts.3." not in name}, r"has the shape \(3, "),
        ({name: value for name, value in found.items() if ".experts." not in name}, r"has no tensor .*gate_up_proj"),
    ):
        save(TensorFile(changed), place / "model.safetensors")
        with pytest.raises(UsageError, match=message):
            deepspeed.initialize(model=values_from(empty("mixtral"), place), config=config(size=1))
    shutil.rmtree(folder)
