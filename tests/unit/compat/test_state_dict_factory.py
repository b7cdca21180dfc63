"""Megatron's tensor-parallel files for other numbers of ranks, against the whole tensors that they were cut from."""

from __future__ import annotations

import json

import pytest
import torch
from deepspeed.runtime.state_dict_factory import MegatronSDLoader, SDLoaderFactory

from deepspeed.errors import CheckpointError, FeatureUnavailable, UsageError

HEADS, WIDTH, HIDDEN = 4, 2, 8
NAMES = {
    "layers.0.attention.query_key_value.weight": (3 * HIDDEN, HIDDEN),
    "layers.0.attention.query_key_value.bias": (3 * HIDDEN,),
    "layers.0.attention.dense.weight": (HIDDEN, HIDDEN),
    "layers.0.attention.dense.bias": (HIDDEN,),
    "layers.0.mlp.dense_h_to_4h.weight": (4 * HIDDEN, HIDDEN),
    "layers.0.mlp.dense_h_to_4h.bias": (4 * HIDDEN,),
    "layers.0.mlp.dense_4h_to_h.weight": (HIDDEN, 4 * HIDDEN),
    "layers.0.mlp.dense_4h_to_h.bias": (HIDDEN,),
    "word_embeddings.weight": (16, HIDDEN),
    "layernorm.weight": (HIDDEN,),
}


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in NAMES.items()}


def part(name: str, value: torch.Tensor, ranks: int, rank: int, version: float) -> torch.Tensor:
    """What a rank of Megatron holds, written down apart from the loader."""
    if "query_key_value" in name:
        if version == 0:  # all queries, all keys, all values
            rows = value.view(3, ranks, -1, *value.shape[1:])[:, rank]
        else:  # head by head
            rows = value.view(ranks, -1, *value.shape[1:])[rank]
        return rows.reshape(-1, *value.shape[1:])
    if name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
        return value.chunk(ranks, dim=1)[rank]
    if "dense_h_to_4h" in name or "word_embeddings" in name:
        return value.chunk(ranks, dim=0)[rank]
    return value


def files(folder, ranks: int, version: float) -> list[str]:
    paths = []
    for rank in range(ranks):
        path = folder / f"mp_rank_{rank:02d}_model_states.pt"
        model = {name: part(name, value, ranks, rank, version).clone() for name, value in whole().items()}
        torch.save({"model": model, "checkpoint_version": version, "mp_world_size": ranks}, path)
        paths.append(str(path))
    return paths


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
@pytest.mark.parametrize(("saved", "wanted"), [(2, 2), (4, 2), (2, 4), (4, 1), (1, 4)])
def test_any_number_of_ranks(tmp_path, version, saved, wanted):
    loader = SDLoaderFactory.get_sd_loader(files(tmp_path, saved, version))
    for rank in range(wanted):
        path, state, (scales, joined) = loader.load(wanted, rank)
        assert path in loader.ckpt_list
        assert scales is None
        assert joined == max(saved // wanted, 1)
        for name, value in whole().items():
            assert torch.equal(state["model"][name], part(name, value, wanted, rank, version)), name


def test_json_names_the_files(tmp_path):
    config = tmp_path / "files.json"
    config.write_text(json.dumps({"type": "Megatron", "version": 1.0, "checkpoints": files(tmp_path, 2, 1.0)}))
    loader = SDLoaderFactory.get_sd_loader_json(str(config))
    assert isinstance(loader, MegatronSDLoader)
    loader.sanity_check(loader.ckpt_list[0])
    assert SDLoaderFactory.get_sd_loader_json({"type": "BLOOM", "checkpoints": []})["type"] == "BLOOM"


def test_errors(tmp_path):
    paths = files(tmp_path, 4, 0)
    with pytest.raises(CheckpointError, match="one of 4 tensor-parallel files, and 3 are listed"):
        SDLoaderFactory.get_sd_loader(paths[:3])
    loader = SDLoaderFactory.get_sd_loader(paths)
    with pytest.raises(CheckpointError, match="4 files cannot be joined for 3 ranks"):
        loader.load(3, 0)
    with pytest.raises(CheckpointError, match="4 files cannot be cut for 6 ranks"):
        loader.load(6, 0)
    with pytest.raises(FeatureUnavailable, match="quantize"):
        loader.load(2, 0, quantize=True)
    with pytest.raises(CheckpointError, match=r"version 3.0 is not known"):
        SDLoaderFactory.get_sd_loader(paths, version=3.0).load(2, 0)
    with pytest.raises(UsageError, match="sd_type is 'GPT'"):
        SDLoaderFactory.get_sd_loader(paths, sd_type="GPT")
    with pytest.raises(CheckpointError, match="empty"):
        SDLoaderFactory.get_sd_loader([])
    torch.save({"a": 1}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="expected 'model' or 'module'"):
        SDLoaderFactory.get_sd_loader([str(tmp_path / "other.pt")]).load(2, 0)
