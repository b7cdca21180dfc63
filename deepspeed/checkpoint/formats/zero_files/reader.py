"""DeepSpeed's files as a `Source`: which flat tensor of which rank's file holds which elements, opened when needed."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.adapters import splits_in
from deepspeed.checkpoint.formats.checked_files import Opened, Opener
from deepspeed.checkpoint.formats.guard import guarded, rank_count, shapes_of
from deepspeed.checkpoint.formats.source import IntervalIndex, Small, Source, StoredInterval
from deepspeed.checkpoint.formats.training_state import Counters
from deepspeed.checkpoint.formats.values import decode
from deepspeed.checkpoint.formats.zero_files.experts import ExpertReader
from deepspeed.checkpoint.formats.zero_files.file_names import CheckpointFiles, sort_files
from deepspeed.checkpoint.formats.zero_files.flat_reader import Sharding, sharding_of
from deepspeed.checkpoint.formats.zero_files.flat_writer import scaler_attributes
from deepspeed.checkpoint.formats.zero_files.whole_optimizer import WholeOptimizer
from deepspeed.checkpoint.formats.zero_files.writer import EXTRA, RESERVED
from deepspeed.errors import CheckpointError
from deepspeed.fragments import DimSplit

_LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")


@guarded
class DeepSpeedSource(Source):
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
        self.files = self._found.files
        self.model_ranks = self._found.model_ranks
        """The model-parallel ranks that wrote model files."""
        self._near = near if near in self._optimizers else min(self._optimizers, default=0)
        self._model_file = self._load_model()
        self.model_entries: Mapping[str, Any] = self._model_file.state
        self._extra: Mapping[str, Any] = self.model_entries.get(EXTRA) or {}
        self.unnamed_layers = self.model_entries["module"] is None and self._extra.get("layers") is None
        """Whether weights lie in files of layers, and no file tells what they are called in the model."""
        self._wholes: list[WholeOptimizer] = []
        self._experts = ExpertReader(self._found, self._opener, mp_rank, self.model_entries, self._extra)
        self.slices: Mapping[str, int] = self._experts.slices
        """Parameters of experts that lie in slices → in how many."""
        self._layered = self._read_layers(layers)
        names = self.model_entries.get("buffer_names") or ()
        self.buffers = {name: self._opened(name).require(self._module[name]) for name in names}
        self._pieces = IntervalIndex(str(directory), self._find_aliases())
        self.shapes, self.aliases = self._pieces.shapes, self._pieces.aliases
        self._sharding = self._fill(order)
        if self._sharding is not None:
            self.stage, self.world, self.groups = self._sharding.stage, self._sharding.world, self._sharding.groups
        else:
            self.stage, self.world = 0, rank_count(self.model_entries.get("dp_world_size", 1), directory)
            self.groups = [group for each in self._wholes for group in each.groups]
        self.copies = rank_count(self._extra.get("copies", 1), directory)
        version = self.model_entries.get("ds_version", "")
        self.format = f"DeepSpeed {version}, {f'ZeRO stage {self.stage}' if self.stage else 'no ZeRO'}"

    @functools.cached_property
    def splits(self) -> Mapping[str, DimSplit] | None:
        """How tensors are cut over model-parallel ranks; None where the file does not tell."""
        told = self._extra.get("splits")
        if told is None:
            return None
        found = splits_in(told, self.directory)
        return found if self._experts.layers is None else self._experts.layers.everywhere(found)

    @functools.cached_property
    def small(self) -> Small:
        model, extra = self.model_entries, self._extra
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
        found = self._pieces.kinds(name)
        if self._sharding is not None and self._sharding.stateless(self._pieces.owner(name)):
            return tuple(kind for kind in found if kind in ("param", "master"))
        return found

    def dtype(self, name: str) -> torch.dtype | None:
        tensor = self._module.get(name)
        if tensor is None and name in self._experts.tensors:
            tensor = self._experts.tensors[name][0]
        return None if tensor is None else tensor.dtype

    def scalars(self, name: str) -> Mapping[str, Any]:
        owner = self._pieces.owner(name)
        if self._sharding is not None:
            return self._sharding.scalars(owner)
        return next((found for each in self._wholes if (found := each.scalars(owner))), {})

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        if rank in self._optimizers:
            opened = self._optimizer(rank)
            return opened.checked(opened.state.get("rank_state") or {})
        name = self._found.ranks.get((rank, self._mp_rank))
        if name is None:
            return {}
        opened = self._opener.torch(name)
        return opened.checked(opened.state or {})

    @property
    def _module(self) -> Mapping[str, Tensor]:
        return self.model_entries["module"] or {name: tensor for name, (tensor, _) in self._layered.items()}

    def _opened(self, name: str) -> Opened:
        return self._layered[name][1] if name in self._layered else self._model_file

    def _read_layers(self, given: Mapping[int, str] | None) -> dict[str, tuple[Tensor, Opened]]:
        """A pipeline's weights by name, where they lie in files of layers."""
        if self.model_entries["module"] is not None:
            return {}
        recorded = {int(number): str(prefix) for number, prefix in (self._extra.get("layers") or {}).items()}
        prefixes = {**recorded, **(given or {})}
        slices = int((self.model_entries.get("checkpoint_parallel_dimensions") or {}).get("tp_degree") or 1)
        found: dict[str, tuple[Tensor, Opened]] = {}
        for file in self._found.layers:
            match = _LAYER.fullmatch(file)
            if match is None or int(match[2] or 0) != (self._mp_rank % max(1, slices) if match[2] else 0):
                continue
            opened = self._opener.torch(file, shared=True)
            if not isinstance(opened.state, Mapping):
                raise CheckpointError(f"{self.directory / file} holds no state dict of a layer")
            prefix = prefixes.get(int(match[1]), f"{int(match[1])}.")
            tensors = {f"{prefix}{name}": tensor for name, tensor in opened.state.items() if isinstance(tensor, Tensor)}
            found.update({name: (tensor, opened) for name, tensor in tensors.items()})
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

    def _find_aliases(self) -> dict[str, str]:
        """Tied names, as recorded; at stage 0, where DeepSpeed records none, those that share memory."""
        known = self._extra.get("aliases") or self.model_entries.get("shared_params")
        if known is not None:
            return dict(known)
        owners: dict[tuple[int, torch.Size], str] = {}
        aliases = {}
        for name, tensor in self._module.items():
            owner = owners.setdefault((tensor.data_ptr(), tensor.shape), name)
            if owner != name and tensor.numel():
                aliases[name] = owner
        return aliases

    def _fill(self, order: Sequence[Sequence[str]] | None) -> Sharding | None:
        sharding = None
        pieces, module = self._pieces, self._module
        sharded = bool(self._found.sharded_models)
        for name, tensor in module.items():
            if name not in pieces.aliases and (not sharded or name in self.buffers):
                pieces.shapes[name] = tensor.shape
                pieces.hold(name, "param", tensor, self._opened(name), "the model file")
        self._experts.add(pieces)
        if sharded:
            self._add_frozen()
        shapes, experts = self.model_entries.get("param_shapes"), self._experts
        if shapes and self._optimizers:
            sharding = sharding_of(
                shapes,
                lambda number: self._open(self._found.optimizers, *experts.place(number), "optimizer"),
                experts.optimizers(),
                self.directory,
                near=experts.number(self._near),
                partial=self._partial,
                experts=experts.layers,
            )
            sharding.fill(pieces)
        elif shapes:
            for group in shapes:
                pieces.shapes.update(*shapes_of([group], self.directory))
        elif self._found.expert_optimizers:
            self._wholes = experts.whole_optimizers(order, pieces)
        elif isinstance(self.model_entries.get("optimizer"), Mapping):
            order = self._extra.get("names") or order
            self._wholes = [WholeOptimizer(self._model_file, order, pieces, ours=bool(self._extra))]
        pieces.sort(module)
        return sharding

    def _add_frozen(self) -> None:
        """Stage 3: every rank's part of the parameters that are not trained."""
        world = rank_count(self.model_entries["dp_world_size"], self.directory)
        held = {dp for dp, mp in self._found.sharded_models if mp == self._mp_rank}
        missing = [rank for rank in range(world) if rank not in held]
        if (missing and not self._partial) or len(held) > world:
            raise CheckpointError(
                f"{self.directory} was written by {world} ranks, but there are model files of ranks {sorted(held)}"
                + (f": rank {missing[0]}'s is missing" if missing else "")
            )
        for name, shape in shapes_of([self.model_entries.get("frozen_param_shapes") or {}], self.directory)[0].items():
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
