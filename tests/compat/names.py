"""Reads `names.txt`: the published names of DeepSpeed 0.19, and which feature brings those not here yet."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

FEATURES = {
    "DeepCompile": "compiled graphs over sharded parameters, and passes over them",
    "hybrid engine": "helpers of its graphs",
    "inference": "the config of a layer of DeepSpeed's injected kernels",
    "rollout": "continuous batches and distillation, as helpers",
}


@dataclass
class Row:
    """One name. `parameters` is None where the reference does not list them."""

    name: str
    parameters: list[str] | None = None
    fields: list[str] = field(default_factory=list)
    feature: str | None = None
    members: list[Row] = field(default_factory=list)


_LINE = re.compile(r"( *)(?:\[([^\]]+)\] )?([\w.]+)(?:\((.*)\))?(?: \{(.*)\})?")


def read(path: Path = Path(__file__).with_name("names.txt")) -> list[Row]:
    """The modules, with their names as members, and these with their methods."""
    modules: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        assert found, f"names.txt:{number}: {line!r} is no row"
        indent, feature, name, parameters, fields = found.groups()
        row = Row(name, _listed(parameters), _listed(fields) or [], feature)
        depth = len(indent) // 4
        home = modules
        for _ in range(depth):
            home = home[-1].members
        home.append(row)
    return modules


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]
