"""What a job would run: its script as a file, the code beside it, and the config that its arguments name."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Program", "code_of", "digest_of", "option_of"]

CONFIG_OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--deepscale_config", "--deepspeed")
FOLDER_OPTIONS = ("--checkpoint_dir", "--checkpoint-dir", "--save_dir", "--save-dir", "--output_dir", "--output-dir")
_MOST_FILES = 2000
_MOST_BYTES = 16 * 2**20  # of one file; what is larger is not code


@dataclass(frozen=True, slots=True)
class Program:
    """The command of a rank: a script, a module (`kind` is "module") or any program ("program"), and its arguments."""

    name: str | None
    kind: str = "script"
    arguments: tuple[str, ...] = ()

    @property
    def file(self) -> Path | None:
        """The file that would be run; None where there is none."""
        if self.name is None:
            return None
        if self.kind == "module":
            return _module_file(self.name)
        if self.kind == "program":
            found = shutil.which(self.name)
            return None if found is None else Path(found)
        return Path(self.name) if Path(self.name).is_file() else None

    @property
    def config(self) -> str | None:
        """What the arguments give as the config."""
        return option_of(self.arguments, CONFIG_OPTIONS)


def option_of(words: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of the first of these options, written `--name value` or `--name=value`; a flag has none."""
    for place, word in enumerate(words):
        name, separator, value = word.partition("=")
        if name in names:
            if separator:
                return value
            if place + 1 < len(words) and not words[place + 1].startswith("-"):
                return words[place + 1]
    return None


def _module_file(name: str) -> Path | None:
    """The file of a module; its package is found, not imported, since that would run code of the job."""
    first, *others = name.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not others and not spec.submodule_search_locations:
        return Path(spec.origin) if spec.origin and Path(spec.origin).is_file() else None
    for folder in spec.submodule_search_locations or ():
        place = Path(folder, *others)
        for file in (place / "__main__.py", place.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def digest_of(file: Path) -> str | None:
    """A short digest of a file's bytes; None if it cannot be read or is no file."""
    try:
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            return None
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def code_of(folder: Path) -> dict[str, str]:
    """Path below the folder → digest, of the Python files in it and in the packages below it."""
    found: dict[str, str] = {}
    for file in _python_files(folder):
        digest = digest_of(file)
        if digest is not None:
            found[str(file.relative_to(folder))] = digest
        if len(found) >= _MOST_FILES:
            break
    return found


def _python_files(folder: Path) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_file() and entry.name.endswith(".py"):
            yield Path(entry.path)
        elif entry.is_dir(follow_symlinks=False) and Path(entry.path, "__init__.py").is_file():
            yield from _python_files(Path(entry.path))
