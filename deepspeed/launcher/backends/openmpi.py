"""Open MPI's mpirun."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, MutableMapping
from typing import ClassVar

from deepspeed.launcher.backends.base import MultiNodeRunner
from deepspeed.launcher.resources import Slots

__all__ = ["OpenMPIRunner"]


class OpenMPIRunner(MultiNodeRunner):
    """`mpirun -n N -hostfile F --mca btl ^openib … -x K=V … python -u script`."""

    programs: ClassVar[tuple[str, ...]] = ("mpirun.openmpi", "mpirun")

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool
        self.add_export("UCX_TLS", "tcp")

    @property
    def name(self) -> str:
        return "openmpi"

    def backend_exists(self) -> str | None:
        return shutil.which("ompi_info")

    def validate_args(self) -> None:
        super().validate_args()
        self.refuse_choice("include", "exclude", "num_nodes", "num_gpus")

    def can_show(self, value: str) -> bool:
        return ";" not in value and "\n" not in value  # between which it would see several variables

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Slots) -> list[str]:
        given = self.launcher_words()
        words = ["mpirun", "-n", str(sum(self.resource_pool.values())), "-hostfile", self.args.hostfile]
        words += ["--mca", "btl", "^openib"]
        if "btl_tcp_if_include" not in given and "btl_tcp_if_exclude" not in given:
            words += ["--mca", "btl_tcp_if_include", "eth0"]
        words += given
        environment.update(self.hidden)
        for key, value in self.exports.items():
            words += ["-x", f"{key}={value}"]
        for key in self.hidden:  # by its name only: mpirun takes the value from its environment
            words += ["-x", key]
        return [*words, *self.python_words(), *self.user_arguments]
