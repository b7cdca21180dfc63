"""Files that DeepSpeed 0.19.8 wrote: every value is found, under its name."""

from __future__ import annotations

import shutil

import pytest
import torch

from deepspeed.checkpoint.formats.detect import open_checkpoint
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.errors import CheckpointError
from tests.checkpoint_states import ORDER, Net, fixture

NAMES = [f"stage{stage}_{dtype}" for stage in range(4) for dtype in ("fp32", "bf16", "fp16")]


def plain_entries(path):
    """A real optimizer file without its objects, to be changed and saved again."""
    entries = safe_load(path, mmap=False)
    inner = entries["optimizer_state_dict"]
    inner["zero_stage"] = int(inner["zero_stage"])
    del inner["loss_scaler"], inner["param_slice_mappings"]
    return entries


@pytest.mark.parametrize("name", NAMES)
def test_a_real_checkpoint_is_read_whole(name):
    source = open_checkpoint(fixture(name), order=ORDER)
    wanted = {key: value.shape for key, value in Net().state_dict().items() if key != "out.weight"}
    assert dict(source.shapes) == wanted
    assert (source.stage, source.world) == (int(name[5]), 2)
    assert dict(source.aliases) == {"out.weight": "emb.weight"}
    assert [list(names) for names, _ in source.groups] == ORDER
    assert [settings["weight_decay"] for _, settings in source.groups] == [0.1, 0.0]
    assert dict(source.small.client_state) == {"note": "from DeepSpeed 0.19.8", "at": 3}
    assert source.small.counters.global_steps == 3
    assert source.small.lr_scheduler == {"last_batch_iteration": 2}
    for names in ORDER:
        for item in names:
            assert source.kinds(item) == ("param", "master", "exp_avg", "exp_avg_sq")
            step = 4 if name in ("stage0_bf16", "stage0_fp16") else 3  # DeepSpeed counts one more there
            assert dict(source.scalars(item)) == {"step": step}
    if "fp16" in name:
        assert source.small.loss_scale is not None
        assert (source.small.loss_scale["cur_scale"], source.small.loss_scale["dynamic"]) == (256, True)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_masters_agree_with_the_weights_at_every_stage(dtype):
    for stage in range(3):
        source = open_checkpoint(fixture(f"stage{stage}_{dtype}"), order=ORDER)
        for names in ORDER:
            for name in names:
                master = source.read(name, "master")
                assert master.dtype == torch.float32
                assert torch.equal(master.to(source.dtype(name)), source.read(name, "param"))


def test_the_stages_agree_with_each_other():
    sources = [open_checkpoint(fixture(f"stage{stage}_fp32"), order=ORDER) for stage in range(4)]
    for name in ("emb.weight", "body.2.weight", "frozen.bias"):
        for kind in sources[0].kinds(name):
            first = sources[0].read(name, kind)
            for source in sources[1:]:
                torch.testing.assert_close(source.read(name, kind), first, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["stage1_fp32", "stage3_bf16"])
def test_an_interval_touches_only_the_files_that_hold_it(name, monkeypatch):
    from deepspeed.checkpoint.formats import checked_files

    seen = []
    real = checked_files.safe_load
    monkeypatch.setattr(checked_files, "safe_load", lambda path: seen.append(path.name) or real(path))
    source = open_checkpoint(fixture(name))
    seen.clear()
    source.read("emb.weight", "exp_avg", 0, 100)  # rank 0's, whose file is open for the index
    assert seen == []
    source.read("body.3.weight", "exp_avg", 700, 888)
    assert len(seen) == 1
    assert "zero_pp_rank_1" in seen[0]


def test_without_names_the_optimizer_of_stage_0_is_not_guessed():
    source = open_checkpoint(fixture("stage0_fp16"))
    assert source.groups == []
    assert source.kinds("emb.weight") == ("param", "master")
    with pytest.raises(CheckpointError, match=r"group 0 has 2976 elements.*have 2088"):
        open_checkpoint(fixture("stage0_fp16"), order=[ORDER[0][:2], ORDER[1]])
    with pytest.raises(CheckpointError, match="exp_avg has 1200 elements where body"):
        open_checkpoint(fixture("stage0_fp32"), order=[ORDER[0][::-1], ORDER[1]])


def test_a_missing_rank_is_named(tmp_path):
    for name, file in (("stage2_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
                       ("stage3_fp32", "zero_pp_rank_1_mp_rank_00_model_states.pt")):  # fmt: skip
        shutil.copytree(fixture(name), tmp_path / name)
        (tmp_path / name / file).unlink()
        with pytest.raises(CheckpointError, match="rank 1"):
            open_checkpoint(tmp_path / name).read("frozen.weight", "param")


def test_a_file_of_another_checkpoint_is_noticed(tmp_path):
    shutil.copytree(fixture("stage2_fp32"), tmp_path / "mixed")
    path = tmp_path / "mixed" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    entries = plain_entries(path)
    entries["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] = torch.zeros(7)
    torch.save(entries, path)
    source = open_checkpoint(tmp_path / "mixed")
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_1.* holds 7 elements .*body.3.weight"):
        source.read("body.3.weight", "master")


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"holds no checkpoint; it has notes.txt"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is no directory"):
        open_checkpoint(tmp_path / "nowhere")


def test_older_shapes_of_the_files_are_read(tmp_path):
    """Elastic lists, BF16_Optimizer's padded masters without a stage, and the old spelling of the name."""
    shutil.copytree(fixture("stage1_bf16"), tmp_path / "old")
    for rank in range(2):
        path = tmp_path / "old" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        entries = plain_entries(path)
        inner = entries["optimizer_state_dict"]
        padding = inner["group_paddings"]
        if rank == 1:
            master = inner["single_partition_of_fp32_groups"]
            inner["single_partition_of_fp32_groups"] = [
                torch.cat([tensor, torch.zeros(count)]) for tensor, count in zip(master, padding, strict=True)
            ]
        states = inner["base_optimizer_state"]["state"]
        inner["base_optimizer_state"] = [states[0], states[1]]
        del inner["zero_stage"], inner["param_alignment_paddings"]
        path.unlink()
        torch.save(entries, tmp_path / "old" / f"zero_pp_rank_{rank}_mp_rank_00optim_states.pt")
    old, new = open_checkpoint(tmp_path / "old"), open_checkpoint(fixture("stage1_bf16"))
    assert old.stage == 1
    for name in ("emb.weight", "body.3.bias"):
        for kind in new.kinds(name):
            assert torch.equal(old.read(name, kind), new.read(name, kind))
