"""A pipeline together with the other axes of a config: its grid, and split layers and experts on each stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deepspeed.config.schema import Schema
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError, LayoutError, UsageError
from deepspeed.log import log_dist
from deepspeed.moe.auto import Opened as OpenedExperts
from deepspeed.moe.auto import spread_blocks
from deepspeed.moe.layer import MoE
from deepspeed.parallel import ParallelLayout
from deepspeed.parallel.topology import PipelineParallelGrid, PipeModelDataParallelTopology, ProcessTopology
from deepspeed.pipe.accord import Accord
from deepspeed.pipe.module import PipelineModule
from deepspeed.tensor_parallel import SplitModel, split_model
from deepspeed.tensor_parallel.apply import Opened
from deepspeed.tensor_parallel.layers import share_of
from deepspeed.tensor_parallel.loss import SplitLogits
from deepspeed.tensor_parallel.piece import Piece
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
    if section.sequence_parallel and module.cut is None:
        raise DeepSpeedConfigError(
            "tensor_parallel.sequence_parallel is true, and the PipelineModule is made of layers of its own: which of "
            "them see other tokens than their own, and must have whole sequences, is not known. Remove the key, or "
            "pass a model of Transformers to PipelineModule.",
            path="tensor_parallel.sequence_parallel",
        )
    if section.vocab_parallel_embedding:
        raise DeepSpeedConfigError(
            "tensor_parallel.vocab_parallel_embedding is true, and the model is a pipeline, whose first stage keeps "
            "its embedding whole. Remove the key.",
            path="tensor_parallel.vocab_parallel_embedding",
        )
    # What the model's plan says of an embedding and a head is not followed: they lie on different stages.
    kept = section.model_copy(update={"vocab_parallel_lm_head": bool(section.vocab_parallel_lm_head)})
    error: UsageError | None = None
    split = SplitModel()
    chosen = schema.model_copy(update={"tensor_parallel": kept})
    try:
        split = split_model(chosen, module, layout["tp"], opened, module.mpu(), piece=_piece(module))
        _require_no_split_ties(module)
    except UsageError as caught:
        error = caught
    Accord(layout).end(error is not None, error, error)
    said = Hosts(layout.world).exchange([split.decided, split.outputs], "layers that are split").any(0)
    if not said[0]:
        raise UsageError(
            f"tensor_parallel.autotp_size is {section.autotp_size}, but no layer of any stage can be split by its own "
            "plan, by a preset or by the names of its layers. Give rules in "
            "tensor_parallel.partition_config.layer_specs, or leave autotp_size out"
        )
    if kept.vocab_parallel_lm_head and not said[1]:
        raise UsageError(
            "tensor_parallel.vocab_parallel_lm_head is true, but no stage has a Linear that is the output layer by its "
            "name. Name it in tensor_parallel.partition_config.lm_head_patterns, by the last part of its path"
        )
    if split.logits is not None:
        _keep_split(module, split.logits)
    return split if module.first else replace(split, check=None)


def _piece(module: PipelineModule) -> Piece:
    """What of the model lies on this rank."""
    cut = module.cut
    if cut is None:
        return Piece(module)
    here = dict(module.named_parameters(remove_duplicate=False))
    tied = {id(here[tie.name]): tie.layers for tie in cut.ties if tie.name in here}
    return Piece(cut.model, cut.blocks(), cut.block(0), cut.block(-1), tied)


def _require_no_split_ties(module: PipelineModule) -> None:
    """Refuse to split what stages share by a `forward_fn`: what it does with a part of a weight is not known."""
    for key in module.keys_with_functions():
        if key in module.tied_modules and share_of(module.tied_modules[key]) is not None:
            raise UsageError(
                f"the tied layer {key!r} would be split over tensor-parallel ranks, and a forward_fn uses its "
                "weight, of which it would see a part. Give it a rule with partition_type skip in "
                "tensor_parallel.partition_config"
            )


def _keep_split(module: PipelineModule, logits: SplitLogits) -> None:
    """On the last stage: logits stay split where the loss is the model's own."""
    assert module.cut is not None, "whose loss takes split logits is a model"
    if module.loss_fn == module.cut.loss:
        module.cut.keep_split(logits)
    else:
        log_dist("vocab_parallel_lm_head: logits are gathered, because the PipelineModule has a loss_fn of its own")


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
