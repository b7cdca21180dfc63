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
    Level,
    PreflightCheck,
    RankFact,
    ThisRank,
    among,
    counted,
    minority_values,
    name_ranks,
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
            usual, others = minority_values({each.rank: each.fact.versions.get(name) for each in told})
            for value, ranks in others.items():
                place = name_ranks(among(told, ranks))
                level = Level.PROBLEM if name in _MUST_AGREE else Level.WARNING
                what = f"{name} is {value or 'absent'} for {place}, and {usual or 'absent'} for the others"
                advice = f"install {name} {usual} there" if usual else f"remove {name} there, or install it everywhere"
                found.append(CheckFinding(level, what, tuple(ranks), advice))
        if found:
            return found
        first = told[0].fact.versions
        shown = ", ".join(f"{name} {first[name]}" for name in _SHOWN if first.get(name))
        return [CheckFinding(Level.OK, shown)]


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
            return [
                CheckFinding(
                    Level.WARNING,
                    "the arguments of the script name no config",
                    advice="give --config FILE, or the script's own --deepspeed_config FILE",
                )
            ]
        found = list(_unread(told)) + list(_different(told))
        problems = {problem: each for each in reversed(told) for problem in each.fact.problems}
        for problem, each in sorted(problems.items()):
            found.append(CheckFinding(Level.PROBLEM, f"{each.fact.source}: {problem}", advice="correct the config"))
        for note in dict.fromkeys(note for each in told for note in each.fact.notes):
            found.append(CheckFinding(Level.WARNING, note, advice="remove the key, or give what it needs"))
        if found:
            return found
        first = told[0].fact
        return [CheckFinding(Level.OK, f"{first.source} is valid on {counted(len(told), 'rank')}")]


def _unread(told: Sequence[RankFact[ConfigFact]]) -> Iterator[CheckFinding]:
    errors: dict[str, list[RankFact[ConfigFact]]] = {}
    for each in told:
        if each.fact.error is not None:
            errors.setdefault(each.fact.error, []).append(each)
    for error, some in errors.items():
        yield CheckFinding(
            Level.PROBLEM,
            f"{name_ranks(some)}: {error}",
            tuple(each.rank for each in some),
            "correct the config" if len(some) == len(told) else "give all hosts the same file",
        )


def _different(told: Sequence[RankFact[ConfigFact]]) -> Iterator[CheckFinding]:
    read = [each for each in told if each.fact.digest is not None]
    if not read:
        return
    usual, others = minority_values({each.rank: each.fact.digest for each in read})
    model = next((each.fact.values for each in read if each.fact.digest == usual and each.fact.values), {})
    for digest, ranks in others.items():
        some = among(read, ranks)
        values = next((each.fact.values for each in some if each.fact.digest == digest and each.fact.values), {})
        keys = sorted(key for key in {*model, *values} if model.get(key) != values.get(key)) if model and values else []
        shown = "; ".join(
            f"{key} is {values.get(key, 'absent')}, not {model.get(key, 'absent')}" for key in keys[:_MOST]
        )
        more = f" and {len(keys) - _MOST} more" if len(keys) > _MOST else ""
        what = f"{name_ranks(some)} has another config" if len(some) == 1 else f"{name_ranks(some)} have another config"
        yield CheckFinding(
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
        return CodeFact(
            program.name,
            program.kind,
            str(file),
            digest_of(file),
            _together(files),
            library,
            files if here.is_first else {},
        )

    def judge(self, told: Sequence[RankFact[CodeFact]]) -> list[CheckFinding]:
        found = list(
            _other(told, "library", "another copy of the package deepspeed", "install the same one everywhere")
        )
        first = told[0].fact
        if first.name is None:
            return [
                *found,
                CheckFinding(Level.WARNING, "no script was given", advice="give the script and its arguments"),
            ]
        absent = [each for each in told if each.fact.file is None]
        if absent:
            what = f"there is no {first.kind} {first.name} for {name_ranks(absent)}"
            ranks = tuple(each.rank for each in absent)
            found.append(
                CheckFinding(Level.PROBLEM, what, ranks, "put it there; a shared file system is the usual way")
            )
        found += _other(told, "script", f"another {first.name}", "copy the script again")
        if not any(finding.level is Level.PROBLEM for finding in found):
            found += _other(told, "beside", "other Python files beside the script", "copy them again", Level.WARNING)
        if found:
            return found
        beside = f", with {counted(len(first.files), 'Python file')} in its folder" if first.files else ""
        return [CheckFinding(Level.OK, f"{first.file}{beside}")]


def _together(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]


def _other(
    told: Sequence[RankFact[CodeFact]], field: str, what: str, advice: str, level: Level = Level.PROBLEM
) -> Iterator[CheckFinding]:
    """A finding for each digest that few ranks have, with the names of the files that differ where they are known."""
    there = [each for each in told if getattr(each.fact, field) is not None]
    if not there:
        return
    usual, others = minority_values({each.rank: getattr(each.fact, field) for each in there})
    model = next((each.fact.files for each in there if getattr(each.fact, field) == usual and each.fact.files), {})
    for value, ranks in others.items():
        some = among(there, ranks)
        files = next((each.fact.files for each in some if getattr(each.fact, field) == value and each.fact.files), {})
        names = sorted(name for name in {*model, *files} if model.get(name) != files.get(name))
        shown = (
            f": {', '.join(names[:_MOST])}{', …' if len(names) > _MOST else ''}" if names and field == "beside" else ""
        )
        yield CheckFinding(
            level, f"{name_ranks(some)} {'has' if len(ranks) == 1 else 'have'} {what}{shown}", tuple(ranks), advice
        )


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
            usual, others = minority_values({each.rank: each.fact.variables.get(name) for each in told})
            for value, ranks in others.items():
                here, there = ("not set" if text is None else text for text in (value, usual))
                what = f"{name} is {here} for {name_ranks(among(told, ranks))}, and {there} for the others"
                advice = "set it for all: a line in .deepspeed_env goes to every host"
                found.append(CheckFinding(Level.WARNING, what, tuple(ranks), advice))
        for warning in dict.fromkeys(warning for each in told for warning in each.fact.warnings):
            found.append(CheckFinding(Level.WARNING, warning, advice="correct or unset it"))
        count = counted(len(told[0].fact.variables), "relevant variable")
        return found or [CheckFinding(Level.OK, f"{count}, the same everywhere")]


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
        config = here.config
        offloaded = config is not None and not isinstance(config, str)
        return OpsFact(chosen, failed, offloaded and config.schema.zero_optimization.offloads_optimizer)  # type: ignore[union-attr]

    def judge(self, told: Sequence[RankFact[OpsFact]]) -> list[CheckFinding]:
        found = []
        for op in dict.fromkeys(op for each in told for op in each.fact.chosen):
            usual, others = minority_values({each.rank: each.fact.chosen.get(op, "none") for each in told})
            for value, ranks in others.items():
                what = f"{name_ranks(among(told, ranks))}: {op} by {value}, elsewhere by {usual}"
                found.append(CheckFinding(Level.WARNING, what, tuple(ranks), "ds_report tells there why"))
        reasons: dict[tuple[str, str], list[int]] = {}
        for each in told:
            for name, reason in each.fact.failed.items():
                reasons.setdefault((name, reason), []).append(each.rank)
        for (name, reason), ranks in reasons.items():
            what = f"{name_ranks(among(told, ranks))}: {name} failed to load: {reason}"
            found.append(
                CheckFinding(Level.WARNING, what, tuple(ranks), "mend what it names, or choose another by DS_OP_…")
            )
        slow = [each for each in told if each.fact.offloaded and each.fact.chosen.get("cpu_adam") not in _HOST_STEP]
        if slow:
            what = f"{name_ranks(slow)}: offloaded states would be updated without the compiled step"
            advice = "install a C++ compiler there (ds_report tells what is missing)"
            found.append(CheckFinding(Level.WARNING, what, tuple(each.rank for each in slow), advice))
        return found or [CheckFinding(Level.OK, f"{len(told[0].fact.chosen)} operations, the same everywhere")]
