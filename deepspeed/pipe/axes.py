"""A pipeline together with the other axes of a config: its grid, its norm, split layers, experts and sequences.

What attention must know of a whole sequence goes from stage to stage among the model's inputs: a layer that runs again
in backward, after other micro-batches, finds it there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.config.schema import Schema
from deepspeed.data.pacing import NumberedBlocks
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError, LayoutError, UsageError
from deepspeed.log import log_dist
from deepspeed.moe.auto_ep import Opened as OpenedExperts
from deepspeed.moe.auto_ep import spread_blocks
from deepspeed.moe.layer import MoE
from deepspeed.moe.placement import SpreadExperts
from deepspeed.parallel import AxisGroup, ParallelLayout
from deepspeed.parallel.rng import rank_generator
from deepspeed.parallel.topology import PipelineParallelGrid, PipeModelDataParallelTopology, ProcessTopology
from deepspeed.pipe.batch_agreement import BatchAgreement
from deepspeed.pipe.engine import PipelineEngine
from deepspeed.pipe.module import PipelineModule
from deepspeed.runtime.model_kind import ModelKind
from deepspeed.runtime.parts import Parts
from deepspeed.sequence.build import SequenceSharing, require_same, sharing_of
from deepspeed.sequence.inputs import mean_over_tokens
from deepspeed.tensor_parallel import SplitModel, split_model
from deepspeed.tensor_parallel.apply import Opened
from deepspeed.tensor_parallel.layers import share_of
from deepspeed.tensor_parallel.loss import SplitLogits
from deepspeed.tensor_parallel.plan import ModelStage
from deepspeed.transformers.attention import SequenceInfo
from deepspeed.zero.interface import NormRanks, RankAgreement, Reshard

_NAMES = {"sp": "sequence", "tp": "model"}
"""Axis → what a topology calls it."""
_KEYS = {"sp": "sequence_parallel_size", "tp": "tensor_parallel.autotp_size"}
_MOST_KINDS = 8  # of sizes over which experts of one model are spread


class PipelineKind(ModelKind):
    """The stages of a pipeline: its own grid, steps that stages agree on, and a `PipelineEngine`."""

    whole = False
    module: PipelineModule

    def mpu(self, mpu: Any, mesh_param: Any, sizes: Mapping[str, int]) -> PipelineParallelGrid:
        if mpu is not None or mesh_param is not None:
            raise UsageError("a PipelineModule has its own topology; pass neither mpu nor mesh_param with it")
        return fit_grid(self.module, sizes)

    def split(self, schema: Schema, layout: ParallelLayout, opened: Reshard, mpu: Any) -> SplitModel:
        spread_stage(schema, self.module, layout, opened)
        agree_on_experts(self.module, layout)
        return split_stage(schema, self.module, layout, opened)

    def share_sequences(
        self,
        schema: Schema,
        layout: ParallelLayout,
        stack: ExitStack,
        forward: Callable[..., Any],
        heads: tuple[int, int] | None,
    ) -> Callable[..., Any]:
        share_stage_sequences(schema, self.module, layout, stack, heads)
        return forward

    def export_experts(self, experts: SpreadExperts | None, stack: ExitStack) -> None:
        """A stage is no model: nothing to do."""

    def measure(self, measure: NormRanks, layout: ParallelLayout) -> NormRanks:
        """Sum over stages, each tied weight once; over tensor slices only what is split."""
        slices, stages = layout.tensor, layout.pipeline
        return replace(
            measure,
            model_group=slices.group if slices.size > 1 else None,
            stages=stages.group if stages.size > 1 else None,
            elsewhere=measure.elsewhere | self.counted_elsewhere(),
        )

    def model_ranks(self, layout: ParallelLayout) -> AxisGroup:
        return layout.tensor

    def stages(self) -> tuple[int, ...]:
        return tuple(self.module.stages)

    def blocks(self) -> NumberedBlocks:
        if self.module.cut is None:
            raise UsageError(
                "progressive_layer_drop.drop_blocks and data_efficiency.data_routing.random_ltd need the blocks of a "
                "model of Transformers; this pipeline is a row of layers. Remove these keys"
            )
        return self.module.cut.numbered_blocks()

    def counted_elsewhere(self) -> frozenset[int]:
        return frozenset(self.module.ties.counted_elsewhere())

    def warn_if_frozen(self, optimizer: Optimizer | None) -> None:
        """Stages compare what they train once all of them are built."""

    def engine(self, parts: Parts) -> PipelineEngine:
        return PipelineEngine(parts)


def model_kind(module: nn.Module) -> ModelKind:
    """How an engine of this module is built."""
    return PipelineKind(module) if isinstance(module, PipelineModule) else ModelKind(module)


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
        split = split_model(chosen, module, layout.tensor, opened, module.mpu(), piece=_piece(module))
        _require_no_split_ties(module)
    except UsageError as caught:
        error = caught
    BatchAgreement(layout).end(error is not None, error, error)
    said = RankAgreement(layout.world).exchange([split.decided, split.outputs], "layers that are split").any(0)
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


def _piece(module: PipelineModule) -> ModelStage:
    """What of the model lies on this rank."""
    cut = module.cut
    if cut is None:
        return ModelStage(module)
    here = dict(module.named_parameters(remove_duplicate=False))
    tied = {id(here[tie.name]): tie.layers for tie in cut.ties if tie.name in here}
    return ModelStage(cut.model, cut.blocks(), cut.block(0), cut.block(-1), tied)


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
    BatchAgreement(layout).end(error is not None, error, error)


def agree_on_experts(module: PipelineModule, layout: ParallelLayout) -> None:
    """Refuse stages whose experts are spread otherwise than those of other stages: groups are made by all ranks."""
    mine = sorted({each.ep_size for each in module.modules() if isinstance(each, MoE)})
    words = [*mine, *[0] * _MOST_KINDS][:_MOST_KINDS]
    said = RankAgreement(layout.world).exchange(words, "experts of the stages").tolist()
    for rank, other in enumerate(said):
        if other != said[0]:
            raise UsageError(
                f"the stage of rank 0 has experts over {_shown(said[0])} ranks, that of rank {rank} over "
                f"{_shown(other)}: every stage of a pipeline needs layers of experts of the same ep_size. Cut the "
                "model at other places (partition_method), or use fewer stages"
            )


def _shown(sizes: list[int]) -> str:
    return " and ".join(str(size) for size in sizes if size) or "no"


_WHOLE = "whole sequences"
"""Among the inputs of a model: rows, length, positions and padding before they were shared out."""


class StageSequences:
    """The sequences that a stage of this rank shares with others."""

    def __init__(self, sharing: SequenceSharing) -> None:
        self._sharing = sharing
        self._compared: set[str] = set()

    def part(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of the arguments of a model, with what it must know of the whole."""
        self._compare("inputs", *inputs.values())
        part = self._sharing.inputs.part((), inputs)
        arguments = {name: value for name, value in part.arguments.items() if name != "use_cache"}
        tokens = arguments.get("input_ids", arguments.get("inputs_embeds"))
        assert tokens is not None, "a part has tokens"
        whole = (len(tokens), part.whole.length, inputs.get("position_ids"), inputs.get("attention_mask"))
        return {**arguments, _WHOLE: whole}

    @contextmanager
    def arguments(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What a model is called with; masks that it makes inside are those of whole sequences."""
        rows, length, positions, mask = inputs[_WHOLE]
        told = positions.expand(rows, length) if positions is not None and positions.dim() == 2 else positions
        attention = self._sharing.attention
        attention.current = SequenceInfo.of(length, told, None if mask is None else mask.bool())
        try:
            yield {name: value for name, value in inputs.items() if name != _WHOLE}
        finally:
            attention.current = None

    def numbers(self, layer: nn.Module) -> AbstractContextManager[None]:
        """A layer runs inside: tokens and heads of ranks are different ones, so that what it drops must be, too."""
        return rank_generator(self._sharing.axis) if layer.training else nullcontext()

    @contextmanager
    def block(self, block: nn.Module) -> Iterator[None]:
        """A block runs inside, which must see the parts of other ranks."""
        self._sharing.attention.used = False
        with self.numbers(block):
            yield
        if not self._sharing.attention.used:
            raise UsageError(
                f"{type(block).__name__} computed no attention over the sequence-parallel ranks, so that their parts "
                "of a sequence do not see each other. Train this model without sequence_parallel_size."
            )

    def loss(self, function: Callable[..., Tensor], logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the labels of all ranks, however these lie."""
        self._compare("labels", labels)
        mine = self._sharing.inputs.part_of_labels(labels)
        own = function(logits=logits, labels=mine, shift_labels=mine)
        return mean_over_tokens(own, mine, self._sharing.axis.group, self._sharing.worth)

    def _compare(self, what: str, *values: Any) -> None:
        """Once: the host waits for it."""
        if what not in self._compared:
            require_same(values, self._sharing.axis)
            self._compared.add(what)


def share_stage_sequences(
    schema: Schema, module: PipelineModule, layout: ParallelLayout, stack: ExitStack, heads: tuple[int, int] | None
) -> None:
    """Let the stages of a model of Transformers share sequences; a row of layers is left to its own attention."""
    cut, asked, size = module.cut, schema.sequence_parallel.attention, layout.sequence.size
    if cut is None and asked is not None and size > 1:
        raise DeepSpeedConfigError(
            f"sequence_parallel.attention is {asked!r}, and the PipelineModule is made of layers of its own, whose "
            "attention is not known. Remove the key, and let the layers use "
            "deepspeed.sequence.layer.DistributedAttention over parts of sequences.",
            path="sequence_parallel.attention",
        )
    if cut is None or size == 1:
        return
    if asked is None or schema.sequence_parallel_size is None:
        raise DeepSpeedConfigError(
            f"{size} ranks share sequences, and the PipelineModule is a model of Transformers, whose attention must do "
            'so. Set sequence_parallel_size, and sequence_parallel.attention to "ulysses", "ring" or "auto".',
            path="sequence_parallel.attention",
        )
    if module.loss_fn != cut.loss:
        raise UsageError(
            "PipelineModule(..., loss_fn=...) sees a part of a sequence where ranks share it, and which label a part's "
            f"last token has is not known. Leave loss_fn out, so that the loss is the model's own, or remove "
            f"sequence_parallel_size {size}."
        )
    sharing = sharing_of(schema, cut.model, layout, stack, _agreed(heads, layout))
    cut.sequences = None if sharing is None else StageSequences(sharing)


def _agreed(heads: tuple[int, int] | None, layout: ParallelLayout) -> tuple[int, int] | None:
    """The heads of a rank on the stages that have attention, for those that have none."""
    if layout.tensor.size == 1:
        return heads
    said = RankAgreement(layout.world).exchange(list(heads or (0, 0)), "heads of the stages").tolist()
    return min(((int(queries), int(keys)) for queries, keys in said if queries), default=None)
