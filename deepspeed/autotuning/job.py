"""The job that is tuned: its script, the option that names its config, and the same job with another config."""

from __future__ import annotations

import argparse
import ast
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.autotuning.utils import get_val_by_key
from deepspeed.errors import UsageError
from deepspeed.planning.sources import NAMES

_OPTIONS = ("--deepspeed_config", "--deepspeed")


@dataclass(frozen=True)
class TunedJob:
    """A command line of `deepspeed`, taken apart."""

    launcher: tuple[str, ...]
    """Options of the launcher, without those of the tuner."""
    script: str
    words: tuple[str, ...]
    """Arguments of the script."""
    nodes: int
    world: int
    plain: bool
    """The script is a file that Python runs."""

    @classmethod
    def of(cls, args: argparse.Namespace, nodes: int, world: int) -> TunedJob:
        """The job of a parsed command line."""
        own = argparse.ArgumentParser(add_help=False)
        own.add_argument("--autotuning")
        own.add_argument("--budget")
        launcher = own.parse_known_args(args.launcher_words)[1]
        plain = not (args.module or args.no_python)
        return cls(tuple(launcher), args.user_script, tuple(args.user_args), nodes, world, plain)

    @property
    def config(self) -> str:
        """The file that the script's option names."""
        place, before = self._place()
        return self.words[place][len(before) :]

    def _place(self) -> tuple[int, str]:
        """Which word has the name of the config, and what of the word comes before it."""
        for option in _OPTIONS:
            for place, word in enumerate(self.words):
                if word.startswith(f"{option}=") and ".json" in word:
                    return place, f"{option}="
                if word == option and ".json" in "".join(self.words[place + 1 : place + 2]):
                    return place + 1, ""
        raise UsageError(
            f"--autotuning: no argument of {self.script} names a config. Expected --deepspeed_config FILE.json, or "
            "--deepspeed FILE.json as scripts on Transformers take it; the tuner puts the config of each run there"
        )

    def argument(self, option: str) -> str | None:
        """The value of an option of the script."""
        for place, word in enumerate(self.words):
            if word == option:
                return next(iter(self.words[place + 1 : place + 2]), None)
            if word.startswith(f"{option}="):
                return word.partition("=")[2]
        return None

    def command(self, file: Path, config: Mapping[str, Any], mappings: Mapping[str, str]) -> list[str]:
        """What follows `deepspeed` for the job with the config in this file; mapped options have its values."""
        words = list(self.words)
        place, before = self._place()
        words[place] = f"{before}{file}"
        for key, option in mappings.items():
            value = get_val_by_key(config, key)
            if value is not None and not isinstance(value, (dict, list)):
                _set_option(words, option, str(value))
        return [*self.launcher, self.script, *words]

    def program(self, command: Sequence[str]) -> list[str]:
        """The command with the interpreter of this process."""
        return [sys.executable, "-u", "-m", "deepspeed.launcher.runner", *command]

    @property
    def digest(self) -> str:
        """Of what a result belongs to: another script, other arguments or other ranks have other results."""
        text = Path(self.script).read_bytes() if self.plain else b""
        rest = repr((self.launcher, self.script, self.words, self.nodes, self.world)).encode()
        return hashlib.sha256(rest + text).hexdigest()

    def shows_model(self) -> bool:
        """Whether the script has a function that builds its model, as the planner looks for it, and trains as main."""
        if not self.plain:
            return False
        try:
            body = ast.parse(Path(self.script).read_bytes()).body
        except (OSError, SyntaxError):
            return False
        return any(isinstance(node, ast.FunctionDef) and node.name in NAMES for node in body)


def _set_option(words: list[str], option: str, value: str) -> None:
    for place, word in enumerate(words):
        if word == option and place + 1 < len(words):
            words[place + 1] = value
            return
        if word.startswith(f"{option}="):
            words[place] = f"{option}={value}"
            return
    words += [option, value]
