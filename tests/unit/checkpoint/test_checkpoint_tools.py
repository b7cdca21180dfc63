"""`python -m deepspeed.checkpoint`, `ds_to_universal`, and the helpers that scripts import."""

from __future__ import annotations

import functools
import json
import os
import re
from collections import OrderedDict, defaultdict
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch

from deepspeed.checkpoint import __main__ as program
from deepspeed.checkpoint import ds_to_universal, tools
from deepspeed.checkpoint.formats.consolidate import write_shards
from deepspeed.checkpoint.formats.detect import find_tag, open_checkpoint
from deepspeed.checkpoint.formats.safetensors import TensorFile, open_file, save, size
from deepspeed.checkpoint.formats.universal.convert import merge_slices
from deepspeed.checkpoint.formats.values import plain
from deepspeed.checkpoint.storage import manifest
from deepspeed.checkpoint.storage.durable import write_file, write_tensorfile, write_text
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save, get_model_ckpt_name_for_rank
from deepspeed.errors import CheckpointError, UsageError
from tests.checkpoint_states import FIXTURES, SMALL, WRITERS, fixture


def sealed(path: Path, form: str) -> Path:
    """A checkpoint with a manifest, through the storage that training uses."""
    path.mkdir()
    facts = {}
    for rank in range(2):
        files = WRITERS[form](SMALL.state(2, rank, 2))
        for name, value in files.objects.items():
            facts[name] = write_tensorfile(path / name, value)
        for name, content in files.tensors.items():
            facts[name] = write_file(path / name, functools.partial(save, content))
        for name, text in files.texts.items():
            facts[name] = write_text(path / name, text)
    manifest.write(path, manifest.Manifest("tag", form, 2, facts))
    return path


def test_inspect_shows_what_is_in_it(capsys):
    assert program.main(["inspect", str(FIXTURES / "stage3_fp16")]) == 0
    text = capsys.readouterr().out
    for part in (
        "ZeRO stage 3",
        "3,711 in 9 tensors, 3,111 trained",
        "out.weight = emb.weight",
        "37×24",
        "frozen",
        "256",
    ):
        assert part in text
    assert program.main(["inspect", str(FIXTURES / "stage3_fp16"), "--short"]) == 0
    assert "37×24" not in capsys.readouterr().out


def test_an_error_is_told_without_a_traceback(tmp_path, capsys):
    assert program.main(["inspect", str(tmp_path)]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err
    assert program.main(["verify", str(FIXTURES / "stage1_fp32"), "--tag", "gone"]) == 1
    assert "has global_step3" in capsys.readouterr().err.replace("\n", "")


def test_verify_without_a_manifest_reads_everything(capsys):
    assert program.main(["verify", str(FIXTURES / "stage1_fp32")]) == 0
    assert "no manifest" in capsys.readouterr().out


def read_all(path: Path) -> None:
    source = open_checkpoint(path)
    assert source.groups
    assert source.small.client_state
    for name in source.shapes:
        source.scalars(name)
        for kind in source.kinds(name):
            source.read(name, kind)
    for rank in range(2):
        source.rank_state(rank)


@pytest.mark.parametrize("form", ["deepspeed", "native"])
def test_a_flipped_byte_is_found_where_it_is_read(tmp_path, form, capsys):
    path = sealed(tmp_path / "tag", form)
    read_all(path)
    assert program.main(["verify", str(path)]) == 0
    assert "every byte is what was written" in capsys.readouterr().out
    for file in sorted(path.iterdir()):
        data = bytearray(file.read_bytes())
        for position in range(3, len(data), max(len(data) // 5, 1)):
            data[position] ^= 0x10
            file.write_bytes(data)
            with pytest.raises(CheckpointError, match=file.name):
                read_all(path)
            data[position] ^= 0x10
        file.write_bytes(data)
    read_all(path)
    file = next(path.glob("*fragments*" if form == "native" else "*model_states*"))
    file.write_bytes(file.read_bytes()[:-100])
    assert program.main(["verify", str(path)]) == 1
    assert file.name in capsys.readouterr().out


@pytest.mark.parametrize("to", ["deepspeed", "native"])
def test_convert_to_another_topology(tmp_path, to):
    SMALL.save(tmp_path / "tag", 3, 2)
    arguments = ["convert", str(tmp_path / "tag"), str(tmp_path / "new"), "--to", to, "--stage", "1", "--ranks", "3"]
    assert program.main(arguments) == 0
    source = open_checkpoint(find_tag(tmp_path / "new"))
    assert (source.stage, source.world) == (1, 3)
    SMALL.check(source)


def test_convert_to_weights(tmp_path):
    SMALL.save(tmp_path / "tag", 3, 2)
    assert program.main(["convert", str(tmp_path / "tag"), str(tmp_path / "new"), "--to", "bf16"]) == 0
    tensors = open_file(tmp_path / "new" / "model.safetensors").tensors
    assert torch.equal(tensors["a.weight"].reshape(-1), SMALL.tensor("a.weight", "master").bfloat16())
    assert tensors["count"].dtype == torch.int64
    assert torch.equal(tensors["tied.weight"], tensors["a.weight"])


def test_convert_for_deepspeed_itself(tmp_path):
    SMALL.save(tmp_path / "tag", 3, 2)
    arguments = ["convert", str(tmp_path / "tag"), str(tmp_path / "new"), "--to", "deepspeed", "--with-classes"]
    assert program.main(arguments) == 0
    SMALL.check(open_checkpoint(find_tag(tmp_path / "new")))


def test_ds_to_universal_runs(tmp_path, capsys):
    arguments = ["--input_folder", str(fixture("stage2_bf16")), "--output_folder", str(tmp_path / "uni")]
    ds_to_universal.main(ds_to_universal.parse_arguments([*arguments, "--inject_missing_state"]))
    told, files = capsys.readouterr(), [path for path in (tmp_path / "uni").rglob("*") if path.is_file()]
    words = f"{sum(path.stat().st_size for path in files) / 1024:.1f} KiB in "
    words = rf"wrote {tmp_path / 'uni'}: universal checkpoint of tag global_step3, {words}\d+\.\d s\n"
    assert re.fullmatch(words, told.out)
    assert told.err == "", "progress is for what takes long"
    real, ours = open_checkpoint(fixture("stage2_bf16")), open_checkpoint(tmp_path / "uni")
    assert [list(names) for names, _ in real.groups] == [list(names) for names, _ in ours.groups]
    assert torch.equal(ours.read("body.0.weight", "exp_avg_sq"), real.read("body.0.weight", "exp_avg_sq"))
    assert json.dumps(dict(ours.small.client_state)) == json.dumps(dict(real.small.client_state))


def test_progress_in_a_file_is_a_line_now_and_then(capsys, monkeypatch):
    for every, expected in ((1000.0, []), (0.0, ["parameters: 1 of 2", "parameters: 2 of 2"])):
        monkeypatch.setattr(tools, "_EVERY", every)
        with tools.bar("parameters") as progress:
            progress(1, 2)
            progress(2, 2)
        assert capsys.readouterr().err.splitlines() == expected


def test_the_tag_is_found(tmp_path):
    assert find_tag(FIXTURES / "stage0_fp32").name == "global_step3"
    assert find_tag(fixture("stage0_fp32")) == fixture("stage0_fp32")
    with pytest.raises(CheckpointError, match="does not exist"):
        find_tag(tmp_path, "gone")
    (tmp_path / "uni").mkdir()
    (tmp_path / "latest_universal").write_text("uni")
    assert find_tag(tmp_path) == tmp_path / "uni", "what ds_to_universal leaves beside its folder"


@pytest.mark.parametrize("safe", [True, False])
def test_a_state_dict_from_memory(tmp_path, safe):
    shared = torch.randn(4, 4)
    state = {"a": shared, "b": torch.randn(5).half(), "part": shared[1:3]}
    plan = write_shards(tmp_path, state, {"c": "a"}, limit=70, safe=safe)
    state["c"] = shared
    found = {}
    for name in plan.shards:
        path = tmp_path / name
        found.update(open_file(path).tensors if safe else torch.load(path, weights_only=True))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("safe", [True, False])
def test_the_safetensors_package_agrees(tmp_path, safe):
    package = pytest.importorskip("safetensors.torch")
    tensors = {"x": torch.randn(3, 2), "n": torch.arange(5), "b": torch.tensor([True]), "h": torch.randn(3).bfloat16()}
    if safe:
        save(TensorFile(tensors, {"format": "pt"}), tmp_path / "file")
        found = package.load_file(tmp_path / "file")
    else:
        package.save_file(tensors, tmp_path / "file")
        found = open_file(tmp_path / "file").tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_safetensors_of_every_kind(tmp_path):
    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.int32, torch.uint8]
    tensors = {str(kind): torch.arange(7).to(kind) for kind in kinds} | {
        "0d": torch.tensor(3.5),
        "none": torch.empty(0, 2),
    }
    content = TensorFile(tensors, {"a": "b"})
    save(content, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size == size(content)
    found = open_file(tmp_path / "file")
    assert found.metadata == {"a": "b"}
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    (tmp_path / "file").write_bytes(b"\xff" * 40)
    with pytest.raises(CheckpointError, match="the header claims"):
        open_file(tmp_path / "file")


def test_plain_values():
    class Colour(Enum):
        RED = 3

    made = plain({"a": (np.float32(1.5), np.arange(3)), "b": defaultdict(list, x=[Colour.RED]), "c": Path("/x")}, "it")
    assert made["a"][0] == 1.5
    assert made["a"][1].tolist() == [0, 1, 2]
    assert (made["b"], type(made["b"]), made["c"]) == ({"x": [3]}, dict, "/x")
    assert type(plain(OrderedDict(a=1), "it")) is OrderedDict
    large = torch.zeros(1000)
    assert plain(large[:2], "it").untyped_storage().nbytes() == 8
    with pytest.raises(UsageError, match=r"it\[0\] is a builtins.function|it\[0\] is a .*function"):
        plain([lambda: 1], "it")


def test_slices_of_model_parallel_ranks():
    one, two = torch.arange(6.0).view(2, 3), torch.arange(6.0, 12).view(2, 3)
    rules = {
        "tp_replicated_parameter_patterns": ["norm"],
        "parameter_with_row_parallelism_patterns": [r".*dense"],
        "parameter_to_average_patterns": ["mean"],
        "vocabulary_parameter_patterns": ["words"],
        "original_vocab_size": 3,
        "parameter_with_2_sub_params_cat_dim_0": ["gate_up"],
        "parameter_with_sub_params": [{"patterns": ["qkv"], "shape": ((2, 2), 3), "partition_dim": 0}],
    }
    assert torch.equal(merge_slices("other", [one, two], rules)[0], torch.cat([one, two]))
    whole, extra = merge_slices("x.dense", [one, two], rules)
    assert (whole.shape, extra) == ((2, 6), {"cat_dim": 1})
    assert torch.equal(merge_slices("mean", [one, two], rules)[0], (one + two) / 2)
    assert merge_slices("words", [one, two], rules)[0].shape == (3, 3)
    for name in ("gate_up", "qkv"):
        assert merge_slices(name, [one, two], rules)[0][:, 0].tolist() == [0, 6, 3, 9]
    with pytest.raises(CheckpointError, match="norm should be the same on all 2"):
        merge_slices("norm", [one, two], rules)


def test_small_helpers():
    large = torch.zeros(100)
    item = {"a": [large[:2], (large[2:3], "x")], "b": OrderedDict(c=3)}
    copy = clone_tensors_for_torch_save(item)
    assert copy["a"][0].untyped_storage().nbytes() == 8
    assert copy["a"][1][1] == "x"
    assert type(copy["b"]) is OrderedDict
    assert get_model_ckpt_name_for_rank("base", "03") == os.path.join("base", "mp_rank_03_model_states.pt")
