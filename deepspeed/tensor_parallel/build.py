"""The `tensor_parallel` section acts: rules are found, the model is split, and what the engine needs comes back."""

from __future__ import annotations

from dataclasses import dataclass
from logging import WARNING
from typing import Any

from torch import nn

from deepspeed import comm
from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.config.schema import Schema
from deepspeed.errors import UsageError
from deepspeed.log import log_dist
from deepspeed.parallel import AxisGroup
from deepspeed.parallel.hierarchy import local_ranks
from deepspeed.parallel.process_groups import ranks_of
from deepspeed.parallel.regions import Members
from deepspeed.tensor_parallel.apply import Opened, apply, counted_elsewhere
from deepspeed.tensor_parallel.dividing import Entrances, divide_sequences
from deepspeed.tensor_parallel.draws import draw_apart, same_generators
from deepspeed.tensor_parallel.experts import check_products
from deepspeed.tensor_parallel.hf_plan import model_plan, of_plan
from deepspeed.tensor_parallel.inputs import InputCheck
from deepspeed.tensor_parallel.layers import share_of
from deepspeed.tensor_parallel.loss import SplitLogits, TileLoss, split_logits
from deepspeed.tensor_parallel.model_init import asked_size, check_asked
from deepspeed.tensor_parallel.piece import Piece
from deepspeed.tensor_parallel.plan import Plan, plan, require_split
from deepspeed.tensor_parallel.presets import by_names, preset
from deepspeed.tensor_parallel.rules import Kind, Rule, Rules, of_spec, plain_path

__all__ = ["SplitModel", "find_rules", "plan_model", "split_model"]


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
    entrances: Entrances | None = None
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
    piece: Piece | None = None,
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
    _tell_nodes(axis)
    by_script = _check_split(model, axis)
    made = plan_model(section, model, axis.size, piece)
    check_products(made.changes, 2 if schema.bf16.enabled or schema.fp16.enabled else None)
    if piece is None and not by_script:
        require_split(made, type(model).__name__)
    apply(made, axis, opened, overlap=section.tp_overlap_comm)
    for param in model.parameters():
        with opened([param]):
            pass  # what stays whole on all of these ranks lies on other ranks, too, from now on
    entrances = divide_sequences(model, made, axis, piece) if section.sequence_parallel else None
    same_generators(axis)
    draw_apart(model, axis, entrances.blocks if entrances is not None else ())
    owner = model if piece is None else piece.owner
    logits = split_logits(owner, made) if section.vocab_parallel_lm_head and made.heads else None
    tile_loss = None if logits is None or piece is not None else logits.attach()
    if made.divides:
        _tell(made)
    elsewhere = counted_elsewhere(model, axis.rank)
    kept = None if piece is None else logits
    decided = by_script or bool(made.changes)
    return SplitModel(
        InputCheck(axis), _fewest_heads(made), elsewhere, tile_loss, kept, len(made.heads), entrances, decided
    )


def plan_model(section: TPTrainingConfig, model: nn.Module, ranks: int, piece: Piece | None = None) -> Plan:
    """What becomes of each layer of a model, or of a piece of one, on so many ranks; changes nothing."""
    grain, split_head = section.tensor_parallel.tp_grain_size, section.vocab_parallel_lm_head
    tied = None if piece is None else piece.tied
    return plan(
        model,
        find_rules(section, model),
        ranks,
        grain=grain,
        split_head=split_head,
        split_embedding=section.vocab_parallel_embedding,
        tied=tied,
    )


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
        if not isinstance(share.axis, Members):
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


def _tell_nodes(axis: AxisGroup) -> None:
    """Ranks that share layers wait for each other several times per block: they belong on one node."""
    here = local_ranks(unknown=comm.get_world_size())
    nodes = {rank // here for rank in axis.ranks}
    if len(nodes) > 1:
        log_dist(
            f"the ranks {list(axis.ranks)}, which share layers, lie on {len(nodes)} nodes of {here} ranks. They are "
            "fastest on one node: let tensor_parallel.autotp_size divide the ranks of a node",
            level=WARNING,
        )


def _fewest_heads(made: Plan) -> tuple[int, int] | None:
    return min((attention.heads.fewest(made.ranks) for attention in made.attention), default=None)


def _of_model(model: nn.Module) -> list[Rule]:
    told = model_plan(model)
    in_blocks = of_plan({path: style for path, style in told.items() if "*" in path})
    paths = [plain_path(path) for path, _ in model.named_modules()]
    fits = any(rule.matches(path, None) for rule in in_blocks for path in paths)
    return of_plan(told) if fits else [*of_plan(told), *by_names()]


def _tell(made: Plan) -> None:
    kinds = [change.kind for change in made.changes]
    columns, rows = kinds.count(Kind.COLUMN), kinds.count(Kind.ROW)
    sources = sorted({change.rule.source for change in made.changes})
    log_dist(
        f"tensor parallelism over {made.ranks} ranks: {columns} layers split by outputs, {rows} by inputs, "
        f"{kinds.count(Kind.VOCABULARY)} embeddings by vocabulary, by {', '.join(sources)}"
    )
