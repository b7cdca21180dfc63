"""Loaders of Megatron's `mp_rank_*` files for any number of tensor-parallel ranks: `runtime.state_dict_factory`.

A rank of as many as there are files reads its own; of fewer, it joins several; of more, it takes its part of one.
Layers are known by Megatron's names: rows of `attention.dense` and `mlp.dense_4h_to_h` are inputs, so that their
weights are cut along dim 1 and their biases are whole; query, key and value lie in one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import CheckpointError, FeatureUnavailable, UsageError
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine, TorchCheckpointEngine

StateDict = dict[str, Any]
_MODULES = ("model", "module")
_INPUTS_CUT = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
_OUTPUTS_CUT = ("mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.bias", "word_embeddings.weight", "final_linear.weight")
_JOINED = "attention.query_key_value"


class SDLoaderFactory:
    """Makes loaders from what names the files."""

    @staticmethod
    def get_sd_loader_json(
        json_file: str | Mapping[str, Any], checkpoint_engine: CheckpointEngine | None = None
    ) -> MegatronSDLoader | Mapping[str, Any]:
        """The loader of a JSON file or dict with `type`, `checkpoints` and `version`.

        As in DeepSpeed, the types that its inference engine reads by itself come back as they are.
        """
        data = json_file if isinstance(json_file, Mapping) else json.loads(Path(json_file).read_text(encoding="utf-8"))
        kind = str(data.get("type", ""))
        if kind.lower() in ("bloom", "ds_model"):
            return data
        return SDLoaderFactory.get_sd_loader(data["checkpoints"], checkpoint_engine, kind, data.get("version"))

    @staticmethod
    def get_sd_loader(
        ckpt_list: Sequence[str],
        checkpoint_engine: CheckpointEngine | None = None,
        sd_type: str = "Megatron",
        version: float | None = None,
    ) -> MegatronSDLoader:
        """The loader of a list of files, one for each tensor-parallel rank that saved."""
        if sd_type.lower() != "megatron":
            raise UsageError(f"sd_type is {sd_type!r}; checkpoints of type 'Megatron' are known")
        return MegatronSDLoader(ckpt_list, version, checkpoint_engine)


class MegatronSDLoader:
    """A list of Megatron-LM's files, and what one rank of any number needs of them.

    `version` 0 has all queries before all keys, 1.0 and 2.0 lie head by head.
    """

    def __init__(
        self, ckpt_list: Sequence[str], version: float | None, checkpoint_engine: CheckpointEngine | None = None
    ) -> None:
        self.ckpt_list = list(ckpt_list)
        self.version = version
        self.module_key: str | None = "auto"
        self.checkpoint_engine = checkpoint_engine or TorchCheckpointEngine()
        self.check_ckpt_list()

    def load(
        self,
        mp_world_size: int,
        mp_rank: int,
        module_key: str | None = "auto",
        is_pipe_parallel: bool = False,
        quantize: bool = False,
        quantize_bits: int = 8,
        quantize_groups: int = 64,
        mlp_extra_grouping: bool = True,
    ) -> tuple[str, StateDict, tuple[list[Any] | None, int]]:
        """(the file that was read first, the state dict of this rank, (None, files joined)).

        With `is_pipe_parallel` the rest of the model's state lies in other files, and module states are left alone.
        """
        if quantize:
            raise FeatureUnavailable(
                "quantize=True: files are not quantised while they are read; load without it, and give init_inference "
                "the key quant, or dtype int8"
            )
        self.module_key = module_key
        files, place = len(self.ckpt_list), mp_rank * len(self.ckpt_list) // mp_world_size
        joined = 1
        if files == mp_world_size or (is_pipe_parallel and module_key is not None and files < mp_world_size):
            state = self._read(self.ckpt_list[place])
        elif files > mp_world_size:
            state, joined = self.merge_state_dict(mp_world_size, mp_rank), files // mp_world_size
        else:
            state = self.split_state_dict(mp_world_size, mp_rank)
        return self.ckpt_list[place], state, (None, joined)

    def _read(self, path: str) -> StateDict:
        state: StateDict = self.checkpoint_engine.load(path, map_location="cpu")
        return state

    def get_merge_state_dicts(self, mp_world_size: int, mp_rank: int) -> list[StateDict]:
        """The files that make up the part of one rank."""
        count, rest = divmod(len(self.ckpt_list), mp_world_size)
        if rest:
            raise CheckpointError(f"{len(self.ckpt_list)} files cannot be joined for {mp_world_size} ranks evenly")
        return [self._read(path) for path in self.ckpt_list[mp_rank * count : (mp_rank + 1) * count]]

    def get_split_state_dict(self, mp_world_size: int, mp_rank: int) -> tuple[StateDict, int, int]:
        """(the file that holds the part of a rank, into how many it is cut, which of them it is)."""
        count, rest = divmod(mp_world_size, len(self.ckpt_list))
        if rest:
            raise CheckpointError(f"{len(self.ckpt_list)} files cannot be cut for {mp_world_size} ranks evenly")
        return self._read(self.ckpt_list[mp_rank // count]), count, mp_rank % count

    def _key(self, sd: Mapping[str, Any]) -> str | None:
        if self.module_key != "auto":
            return self.module_key
        found = [key for key in _MODULES if key in sd]
        if len(found) != 1:
            raise CheckpointError(
                f"expected 'model' or 'module' among the keys of the checkpoint, found {found or list(sd)[:8]}; give "
                "module_key"
            )
        return found[0]

    def get_module(self, sd: StateDict) -> StateDict:
        """The parameters among what a file holds."""
        key = self._key(sd)
        module: StateDict = sd if key is None else sd[key]
        return module

    def set_module(self, sd: StateDict, module: StateDict) -> StateDict:
        """The same file with other parameters."""
        key = self._key(sd)
        if key is None:
            return module
        sd[key] = module
        return sd

    def check_ckpt_list(self) -> None:
        """Raise for a list that is empty, or from a job of another number of tensor-parallel ranks."""
        if not self.ckpt_list:
            raise CheckpointError("the list of checkpoint files is empty")
        first = self._read(self.ckpt_list[0])
        saved = first.get("mp_world_size") if isinstance(first, dict) else None
        if saved is not None and saved != len(self.ckpt_list):
            raise CheckpointError(
                f"{self.ckpt_list[0]} is one of {saved} tensor-parallel files, and {len(self.ckpt_list)} are listed"
            )

    def merge_query_key_value(self, param_list: Sequence[Tensor], ckpt_ver: float) -> Tensor:
        """The joined parts of several ranks."""
        if self._by_head(ckpt_ver):
            return torch.cat(list(param_list), dim=0)
        parts = [torch.chunk(param, 3, dim=0) for param in param_list]
        return torch.cat([torch.cat(same, dim=0) for same in zip(*parts, strict=True)], dim=0)

    def split_query_key_value(self, param: Tensor, num_to_split: int, offset: int, ckpt_ver: float) -> Tensor:
        """One of `num_to_split` parts."""
        if self._by_head(ckpt_ver):
            return _part(param, 0, num_to_split, offset)
        return torch.cat([_part(each, 0, num_to_split, offset) for each in torch.chunk(param, 3, dim=0)], dim=0)

    @staticmethod
    def _by_head(version: float) -> bool:
        if version not in (0, 1.0, 2.0):
            raise CheckpointError(f"checkpoint version {version} is not known; versions 0, 1.0 and 2.0 are")
        return version != 0

    def merge_state_dict(self, mp_world_size: int, mp_rank: int) -> StateDict:
        """The state dict of a rank of fewer than there are files."""
        files = self.get_merge_state_dicts(mp_world_size, mp_rank)
        modules = [self.get_module(each) for each in files]
        version = self.get_checkpoint_version(files[0])
        made: StateDict = {}
        for name, value in modules[0].items():
            values = [module[name] for module in modules]
            dim = _dim(name)
            if _JOINED in name:
                made[name] = self.merge_query_key_value(values, version)
            else:
                made[name] = value if dim is None else torch.cat(values, dim=dim)
        return self.set_module(dict(files[0]), made)

    def split_state_dict(self, mp_world_size: int, mp_rank: int) -> StateDict:
        """The state dict of a rank of more than there are files."""
        file, count, offset = self.get_split_state_dict(mp_world_size, mp_rank)
        version = self.get_checkpoint_version(file)
        made: StateDict = {}
        for name, value in self.get_module(file).items():
            dim = _dim(name)
            if _JOINED in name:
                made[name] = self.split_query_key_value(value, count, offset, version)
            else:
                made[name] = value if dim is None else _part(value, dim, count, offset)
        return self.set_module(dict(file), made)

    def sanity_check(self, ckpt_file_name: str) -> None:
        """Raise if the layers that are cut are not in the file under the names that are known."""
        names = self.get_module(self._read(ckpt_file_name))
        for known in (*_INPUTS_CUT, "mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.bias", _JOINED):
            if not any(known in name for name in names):
                raise CheckpointError(f"{ckpt_file_name} has no parameter named *{known}*: is it Megatron's?")

    def get_checkpoint_version(self, state_dict: Mapping[str, Any]) -> float:
        """The version given, else the file's, else 0."""
        return self.version if self.version is not None else state_dict.get("checkpoint_version", 0)


def _dim(name: str) -> int | None:
    """Along which dim ranks cut a parameter; None if all have the same."""
    if any(known in name for known in _INPUTS_CUT):
        return 1
    return 0 if any(known in name for known in _OUTPUTS_CUT) else None


def _part(param: Tensor, dim: int, count: int, offset: int) -> Tensor:
    size, rest = divmod(param.shape[dim], count)
    if rest:
        raise CheckpointError(f"dim {dim} of {tuple(param.shape)} cannot be cut in {count} equal parts")
    return param.narrow(dim, offset * size, size).clone()
