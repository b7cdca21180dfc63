"""The offline classes for grids of ranks: which files make up a rank of a smaller grid."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deepspeed.checkpoint
from deepspeed.checkpoint import DeepSpeedCheckpoint
from deepspeed.errors import CheckpointError
from tests.checkpoint_states import SMALL, fixture


def grid(folder, pp, tp, dp):
    """Empty files as a grid of ranks writes them."""
    for rank in range(pp * tp):
        (folder / f"mp_rank_{rank:02d}_model_states.pt").touch()
        for replica in range(dp):
            (folder / f"zero_pp_rank_{replica}_mp_rank_{rank:02d}_optim_states.pt").touch()
    for slice_ in range(tp):
        (folder / f"layer_00-model_{slice_:02d}-model_states.pt").touch()


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        (
            (2, 2, 2),
            (1, 2, 2),
            {(0, 0, 0): [0, 4], (0, 1, 0): [1, 5], (0, 0, 1): [2, 6], (0, 1, 1): [3, 7]},
        ),
        ((2, 2, 2), (1, 1, 1), {(0, 0, 0): [0, 4, 1, 5, 2, 6, 3, 7]}),
        ((1, 1, 4), (1, 1, 2), {(0, 0, 0): [0, 1], (0, 0, 1): [2, 3]}),
        ((4, 1, 2), (2, 1, 1), {(0, 0, 0): [0, 4, 1, 5], (1, 0, 0): [2, 6, 3, 7]}),
    ],
)
def test_smaller_grids(tmp_path, source, target, wanted):
    grid(tmp_path, *source)
    pp, tp, dp = target
    found = DeepSpeedCheckpoint(str(tmp_path), tp, pp, dp)
    files = DeepSpeedCheckpoint(str(tmp_path))
    assert (files.pp_degree, files.tp_degree, files.dp_degree) == source
    in_order = sorted(path.name for path in tmp_path.glob("zero*"))
    for place, numbers in wanted.items():
        assert [Path(file).name for file in found.get_zero_files(*place)] == [in_order[number] for number in numbers]


def test_larger_grids_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="No ZeRO files found"):
        DeepSpeedCheckpoint(str(tmp_path))
    grid(tmp_path, 2, 2, 2)
    with pytest.raises(CheckpointError, match="Expansion reshape not supported - PP: 2 ---> 4"):
        DeepSpeedCheckpoint(str(tmp_path), pp_degree=4)
    with pytest.raises(CheckpointError, match="Expansion"):
        DeepSpeedCheckpoint(str(tmp_path), tp_degree=3)
    with pytest.raises(CheckpointError, match="PP indexing error: index 2 >= degree 2"):
        DeepSpeedCheckpoint(str(tmp_path)).get_zero_files(2, 0, 0)


def test_optimizer_files_of_a_real_checkpoint():
    folder = str(fixture("stage2_fp32"))
    files = DeepSpeedCheckpoint(folder, dp_degree=1)
    assert (files.original_world_size, len(files.get_zero_files(0, 0, 0))) == (2, 2)
    inner = files.get_zero_checkpoint_state(0, 0, 0)["optimizer_state_dict"]
    assert len(inner["base_optimizer_state"]["state"][1]["exp_avg"]) == 135
    assert len(inner["single_partition_of_fp32_groups"][1]) == 135
    assert inner["partition_count"] == [1, 1]
    with pytest.raises(CheckpointError, match="DP indexing error"):
        files.get_zero_files(0, 0, 1)


def test_layers_of_a_pipeline(tmp_path):
    SMALL.save(tmp_path, 1, 2)
    (tmp_path / "mp_rank_00_model_states.pt").rename(tmp_path / "first.pt")
    for rank in range(2):
        torch.save({"iteration": 9, "args": {"x": 1}}, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    for layer in range(4):
        for rank in range(2):
            state = {"weight": torch.full((2,), 10.0 * layer + rank)}
            torch.save(state, tmp_path / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    found = DeepSpeedCheckpoint(str(tmp_path), tp_degree=1)
    assert (found.layer_count, found.get_iteration(), found.get_args()) == (4, 9, {"x": 1})
    assert found.get_embedding_state(0)["weight"].tolist() == [0, 0, 1, 1]
    assert [state["weight"].tolist() for state in found.get_transformer_state(0, 0)] == [
        [10, 10, 11, 11],
        [20, 20, 21, 21],
    ]
    assert found.get_final_norm_state(0)["weight"].tolist() == [30, 30]
    assert len(found.get_2d_parallel_files(0, 0)) == 2


def test_every_public_name_is_there():
    for name in deepspeed.checkpoint.__all__:
        assert getattr(deepspeed.checkpoint, name) is not None
