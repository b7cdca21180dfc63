"""Software: versions, the config, the code, variables and operations are the same everywhere, and can work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed._assemble.trial import verdict
from deepspeed.launcher.environment import mask_secrets, relevant
from deepspeed.launcher.facts import variable_warnings, versions
from deepspeed.ops.registry import State, explain
from deepspeed.preflight.arguments import code_of, digest_of
from deepspeed.preflight.check import (
    CheckFinding,
    F,
    Level,
    PreflightCheck,
    RankFact,
    ThisRank,
    counted,
    finding,
    grouped,
    name_ranks,
    passed,
    unlike_most,
)

# ---- versions

_MUST_AGREE = ("deepspeed", "torch", "torch built for CUDA", "torch built for ROCm", "nccl")
_SHOWN = ("python", "torch", "deepspeed", "nccl", "NVIDIA driver")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class VersionFact:
    """Name → version."""

    versions: dict[str, str | None]


class VersionsCheck(PreflightCheck[VersionFact]):
    """Python, torch, this package, NCCL and the driver are the same everywhere."""

    name = "versions"
    fact = VersionFact

    def gather(self, here: ThisRank) -> VersionFact:
        return VersionFact({**versions(), "NVIDIA driver": driver_version(_DRIVER)})

    def judge(self, told: Sequence[RankFact[VersionFact]]) -> list[CheckFinding]:
        found = []
        for name in dict.fromkeys(name for each in told for name in each.fact.versions):
            for value, usual, some in unlike_most(told, [each.fact.versions.get(name) for each in told]):
                level = Level.PROBLEM if name in _MUST_AGREE else Level.WARNING
                what = f"{name} is {value or 'absent'} for {name_ranks(some)}, and {usual or 'absent'} for the others"
                advice = f"install {name} {usual} there" if usual else f"remove {name} there, or install it everywhere"
                found.append(finding(level, what, some, advice))
        first = told[0].fact.versions
        return found or [passed(", ".join(f"{name} {first[name]}" for name in _SHOWN if first.get(name)))]


def driver_version(file: Path) -> str | None:
    """The version that NVIDIA's kernel module tells of itself."""
    try:
        first = file.read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return None
    return next((word for word in first.split() if word[0].isdigit() and "." in word), None)


# ---- the config

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


class ConfigCheck(PreflightCheck[ConfigFact]):
    """The job's config exists, is valid, and is the same on all ranks."""

    name = "config"
    fact = ConfigFact

    def gather(self, here: ThisRank) -> ConfigFact:
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
        values = {path: mask_secrets(str(value))[:200] for path, value in _flat("", here.config.raw)}
        return ConfigFact(here.config.source, None, digest, values, tried.problems, tried.notes)

    def judge(self, told: Sequence[RankFact[ConfigFact]]) -> list[CheckFinding]:
        if all(each.fact.source is None for each in told):
            advice = "give --config FILE, or the script's own --deepspeed_config FILE"
            return [finding(Level.WARNING, "the arguments of the script name no config", advice=advice)]
        found = [*_unread(told), *_different(told)]
        problems = {problem: each.fact.source for each in reversed(told) for problem in each.fact.problems}
        for problem, source in sorted(problems.items()):
            found.append(finding(Level.PROBLEM, f"{source}: {problem}", advice="correct the config"))
        for note in dict.fromkeys(note for each in told for note in each.fact.notes):
            found.append(finding(Level.WARNING, note, advice="remove the key, or give what it needs"))
        return found or [passed(f"{told[0].fact.source} is valid on {counted(len(told), 'rank')}")]


def _unread(told: Sequence[RankFact[ConfigFact]]) -> Iterator[CheckFinding]:
    for error, some in grouped((each.fact.error, each) for each in told if each.fact.error is not None).items():
        advice = "correct the config" if len(some) == len(told) else "give all hosts the same file"
        yield finding(Level.PROBLEM, f"{name_ranks(some)}: {error}", some, advice)


def _different(told: Sequence[RankFact[ConfigFact]]) -> Iterator[CheckFinding]:
    for some, values, usual in _unlike_most(told, "digest", "values"):
        what = f"{name_ranks(some)} {_has(some)} another config"
        if keys := [key for key in sorted({*usual, *values}) if usual and values and usual.get(key) != values.get(key)]:
            pairs = (f"{key} is {values.get(key, 'absent')}, not {usual.get(key, 'absent')}" for key in keys[:_MOST])
            more = f" and {len(keys) - _MOST} more" if len(keys) > _MOST else ""
            what = f"{what}: {'; '.join(pairs)}{more}"
        yield finding(Level.PROBLEM, what, some, "give all hosts the same file")


def _unlike_most(
    told: Sequence[RankFact[F]], digest: str, details: str
) -> Iterator[tuple[list[RankFact[F]], dict[str, str], dict[str, str]]]:
    """For each digest that few ranks have: those ranks, their details, the usual ones; empty where no rank has them."""
    known = [each for each in told if getattr(each.fact, digest) is not None]
    digests = [getattr(each.fact, digest) for each in known]
    first: dict[str, dict[str, str]] = {}
    for each, value in zip(known, digests, strict=True):
        first[value] = first.get(value) or getattr(each.fact, details)
    for value, usual, some in unlike_most(known, digests):
        yield some, first[value], first[usual]


def _has(some: Sequence[RankFact[Any]]) -> str:
    return "has" if len(some) == 1 else "have"


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, value


# ---- the code


@dataclass(frozen=True, slots=True)
class CodeFact:
    """Digests as a rank sees the files; `files` only of the first rank of a host."""

    name: str | None = None
    kind: str = "script"
    file: str | None = None
    script: str | None = None
    beside: str | None = None
    library: str | None = None
    files: dict[str, str] = field(default_factory=dict)


class CodeCheck(PreflightCheck[CodeFact]):
    """The script exists on every host, and it and its modules are the same there."""

    name = "code"
    fact = CodeFact

    def gather(self, here: ThisRank) -> CodeFact:
        program = here.program
        file = program.file
        library = _together(code_of(Path(__file__).resolve().parents[2]))
        if file is None:
            return CodeFact(program.name, program.kind, library=library)
        files = {} if program.kind == "program" else code_of(file.absolute().parent)
        shown = files if here.is_first else {}
        return CodeFact(program.name, program.kind, str(file), digest_of(file), _together(files), library, shown)

    def judge(self, told: Sequence[RankFact[CodeFact]]) -> list[CheckFinding]:
        found = [*_other(told, "library", "another copy of the package deepspeed", "install the same one everywhere")]
        first = told[0].fact
        if first.name is None:
            advice = "give the script and its arguments"
            return [*found, finding(Level.WARNING, "no script was given", advice=advice)]
        absent = [each for each in told if each.fact.file is None]
        if absent:
            what = f"there is no {first.kind} {first.name} for {name_ranks(absent)}"
            advice = "put it there; a shared file system is the usual way"
            found.append(finding(Level.PROBLEM, what, absent, advice))
        found += _other(told, "script", f"another {first.name}", "copy the script again")
        if not any(each.level is Level.PROBLEM for each in found):
            found += _other(told, "beside", "other Python files beside the script", "copy them again", Level.WARNING)
        beside = f", with {counted(len(first.files), 'Python file')} in its folder" if first.files else ""
        return found or [passed(f"{first.file}{beside}")]


def _together(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]


def _other(
    told: Sequence[RankFact[CodeFact]], field: str, what: str, advice: str, level: Level = Level.PROBLEM
) -> Iterator[CheckFinding]:
    """A finding for each digest that few ranks have; for files beside the script, with the names that differ."""
    for some, files, usual in _unlike_most(told, field, "files"):
        names = [name for name in sorted({*usual, *files}) if usual.get(name) != files.get(name)]
        shown = f": {', '.join(names[:_MOST])}{', …' * (len(names) > _MOST)}" if names and field == "beside" else ""
        yield finding(level, f"{name_ranks(some)} {_has(some)} {what}{shown}", some, advice)


# ---- variables

# What a launcher gives each rank or each host as its own.
_OWN = ("RANK", "SIZE", "MASTER_", "SLURM_", "PMI_", "PMIX_", "OMPI_", "MV2_COMM", "TORCHELASTIC_", "VISIBLE_DEVICES")
_OWN_NAMES = ("ZE_AFFINITY_MASK", "OMP_NUM_THREADS", "PDSH_RCMD_TYPE", "DEEPSPEED_RELAY", "CONDA_PREFIX")


@dataclass(frozen=True, slots=True)
class EnvironmentFact:
    """Variables as ds_report shows them, with secrets masked; and what is wrong with them."""

    variables: dict[str, str]
    warnings: list[str] = field(default_factory=list)


class EnvironmentCheck(PreflightCheck[EnvironmentFact]):
    """Ranks were started with the same settings."""

    name = "environment"
    fact = EnvironmentFact

    def gather(self, here: ThisRank) -> EnvironmentFact:
        shared = {name: value for name, value in relevant(here.environ).items() if not _is_own(name)}
        return EnvironmentFact(shared, variable_warnings(here.environ))

    def judge(self, told: Sequence[RankFact[EnvironmentFact]]) -> list[CheckFinding]:
        found = []
        for name in sorted({name for each in told for name in each.fact.variables}):
            for value, usual, some in unlike_most(told, [each.fact.variables.get(name) for each in told]):
                here, there = ("not set" if text is None else text for text in (value, usual))
                what = f"{name} is {here} for {name_ranks(some)}, and {there} for the others"
                advice = "set it for all: a line in .deepspeed_env goes to every host"
                found.append(finding(Level.WARNING, what, some, advice))
        for warning in dict.fromkeys(warning for each in told for warning in each.fact.warnings):
            found.append(finding(Level.WARNING, warning, advice="correct or unset it"))
        return found or [passed(f"{counted(len(told[0].fact.variables), 'relevant variable')}, the same everywhere")]


def _is_own(name: str) -> bool:
    return name in _OWN_NAMES or any(part in name for part in _OWN)


# ---- operations

_HOST_STEP = {"native"}  # the implementations of a step over host memory that are made for it


@dataclass(frozen=True, slots=True)
class OpsFact:
    """Operation → the implementation that runs; operation → why a better one does not; whether states are offloaded."""

    chosen: dict[str, str]
    failed: dict[str, str] = field(default_factory=dict)
    offloaded: bool = False


class OpsCheck(PreflightCheck[OpsFact]):
    """What `ds_report` shows of operations is the same everywhere."""

    name = "ops"
    fact = OpsFact

    def gather(self, here: ThisRank) -> OpsFact:
        lines = explain()
        failed = {f"{line.op}.{line.implementation}": line.reason for line in lines if line.state is State.FAILED}
        chosen = {line.op: line.implementation for line in lines if line.state is State.CHOSEN}
        return OpsFact(chosen, failed, here.schema is not None and here.schema.zero_optimization.offloads_optimizer)

    def judge(self, told: Sequence[RankFact[OpsFact]]) -> list[CheckFinding]:
        found = []
        for op in dict.fromkeys(op for each in told for op in each.fact.chosen):
            for value, usual, some in unlike_most(told, [each.fact.chosen.get(op, "none") for each in told]):
                what = f"{name_ranks(some)}: {op} by {value}, elsewhere by {usual}"
                found.append(finding(Level.WARNING, what, some, "ds_report tells there why"))
        reasons = grouped((failure, each) for each in told for failure in each.fact.failed.items())
        for (name, reason), some in reasons.items():
            what = f"{name_ranks(some)}: {name} failed to load: {reason}"
            found.append(finding(Level.WARNING, what, some, "mend what it names, or choose another by DS_OP_…"))
        slow = [each for each in told if each.fact.offloaded and each.fact.chosen.get("cpu_adam") not in _HOST_STEP]
        if slow:
            what = f"{name_ranks(slow)}: offloaded states would be updated without the compiled step"
            advice = "install a C++ compiler there (ds_report tells what is missing)"
            found.append(finding(Level.WARNING, what, slow, advice))
        return found or [passed(f"{len(told[0].fact.chosen)} operations, the same everywhere")]
