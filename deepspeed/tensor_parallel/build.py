"""The `tensor_parallel` section acts: rules are found, the model is split, and what the engine needs comes back."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.checkpoint.storage.durable import tensors_in
from deepspeed.comm.discover import local_ranks
from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.config.schema import Schema
from deepspeed.errors import UsageError
from deepspeed.log import log_dist
from deepspeed.parallel import AxisGroup
from deepspeed.parallel.process_groups import ranks_of
from deepspeed.parallel.regions import GroupMembers, RankGroup
from deepspeed.parallel.rng import sync_generators
from deepspeed.tensor_parallel.apply import Opened, apply, counted_elsewhere
from deepspeed.tensor_parallel.dropout import use_rank_generators
from deepspeed.tensor_parallel.layer_splits import check_products
from deepspeed.tensor_parallel.layers import share_of
from deepspeed.tensor_parallel.loss import SplitLogits, TileLoss, split_logits
from deepspeed.tensor_parallel.model_init import asked_size, check_asked
from deepspeed.tensor_parallel.plan import ModelStage, Planner, SplitPlan, require_split
from deepspeed.tensor_parallel.rules import (
    Rule,
    Rules,
    SplitKind,
    by_names,
    model_plan,
    of_plan,
    of_spec,
    plain_path,
    preset,
)
from deepspeed.tensor_parallel.sequence import SequenceGathers, divide_sequences


class InputCheck:
    """Compares the inputs of the first forward over the ranks of an axis."""

    def __init__(self, axis: AxisGroup) -> None:
        self._axis = axis
        self._done = False

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise on all ranks where they differ."""
        if self._done:
            return
        self._done = True
        own = torch.tensor([_checksum((args, kwargs))], dtype=torch.int64, device=comm.group_device())
        found = [own.clone() for _ in range(self._axis.size)]  # pretended ranks say nothing
        with comm.labelled("inputs of tensor-parallel ranks"):
            comm.all_gather(found, own, group=self._axis.group)
        sums = [int(value) for value in found]
        different = [rank for rank, value in zip(self._axis.ranks, sums, strict=True) if value != sums[0]]
        if different:
            raise UsageError(
                f"the tensor-parallel ranks {list(self._axis.ranks)} compute one model together and must get the same "
                f"inputs, but those of rank {', '.join(map(str, different))} are not those of rank "
                f"{self._axis.ranks[0]}. Give the data loader the data-parallel rank and size, not the world's, as "
                "engine.deepspeed_io and training_data do"
            )


def _checksum(value: Any) -> int:
    total = 0
    for tensor in tensors_in(value):
        if tensor.is_meta:
            continue
        data = tensor.detach().cpu().contiguous().reshape(-1)
        total = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), total)
        if data.numel():
            total = zlib.crc32(data.view(torch.uint8).numpy().data, total)
    return total


@dataclass(frozen=True)
class SplitModel:
    """What the other parts of an engine must know of a model that may have been split."""

    check: InputCheck | None = None
    """Compares the inputs of ranks that share layers."""
    heads: tuple[int, int] | None = None
    """The fewest query and key-value heads that a rank computes; None where each computes all of them."""
    elsewhere: frozenset[int] = frozenset()
    """Ids of parameters of which another rank holds the same and counts it in the norm."""
    tile_loss: TileLoss | None = None
    """The loss of some tokens of a causal model whose logits stay split; None where logits are whole."""
    logits: SplitLogits | None = None
    """Of a piece with the output layer: how the loss takes split logits, which nobody keeps split yet."""
    outputs: int = 0
    """Output layers that were split."""
    entrances: SequenceGathers | None = None
    """Where whole sequences are gathered of those that stay split; None where they are always whole."""
    decided: bool = False
    """Some layer is split, or a rule says that it stays whole."""


def split_model(
    schema: Schema,
    model: nn.Module,
    axis: AxisGroup,
    opened: Opened,
    mpu: Any = None,
    *,
    piece: ModelStage | None = None,
) -> SplitModel:
    """Split a model over the ranks of an axis, where the config or `tp_model_init` asks for it.

    A `piece` of a model may have nothing that can be split.
    """
    section = schema.tensor_parallel
    size = asked_size(model, section.autotp_size)
    if size < 2:
        return SplitModel()
    if axis.size != size:
        raise UsageError(
            f"the model is to be split over {size} ranks (tensor_parallel.autotp_size, or tp_model_init), but the "
            f"layout has {axis.size} tensor-parallel ranks. Set tensor_parallel.autotp_size to {size}, and let an "
            "mpu or mesh agree with it"
        )
    check_asked(model, schema, axis, mpu)
    _warn_of_nodes(axis)
    by_script = _check_split(model, axis)
    half = schema.bf16.enabled or schema.fp16.enabled
    made = split(model, axis, section, opened, piece=piece, required=not by_script, element_size=2 if half else None)
    for param in model.parameters():
        with opened([param]):
            pass  # what stays whole on all of these ranks lies on other ranks, too, from now on
    entrances = divide_sequences(model, made, axis, piece) if section.sequence_parallel else None
    sync_generators(axis)
    use_rank_generators(model, axis, entrances.blocks if entrances is not None else ())
    owner = model if piece is None else piece.owner
    logits = split_logits(owner, made) if section.vocab_parallel_lm_head and made.heads else None
    tile_loss = None if logits is None or piece is not None else logits.attach()
    if made.divides:
        _log_plan(made)
    elsewhere = counted_elsewhere(model, axis.rank)
    kept = None if piece is None else logits
    decided = by_script or bool(made.changes)
    heads = min((attention.heads.fewest(made.ranks) for attention in made.attention), default=None)
    return SplitModel(InputCheck(axis), heads, elsewhere, tile_loss, kept, len(made.heads), entrances, decided)


def split(
    model: nn.Module,
    axis: RankGroup,
    section: TPTrainingConfig,
    opened: Opened = lambda _: nullcontext(),
    *,
    piece: ModelStage | None = None,
    required: bool = True,
    element_size: int | None = None,
) -> SplitPlan:
    """Cut a model's layers in place for this rank of an axis, or of `GroupMembers` of any group; returns what was done.

    For training and inference: no engine, layout or mpu takes part. `opened` makes sharded parameters whole;
    `element_size` is that of the dtype the model will have, where that is another one than now. Unless it is not
    `required`, a whole model of which nothing can be split is an error.
    """
    made = plan_model(section, model, axis.size, piece)
    check_products(made.changes, element_size)
    if piece is None and required:
        require_split(made, type(model).__name__)
    apply(made, axis, opened, overlap=section.tp_overlap_comm)
    return made


def plan_model(section: TPTrainingConfig, model: nn.Module, ranks: int, piece: ModelStage | None = None) -> SplitPlan:
    """What becomes of each layer of a model, or of a piece of one, on so many ranks; changes nothing."""
    return Planner(model, find_rules(section, model), ranks, section, piece).plan()


def find_rules(section: TPTrainingConfig, model: nn.Module) -> Rules:
    """The user's rules and preset; else the model's own plan; else what the names of layers tell."""
    own = section.partition_config
    rules: list[Rule] = []
    strict, heads = False, Rules(()).heads
    if own is not None:
        source = "tensor_parallel.partition_config"
        rules = [rule for spec in own.layer_specs for rule in of_spec(spec, source)]
        strict, heads = own.strict_mode, own.lm_head_patterns
    if section.preset_model is not None and (own is None or own.use_default_specs):
        rules += preset(section.preset_model)
    if not rules and (own is None or own.use_default_specs):
        rules = _of_model(model)
    return Rules(tuple(rules), strict, tuple(heads))


def _check_split(model: nn.Module, axis: AxisGroup) -> bool:
    """Whether a script has split layers of the model by itself; what another engine has split is an error."""
    shares = [share for share in map(share_of, model.modules()) if share is not None and share.axis.size > 1]
    for share in shares:
        if not isinstance(share.axis, GroupMembers):
            raise UsageError(
                "tensor_parallel: the model is split already, by an earlier deepspeed.initialize. Build the model "
                "anew, or take the engine that you have"
            )
        if ranks_of(share.axis.group) != axis.ranks:
            raise UsageError(
                f"tensor_parallel: the script has split layers of the model over the ranks "
                f"{list(ranks_of(share.axis.group))}, but the tensor-parallel ranks of this one are {list(axis.ranks)}."
                " Let tensor_parallel.autotp_size and the group of these layers agree"
            )
    return bool(shares)


def _warn_of_nodes(axis: AxisGroup) -> None:
    """Ranks that share layers wait for each other several times per block: they belong on one node."""
    here = local_ranks(unknown=comm.get_world_size())
    nodes = {rank // here for rank in axis.ranks}
    if len(nodes) > 1:
        log_dist(
            f"the ranks {list(axis.ranks)}, which share layers, lie on {len(nodes)} nodes of {here} ranks. They are "
            "fastest on one node: let tensor_parallel.autotp_size divide the ranks of a node",
            level=WARNING,
        )


def _of_model(model: nn.Module) -> list[Rule]:
    found = model_plan(model)
    in_blocks = of_plan({path: style for path, style in found.items() if "*" in path})
    paths = [plain_path(path) for path, _ in model.named_modules()]
    fits = any(rule.matches(path, None) for rule in in_blocks for path in paths)
    return of_plan(found) if fits else [*of_plan(found), *by_names()]


def _log_plan(made: SplitPlan) -> None:
    kinds = [change.kind for change in made.changes]
    columns, rows = kinds.count(SplitKind.COLUMN), kinds.count(SplitKind.ROW)
    sources = sorted({change.rule.source for change in made.changes})
    log_dist(
        f"tensor parallelism over {made.ranks} ranks: {columns} layers split by outputs, {rows} by inputs, "
        f"{kinds.count(SplitKind.VOCABULARY)} embeddings by vocabulary, by {', '.join(sources)}"
    )
