"""The `tensor_parallel` section acts: rules are found, the model is split, and what the engine needs comes back."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.config.schema import Schema
from deepspeed.errors import UsageError
from deepspeed.log import log_dist
from deepspeed.parallel import AxisGroup
from deepspeed.tensor_parallel.apply import apply
from deepspeed.tensor_parallel.dividing import divide_sequences
from deepspeed.tensor_parallel.draws import same_generators
from deepspeed.tensor_parallel.hf_plan import model_plan, of_plan
from deepspeed.tensor_parallel.inputs import InputCheck
from deepspeed.tensor_parallel.loss import split_loss
from deepspeed.tensor_parallel.model_init import asked_size, check_asked
from deepspeed.tensor_parallel.plan import Plan, plan
from deepspeed.tensor_parallel.presets import by_names, preset
from deepspeed.tensor_parallel.rules import Kind, Rule, Rules, of_spec

__all__ = ["find_rules", "is_split_model", "plan_model", "split_model"]


def split_model(schema: Schema, model: nn.Module, axis: AxisGroup, mpu: Any = None) -> InputCheck | None:
    """Split a model over the ranks of an axis, as the config says; None where there is nothing to do."""
    section = schema.tensor_parallel
    size = asked_size(model, section.autotp_size)
    if size < 2:
        return None
    if axis.size != size:
        raise UsageError(
            f"the model is to be split over {size} ranks (tensor_parallel.autotp_size, or tp_model_init), but the "
            f"layout has {axis.size} tensor-parallel ranks. Set tensor_parallel.autotp_size to {size}, and let an "
            "mpu or mesh agree with it"
        )
    check_asked(model, schema, axis, mpu)
    _require_whole(model)
    if is_split_model(model):
        raise UsageError(
            "tensor_parallel: the model is split already, by an earlier deepspeed.initialize. Build the model anew, or "
            "take the engine that you have"
        )
    made = plan_model(section, model, axis.size)
    apply(made, axis, overlap=section.tp_overlap_comm)
    if section.sequence_parallel:
        divide_sequences(model, made, axis)
    same_generators(axis)
    if section.vocab_parallel_lm_head:
        split_loss(model, made)
    _tell(made)
    return InputCheck(axis)


def plan_model(section: TPTrainingConfig, model: nn.Module, ranks: int) -> Plan:
    """What becomes of each layer of a model on so many ranks; changes nothing."""
    grain = section.tensor_parallel.tp_grain_size
    return plan(model, find_rules(section, model), ranks, grain=grain, split_head=section.vocab_parallel_lm_head)


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


def is_split_model(model: nn.Module) -> bool:
    """Whether some layer of it is split already."""
    return any(getattr(module, "share", None) is not None for module in model.modules())


def _require_whole(model: nn.Module) -> None:
    """Refuse parameters that zero.Init has sharded already: layers are cut first."""
    names = (name for name, param in model.named_parameters() if getattr(param, "ds_shape", param.shape) != param.shape)
    if (name := next(names, None)) is not None:
        raise UsageError(
            f"tensor_parallel: {name} was sharded by zero.Init when the model was built, but layers are split before "
            "ZeRO shards what a rank holds of them. Build the model outside of zero.Init"
        )


def _of_model(model: nn.Module) -> list[Rule]:
    told = model_plan(model)
    rules = of_plan(told)
    in_blocks = any("*" in path for path in told)
    return rules if in_blocks else [*rules, *by_names()]


def _tell(made: Plan) -> None:
    kinds = [change.kind for change in made.changes]
    columns, rows = kinds.count(Kind.COLUMN), kinds.count(Kind.ROW)
    sources = sorted({change.rule.source for change in made.changes})
    log_dist(
        f"tensor parallelism over {made.ranks} ranks: {columns} layers split by outputs, {rows} by inputs, "
        f"{kinds.count(Kind.VOCABULARY)} embeddings by vocabulary, by {', '.join(sources)}"
    )
