"""A pipeline together with the other axes of a config: its grid, and split layers and experts on each stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deepspeed.config.schema import Schema
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError, LayoutError, UsageError
from deepspeed.moe.auto import Opened as OpenedExperts
from deepspeed.moe.auto import spread_blocks
from deepspeed.moe.layer import MoE
from deepspeed.parallel import ParallelLayout
from deepspeed.parallel.topology import PipelineParallelGrid, PipeModelDataParallelTopology, ProcessTopology
from deepspeed.pipe.accord import Accord
from deepspeed.pipe.module import PipelineModule
from deepspeed.tensor_parallel import SplitModel, split_model
from deepspeed.tensor_parallel.apply import Opened
from deepspeed.tensor_parallel.build import is_split_model
from deepspeed.zero.agreement import Hosts

__all__ = ["agree_on_experts", "fit_grid", "split_stage", "spread_stage"]

_NAMES = {"sp": "sequence", "tp": "model"}
"""Axis → what a topology calls it."""
_KEYS = {"sp": "sequence_parallel_size", "tp": "tensor_parallel.autotp_size"}
_MOST_KINDS = 8  # of sizes over which experts of one model are spread


def fit_grid(module: PipelineModule, sizes: Mapping[str, int]) -> PipelineParallelGrid:
    """The grid of a pipeline with the axes that the config names; a rank keeps its stage."""
    topology = module.topology()
    found = {axis: max(1, topology.get_dim(name)) for axis, name in _NAMES.items()}
    wanted = {axis: sizes[axis] for axis in _NAMES}
    for axis, key in _KEYS.items():
        if wanted[axis] not in (1, found[axis]) and not module.sized_by_stages:
            raise DeepSpeedConfigError(
                f"{key} is {wanted[axis]}, but the topology of the PipelineModule has {found[axis]} along "
                f"{_NAMES[axis]!r}. Let them agree, or build the PipelineModule with num_stages alone",
                path=key,
            )
    if all(wanted[axis] in (1, found[axis]) for axis in _NAMES):
        return module.mpu()
    replicas, share = topology.world_size() // module.num_stages, wanted["sp"] * wanted["tp"]
    if replicas % share:
        keys = " × ".join(f"{key} {wanted[axis]}" for axis, key in _KEYS.items() if wanted[axis] > 1)
        raise LayoutError(
            f"{replicas} ranks hold each of the {module.num_stages} stages, which {keys} does not divide. Start a "
            f"multiple of {module.num_stages * share} processes, or change these keys or num_stages"
        )
    module.use_topology(_grid(module.num_stages, replicas // share, wanted["sp"], wanted["tp"]))
    return module.mpu()


def _grid(stages: int, replicas: int, sequence: int, slices: int) -> ProcessTopology:
    if sequence == 1:
        return PipeModelDataParallelTopology(stages, slices, replicas)
    return ProcessTopology(["pipe", "data", "sequence", "model"], [stages, replicas, sequence, slices])


def split_stage(schema: Schema, module: PipelineModule, layout: ParallelLayout, opened: Opened) -> SplitModel:
    """Split the layers of this rank's stages as the config says; what fails on one stage is an error on all."""
    section = schema.tensor_parallel
    if section.autotp_size < 2:
        return SplitModel()
    for name in ("vocab_parallel_lm_head", "sequence_parallel"):
        if getattr(section, name):
            raise DeepSpeedConfigError(
                f"tensor_parallel.{name} is true, and the model is a PipelineModule, between whose stages hidden "
                "states are whole, and whose embedding and head may share a weight. Remove the key.",
                path=f"tensor_parallel.{name}",
            )
    # An embedding and a head that share a weight lie on different stages, which would decide apart: both stay whole.
    kept = section.model_copy(update={"vocab_parallel_lm_head": False})
    error: UsageError | None = None
    split = SplitModel()
    chosen = schema.model_copy(update={"tensor_parallel": kept})
    try:
        split = split_model(chosen, module, layout["tp"], opened, module.mpu(), part=True)
    except UsageError as caught:
        error = caught
    Accord(layout).end(error is not None, error, error)
    if not Hosts(layout.world).exchange([is_split_model(module)], "layers that are split").any():
        raise UsageError(
            f"tensor_parallel.autotp_size is {section.autotp_size}, but no layer of any stage can be split by its own "
            "plan, by a preset or by the names of its layers. Give rules in "
            "tensor_parallel.partition_config.layer_specs, or leave autotp_size out"
        )
    return split if module.first else replace(split, check=None)


def spread_stage(schema: Schema, module: PipelineModule, layout: ParallelLayout, opened: OpenedExperts) -> None:
    """Spread the blocks of experts of this rank's stages as the config says; what fails on one is an error on all."""
    if not schema.expert_parallel.enabled:
        return
    error: UsageError | None = None
    try:
        spread_blocks(schema, module, layout, opened)
    except DeepSpeedError as caught:
        error = UsageError(
            f"{module.describe()}: {caught}. Every stage of a pipeline needs blocks of experts: cut the model at other "
            "places (partition_method, schedule), or use fewer stages"
        )
    Accord(layout).end(error is not None, error, error)


def agree_on_experts(module: PipelineModule, layout: ParallelLayout) -> None:
    """Refuse stages whose experts are spread otherwise than those of other stages: groups are made by all ranks."""
    mine = sorted({each.ep_size for each in module.modules() if isinstance(each, MoE)})
    words = [*mine, *[0] * _MOST_KINDS][:_MOST_KINDS]
    said = Hosts(layout.world).exchange(words, "experts of the stages").tolist()
    for rank, other in enumerate(said):
        if other != said[0]:
            raise UsageError(
                f"the stage of rank 0 has experts over {_shown(said[0])} ranks, that of rank {rank} over "
                f"{_shown(other)}: every stage of a pipeline needs layers of experts of the same ep_size. Cut the "
                "model at other places (partition_method), or use fewer stages"
            )


def _shown(sizes: list[int]) -> str:
    return " and ".join(str(size) for size in sizes if size) or "no"
