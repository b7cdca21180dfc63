"""Launchers over Hydra's mpirun: MPICH, Intel MPI and MVAPICH."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import ClassVar

from deepspeed.accelerator import get_accelerator
from deepspeed.launcher.backends.base import MultiNodeRunner, even_slots
from deepspeed.launcher.binding import bind
from deepspeed.launcher.resources import Slots
from deepspeed.log import logger

__all__ = ["IMPIRunner", "MPICHRunner", "MVAPICHRunner"]

HELPER = Path(__file__).resolve().parents[1] / "launcher_helper.py"


class _HydraRunner(MultiNodeRunner):
    """What the three share: a fixed set of hosts, and variables by `-genv`.

    mpirun gives the ranks its whole environment, so what must not be seen only has to be there. (Naming variables with
    -genvlist loses the last one of the environment.)
    """

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    def backend_exists(self) -> str | bool | None:
        return shutil.which("mpirun")

    def validate_args(self) -> None:
        super().validate_args()
        self.refuse_choice("include", "exclude", "num_nodes", "num_gpus")

    def can_show(self, value: str) -> bool:
        return bool(value) and "\n" not in value

    def meeting(self, total: int, per_host: int | None) -> list[tuple[str, str]]:
        """Where ranks meet, and how many there are."""
        sizes = [("WORLD_SIZE", str(total)), *([("LOCAL_SIZE", str(per_host))] if per_host else [])]
        return [("MASTER_ADDR", self.args.master_addr), ("MASTER_PORT", str(self.args.master_port)), *sizes]


class MPICHRunner(_HydraRunner):
    """`mpirun -n N -ppn P -genv K V … -hosts h1,h2 python -u launcher_helper.py --launcher mpich script`."""

    programs: ClassVar[tuple[str, ...]] = ("mpirun.mpich", "mpirun.hydra", "mpirun")

    @property
    def name(self) -> str:
        return "mpich"

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Slots) -> list[str]:
        counts = list(self.resource_pool.values())
        total, even = sum(counts), len(set(counts)) == 1
        words = ["mpirun", "-n", str(total), *(["-ppn", str(counts[0])] if even else []), *self.launcher_words()]
        environment.update(self.hidden)
        for key, value in [*self.exports.items(), *self.meeting(total, counts[0] if even else None)]:
            words += ["-genv", key, value]
        hosts = [host if even else f"{host}:{count}" for host, count in self.resource_pool.items()]
        words += ["-hosts", ",".join(hosts)]
        helper = [sys.executable, "-u", str(HELPER), "--launcher", self.name]
        helper += [f"--{flag}" for flag in ("module", "no_python") if getattr(self.args, flag)]
        return [*words, *helper, self.user_script, *self.user_arguments]


class IMPIRunner(_HydraRunner):
    """`mpirun -ppn P -genv K V … -hosts h1,h2 -n 1 -env RANK 0 … python -u script : -n 1 -env RANK 1 …`."""

    programs: ClassVar[tuple[str, ...]] = ("mpirun",)
    unused: ClassVar[tuple[str, ...]] = ("venv_script", "ssh_port")

    @property
    def name(self) -> str:
        return "impi"

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Slots) -> list[str]:
        per_host = even_slots(active_resources, self.name)
        total = per_host * len(active_resources)
        bindings = None
        if self.args.bind_cores_to_rank or self.args.bind_core_list:
            bindings = bind(per_host, self.args.bind_core_list)
        words = ["mpirun", "-ppn", str(per_host), *self.launcher_words()]
        environment.update(self.hidden)
        shared = [*self.exports.items()]
        if bindings is not None:
            shared.append(("OMP_NUM_THREADS", str(len(bindings[0].cores))))
        for key, value in [*shared, *self.meeting(total, per_host), ("I_MPI_PIN", "0")]:
            words += ["-genv", key, value]
        words += ["-hosts", ",".join(active_resources)]
        for rank in range(total):
            local = rank % per_host
            words += [":"] if rank else []
            words += ["-n", "1", "-env", "RANK", str(rank), "-env", "LOCAL_RANK", str(local)]
            words += [*(bindings[local].prefix if bindings else ()), *self.python_words(), *self.user_arguments]
        return words


class MVAPICHRunner(_HydraRunner):
    """`mpirun -np N -ppn P --hostfile F -env K=V … python -u script`, with the variables that MVAPICH2-GDR needs."""

    programs: ClassVar[tuple[str, ...]] = ("mpirun",)

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        self.add_export("MV2_SMP_USE_CMA", "0")
        self.add_export("MV2_DEBUG_SHOW_BACKTRACE", "1")
        if get_accelerator().device_name() == "cuda":
            self.add_export("MV2_USE_CUDA", "1")
        for key, value in (
            ("MV2_SUPPORT_DL", "1"),
            ("MV2_ENABLE_AFFINITY", "0"),
            ("MV2_INTER_ALLGATHER_TUNING", "5"),
            ("MV2_CUDA_USE_NAIVE", "0"),
        ):
            self.add_export(key, value)

    @property
    def name(self) -> str:
        return "mvapich"

    def backend_exists(self) -> bool:
        program = shutil.which("mpiname")
        if program is None:
            logger.warning("there is no mpiname on PATH, so MVAPICH is not installed properly")
            return False
        found = subprocess.run([program], capture_output=True, text=True, timeout=30, check=False).stdout
        if "MVAPICH2-GDR" not in found:
            logger.warning("mpiname says %.200r; MVAPICH2-GDR is needed", found.strip())
            return False
        return True

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Slots) -> list[str]:
        per_host = even_slots(active_resources, self.name)
        total = per_host * len(active_resources)
        # A name that nobody can guess, in a file that only this user can write: what it lists is started.
        descriptor, hostfile = tempfile.mkstemp(prefix="deepspeed_mvapich_hostfile_")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{host}\n" for host in active_resources)
        weakref.finalize(self, os.unlink, hostfile)
        words = ["mpirun", "-np", str(total), "-ppn", str(per_host), "--hostfile", hostfile, *self.launcher_words()]
        environment.update(self.hidden)
        for key, value in self.exports.items():
            words += ["-env", f"{key}={value}"]
        return [*words, *self.python_words(), *self.user_arguments]
