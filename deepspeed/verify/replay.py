"""Records of steps in files, and `replay`: one recorded step repeated in one process.

A folder `step_N` has a file per rank: the gradients that the rank computed for the sampled parameters. The file of the
rank that judged a parameter also has the reduced gradient, the state before the step, and what the step made of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.trust import open_regular
from deepspeed.verify.copies import Finding
from deepspeed.verify.sample import SampledUpdate, StepFacts

_VERSION = 1


@dataclass(frozen=True)
class ReplayReport:
    """What a recorded step gave when it was repeated."""

    step: int
    parameters: tuple[str, ...]
    """Those that were recorded."""
    differences: tuple[Finding, ...]
    """In the order in which a step computes: the first is where the difference arises."""
    recorded: tuple[str, ...]
    """What the job itself found."""

    def __str__(self) -> str:
        lines = [f"step {self.step}, {len(self.parameters)} parameters repeated"]
        lines += [f"recorded: {line}" for line in self.recorded]
        if not self.differences:
            return "\n".join([*lines, "gradients, clipping and updates of these parameters are as they must be"])
        return "\n".join([*lines, *(f"first difference: {finding}" for finding in self.differences[:1])])


def record(
    folder: str | os.PathLike[str],
    rank: int,
    facts: StepFacts,
    samples: Sequence[SampledUpdate],
    local: dict[str, Tensor],
    findings: Sequence[Finding],
) -> Path:
    """Write what this rank knows of a step; returns the folder of the step."""
    place = Path(folder) / f"step_{facts.step}"
    place.mkdir(parents=True, exist_ok=True)
    content = {
        "version": _VERSION,
        "rank": rank,
        "facts": asdict(facts),
        "samples": [{each.name: getattr(sample, each.name) for each in fields(sample)} for sample in samples],
        "local": local,
        "findings": [str(finding) for finding in findings],
    }
    staged = place / f".rank_{rank}.pt"
    torch.save(content, staged)
    os.replace(staged, place / f"rank_{rank}.pt")
    return place


def replay(folder: str | os.PathLike[str]) -> ReplayReport:
    """Repeat a recorded step in this process: sum the gradients of the ranks, clip, update, and compare.

    `folder` is that of one step, or one with several, of which the last is taken. Forward and backward are not part of
    a record.
    """
    place = _step_folder(Path(folder))
    files = sorted(place.glob("rank_*.pt"))
    contents = [_read(file) for file in files]
    facts = StepFacts(**contents[0]["facts"])
    differences: list[Finding] = []
    names: list[str] = []
    norm = facts.judge(0)
    if norm is not None:
        differences.append(norm)
    for content in contents:
        for values in content["samples"]:
            sample = SampledUpdate(**values)
            names.append(sample.name)
            if sample.total is not None:
                parts = [each["local"][sample.name] for each in contents if each["rank"] in sample.ranks]
                sample.total = torch.stack(parts).sum(0)
            found = sample.judge(facts)
            if found is not None:
                differences.append(found)
    differences.sort(key=lambda finding: "gradient" not in finding.tensor)
    recorded = tuple(dict.fromkeys(line for content in contents for line in content["findings"]))
    return ReplayReport(facts.step, tuple(dict.fromkeys(names)), tuple(differences), recorded)


def _step_folder(folder: Path) -> Path:
    if any(folder.glob("rank_*.pt")):
        return folder
    steps = [each for each in folder.glob("step_*") if each.name[5:].isdigit() and any(each.glob("rank_*.pt"))]
    if not steps:
        raise UsageError(
            f"deepspeed.replay: no recorded step in {folder}: expected files rank_*.pt in it or in its folders step_N. "
            'The config {"verify": {"every": n, "action": "save", "replay": folder}} records steps with a difference'
        )
    return max(steps, key=lambda each: int(each.name[5:]))


def _read(file: Path) -> dict[str, Any]:
    with os.fdopen(open_regular(file), "rb") as stream:
        try:
            content = torch.load(stream, weights_only=True, map_location="cpu")
        except Exception as error:  # torch has no common base of what a damaged file raises
            raise UsageError(f"deepspeed.replay: {file} is no readable record of a step: {error}") from error
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        raise UsageError(f"deepspeed.replay: {file} is no record of a step of version {_VERSION}")
    return content
