"""Old names about checkpoints' grids and files, debugging and the compiler."""

from __future__ import annotations

import gc

import pytest
import torch
from deepspeed.checkpoint.reshape_3d_utils import flatten_dp_dimension, unflatten_dp_dimension
from deepspeed.checkpoint.reshape_meg_2d import get_mpu_ranks, meg_2d_parallel_map, reshape_meg_2d_parallel
from deepspeed.checkpoint.reshape_utils import (
    basic_folder_validation,
    get_files,
    get_files_with_prefix,
    get_zero_files,
    merge_state,
    merge_state_dict,
    partition_data,
    validate_files,
)
from deepspeed.runtime.torch_autocast import (
    get_all_comm_dtypes,
    get_comm_dtype,
    get_default_autocast_lower_precision_modules,
    has_comm_dtype,
    sort_dtypes,
)
from torch import nn

import deepspeed
from deepspeed.checkpoint import model_3d_desc
from deepspeed.checkpoint.universal_checkpoint import enable_universal_checkpoint
from deepspeed.errors import CheckpointError, FeatureUnavailable, UsageError
from deepspeed.runtime import compiler
from deepspeed.utils import debug
from tests.harness import ranks

# ---- grids


def numbered(pp, tp):
    made = meg_2d_parallel_map(pp, tp)
    made.simple_init()
    return made


def test_a_map_of_places(capsys):
    grid = numbered(2, 2)
    assert grid.map == {"0,0": [0], "0,1": [1], "1,0": [2], "1,1": [3]}
    assert [grid.get_data(), grid.get_data(0), grid.get_data(None, 1), grid.get_data(1, 0)] == [
        [0, 1, 2, 3],
        [0, 1],
        [1, 3],
        [2],
    ]
    grid.add_data(0, 0, [9])
    grid.print_data("grid")
    assert "(0,0) = [0, 9]" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"\(0, 2\) in 2 stages × 2 slices"):
        grid.get_data(0, 2)


def test_smaller_grids():
    assert reshape_meg_2d_parallel(2, 2, 1, 1).map == {"0,0": [0, 1, 2, 3]}
    assert reshape_meg_2d_parallel(4, 2, 2, 1).map == {"0,0": [0, 1, 2, 3], "1,0": [4, 5, 6, 7]}
    with pytest.raises(UsageError, match="1 items cannot be cut into 2"):
        reshape_meg_2d_parallel(1, 1, 2, 1)
    flat = flatten_dp_dimension(numbered(1, 2), 2, 3)
    assert flat.map == {"0,0": [0, 2, 4], "0,1": [1, 3, 5]}
    assert [cut.map for cut in unflatten_dp_dimension(flat, 3)] == [
        {"0,0": [0], "0,1": [1]},
        {"0,0": [2], "0,1": [3]},
        {"0,0": [4], "0,1": [5]},
    ]


@pytest.mark.parametrize(("old", "new"), [((2, 2, 2), (2, 2, 2)), ((2, 2, 2), (1, 2, 1)), ((1, 2, 4), (1, 1, 2))])
def test_both_ways_to_a_smaller_grid_agree(old, new):
    pp, tp, dp = old
    grid = flatten_dp_dimension(reshape_meg_2d_parallel(pp, tp, new[0], new[1]), pp * tp, dp)
    cuts = unflatten_dp_dimension(grid, new[2])
    for cut, other in zip(cuts, model_3d_desc(*old).reshape(model_3d_desc(*new)), strict=True):
        assert {place: sorted(ranks) for place, ranks in cut.map.items()} == {
            f"{stage},{part}": sorted(ranks) for (stage, part), ranks in other.items()
        }


def test_groups_of_megatrons_grid():
    tensor, model, data = get_mpu_ranks(2, 2, 2)
    assert tensor == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert model == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert data == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_files(tmp_path):
    names = [f"zero_pp_rank_{dp}_mp_rank_00_optim_states.pt" for dp in (10, 2, 0)]
    for name in (*names, "mp_rank_00_model_states.pt"):
        (tmp_path / name).touch()
    files = get_files(str(tmp_path))
    assert len(files) == 4
    assert [file.rpartition("/")[2] for file in get_zero_files(str(tmp_path))] == [names[2], names[1], names[0]]
    assert len(get_files_with_prefix(files, "mp_rank_")) == 1
    basic_folder_validation(str(tmp_path))
    validate_files(files)
    for act in (lambda: basic_folder_validation(files[0]), lambda: validate_files(["/none"])):
        with pytest.raises(UsageError):
            act()
    assert get_zero_files(str(tmp_path / "none")) == []


def test_states_join():
    one = {"a": torch.ones(1), "b": [torch.ones(2)], "c": "x", "step": torch.tensor(3)}
    other = {"a": torch.zeros(1), "b": [torch.zeros(1)], "c": "y", "step": torch.tensor(3)}
    joined = merge_state(one, other)
    assert joined["a"].tolist() == [1, 0]
    assert joined["b"][0].tolist() == [1, 1, 0]
    assert (joined["c"], int(joined["step"])) == ("x", 3)
    with pytest.raises(UsageError, match="only one of the two states has z"):
        merge_state_dict({"z": 1}, {}, [])
    with pytest.raises(UsageError, match=r"a\.b: a list and a tuple"):
        merge_state({"a": {"b": []}}, {"a": {"b": ()}})
    with pytest.raises(UsageError, match="lists of 1 and 0"):
        merge_state([1], [])
    assert partition_data([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]
    with pytest.raises(UsageError, match="3 items"):
        partition_data([1, 2, 3], 2)


@ranks(1)
def test_a_folder_of_a_universal_checkpoint(tmp_path):
    model = nn.Linear(3, 4, bias=False)
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=model, config={**config, "bf16": {"enabled": True}})
    engine.backward(engine(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
    engine.step()
    values = {key: torch.randn(4, 3) for key in ("fp32", "exp_avg", "exp_avg_sq")}
    for key, value in values.items():
        torch.save({"param": value, "cat_dim": 0}, tmp_path / f"{key}.pt")
    torch.save(17, tmp_path / "step.pt")
    param = next(engine.module.parameters())
    enable_universal_checkpoint([param])
    assert param.load_hp_checkpoint_state(str(tmp_path), 0, 1) == 17
    torch.testing.assert_close(deepspeed.utils.safe_get_full_fp32_param(param), values["fp32"])
    found = deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg_sq")
    torch.testing.assert_close(found, values["exp_avg_sq"])
    with pytest.raises(FeatureUnavailable, match="experts"):
        param.load_hp_checkpoint_state(str(tmp_path), 0, 1, ep_size=2)
    with pytest.raises(CheckpointError, match=r"no fp32\.pt"):
        param.load_hp_checkpoint_state(str(tmp_path / "none"), 0, 1)
    engine.destroy()


# ---- base_optimizer


@pytest.mark.parametrize(("scale", "needed"), [(0, True), (8, True), (1, False)])
@ranks(1)
def test_losses_are_scaled_where_they_must_be(scale, needed):
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 1},
        "fp16": {"enabled": True, "loss_scale": scale},
    }
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(1, 1), config=config)
    assert optimizer.needs_scaler() is needed
    loss = torch.ones((), requires_grad=True)
    assert float(optimizer.scale_if_loss(loss).detach()) == optimizer.cur_scale
    for value in (torch.ones(()), torch.ones(2, requires_grad=True), 3.0, None):
        assert optimizer.scale_if_loss(value) is value
    engine.destroy()


# ---- torch_autocast


@ranks(1)
def test_the_dtype_that_gradients_travel_in():
    model = nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1))
    assert not has_comm_dtype(model[0].weight)
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}}
    engine, *_ = deepspeed.initialize(
        model=model, config={**config, "torch_autocast": {"enabled": True, "dtype": "bf16"}}
    )
    assert [has_comm_dtype(param) for param in (model[0].weight, model[1].weight)] == [True, False]
    assert get_comm_dtype(model[0].weight) is torch.bfloat16
    assert get_all_comm_dtypes(model.parameters()) == {torch.bfloat16, torch.float32}
    assert sort_dtypes([torch.float32, torch.bfloat16, torch.float16])[0] is torch.bfloat16
    assert "torch.nn.modules.linear.Linear" in get_default_autocast_lower_precision_modules()
    engine.destroy()


# ---- debugging


def test_names_for_messages():
    model = nn.Sequential(nn.Linear(2, 2))
    assert debug.debug_module2name(model[0]) == debug.debug_param2name(model[0].weight) == "unknown"
    debug.debug_extract_module_and_param_names(model)
    assert debug.debug_module2name_class(model[0]) == "name=0 Linear"
    assert debug.debug_module2name_id(model[0]) == "name=0 id=none"
    weight = model[0].weight
    assert debug.debug_param2name_id_numel(weight) == "name=0.weight id=none numel=4"
    assert debug.debug_param2name_id_shape_device(weight) == (
        "name=0.weight id=none shape=torch.Size([2, 2]) device=cpu"
    )
    assert debug.debug_param2name_id_shape_status(weight).endswith("status=none")
    debug.debug_clear_module_and_param_names()
    assert debug.debug_param2name(weight) == "unknown"


def test_names_keep_nothing_alive():
    names = debug.WeakIdNameMap()
    module = nn.Linear(1, 1)
    names[module] = "x"
    assert (names.get(module), len(names)) == ("x", 1)
    del module
    gc.collect()
    assert len(names) == 0


def test_messages(capsys, tmp_path, monkeypatch):
    debug.print_rank0("quiet")
    debug.print_rank("quiet")
    assert capsys.readouterr().out == ""
    debug.print_rank0("a", 1, force=True)
    debug.print_backward_tensors(nn.Linear(2, 1)(torch.ones(1, 2)).sum())
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "[0] a 1"
    assert any(line.startswith("AccumulateGrad → (1, 2)") for line in out)
    monkeypatch.chdir(tmp_path)
    debug.log_rank_file(3, "one", "two")
    assert (tmp_path / "debug_rank3.txt").read_text() == "one\ntwo\n"


# ---- the compiler


def test_decorators_for_the_compiler():
    def add(x):
        return x + 1

    assert compiler.is_compile_supported()
    assert not compiler.is_compiling()
    assert compiler.enable()(add) is add
    assert compiler.enable("99.0")(add) is not add
    assert [make(add)(1) for make in (compiler.disable, compiler.lazy_disable, compiler.enable("99.0"))] == [2, 2, 2]
    with compiler.compiled_autograd(False, {}):
        pass


def test_backward_may_be_compiled():
    x = torch.ones(2, requires_grad=True)
    with compiler.compiled_autograd(True, {"backend": "eager"}):
        (x * 3).sum().backward()
    assert x.grad.tolist() == [3, 3]
