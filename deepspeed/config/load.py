"""The loader: source → raw dict → renamed → cleaned → validated schema, with the origin of every value."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from deepspeed.config import renamed
from deepspeed.config.batch import MICRO, STEPS, TRAIN
from deepspeed.config.clean import ConfigProblem, Findings, clean
from deepspeed.config.explain import values_of
from deepspeed.config.features import UNBUILT, missing_first
from deepspeed.config.model import Model, from_text, keys_of
from deepspeed.config.optimizer import check_optimizer, check_scheduler
from deepspeed.config.read import ConfigSource, RawConfig, read
from deepspeed.config.schema import Schema
from deepspeed.errors import BatchSizeError, DeepSpeedConfigError, FeatureUnavailable
from deepspeed.log import get_dist_msg, warn_once

_TRAINER = "Transformers' Trainer"
_BOTH = f"{_TRAINER} and Accelerate"

FILLED: dict[str, str] = {
    "train_micro_batch_size_per_gpu": f"{_BOTH} fill it from the per-device batch size",
    "gradient_accumulation_steps": f"{_BOTH} fill it from their own gradient_accumulation_steps",
    "train_batch_size": f"{_BOTH} compute it from the other two batch keys and the number of processes",
    "gradient_clipping": f"{_TRAINER} fills it from max_grad_norm, Accelerate from gradient_clipping",
    "optimizer.params.lr": f"{_TRAINER} fills it from learning_rate, Accelerate from DummyOptim",
    "optimizer.params.betas": f"{_TRAINER} fills it from adam_beta1 and adam_beta2",
    "optimizer.params.eps": f"{_TRAINER} fills it from adam_epsilon",
    "optimizer.params.weight_decay": f"{_TRAINER} fills it from weight_decay, Accelerate from DummyOptim",
    "scheduler.params.warmup_min_lr": f"{_BOTH} set it to 0",
    "scheduler.params.warmup_max_lr": f"{_BOTH} fill it from the learning rate",
    "scheduler.params.warmup_num_steps": f"{_BOTH} fill it from the warm-up steps",
    "scheduler.params.total_num_steps": f"{_BOTH} fill it from the length of the training",
    "fp16.enabled": f"{_TRAINER} fills it from fp16, Accelerate from mixed_precision",
    "bf16.enabled": f"{_TRAINER} fills it from bf16, Accelerate from mixed_precision",
    "zero_optimization.stage": "Accelerate fills it from its zero_stage",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "Accelerate fills it from zero3_save_16bit_model",
    "zero_optimization.offload_optimizer.device": "Accelerate fills it from offload_optimizer_device",
    "zero_optimization.offload_param.device": "Accelerate fills it from offload_param_device",
}
"""Keys that clients fill, and who does it from what."""


def unresolved(path: str) -> str:
    """What to say of a key that is still "auto" when the engine is built."""
    who = FILLED.get(path)
    if who is None:
        return 'it is "auto", and no client fills this key: write a value, or remove the key to get its default'
    return (
        f'it is still "auto": {who} before the engine is built. Build the engine through that client, or write a value.'
    )


_SIZES = (
    *("reduce_bucket_size", "allgather_bucket_size", "sub_group_size"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance"),
)
_DEFAULTED = frozenset(f"zero_optimization.{name}" for name in _SIZES)
"""Keys that decide about speed and memory only: OpenRLHF and others leave them at "auto" to get the defaults."""


def is_inert(path: str, stage: object) -> bool:
    """True for a key that may stay at "auto": it has no effect at this ZeRO stage, or only on speed and memory.

    TRL builds engines for reference models from the config as it is before Accelerate has filled it: the flag about
    saving, which such an engine never does, is still "auto" there.
    """
    if path == "zero_optimization.stage3_gather_16bit_weights_on_model_save" or path in _DEFAULTED:
        return True
    return path.startswith("zero_optimization.stage3_") and stage not in (3, "3")


_FLAG = TypeAdapter(bool)
BY_STRICT = ' (an error because of "strict": true)'
"""What is added to what would be a warning otherwise."""


@dataclass(frozen=True)
class Loaded:
    """A validated config and how each of its values came about."""

    schema: Schema
    raw: dict[str, Any]
    source: str
    given: dict[str, str]
    """Usual path of every given key → the path as the user spelled it."""
    renamed: dict[str, str]
    """New path → the old one that was given."""
    autos: tuple[str, ...]
    """Keys left at "auto"; non-empty only for a partial config."""


def load(source: ConfigSource | RawConfig, *, partial: bool = False) -> Loaded:
    """Load a config; one DeepSpeedConfigError lists everything that is wrong with it.

    A `partial` config may still hold "auto", as it does when a model is constructed before a client resolves it;
    such keys take their defaults.
    """
    raw, name = read(source)
    working, _ = read(raw)
    moved, wrong = renamed.apply(working)
    found = clean(working, Schema)
    _imply(found.data)
    problems = [ConfigProblem(path, text) for path, text in wrong] + found.problems
    problems += _check_params(found)
    if not partial:
        stage = found.data.get("zero_optimization", {})
        stage = stage.get("stage") if isinstance(stage, dict) else None
        problems += [ConfigProblem(path, unresolved(path)) for path in found.autos if not is_inert(path, stage)]
    if _is_strict(found):
        problems += [ConfigProblem(path, f"unknown key{BY_STRICT}") for path in found.unknown]
    schema = _validate(found, problems)
    texts = [] if schema is None else list(_numbers_as_text(found, schema))
    if _is_strict(found):
        problems += [ConfigProblem(each.path, f"{each.text}{BY_STRICT}") for each in texts]
    if problems:
        raise _error(missing_first(problems, found.data), name)
    assert schema is not None, "without a problem there is a schema"
    _warn(found, moved, texts, name)
    return Loaded(
        schema,
        raw,
        name,
        found.given,
        {move.new: move.old for move in moved},
        tuple(found.autos) if partial else (),
    )


def _imply(data: dict[str, Any]) -> None:
    """DeepCompile's offload of parameters is that of ZeRO stage 3, its AutoSP the sharing of sequences by Ulysses."""
    graphs, zero = data.get("compile"), data.get("zero_optimization")
    if not isinstance(graphs, dict) or graphs.get("deepcompile") is not True:
        return
    sharded = isinstance(zero, dict) and zero.get("stage") == 3 and zero.get("offload_param") is None
    if isinstance(zero, dict) and sharded and graphs.get("offload_parameters") is True:
        zero["offload_param"] = {"device": "cpu"}
    passes = graphs.get("passes")
    if isinstance(passes, list) and "autosp" in passes:
        sequences = data.setdefault("sequence_parallel", {})
        if isinstance(sequences, dict) and sequences.get("attention") is None:
            sequences["attention"] = "ulysses"


def _is_strict(found: Findings) -> bool:
    """`strict` in any spelling that the schema takes for true; another value is the schema's to refuse."""
    try:
        return _FLAG.validate_python(found.data.get("strict", False))
    except ValidationError:
        return False


def _check_params(found: Findings) -> list[ConfigProblem]:
    problems: list[ConfigProblem] = []
    for section, check in (("optimizer", check_optimizer), ("scheduler", check_scheduler)):
        data = found.data.get(section)
        if isinstance(data, dict):
            problems += check(data, found.autos)
    return problems


def _validate(found: Findings, problems: list[ConfigProblem]) -> Schema | None:
    try:
        return Schema.model_validate(found.data)
    except ValidationError as error:
        for item in error.errors():
            text = str(item["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
            path = _path_of(item["loc"])
            shown = _shown(item.get("input"))
            if path and shown and not item["type"].startswith(("value_error", "assertion", "missing")):
                text = f"{text[0].lower()}{text[1:]}, found {shown}"
            # A section reports all its broken rules at once, a line each.
            problems.extend(ConfigProblem(found.given.get(path, path), line) for line in text.splitlines())
    return None


def _numbers_as_text(found: Findings, schema: Schema) -> Iterator[ConfigProblem]:
    """The keys at which text was read as a number or as true or false."""
    texts = {path for path, given in found.values.items() if isinstance(given, (str, list))}
    for path, value in values_of(schema) if texts else ():
        if path not in texts:
            continue
        given = found.values[path]
        pairs = zip(given, value, strict=False) if isinstance(given, list) else [(given, value)]
        for text, number in pairs:
            spelled = isinstance(number, bool) or (isinstance(number, (int, float)) and from_text(text) is not None)
            if isinstance(text, str) and spelled:  # a size such as "70GB" is meant to be text
                shown = json.dumps(number)
                yield ConfigProblem(
                    found.given[path], f"the text {text!r} was read as {shown}; write {shown} without quotes"
                )


def _path_of(loc: Iterable[int | str]) -> str:
    """pydantic's location as a dotted path of JSON keys; its marks for union members are left out."""
    path, model = "", cast(Model, Schema)
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        key = keys_of(model).get(part)
        if key is None and path and not _is_label(part):
            continue
        path = f"{path}.{key.json if key else part}" if path else (key.json if key else part)
        model = key.section if key is not None and key.section is not None else model
    return path


def _is_label(part: str) -> bool:
    """True for a name that a user gave (a metric, a group), False for pydantic's names of union members."""
    return not any(mark in part for mark in "[](),") and part not in ("int", "float", "str", "bool", "none", "function")


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _error(problems: list[ConfigProblem], source: str) -> DeepSpeedConfigError:
    unique = list(dict.fromkeys(problems))
    kind = BatchSizeError if any(problem.path in (TRAIN, MICRO, STEPS) for problem in unique) else DeepSpeedConfigError
    if all(problem in (feature.problem for feature in UNBUILT) for problem in unique):
        kind = FeatureUnavailable
    if len(unique) == 1:
        return kind(str(unique[0]), path=unique[0].path)
    lines = "\n".join(f"  {problem}" for problem in unique)
    return kind(f"{len(unique)} problems in the config ({source}):\n{lines}", path=unique[0].path)


_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "LOCAL_RANK")


def _warns() -> bool:
    """Whether this process is rank 0: a config may be read before the ranks meet, when only the environment tells."""
    rank = next((os.environ[name] for name in _RANKS if os.environ.get(name, "").isdigit()), "0")
    return get_dist_msg("") is not None and int(rank) == 0


def _warn(found: Findings, moved: list[renamed.Renamed], texts: list[ConfigProblem], source: str) -> None:
    """Log what is worth a change, each once and on rank 0."""
    if not _warns():
        return
    for move in moved:
        if move.warns:
            warn_once(f"config key '{move.old}' is the old name of '{move.new}'; please rename it")
    for path in found.unknown:
        warn_once(f"config key '{path}' is not known and is ignored ({source})")
    for each in texts:
        warn_once(f"config: {each}")
