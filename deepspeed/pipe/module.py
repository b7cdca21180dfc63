"""`PipelineModule`: a model as a row of layers, of which this rank builds those of its stages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from torch import nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.formats.training_state import PipelineLayers
from deepspeed.checkpoint.formats.zero_files.file_names import layer_file
from deepspeed.errors import CheckpointError, LayoutError, PipelineError, UsageError
from deepspeed.parallel import layout_from_mpu
from deepspeed.parallel.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from deepspeed.pipe.batch_agreement import BatchAgreement
from deepspeed.pipe.layers import (
    Layer,
    LayerSpec,
    RemoteLayer,
    TiedLayerSpec,
    bounds_of,
    callable_of,
    forms_of_inputs,
    is_fake_world,
    name_of,
    trained_parameters,
)
from deepspeed.pipe.model_layers import ModelCut, ModelLayer
from deepspeed.pipe.schedule.generators import kind_of
from deepspeed.pipe.split_backward import DeferredBackward
from deepspeed.pipe.ties import StageTies, TiedWeights
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.zero.parameters.nested_tensors import tensors_in

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]

_LOSS = "loss_fn"
"""The loss of a pipeline, where it is a module of the model."""


class PipelineModule(nn.Module):
    """Layers that follow each other, spread over the pipeline's ranks.

    Each layer takes what the one before it gave, as one argument. A layer is a module, a `LayerSpec`, a `TiedLayerSpec`
    or a function. Modules are registered by the number of their layer, tied ones as `tied_modules.<key>`.
    """

    def __init__(
        self,
        layers: Iterable[Layer] | nn.Module,
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        schedule: str = "1f1b",
        chunks: int | None = None,
        example_input: Any = None,
    ) -> None:
        """`layers` may be a model of Transformers, cut at its blocks: what other ranks have is taken out of it.

        `schedule` decides which stages a rank holds, `chunks` how many; `example_input`, which the first layer
        takes of a micro-batch, is what a profile runs, and what a rank among pretended ones knows shapes by.
        """
        super().__init__()
        if num_stages is None and topology is None:
            raise UsageError("PipelineModule needs num_stages=..., or a topology with an axis 'pipe'")
        _require_kinds(num_stages, chunks, partition_method, checkpointable_layers)
        self.cut = _cut(layers, loss_fn) if _is_model(layers) else None
        """The model of Transformers that the layers are those of; None: it is a row of layers by itself."""
        if self.cut is not None:
            self.config = self.cut.config
        self._layer_specs: list[Layer] = list(cast("Iterable[Layer]", layers) if self.cut is None else self.cut.layers)
        _require_layers(self._layer_specs)
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.set_checkpoint_interval(activation_checkpoint_interval)
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = None if checkpointable_layers is None else list(checkpointable_layers)
        self.dynamic_shape = dynamic_shape
        self.use_reentrant = True
        self.later = DeferredBackward()
        self.micro_offset = 0
        comm.init_distributed()
        self.sized_by_stages = topology is None  # the number of stages was given, and what the other axes are is open
        self._topo = _topology(num_stages, topology)
        self._grid = PipelineParallelGrid(topology=self._topo)
        self.global_rank, self.world_size = self._grid.global_rank, self._grid.world_size
        self.stage_id, self.num_stages = self._grid.stage_id, self._grid.pipe_parallel_size
        self.schedule, kind = schedule, kind_of(schedule)
        self.chunks = kind.chunks if chunks is None else chunks
        if self.chunks != kind.chunks and not kind.chosen:
            raise UsageError(f"schedule {schedule!r} puts {kind.chunks} stages on each rank; found chunks={chunks}")
        self.owners = kind.owners(self.num_stages, self.chunks)
        """Stage → pipeline rank; with several stages on a rank there are more of them than ranks."""
        self.parts = bounds_of(
            partition_method, self._layer_specs, len(self.owners), example_input, count=self._count_layer_params
        )
        self.stages = tuple(stage for stage, owner in enumerate(self.owners) if owner == self.stage_id)
        self.first, self.last = 0 in self.stages, len(self.owners) - 1 in self.stages
        """Whether this rank takes the inputs; whether it computes the loss."""
        self._local_start, self._local_stop = self.parts[self.stages[0]], self.parts[self.stages[0] + 1]
        known = example_input is not None and is_fake_world()
        self.foretold = forms_of_inputs(self._layer_specs, self.parts, self.stages, example_input) if known else {}
        """Among pretended ranks: stage → the form of what comes into it."""
        self._take_loss(loss_fn if self.cut is None or loss_fn is not None else self.cut.loss)
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs: list[Callable[..., Any]] = []
        self.fwd_map: dict[str, int] = {}
        self._calls: dict[int, Callable[..., Any]] = {}
        self._build_all()
        self._let_go()
        device = torch.device(get_accelerator().current_device_name())
        self.to(device)
        if self.last and isinstance(self.loss_fn, nn.Module):
            self.loss_fn.to(device)
        self.ties = StageTies(self._find_ties(), self._grid, self._tied_module)
        self.ties.share()

    # ---- building

    def _take_loss(self, loss_fn: Callable[[Any, Any], Any] | None) -> None:
        """A loss that is a module is a part of the model where it has weights to train, on the last stage only."""
        if isinstance(loss_fn, nn.Module) and self.last and next(loss_fn.parameters(), None) is not None:
            self.loss_fn = loss_fn
        else:
            self.__dict__["loss_fn"] = loss_fn

    def train(self, mode: bool = True) -> PipelineModule:
        """As of any module; a loss without weights is no part of the model, but follows it."""
        super().train(mode)
        if isinstance(self.loss_fn, nn.Module):
            self.loss_fn.train(mode)
        return self

    def _build_all(self) -> None:
        """Build the layers of this rank's stages; what fails on one rank is an error on all, and no group is left."""
        error: PipelineError | None = None
        for stage in self.stages:
            for number in self.layers_of(stage) if error is None else ():
                layer = self._layer_specs[number]
                try:
                    self._build(number, layer)
                except Exception as caught:  # noqa: BLE001 - a constructor of the script; told on all ranks
                    words = f"layer {number} ({name_of(layer)}) of stage {stage} could not be built"
                    error = PipelineError(f"{words}: {type(caught).__name__}: {caught}")
                    error.__cause__ = caught
                    break
        try:
            if self.world_size > 1:
                with layout_from_mpu(self._grid) as layout:
                    BatchAgreement(layout).end(error is not None, error, error)
            elif error is not None:
                raise error
        except PipelineError:
            self._grid.close()
            raise

    def _build(self, number: int, layer: Layer) -> None:
        if self.seed_layers:
            self._seed(self.base_seed + number)
        call = callable_of(layer, self.tied_modules)
        if isinstance(call, nn.Module) and not isinstance(layer, TiedLayerSpec):
            self.add_module(str(number), call)
            self.fwd_map[str(number)] = len(self.forward_funcs)
        self._calls[number] = call
        self.forward_funcs.append(call)

    def _let_go(self) -> None:
        """Of the layers of other ranks only their names remain."""
        if self.cut is not None:
            for name, module in self.cut.keep(self._calls).items():
                if hasattr(self, name):
                    raise UsageError(
                        f"the model's module {name!r} has a name that PipelineModule uses itself; rename it"
                    )
                self.add_module(name, module)
        for number, layer in enumerate(self._layer_specs):
            if isinstance(layer, nn.Module) and number not in self._calls:
                self._layer_specs[number] = RemoteLayer(name_of(layer))

    def _tied_module(self, key: str) -> nn.Module:
        return self.tied_modules[key] if self.cut is None else self.get_submodule(key)

    def _find_ties(self) -> Iterator[TiedWeights]:
        """The tied keys in the order of their first layer, with the stages on which they lie."""
        for shared in self.cut.ties if self.cut is not None else ():
            yield TiedWeights(shared.path, (shared.attribute,), list(dict.fromkeys((self.owners[0], self.owners[-1]))))
        found: dict[str, TiedWeights] = {}
        for stage, (first, last) in enumerate(pairwise(self.parts)):
            for layer in self._layer_specs[first:last]:
                if isinstance(layer, TiedLayerSpec):
                    tie = found.setdefault(layer.key, TiedWeights(layer.key, tuple(layer.tied_weight_attr), []))
                    if self.owners[stage] not in tie.ranks:
                        tie.ranks.append(self.owners[stage])
        yield from found.values()

    def keys_with_functions(self) -> set[str]:
        return {each.key for each in self._layer_specs if isinstance(each, TiedLayerSpec) and each.forward_fn}

    def _seed(self, seed: int) -> None:
        if self.seed_fn is not None:
            self.seed_fn(seed)
        else:
            torch.manual_seed(seed)
            get_accelerator().manual_seed_all(seed)

    # ---- running

    def forward(self, forward_input: Any, stage: int | None = None) -> Any:
        """Run the layers of a stage of this rank; which one need only be said where it holds several."""
        stage = self.stages[0] if stage is None else stage
        self.__dict__["micro_offset"] += 1  # a number: nothing that a module has to register
        first, last, value = self.parts[stage], self.parts[stage + 1], forward_input
        if stage == 0 and isinstance(value, tuple) and len(value) == 1:
            value = value[0]  # the inputs of a batch
        interval = self.activation_checkpoint_interval
        if interval == 0 or not torch.is_grad_enabled():
            return self._run(first, last, self.micro_offset, False, value)
        for begin in range(first, last, interval):
            end, inputs = min(begin + interval, last), value if isinstance(value, tuple) else (value,)
            # Which micro-batch it is, also when it runs again.
            run = partial(self._run, begin, end, self.micro_offset, inputs is value)
            value = self._checkpointed(run, inputs) if self._is_checkpointable(begin, end) else run(*inputs)
        return value

    def _run(self, first: int, last: int, offset: int, is_tuple: bool, *inputs: Any) -> Any:
        value = inputs if is_tuple else inputs[0]
        for number in range(first, last):
            if self.seed_layers:
                self._seed(self.base_seed * offset + number)
            value = self._calls[number](value)
        return value

    def _checkpointed(self, run: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        if self.activation_checkpoint_func is not checkpointing.checkpoint:
            return self.activation_checkpoint_func(run, *inputs)
        # The reentrant kind loses the gradients of layers whose inputs have none, such as tokens.
        reentrant = self.use_reentrant and any(tensor.requires_grad for tensor in tensors_in(inputs))
        if reentrant and self.later.wanted:
            return checkpointing.recompute(run, self.later.backward, *inputs)
        return checkpointing.checkpoint(run, *inputs, use_reentrant=reentrant)

    def _is_checkpointable(self, first: int, last: int) -> bool:
        """Whether it is worth it: only layers of the given classes, or any that has parameters."""
        calls = [self._calls[number] for number in range(first, last)]
        if self.checkpointable_layers is not None:
            return all(name_of(call) in self.checkpointable_layers for call in calls)
        return any(isinstance(call, (nn.Module, ModelLayer)) and any(True for _ in call.parameters()) for call in calls)

    @property
    def splits_checkpoints(self) -> bool:
        """Whether backward of layers whose activations are not kept can be split."""
        plain = self.activation_checkpoint_func is checkpointing.checkpoint
        return self.activation_checkpoint_interval == 0 or (plain and self.use_reentrant)

    # ---- what it is

    def layers_of(self, stage: int) -> range:
        return range(self.parts[stage], self.parts[stage + 1])

    def partitions(self) -> list[int]:
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """The pipeline rank that holds a layer."""
        for stage, (first, last) in enumerate(pairwise(self.parts)):
            if first <= layer_idx < last:
                return self.owners[stage]
        raise UsageError(f"there is no layer {layer_idx}; the layers are 0 to {self.parts[-1] - 1}")

    def _count_layer_params(self) -> list[int]:
        """The trained parameters of each layer, which the method "parameters" balances; scripts replace it."""
        return [trained_parameters(layer) for layer in self._layer_specs]

    def describe(self) -> str:
        """The stages with the names of their layers, for the log."""
        rows = (
            f"stage {stage} on pipeline rank {self.owners[stage]}: layers {first} to {last - 1} "
            f"({', '.join(name_of(layer) for layer in self._layer_specs[first:last])})"
            for stage, (first, last) in enumerate(pairwise(self.parts))
        )
        return "; ".join(rows)

    def set_checkpoint_interval(self, interval: int) -> None:
        """Layers per activation checkpoint; 0 keeps all activations."""
        if interval < 0:
            raise UsageError(f"an activation checkpoint interval is at least 0; found {interval}")
        self.activation_checkpoint_interval = interval

    def allreduce_tied_weight_gradients(self) -> None:
        """Sum the gradients of tied weights over the stages that have them."""
        self.ties.reduce(lambda param, change: setattr(param, "grad", change(param.grad)))

    def get_additional_losses(self) -> dict[str, Any] | None:
        """Further losses of the last forward, by name, for subclasses: they are averaged and shown, not trained."""
        return None

    def topology(self) -> ProcessTopology:
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        return self._grid

    def use_topology(self, topology: ProcessTopology) -> None:
        """Take another topology, in which every rank has the stage that it has; on all ranks together."""
        self._grid.close()
        self._topo, self._grid = topology, PipelineParallelGrid(topology=topology)
        assert self._grid.stage_id == self.stage_id, "stages are the slowest axis of every topology"
        self.ties = StageTies(self._find_ties(), self._grid, self._tied_module)

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    # ---- checkpoint files

    def layer_names(self) -> PipelineLayers:
        """The layers that have a file, with what the names of their tensors begin."""
        if self.cut is not None:
            files = list(enumerate(self.cut.files()))
            here = {file: prefix for file, (number, prefix) in files if number in self._calls}
            tied = {f"{tie.path}." for tie in self.cut.ties} if len(self._layer_specs) - 1 in self._calls else set()
            here |= self._loss_file(len(files))
            return PipelineLayers(
                here, {file: prefix for file, (_, prefix) in files if file not in here and prefix in tied}
            )
        owned = {number: f"tied_modules.{key}." for key, number in _files_of_ties(self._layer_specs).items()}
        here = {}
        for number in self._calls:
            layer = self._layer_specs[number]
            if number in owned:
                here[number] = owned[number]
            elif isinstance(layer, (LayerSpec, nn.Module)) and not isinstance(layer, TiedLayerSpec):
                here[number] = f"{number}."
        here |= self._loss_file(len(self._layer_specs))
        prefixes = tuple(f"tied_modules.{key}." for key in self.tied_modules)
        return PipelineLayers(here, {n: p for n, p in owned.items() if n not in here and p in prefixes})

    def _loss_file(self, number: int) -> dict[int, str]:
        """The file behind those of the layers, where the loss has weights."""
        return {number: f"{_LOSS}."} if _LOSS in self._modules else {}

    def holds(self, name: str) -> bool:
        """Whether a tensor of the whole model lies on this rank; what no rank can have does, to be refused there."""
        if name.startswith(f"{_LOSS}."):
            return _LOSS in self._modules
        if self.cut is not None:
            return not self.cut.knows(name) or name.startswith(tuple(self.layer_names().known.values()))
        first, _, rest = name.partition(".")
        if first == "tied_modules":
            return rest.partition(".")[0] in self.tied_modules
        if not first.isdigit() or int(first) >= len(self._layer_specs):
            return True
        return first in self._modules

    def ckpt_prefix(self, checkpoints_path: str | os.PathLike[str], tag: str) -> str:
        """The beginning of the names of this rank's model files."""
        words = self._grid.topology().get_rank_repr(self._grid.global_rank, ("data", "pipe", "sequence"))
        return str(Path(checkpoints_path) / tag / (f"module-{words}" if words else "module"))

    def ckpt_layer_path(self, ckpt_dir: str | os.PathLike[str], local_layer_idx: int) -> str:
        """The file of this rank's layer of that number."""
        return str(Path(ckpt_dir) / self._file(self._local_start + local_layer_idx))

    def save_state_dict(
        self, save_dir: str | os.PathLike[str], checkpoint_engine: Any, exclude_frozen_params: bool = False
    ) -> None:
        """Write the files of this rank's layers by a checkpoint engine; on the first replica only."""
        if self._grid.data_parallel_id != 0 or self._grid.get_sequence_parallel_rank() != 0:
            return
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        for number, module in self._with_files():
            params = module.named_parameters() if exclude_frozen_params else ()
            frozen = {name for name, param in params if not param.requires_grad}
            values = {name: value for name, value in module.state_dict().items() if name not in frozen}
            checkpoint_engine.save(values, str(Path(save_dir) / self._file(number)))

    def load_state_dir(self, load_dir: str | os.PathLike[str], checkpoint_engine: Any, strict: bool = True) -> None:
        """Read the files of this rank's layers by a checkpoint engine."""
        for number, module in self._with_files():
            path = Path(load_dir) / self._file(number)
            if not path.exists():
                raise CheckpointError(f"{path} is missing: the checkpoint has no file of layer {number}")
            module.load_state_dict(checkpoint_engine.load(str(path), map_location="cpu"), strict=strict)
        self.ties.share()

    def _with_files(self) -> list[tuple[int, nn.Module]]:
        here = self.layer_names().here
        return [(number, self.get_submodule(prefix.removesuffix("."))) for number, prefix in here.items()]

    def _file(self, number: int) -> str:
        slices = self._grid.get_slice_parallel_world_size()
        return layer_file(number, self._grid.get_slice_parallel_rank() if slices > 1 else None)


def _require_kinds(num_stages: object, chunks: object, method: object, checkpointable: object) -> None:
    """Refuse arguments that look right and would mean something else."""
    for name, value in (("num_stages", num_stages), ("chunks", chunks)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise LayoutError(f"PipelineModule: {name} is {value!r}; expected a whole number of at least 1")
    if not isinstance(method, str):
        raise UsageError(f"PipelineModule: partition_method is {method!r}; expected a name, such as 'uniform'")
    if isinstance(checkpointable, str):
        raise UsageError(
            f"PipelineModule: checkpointable_layers is {checkpointable!r}; expected a list of names of classes"
        )


def _require_layers(layers: Sequence[object]) -> None:
    """Refuse what cannot be a layer, wherever it would lie."""
    for number, layer in enumerate(layers):
        if isinstance(layer, PipelineModule):
            raise UsageError(f"layer {number} is a PipelineModule; a pipeline cannot be a layer of another one")
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise UsageError(
                f"layer {number} is of the type {type(layer).__name__}; expected a module, a LayerSpec or a function"
            )


def _is_model(layers: object) -> TypeGuard[nn.Module]:
    if isinstance(layers, str) or not isinstance(layers, (nn.Module, Iterable)):
        raise UsageError(f"layers is a {type(layers).__name__}; expected a list of layers, an nn.Sequential or a model")
    return isinstance(layers, nn.Module) and not isinstance(layers, (nn.Sequential, nn.ModuleList))


def _cut(model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None) -> ModelCut:
    """A model as layers, which has a loss."""
    cut = ModelCut(model)
    if loss_fn is None and not cut.has_loss:
        raise UsageError(
            f"{type(model).__name__} is cut without its loss, which is known for models that predict the next token; "
            "pass PipelineModule(..., loss_fn=fn), which is called as fn(outputs, labels)"
        )
    return cut


def _topology(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    world = comm.get_world_size()
    if topology is not None:
        stages = max(1, topology.get_dim("pipe"))
        if num_stages not in (None, stages):
            raise LayoutError(
                f"num_stages is {num_stages}, but the topology has {stages} along 'pipe'; pass one of them"
            )
        return topology
    assert num_stages is not None, "checked by the caller"
    if num_stages < 1 or world % num_stages:
        raise LayoutError(
            f"world size {world} is not divisible by num_stages {num_stages}. Start a multiple of {max(1, num_stages)} "
            "processes, or change num_stages."
        )
    return PipeDataParallelTopology(num_pp=num_stages, num_dp=world // num_stages)


def _files_of_ties(layers: Sequence[Layer]) -> dict[str, int]:
    """Tied key → the layer whose file holds it: its first use as a plain module, or its first use."""
    found: dict[str, int] = {}
    for number, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            known = found.setdefault(layer.key, number)
            first = layers[known]
            if layer.forward_fn is None and isinstance(first, TiedLayerSpec) and first.forward_fn is not None:
                found[layer.key] = number
    return found
