"""The config: every host reads the same one, and the engine would take it on this number of ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed._trial import verdict
from deepspeed.launcher.masking import scrub
from deepspeed.preflight.check import Check, Here
from deepspeed.preflight.finding import Finding, Level, Told, among, counted, odd_ones, who

__all__ = ["Config", "ConfigFact"]

_MOST = 5


@dataclass(frozen=True, slots=True)
class ConfigFact:
    """A config as a rank reads it; `values` only of the first rank of a host, and what is wrong with it likewise."""

    source: str | None = None
    error: str | None = None
    digest: str | None = None
    values: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Config(Check[ConfigFact]):
    """The job's config exists, is valid, and is the same on all ranks."""

    name = "config"
    about = "the config is valid for this number of ranks, and equal"
    fact = ConfigFact

    def gather(self, here: Here) -> ConfigFact:
        if here.config is None:
            return ConfigFact()
        source = here.options.config or here.program.config
        if isinstance(here.config, str):
            return ConfigFact(source, error=here.config)
        text = json.dumps(here.config.raw, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        if not here.is_first:
            return ConfigFact(here.config.source, digest=digest)
        tried = verdict(here.config, here.world)
        values = {path: scrub(str(value))[:200] for path, value in _flat("", here.config.raw)}
        return ConfigFact(here.config.source, None, digest, values, tried.problems, tried.notes)

    def judge(self, told: Sequence[Told[ConfigFact]]) -> list[Finding]:
        if all(each.fact.source is None for each in told):
            return [
                Finding(
                    Level.WARNING,
                    "the arguments of the script name no config",
                    advice="give --config FILE, or the script's own --deepspeed_config FILE",
                )
            ]
        found = list(_unread(told)) + list(_different(told))
        problems = {problem: each for each in reversed(told) for problem in each.fact.problems}
        for problem, each in sorted(problems.items()):
            found.append(Finding(Level.PROBLEM, f"{each.fact.source}: {problem}", advice="correct the config"))
        for note in dict.fromkeys(note for each in told for note in each.fact.notes):
            found.append(Finding(Level.WARNING, note, advice="remove the key, or give what it needs"))
        if found:
            return found
        first = told[0].fact
        return [Finding(Level.OK, f"{first.source} is valid on {counted(len(told), 'rank')}")]


def _unread(told: Sequence[Told[ConfigFact]]) -> Iterator[Finding]:
    errors: dict[str, list[Told[ConfigFact]]] = {}
    for each in told:
        if each.fact.error is not None:
            errors.setdefault(each.fact.error, []).append(each)
    for error, some in errors.items():
        yield Finding(
            Level.PROBLEM,
            f"{who(some)}: {error}",
            tuple(each.rank for each in some),
            "correct the config" if len(some) == len(told) else "give all hosts the same file",
        )


def _different(told: Sequence[Told[ConfigFact]]) -> Iterator[Finding]:
    read = [each for each in told if each.fact.digest is not None]
    if not read:
        return
    usual, others = odd_ones({each.rank: each.fact.digest for each in read})
    model = next((each.fact.values for each in read if each.fact.digest == usual and each.fact.values), {})
    for digest, ranks in others.items():
        some = among(read, ranks)
        values = next((each.fact.values for each in some if each.fact.digest == digest and each.fact.values), {})
        keys = sorted(key for key in {*model, *values} if model.get(key) != values.get(key)) if model and values else []
        shown = "; ".join(
            f"{key} is {values.get(key, 'absent')}, not {model.get(key, 'absent')}" for key in keys[:_MOST]
        )
        more = f" and {len(keys) - _MOST} more" if len(keys) > _MOST else ""
        what = f"{who(some)} has another config" if len(some) == 1 else f"{who(some)} have another config"
        yield Finding(
            Level.PROBLEM,
            f"{what}: {shown}{more}" if keys else what,
            tuple(ranks),
            "give all hosts the same file",
        )


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, value
