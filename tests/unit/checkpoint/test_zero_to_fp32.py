"""One state dict out of a ZeRO checkpoint: as functions, and as the script that lies beside it."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deepspeed.checkpoint.zero_to_fp32 as script
from deepspeed.checkpoint.formats import consolidate
from deepspeed.checkpoint.formats.detect import open_checkpoint
from deepspeed.checkpoint.formats.safetensors import open_file
from deepspeed.errors import CheckpointError
from deepspeed.utils import zero_to_fp32 as tools
from tests.checkpoint_states import FIXTURES, ORDER, SMALL, Net, Whole, fixture

NAMES = [f"stage{stage}_{dtype}" for stage in range(4) for dtype in ("fp32", "bf16", "fp16")]


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_of_a_real_checkpoint(name):
    state = tools.get_fp32_state_dict_from_zero_checkpoint(str(FIXTURES / name))
    assert set(state) == set(Net().state_dict())
    assert state["out.weight"] is state["emb.weight"]
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    source = open_checkpoint(fixture(name), order=ORDER)
    kind = "param" if name.startswith("stage0") else "master"
    for key, tensor in state.items():
        assert torch.equal(tensor.reshape(-1), source.read(key, kind).float()), key
    Net().load_state_dict(state)


def test_the_stages_of_a_pipeline():
    """Written by DeepSpeed 0.19.8; at stage 0 its files do not tell which names tied layers have."""
    written = Path(__file__).parents[2] / "fixtures" / "pipeline-deepspeed-0.19.8"
    state = tools.get_fp32_state_dict_from_zero_checkpoint(str(written), "stage1")
    expected = {f"{number}.{name}" for number in range(1, 5) for name in ("weight", "bias")}
    assert set(state) == {"tied_modules.embed.weight", *expected}
    for number in range(1, 5):
        layer = torch.load(written / "stage1" / f"layer_{number:02d}-model_states.pt", weights_only=True)
        assert all(torch.equal(state[f"{number}.{name}"], value) for name, value in layer.items())
    with pytest.raises(CheckpointError, match="does not tell the names of its layers' weights"):
        tools.get_fp32_state_dict_from_zero_checkpoint(str(written), "stage0")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 3])
def test_what_we_write(tmp_path, stage, world):
    SMALL.save(tmp_path / "tag", stage, world, sub_group_size=20)
    (tmp_path / "latest").write_text("tag")
    state = tools.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    for name in ("a.weight", "b.bias", "c.weight"):
        assert torch.equal(state[name].reshape(-1), SMALL.tensor(name, "master"))
    assert torch.equal(state["ice.weight"].reshape(-1), SMALL.tensor("ice.weight", "param"))
    assert state["count"].dtype == torch.int64
    assert state["tied.weight"] is state["a.weight"]
    without = tools.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
    assert set(state) - set(without) == {"ice.weight", "ice.bias"}


def test_lazy_mode_reads_when_asked(tmp_path):
    lazy = tools.get_fp32_state_dict_from_zero_checkpoint(str(FIXTURES / "stage3_bf16"), lazy_mode=True)
    assert not isinstance(lazy["emb.weight"], torch.Tensor)
    assert lazy["emb.weight"].shape == (50, 24)
    assert lazy["out.weight"] is lazy["emb.weight"]
    read = tools.get_fp32_state_dict_from_zero_checkpoint(str(FIXTURES / "stage3_bf16"))
    assert torch.equal(lazy["emb.weight"].contiguous(), read["emb.weight"])


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", [None, "5GB", "6KB"])
def test_files_of_bounded_size(tmp_path, safe, limit):
    folder = str(FIXTURES / "stage2_fp16")
    tools.convert_zero_checkpoint_to_fp32_state_dict(folder, str(tmp_path), limit, safe)
    wanted = tools.get_fp32_state_dict_from_zero_checkpoint(folder)
    files = sorted(tmp_path.glob("*.safetensors" if safe else "*.bin"))
    found = {}
    for file in files:
        found.update(open_file(file).tensors if safe else torch.load(file, weights_only=True, mmap=True))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    if not safe:
        assert found["out.weight"].data_ptr() == found["emb.weight"].data_ptr()
    if limit == "6KB":
        index = json.loads(next(tmp_path.glob("*.index.json")).read_text())
        assert set(index["weight_map"]) == set(wanted)
        assert {path.name for path in files} == set(index["weight_map"].values())
        assert files[0].name == ("model-00001-of-00004.safetensors" if safe else "pytorch_model-00001-of-00004.bin")
    else:
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors" if safe else "pytorch_model.bin"]


def test_the_torch_file_is_what_torch_would_have_written(tmp_path):
    values = {"a": torch.randn(3, 5), "b": torch.tensor(2.5), "none": torch.empty(0, 3), "n": torch.arange(4)}
    consolidate.write_shards(tmp_path, values, {"c": "a"})
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert list(found) == ["a", "b", "none", "n", "c"]
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in values.items()
    )
    assert torch.load(tmp_path / "pytorch_model.bin", weights_only=True, mmap=True)["a"].data_ptr() % 64 == 0


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("float16", torch.float16)])
def test_other_dtypes(tmp_path, name, dtype):
    arguments = [str(FIXTURES / "stage1_fp32"), str(tmp_path), "--safe_serialization", "--dtype", name]
    script.main(arguments, choose_dtype=True)
    tensors = open_file(tmp_path / "model.safetensors").tensors
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}


@pytest.mark.parametrize("more", [[], ["--safe_serialization", "--max_shard_size", "4KB"]])
def test_the_script_says_what_it_wrote(tmp_path, capsys, more):
    script.main([str(FIXTURES / "stage2_bf16"), str(tmp_path), *more])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, "progress is for what takes long"
    files = sorted(path for path in tmp_path.iterdir() if path.suffix != ".json")
    what = f"{files[0]} and {len(files) - 1} more, with an index" if more else str(files[0])
    assert (len(files) > 1) == bool(more)
    assert re.fullmatch(rf"wrote {what}: tag global_step3, \d+\.\d KiB in \d+\.\d s", lines[1])


@pytest.mark.parametrize("module", ["deepspeed.utils.zero_to_fp32", "deepspeed.checkpoint.zero_to_fp32"])
def test_the_modules_run_as_programs(tmp_path, monkeypatch, module):
    monkeypatch.setattr(sys, "argv", ["zero_to_fp32", str(FIXTURES / "stage2_bf16"), str(tmp_path)])
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert (tmp_path / "pytorch_model.bin").exists()


@pytest.mark.slow
def test_the_scripts_beside_a_checkpoint(tmp_path, monkeypatch):
    shutil.copytree(FIXTURES / "stage3_fp16", tmp_path / "run")
    for name, text in consolidate.scripts().items():
        (tmp_path / "run" / name).write_text(text)
    program = [sys.executable, "zero_to_fp32.py", ".", "out0"]
    done = subprocess.run(program, cwd=tmp_path / "run", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "stage 3, 2 ranks, 10 tensors" in done.stderr
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.setattr("sys.argv", ["zero_to_torch.py", ".", "out1", "--dtype", "bf16"])
    runpy.run_path("zero_to_torch.py", run_name="__main__")
    state = torch.load(tmp_path / "run" / "out0" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(
        state["emb.weight"], open_checkpoint(fixture("stage3_fp16")).read("emb.weight", "master").view(50, 24)
    )
    assert torch.load(tmp_path / "run" / "out1" / "pytorch_model.bin")["emb.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["zero_to_fp32.py", "zero_to_torch.py"])
def test_a_script_without_the_package_says_what_to_do(tmp_path, name):
    (tmp_path / name).write_text(consolidate.scripts()[name])
    code = "import runpy, sys; sys.modules['deepspeed'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    program = [sys.executable, "-c", code, name, ".", "out"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{name} reads checkpoints with the package deepspeed, which {sys.executable} cannot")
    assert "pip install deepspeed" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["stage2_fp32", "stage3_fp32"])
def test_a_missing_rank_is_an_error(tmp_path, name):
    shutil.copytree(FIXTURES / name, tmp_path / "run")
    (tmp_path / "run" / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="written by 2 ranks, but there are optimizer files of ranks \\[0\\]"):
        tools.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "run"))


def test_loading_into_a_model_and_the_parts(tmp_path):
    model = tools.load_state_dict_from_zero_checkpoint(Net(), str(FIXTURES / "stage1_fp32"))
    assert torch.equal(
        model.emb.weight.reshape(-1), open_checkpoint(fixture("stage1_fp32")).read("emb.weight", "master")
    )
    folder = str(fixture("stage2_fp16"))
    files = tools.get_optim_files(folder)
    assert [Path(file).name[:14] for file in files] == ["zero_pp_rank_0", "zero_pp_rank_1"]
    stage, world, flats = tools.parse_optim_states(files, folder)
    assert (stage, world, [len(tensor) for tensor in flats[1]]) == (2, 2, [1488, 67])
    assert [Path(file).name for file in tools.get_model_state_files(folder)] == ["mp_rank_00_model_states.pt"]
    for rank in (10, 9):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    assert [Path(file).name[:15] for file in tools.get_optim_files(str(tmp_path))] == [
        "zero_pp_rank_9_",
        "zero_pp_rank_10",
    ]
    assert tools.get_model_state_file(folder, 2).endswith("mp_rank_00_model_states.pt")


def test_sizes_are_read_as_people_write_them():
    assert [consolidate.parse_size(text) for text in ("5GB", "200MiB", "1.5kb", 17)] == [
        5 * 10**9,
        200 * 2**20,
        1500,
        17,
    ]
    with pytest.raises(ValueError, match="found 'much'"):
        consolidate.parse_size("much")


MEASURE = """
import sys
from deepspeed.checkpoint import zero_to_fp32 as script
from deepspeed.checkpoint.formats import consolidate

def held():
    # Memory of the process's own, swapped out or not, and pages of the checkpoint; what is there of libraries depends
    # on how much memory other programs want.
    total, counts = 0, False
    for line in open("/proc/self/smaps"):
        first, *rest = line.split()
        if not first.endswith(":"):
            counts = len(rest) < 5 or rest[4].startswith(("[", sys.argv[1]))
        elif counts and first in ("Rss:", "Swap:"):
            total += int(rest[0]) * 1024
    return total

put, most = consolidate._put, 0
def watched(*arguments):  # a tensor was read, and is about to be written
    global most
    most = max(most, held())
    put(*arguments)

consolidate._put = watched
before = held()
script.main(sys.argv[1:])
print(most - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="memory is measured with Linux's /proc")
@pytest.mark.parametrize("more", [["--safe_serialization"], []], ids=["safetensors", "torch"])
def test_converting_needs_far_less_memory_than_the_model(tmp_path, more):
    """Eight ranks of a model whose fp32 weights have 128 MiB, and twice that of moments nobody may touch."""
    ranks, layers, width = 8, 32, 1024
    whole = Whole([{f"layer{place}.weight": (width, width) for place in range(layers)}], precision="bf16")
    folder = tmp_path / "tag"
    folder.mkdir()
    numel, shard = layers * width * width, layers * width * width // ranks
    shapes = [{name: torch.Size(shape) for name, shape in whole.shapes[0].items()}]
    model = {"module": {}, "buffer_names": [], "param_shapes": shapes, "dp_world_size": ranks}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        flat = {"single_partition_of_fp32_groups": [torch.full((shard,), float(rank))], "zero_stage": 2}
        moments = {"state": {0: {"exp_avg": torch.zeros(shard * 2)}}, "param_groups": [{"params": [0]}]}
        entries = {**flat, "partition_count": [ranks], "base_optimizer_state": moments}
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": entries}, folder / name)
    (tmp_path / "latest").write_text("tag")
    program = [
        sys.executable,
        "-c",
        MEASURE,
        str(tmp_path),
        str(tmp_path / "out"),
        *more,
    ]
    # Tensors from maps of their own: how the heap of the C library falls to pieces differs from run to run, by 24 MiB.
    own_maps = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=own_maps)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4 * numel // 3, f"{int(done.stdout) / 2**20:.0f} MiB"
    file = next((tmp_path / "out").iterdir())
    tensors = open_file(file).tensors if more else torch.load(file, mmap=True)
    assert float(tensors["layer31.weight"][-1, -1]) == 7.0
