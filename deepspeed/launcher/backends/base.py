"""What the launchers of several hosts have in common; users subclass it for launchers of their own."""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, ClassVar

from deepspeed.launcher.errors import LaunchError, option_words
from deepspeed.launcher.exports import looks_secret
from deepspeed.launcher.resources import Slots, decode_world_info

__all__ = ["MultiNodeRunner", "even_slots"]


class MultiNodeRunner(ABC):
    """Builds the command that starts a job on several hosts with one program.

    Variables given to `add_export` become part of the command. Those that look like secrets do not, since anybody can
    read the list of processes: `hidden` has them, and they go through the environment of the program.
    """

    programs: ClassVar[tuple[str, ...]] = ()  # what is looked for on PATH, the first one found is run
    forwards: ClassVar[bool] = True  # whether the program passes signals such as SIGUSR1 on to the ranks
    unused: ClassVar[tuple[str, ...]] = ("venv_script", "bind_cores_to_rank", "bind_core_list", "ssh_port")

    def __init__(self, args: argparse.Namespace, world_info_base64: str) -> None:
        self.args = args
        self.world_info_base64 = world_info_base64
        self.exports: dict[str, str] = {}
        self.hidden: dict[str, str] = {}
        self.user_script = args.user_script
        self.user_arguments = self.parse_user_args()
        self.validate_args()

    @property
    def name(self) -> str:
        """The word for `--launcher`."""
        return type(self).__name__

    @abstractmethod
    def backend_exists(self) -> Any:
        """Something true if the program is installed."""

    @abstractmethod
    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Slots) -> Any:
        """The command; what it needs in its own environment is set in `environment`."""

    def add_export(self, key: str, var: str) -> None:
        """Let the ranks have a variable."""
        value = var.strip()
        (self.hidden if looks_secret(key, value) or not self.can_show(value) else self.exports)[key.strip()] = value

    def can_show(self, value: str) -> bool:
        """Whether the program takes such a value on its command line as it is."""
        return True

    def parse_user_args(self) -> list[str]:
        """The arguments of the user's script, as they are put into the command."""
        return list(self.args.user_args)

    def validate_args(self) -> None:
        """Refuse options that the program cannot follow."""
        if self.args.module and self.args.no_python:
            raise LaunchError("--module and --no_python contradict each other: a module is run by Python; give one")

    def validate_active_resources(self, active_resources: Slots) -> None:
        """Refuse slots that the program cannot start ranks on."""
        if bare := [host for host, slots in active_resources.items() if not slots]:
            raise LaunchError(f"these hosts have no slots: {', '.join(bare)}; leave them out or give them some")

    # ---- for subclasses

    def python_words(self) -> list[str]:
        """How the script is run: Python's words and the script."""
        words = [] if self.args.no_python else [sys.executable, "-u", *(["-m"] if self.args.module else [])]
        return [*words, self.user_script]

    def launcher_words(self) -> list[str]:
        """`--launcher_args` as words."""
        return option_words("launcher_args", self.args.launcher_args)

    def refuse_choice(self, *names: str) -> None:
        """End with what this program has no way to say."""
        for option in names:
            value = getattr(self.args, option)
            if value not in ("", -1, None, False):
                raise LaunchError(
                    f"--launcher {self.name} does not take --{option} {value}: it starts ranks on all slots of the "
                    "hostfile; write a hostfile with the hosts and slots to use"
                )

    @property
    def world(self) -> Mapping[str, Sequence[int | str]]:
        """Host → slots of the job."""
        return decode_world_info(self.world_info_base64)


def even_slots(active: Slots, launcher: str) -> int:
    """Ranks per host where the program wants the same number on each."""
    counts = {host: len(slots) for host, slots in active.items()}
    if len(set(counts.values())) != 1:
        told = ", ".join(f"{host} {count}" for host, count in counts.items())
        raise LaunchError(
            f"--launcher {launcher} starts the same number of ranks on each host, but the slots are: {told}; "
            "even them out with --include, or use --launcher ssh"
        )
    return next(iter(counts.values()))
