"""What we write is laid out as DeepSpeed lays it out: its own files, read and written again, are the same."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from deepspeed.checkpoint.formats.adapters import state_of
from deepspeed.checkpoint.formats.detect import open_checkpoint
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.formats.zero_files.file_names import expert_file, layer_file, sort_files
from deepspeed.checkpoint.formats.zero_files.flat_writer import scaler_stand_in, with_classes
from deepspeed.checkpoint.formats.zero_files.writer import files
from tests.checkpoint_states import ORDER, SMALL, Whole, fixture

OURS = {"ds_extra", "rank_state", "universal_checkpoint_info", "loss_scale", "parameter_scalars"}
THEIRS = {"loss_scaler"}
FREE = {"ds_version", "frozen_param_shapes", "frozen_param_fragments", "shared_params"}


def differences(real, ours, path=""):
    """Where two objects differ, but for what is known to."""
    if isinstance(real, dict):
        for key in (real.keys() | ours.keys()) - OURS - THEIRS - FREE:
            if key not in real or key not in ours:
                yield f"{path}/{key} only in {'one' if key in real else 'ours'}"
            else:
                yield from differences(real[key], ours[key], f"{path}/{key}")
    elif isinstance(real, (list, tuple)):
        if len(real) != len(ours):
            yield f"{path}: {len(real)} and {len(ours)} entries"
        for place, (one, other) in enumerate(zip(real, ours, strict=False)):
            yield from differences(one, other, f"{path}[{place}]")
    elif isinstance(real, torch.Tensor):
        if real.dtype != ours.dtype or not torch.equal(real, ours):
            yield f"{path}: {real.dtype} {tuple(real.shape)} and {ours.dtype} {tuple(ours.shape)}"
    elif type(real).__name__ == "fragment_address":
        if (real.numel, real.start) != (ours.numel, ours.start):
            yield path
    elif real != ours:
        yield f"{path}: {real!r} and {ours!r}"


@pytest.mark.parametrize("name", [f"stage{stage}_{dtype}" for stage in range(4) for dtype in ("fp32", "bf16", "fp16")])
def test_the_same_file_again(name):
    source = open_checkpoint(fixture(name), order=ORDER)
    for rank in range(2):
        made = files(state_of(source, stage=int(name[5]), rank=rank, world=2)).objects
        for file, ours in made.items():
            real = safe_load(fixture(name) / file)
            found = [text for text in differences(real, ours) if not text.startswith(("/note", "/at"))]
            if name.startswith("stage0"):  # names DeepSpeed has only in some of its optimizers
                found = [text for text in found if "/optimizer" not in text or "exp_avg" in text or "groups" in text]
            assert found == []
    expected = {path.name for path in fixture(name).iterdir()}
    assert expected >= set(made) - {f"dp_rank_{rank}_mp_rank_00_rank_states.pt" for rank in range(2)}


def test_moments_are_padded_and_masters_are_not():
    state = SMALL.state(2, 1, 2)
    entries = files(state).objects["bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]
    assert [len(tensor) for tensor in entries["single_partition_of_fp32_groups"]] == [57 - 30, 8 - 4]
    assert entries["group_paddings"] == [3, 0]
    assert len(entries["base_optimizer_state"]["state"][0]["exp_avg"]) == 30
    assert entries["base_optimizer_state"]["state"][0]["exp_avg"][27:].tolist() == [0, 0, 0]


def test_sub_groups_end_where_they_are_full():
    state = SMALL.state(3, 0, 2, sub_group_size=18)
    made = files(state).objects
    shapes = made["zero_pp_rank_0_mp_rank_00_model_states.pt"]["param_shapes"]
    assert [list(group) for group in shapes] == [["a.weight"], ["b.weight", "c.weight"], ["a.bias", "b.bias"]]
    inner = made["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]
    assert [len(tensor) for tensor in inner["fp32_flat_groups"]] == [18, 2 + 9, 4 + 1]
    assert [group["params"] for group in inner["optimizer_state_dict"]["param_groups"]] == [[0, 1], [2]]


def test_parameters_without_elements_are_in_no_group():
    whole = Whole([{"a": (3,), "none": (0, 4), "b": (2,)}], precision="fp32")
    for stage in (1, 3):
        made = files(whole.state(stage, 0, 1)).objects
        model = next(value for name, value in made.items() if "model_states" in name)
        assert [list(group) for group in model["param_shapes"]] == [["a", "b"]]
        assert "none" in model["frozen_param_shapes"]


def test_the_scaler_of_a_constant_one_needs_no_class(tmp_path):
    torch.save(scaler_stand_in({"cur_scale": 1.0, "dynamic": False}), tmp_path / "scaler.pt")
    scaler = torch.load(tmp_path / "scaler.pt", weights_only=True)
    weight = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    scaler.scale_loss((weight * 2).sum()).backward()
    assert weight.grad.tolist() == [2, 2, 2]
    scaler.update_scale(False)
    assert scaler.cur_scale == 1.0
    assert scaler_stand_in({"cur_scale": 256, "dynamic": True}) is None
    assert scaler_stand_in({"cur_scale": 8.0, "dynamic": False}) is None


def test_with_classes_names_deepspeeds_own(tmp_path):
    entries = files(Whole(SMALL.shapes, precision="fp16").state(3, 0, 1)).objects
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    with_classes(entries[path.name], path)
    assert b"deepspeed.runtime.fp16.loss_scaler" in path.read_bytes()
    with pytest.raises(Exception, match="DynamicLossScaler"):
        torch.load(path, weights_only=True)
    scaler = safe_load(path)["optimizer_state_dict"]["loss_scaler"]
    assert (type(scaler).__name__, scaler.cur_scale) == ("DynamicLossScaler", 512.0)


def test_names_are_recognised():
    found = sort_files(
        ["mp_rank_01_model_states.pt", "fp16_zero_pp_rank_12_mp_rank_03_optim_states.pt", layer_file(3, 1),
         "zero_pp_rank_0_mp_rank_00optim_states.pt", expert_file(0, 7, 1), "expp_rank_0_mp_rank_00_optim_states.pt",
         "latest", "zero_to_fp32.py"]
    )  # fmt: skip
    assert found.models == {1: "mp_rank_01_model_states.pt"}
    assert sorted(found.optimizers) == [(0, 0), (12, 3)]
    assert found.layers == ["layer_03-model_01-model_states.pt"]
    assert found.experts == {(0, 7, 1): "layer_0_expert_7_mp_rank_01_model_states.pt"}
    assert found.expert_optimizers == {(0, 0): "expp_rank_0_mp_rank_00_optim_states.pt"}
    assert layer_file(3) == "layer_03-model_states.pt"


def test_an_address_is_an_ordered_dict_with_attributes():
    made = files(SMALL.state(1, 0, 2)).objects["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    mapping = made["optimizer_state_dict"]["param_slice_mappings"][0]
    assert [(name, item.numel, item.start) for name, item in mapping.items()] == [("a.weight", 30, 0)]
    assert all(type(item) is OrderedDict for item in mapping.values())


def test_stage_3_in_fp16_leaves_out_what_needs_a_class():
    """DeepSpeed then stops at the load, naming the entry, instead of training with another scale."""
    source = open_checkpoint(fixture("stage3_fp16"))
    made = files(state_of(source, stage=3, rank=0, world=2)).objects
    inner = made["zero_pp_rank_0_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]
    assert "loss_scaler" not in inner
    assert inner["loss_scale"]["cur_scale"] == 256
    source = open_checkpoint(fixture("stage3_bf16"))
    made = files(state_of(source, stage=3, rank=0, world=2)).objects
    assert (
        made["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]["loss_scaler"].cur_scale == 1.0
    )
