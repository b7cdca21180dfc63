"""Slurm's srun."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from typing import ClassVar

from deepspeed.launcher.backends.base import MultiNodeRunner, even_slots
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.resources import Slots

__all__ = ["SlurmRunner"]


class SlurmRunner(MultiNodeRunner):
    """`srun -n N [--nodelist …] [--nodes …] [--gpus-per-node …] --export=ALL,K=V,… python -u script`."""

    programs: ClassVar[tuple[str, ...]] = ("srun",)

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    @property
    def name(self) -> str:
        return "slurm"

    def backend_exists(self) -> str | None:
        return shutil.which("sinfo")

    def can_show(self, value: str) -> bool:
        # Commas part one variable from the next, unless they are between quotes.
        return re.fullmatch(r"[\w@%+=:./ -]*", value, re.ASCII) is not None

    def validate_active_resources(self, active_resources: Slots) -> None:
        super().validate_active_resources(active_resources)
        count = even_slots(active_resources, self.name)
        for host, slots in active_resources.items():
            if list(slots) != list(range(count)):
                raise LaunchError(
                    f"--launcher slurm cannot choose the slots {','.join(map(str, slots))} of {host}: Slurm gives a "
                    f"job the first ones of a node; include 0 to {count - 1}, or use --launcher ssh"
                )

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Slots) -> list[str]:
        args = self.args
        total = sum(len(slots) for slots in active_resources.values())
        words = ["srun", "-n", str(total), *self.launcher_words()]
        if comment := getattr(args, "comment", ""):
            words += ["--comment", comment]
        if args.include or args.exclude:
            self.validate_active_resources(active_resources)
            words += ["--nodelist", ",".join(active_resources), "--nodes", str(len(active_resources))]
        elif args.num_nodes > 0:
            words += ["--nodes", str(args.num_nodes)]
        if args.num_gpus > 0:
            words += ["--gpus-per-node", str(args.num_gpus)]
        environment.update(self.hidden)  # which ALL covers
        words.append(",".join(["--export=ALL", *(f"{key}={value}" for key, value in self.exports.items())]))
        return [*words, *self.python_words(), *self.user_arguments]

    def placed(self, command: Sequence[str], environment: MutableMapping[str, str], active: Slots) -> list[str]:
        """The command with each rank on the host that the hostfile says, which may have more slots than another."""
        if self.args.include or self.args.exclude or self.args.num_nodes > 0:
            return list(command)
        descriptor, path = tempfile.mkstemp(prefix="deepspeed_slurm_hostfile_")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{host}\n" for host, slots in active.items() for _ in slots)
        weakref.finalize(self, os.unlink, path)
        environment["SLURM_HOSTFILE"] = path
        return [command[0], "--distribution=arbitrary", *command[1:]]
