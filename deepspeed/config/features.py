"""What a valid config asks for in vain: features that this version does not have, and keys that change nothing here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from deepspeed.config.clean import ConfigProblem
from deepspeed.config.explain import values_of
from deepspeed.config.model import Key, NoEffect, NotBuilt, Unbuilt, switches, walk
from deepspeed.config.schema import Schema
from deepspeed.errors import FeatureUnavailable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True)
class Feature:
    """A key that asks for something this version does not have."""

    path: str
    mark: NotBuilt
    asked: Callable[[Schema], bool]
    conditional: bool = False
    """The key exists; it is only its combination with others that does not."""

    @property
    def plugin(self) -> EntryPoint | None:
        """What an installed package brings for it."""
        if not self.mark.plugins:
            return None
        from importlib.metadata import entry_points  # slow to import, and seldom needed

        return min(entry_points(group=self.mark.plugins, name=self.path), key=lambda point: point.value, default=None)

    @property
    def problem(self) -> ConfigProblem:
        """The error where it is asked for."""
        mark = self.mark
        if not mark.package:
            return ConfigProblem(self.path, f"{mark.feature}: not part of this version yet; {mark.instead}")
        there = "is" if find_spec(mark.package) is not None else "is not"
        why = "and which this library does not call"
        if mark.plugins:
            why += f" (no package registers {self.path!r} as an entry point of {mark.plugins})"
        package = f"{mark.feature}: part of the package {mark.package}, which {there} installed here, {why}"
        return ConfigProblem(self.path, f"{package}; {mark.instead}")


def _marked(path: str, key: Key, mark: NotBuilt) -> Feature:
    default, parent = key.info.default, path.rpartition(".")[0]

    def asked(schema: Schema) -> bool:
        value = attrgetter(path)(schema)
        if mark.asked is not None:
            return mark.asked(value)
        if isinstance(value, Unbuilt):
            return any(switches(value.given))
        on = getattr(attrgetter(parent)(schema), "enabled", True) if parent else True
        return on and value != default

    return Feature(path, mark, asked)


def _fuses_loss(schema: Schema) -> bool:
    return schema.fused_kernels.enabled and schema.fused_kernels.loss


UNBUILT: tuple[Feature, ...] = (
    *(
        _marked(path, key, mark)
        for path, key in walk(Schema)
        for mark in key.info.metadata
        if isinstance(mark, NotBuilt)
    ),
    Feature(
        "fused_kernels.loss",
        NotBuilt("the fused loss of sequences that ranks share (sequence_parallel.attention)"),
        lambda c: _fuses_loss(c) and c.sequence_parallel.attention is not None,
        conditional=True,
    ),
    Feature(
        "sequence_parallel.tiled_loss",
        NotBuilt("tiles of a loss that is fused, and tiled by itself (fused_kernels.loss)"),
        lambda c: _fuses_loss(c) and c.sequence_parallel.tiled_loss is not None,
        conditional=True,
    ),
    Feature(
        "expert_parallel",
        NotBuilt("spread experts together with divided sequences (tensor_parallel.sequence_parallel)"),
        lambda c: c.expert_parallel.enabled and c.axis_sizes["tp"] > 1 and c.tensor_parallel.sequence_parallel,
        conditional=True,
    ),
)
"""The keys that are marked so, and what does not work together yet."""


def unbuilt(schema: Schema, features: tuple[Feature, ...] = UNBUILT) -> list[ConfigProblem]:
    """What this config asks for and this version does not have."""
    return [feature.problem for feature in features if feature.asked(schema) and feature.plugin is None]


def plugins(schema: Schema, group: str) -> list[tuple[str, EntryPoint]]:
    """What installed packages bring for keys that this config gives, by the keys."""
    asked = [feature for feature in UNBUILT if feature.mark.plugins == group and feature.asked(schema)]
    return [(each.path, found) for each in asked if (found := each.plugin) is not None]


def missing_first(problems: list[ConfigProblem], data: Mapping[str, Any]) -> list[ConfigProblem]:
    """The problems of a config that is not valid: what no correction would make work goes before everything else.

    What is wrong inside of a section of a missing feature is left out.
    """
    turned_on = [each for each in UNBUILT if not each.conditional and _turned_on(data, each.path)]
    missing = [each for each in turned_on if each.plugin is None]
    inside = tuple(f"{each.path}{mark}" for each in missing for mark in ".:,")
    return [*(each.problem for each in missing), *(each for each in problems if not str(each).startswith(inside))]


def _turned_on(data: Mapping[str, Any], path: str) -> bool:
    """Whether a config that may not be valid asks for what is at `path`, as far as that can be seen."""
    value: Any = data
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value is True or (isinstance(value, Mapping) and any(switches(value)))


def require(schema: Schema, features: tuple[Feature, ...] = UNBUILT) -> None:
    """Raise one FeatureUnavailable for all of them."""
    missing = unbuilt(schema, features)
    if missing:
        raise FeatureUnavailable("\n".join(map(str, missing)), path=missing[0].path)


def _without_effect() -> Iterator[NoEffect]:
    """The marks of the schema, then the sections that are off unless their `enabled` is given.

    A section inside of one that is off, and one whose mark says more, are left out of these.
    """
    found: list[str] = []
    marked: list[str] = []
    for path, key in walk(Schema):
        marks = [replace(mark, path=path) for mark in key.info.metadata if isinstance(mark, NoEffect)]
        marked += [path] if marks and key.section is Unbuilt else []
        yield from marks
    for path, key in walk(Schema):
        section = path.removesuffix(".enabled")
        inner = path.startswith(tuple(f"{outer}." for outer in found))
        if key.json == "enabled" and key.info.default is False and not inner and section not in marked:
            found.append(section)
            why = f"{path} is not given, and false by default"
            yield NoEffect(why, _is_off(path), unless=path, path=section)


def _is_off(switch: str) -> Callable[[Schema], bool]:
    return lambda schema: not attrgetter(switch)(schema)


IDLE: tuple[NoEffect, ...] = tuple(_without_effect())


def unused_by_model(*, staged: bool, experts: bool, shared_sequences: bool) -> tuple[NoEffect, ...]:
    """The rows that depend on what the config does not say: the kind of the model, and the layout of an mpu."""
    no_sequences = "sequence_parallel_size is below 2, so that sequences are not shared out"
    no_experts = "the model has no experts that lie on several ranks"
    rows = {
        NoEffect("the model is not a PipelineModule", path="pipeline"): staged,
        NoEffect(no_experts, path="use_data_before_expert_parallelism"): experts,
        NoEffect(no_sequences, path="seq_parallel_communication_data_type"): shared_sequences,
    }
    return tuple(row for row, used in rows.items() if not used)


def keys_without_effect(
    schema: Schema, given: Container[str], rows: tuple[NoEffect, ...] = IDLE
) -> list[ConfigProblem]:
    """Which of the `given` keys have no effect, a line for each row; a value that is the default asks for nothing."""
    changed = [path for path, value in values_of(schema) if path in given and _differs(path, value)]
    notes = []
    for row in rows:
        keys = [path for path in changed if row.covers(path)]
        said = row.unless != "" and row.unless in given
        if keys and not said and row.when(schema):
            notes.append(ConfigProblem(", ".join(keys), f"no effect: {row.why}"))
    return notes


@functools.cache
def _defaults() -> dict[str, object]:
    declared = {path: key.info.default for path, key in walk(Schema) if key.section is None}
    return declared | dict(values_of(Schema()))


def _differs(path: str, value: object) -> bool:
    """Whether a value asks for something; of a key that the schema does not know, all but `false` does."""
    default = _defaults().get(path, False)
    # Some keys hold Python objects, which need not know what equality is.
    return value is not None if default is None else value is not None and value != default
