"""The environment variables that go to other hosts: by the beginning of their names, and those of `.deepspeed_env`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.masking import is_secret, scrub
from deepspeed.trust import read_regular

__all__ = ["ENVIRONMENT_FILE", "exported", "looks_secret", "parse_environment_file"]

# File in the home or working folder whose K=V lines go to other hosts; clients append to it.
ENVIRONMENT_FILE = os.environ.get("DS_ENV_FILE", ".deepspeed_env")

_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX", "GLOO_", "DS_", "DEEPSPEED_")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_MOST_BYTES = 2**24


def exported(
    environ: Mapping[str, str],
    prefixes: Sequence[str],
    folders: Iterable[Path],
    name: str = ENVIRONMENT_FILE,
) -> dict[str, str]:
    """Name → value for the ranks of other hosts; `prefixes` are the accelerator's, a later folder's file wins."""
    wanted = (*_PREFIXES, *prefixes)
    found = {key: value for key, value in environ.items() if key.startswith(wanted) and _NAME.fullmatch(key)}
    if "AISC_JOB_NAME" in environ:  # its hosts choose their own network devices
        for own in ("NCCL_IB_HCA", "UCX_NET_DEVICES"):
            found.pop(own, None)
    here = os.getcwd()
    paths = environ.get("PYTHONPATH")
    found["PYTHONPATH"] = here if not paths else f"{here}{os.pathsep}{paths}"
    for folder in folders:
        path = folder / name
        if path.is_file():
            try:
                text = read_regular(path, _MOST_BYTES).decode("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise LaunchError(f"{path} cannot be read: {error}") from error
            found.update(parse_environment_file(text, str(path)))
    return found


def parse_environment_file(text: str, name: str = ENVIRONMENT_FILE) -> dict[str, str]:
    """One KEY=VALUE per line, the value as written but for spaces around it; blank lines and # lines are skipped."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.strip()
        if not words or words.startswith("#"):
            continue
        key, sign, value = words.partition("=")
        key = key.strip()
        if not sign or not _NAME.fullmatch(key):
            raise LaunchError(f"{name}, line {number}: {scrub(words)!r:.200} is not a variable; write KEY=VALUE")
        if "\0" in value:
            raise LaunchError(f"{name}, line {number}: the value of {key} has a NUL character, which no variable can")
        found[key] = value.strip()
    return found


def looks_secret(name: str, value: str) -> bool:
    """True if a variable's name or value says that others must not see it."""
    return is_secret(name) or scrub(value) != value
