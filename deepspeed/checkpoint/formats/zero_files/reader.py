"""DeepSpeed's files as a `Source`: which flat tensor of which rank's file holds which elements, opened when needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.adapters import splits_in
from deepspeed.checkpoint.formats.checked_files import Opened, Opener
from deepspeed.checkpoint.formats.guard import guarded, rank_count, shapes_of
from deepspeed.checkpoint.formats.source import IndexedSource, IntervalIndex, Small, StoredInterval
from deepspeed.checkpoint.formats.training_state import Counters
from deepspeed.checkpoint.formats.values import decode
from deepspeed.checkpoint.formats.zero_files.class_stand_ins import scaler_attributes
from deepspeed.checkpoint.formats.zero_files.experts import ExpertReader
from deepspeed.checkpoint.formats.zero_files.file_names import CheckpointFiles, sort_files
from deepspeed.checkpoint.formats.zero_files.flat_reader import Sharding, sharding_of
from deepspeed.checkpoint.formats.zero_files.layer_files import read_layers
from deepspeed.checkpoint.formats.zero_files.whole_optimizer import WholeOptimizer
from deepspeed.checkpoint.formats.zero_files.writer import EXTRA, RESERVED
from deepspeed.checkpoint.storage.tensor_memory import tensors_in
from deepspeed.errors import CheckpointError
from deepspeed.fragments import DimSplit


@guarded
class DeepSpeedSource(IndexedSource):
    """A directory with DeepSpeed's files, of stage 0 to 3, whoever wrote them.

    `order` is needed for the optimizer's state of stage 0 alone, which DeepSpeed stores without names: the names that
    each parameter group of the optimizer holds, in order. `near`: the rank whose optimizer file this process reads
    most, and which it therefore asks for what all of them say.
    """

    def __init__(
        self,
        directory: Path,
        mp_rank: int = 0,
        order: Sequence[Sequence[str]] | None = None,
        *,
        opener: Opener | None = None,
        partial: bool = False,
        near: int = 0,
        layers: Mapping[int, str] | None = None,
    ) -> None:
        """`layers`: with what names of a pipeline's layers begin in the model that reads; else as was recorded."""
        self.directory = directory
        self._opener = opener or Opener(directory)
        self._mp_rank = mp_rank
        self._partial = partial
        self._found = sort_files(path.name for path in directory.iterdir())
        self._optimizers = {dp: name for (dp, mp), name in self._found.optimizers.items() if mp == mp_rank}
        self.files: Sequence[str] = self._found.files
        self.model_ranks = self._found.model_ranks
        """The model-parallel ranks that wrote model files."""
        self._near = near if near in self._optimizers else min(self._optimizers, default=0)
        self._model_file = self._load_model()
        self._model: Mapping[str, Any] = self._model_file.state
        self._extra: Mapping[str, Any] = self._model.get(EXTRA) or {}
        self._wholes: list[WholeOptimizer] = []
        self._experts = ExpertReader(self._found, self._opener, mp_rank, self._model, self._extra)
        self.slices: Mapping[str, int] = self._experts.slices
        """Parameters of experts that lie in slices → in how many."""
        self._sharding: Sharding | None = None
        self._layered = self._read_layers(layers)
        names = self._model.get("buffer_names") or ()
        self.buffers: Mapping[str, Tensor] = {name: self._opened(name).require(self._module[name]) for name in names}
        self._pieces = IntervalIndex({}, self._find_aliases(), str(directory))
        self._fill(order)

    @property
    def format(self) -> str:
        """A few words on what this is."""
        return f"DeepSpeed {self.small.version}, {f'ZeRO stage {self.stage}' if self.stage else 'no ZeRO'}"

    @property
    def stage(self) -> int:
        """ZeRO's stage when it was written."""
        return 0 if self._sharding is None else self._sharding.stage

    @property
    def world(self) -> int:
        """Ranks over which ZeRO sharded."""
        if self._sharding is not None:
            return self._sharding.world
        return rank_count(self._model.get("dp_world_size", 1), self.directory)

    @property
    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        """The optimizer's groups; empty where unknown."""
        if self._sharding is not None:
            return self._sharding.groups
        return [group for each in self._wholes for group in each.groups]

    @functools.cached_property
    def splits(self) -> Mapping[str, DimSplit] | None:
        """How tensors are cut over model-parallel ranks; None where the file does not tell."""
        told = self._extra.get("splits")
        if told is None:
            return None
        spread = self._experts.spread
        found = splits_in(told, self.directory)
        return found if spread is None else spread.layers.everywhere(found)

    @property
    def unnamed_layers(self) -> bool:
        """Whether weights lie in files of layers, and no file tells what they are called in the model."""
        return self._model["module"] is None and self._extra.get("layers") is None

    @property
    def model_entries(self) -> Mapping[str, Any]:
        """The entries of the model's file."""
        return self._model

    @functools.cached_property
    def small(self) -> Small:
        """What is not a tensor."""
        model, extra = self._model, self._extra
        first = model.get("optimizer") or {}
        if self._optimizers:
            first = self._optimizer(self._near).state["optimizer_state_dict"]
        scale = extra["loss_scale"] if "loss_scale" in extra else scaler_attributes(first.get("loss_scaler"))
        if scale is None and not extra and "cur_scale" in first:
            names = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
            scale = {name: first[name] for name in names if name in first}
            scale["dynamic"] = bool(first.get("dynamic_loss_scale"))
        client = decode(extra.get("client_state"))
        if client is None:
            client = {key: value for key, value in model.items() if key not in RESERVED}
        steps = int(model.get("global_steps", 0))
        counters = Counters(
            steps, int(model.get("global_samples", 0)), int(model.get("skipped_steps", 0)), extra.get("micro_steps", 0)
        )
        clip = extra.get("clip", first.get("clip_grad"))
        version = str(model.get("ds_version", ""))
        config = model.get("ds_config") or {}
        overflow = bool(first.get("overflow", False))
        kept = extra.get("module") or {}
        return Small(counters, model.get("lr_scheduler"), scale, overflow, clip, client, config, version, kept)

    def kinds(self, name: str) -> tuple[str, ...]:
        """What can be read of a parameter."""
        found = self._pieces.kinds(name)
        if self._sharding is not None and self._sharding.stateless(self._pieces.owner(name)):
            return tuple(kind for kind in found if kind in ("param", "master"))
        return found

    def dtype(self, name: str) -> torch.dtype | None:
        """What the model computed with."""
        tensor = self._module.get(name)
        if tensor is None and name in self._experts.tensors:
            tensor = self._experts.tensors[name][0]
        return None if tensor is None else tensor.dtype

    def scalars(self, name: str) -> Mapping[str, Any]:
        """The optimizer's state of a parameter that has no elements of its own."""
        owner = self._pieces.owner(name)
        if self._sharding is not None:
            return self._sharding.scalars(owner)
        return next((found for each in self._wholes if (found := each.scalars(owner))), {})

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        """`rng` and `data` of a rank that wrote it."""
        if rank in self._optimizers:
            return self._whole_of(self._optimizer(rank), "rank_state")
        name = self._found.ranks.get((rank, self._mp_rank))
        return self._whole_of(self._opener.torch(name), None) if name else {}

    @property
    def _module(self) -> Mapping[str, Tensor]:
        return self._model["module"] or {name: tensor for name, (tensor, _) in self._layered.items()}

    def _opened(self, name: str) -> Opened:
        return self._layered[name][1] if name in self._layered else self._model_file

    def _read_layers(self, given: Mapping[int, str] | None) -> dict[str, tuple[Tensor, Opened]]:
        """A pipeline's weights by name, where they lie in files of layers."""
        if self._model["module"] is not None:
            return {}
        recorded = {int(number): str(prefix) for number, prefix in (self._extra.get("layers") or {}).items()}
        slices = int((self._model.get("checkpoint_parallel_dimensions") or {}).get("tp_degree") or 1)
        found = read_layers(
            self._found.layers, self._opener, {**recorded, **(given or {})}, self._mp_rank % max(1, slices)
        )
        mine = tuple(recorded.values())
        return {name: value for name, value in found.items() if not mine or name.startswith(mine)}

    def _load_model(self) -> Opened:
        found = self._found
        sharded = [name for (_, mp), name in sorted(found.sharded_models.items()) if mp == self._mp_rank]
        name = found.models.get(self._mp_rank) or next(iter(sharded), None)
        if name is None:
            raise CheckpointError(f"{self.directory} has no model file of model-parallel rank {self._mp_rank}")
        opened = self._opener.torch(name, shared=True)
        layered = bool(found.layers) and isinstance(opened.state, Mapping) and opened.state.get("module", "") is None
        if not layered and (
            not isinstance(opened.state, Mapping) or not isinstance(opened.state.get("module"), Mapping)
        ):
            raise CheckpointError(f"{self.directory / name} has no 'module': it is no model file of DeepSpeed")
        return opened

    def _whole_of(self, opened: Opened, key: str | None) -> Mapping[str, Any]:
        """Small objects of a file, every tensor among them checked."""
        found: Mapping[str, Any] = (opened.state if key is None else opened.state.get(key)) or {}
        for tensor in tensors_in(found):
            opened.require(tensor)
        return found

    def _find_aliases(self) -> dict[str, str]:
        """Tied names, as recorded; at stage 0, where DeepSpeed records none, those that share memory."""
        known = self._extra.get("aliases") or self._model.get("shared_params")
        if known is not None:
            return dict(known)
        owners: dict[tuple[int, torch.Size], str] = {}
        aliases = {}
        for name, tensor in self._module.items():
            owner = owners.setdefault((tensor.data_ptr(), tensor.shape), name)
            if owner != name and tensor.numel():
                aliases[name] = owner
        return aliases

    def _fill(self, order: Sequence[Sequence[str]] | None) -> None:
        pieces, module = self._pieces, self._module
        sharded = bool(self._found.sharded_models)
        for name, tensor in module.items():
            if name not in pieces.aliases and (not sharded or name in self.buffers):
                pieces.shapes[name] = tensor.shape
                load = functools.partial(self._same, tensor, name)
                pieces.add(name, "param", StoredInterval((0, tensor.numel()), load, 0, "the model file"))
        self._experts.add(pieces)
        if sharded:
            self._add_frozen()
        if self._model.get("param_shapes") and self._optimizers:
            shapes, experts = self._model["param_shapes"], self._experts
            self._sharding = sharding_of(
                shapes,
                lambda number: self._open(self._found.optimizers, *experts.place(number), "optimizer"),
                experts.optimizers(),
                self.directory,
                near=experts.number(self._near),
                partial=self._partial,
                spread=self._experts.spread,
            )
            self._sharding.fill(pieces)
        elif self._model.get("param_shapes"):
            for group in self._model["param_shapes"]:
                pieces.shapes.update(*shapes_of([group], self.directory))
        elif self._found.expert_optimizers:
            self._wholes = self._experts.whole_optimizers(order, pieces)
        elif isinstance(self._model.get("optimizer"), Mapping):
            order = self._extra.get("names") or order
            self._wholes = [WholeOptimizer(self._model_file, order, pieces, ours=bool(self._extra))]
        places = {name: place for place, name in enumerate(module)}
        ordered = sorted(pieces.shapes.items(), key=lambda item: places.get(item[0], len(places)))
        pieces.shapes.clear()
        pieces.shapes.update(ordered)

    def _add_frozen(self) -> None:
        """Stage 3: every rank's part of the parameters that are not trained."""
        world = rank_count(self._model["dp_world_size"], self.directory)
        held = {dp for dp, mp in self._found.sharded_models if mp == self._mp_rank}
        missing = [rank for rank in range(world) if rank not in held]
        if (missing and not self._partial) or len(held) > world:
            raise CheckpointError(
                f"{self.directory} was written by {world} ranks, but there are model files of ranks {sorted(held)}"
                + (f": rank {missing[0]}'s is missing" if missing else "")
            )
        for name, shape in shapes_of([self._model.get("frozen_param_shapes") or {}], self.directory)[0].items():
            self._stripe(name, shape, [(rank, self._mp_rank) for rank in range(world)])
        for name, shape, holders in self._experts.frozen():
            self._stripe(name, shape, holders)

    def _stripe(self, name: str, shape: torch.Size, holders: Sequence[tuple[int, int]]) -> None:
        """Enter a parameter of which each of these ranks has a part."""
        numel = shape.numel()
        chunk = -(-numel // len(holders))
        self._pieces.shapes[name] = shape
        for place, (rank, mp_rank) in enumerate(holders):
            interval = min(place * chunk, numel), min((place + 1) * chunk, numel)
            load = functools.partial(self._frozen_part, rank, mp_rank, name)
            file = self._found.sharded_models.get((rank, mp_rank), f"the model file of rank {rank}")
            self._pieces.add(name, "param", StoredInterval(interval, load, 0, file))

    def _frozen_part(self, rank: int, mp_rank: int, name: str) -> tuple[Tensor, Opened]:
        opened = self._open(self._found.sharded_models, rank, mp_rank, "model")
        fragments = opened.state.get("frozen_param_fragments") or {}
        if name not in fragments:
            raise CheckpointError(f"{self.directory}: the model file of rank {rank} has no part of frozen {name}")
        return fragments[name], opened

    def _same(self, tensor: Tensor, name: str) -> tuple[Tensor, Opened]:
        return tensor, self._opened(name)

    def _optimizer(self, rank: int) -> Opened:
        return self._open(self._found.optimizers, rank, self._mp_rank, "optimizer")

    def _open(self, names: Mapping[tuple[int, int], str], rank: int, mp_rank: int, what: str) -> Opened:
        name = names.get((rank, mp_rank))
        if name is None:
            raise CheckpointError(
                f"{self.directory} has no {what} file of rank {rank}; there are files of ranks "
                f"{sorted(dp for dp, mp in names if mp == mp_rank)}. The checkpoint is not whole"
            )
        opened = self._opener.torch(name)
        if what == "optimizer" and not isinstance(opened.state.get("optimizer_state_dict"), Mapping):
            raise CheckpointError(f"{self.directory / name} has no 'optimizer_state_dict': it is not of DeepSpeed")
        return opened


def is_deepspeed(found: CheckpointFiles) -> bool:
    """Whether a directory's files are DeepSpeed's."""
    return bool(found.models or found.sharded_models or found.layers or found.experts)
