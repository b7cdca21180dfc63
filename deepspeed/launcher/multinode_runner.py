"""Programs that start ranks on several hosts: each class builds one command line; users subclass the first."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from deepspeed.accelerator import get_accelerator
from deepspeed.launcher.arguments import node_words
from deepspeed.launcher.binding import bind
from deepspeed.launcher.environment import looks_secret
from deepspeed.launcher.errors import LaunchError, option_words
from deepspeed.launcher.hosts import Slots
from deepspeed.log import logger

__all__ = [
    "IMPIRunner",
    "MPICHRunner",
    "MVAPICHRunner",
    "MultiNodeRunner",
    "OpenMPIRunner",
    "PDSHRunner",
    "SlurmRunner",
]

HELPER = Path(__file__).resolve().with_name("launcher_helper.py")


class MultiNodeRunner(ABC):
    """Builds the command that starts a job on several hosts with one program.

    Variables given to `add_export` become part of the command. Those that look like secrets do not, since anybody can
    read the list of processes: `hidden` has them, and they go through the environment of the program.
    """

    word: ClassVar[str] = ""  # for `--launcher`
    programs: ClassVar[tuple[str, ...]] = ()  # what is looked for on PATH, the first one found is run
    forwards: ClassVar[bool] = True  # whether the program passes signals such as SIGUSR1 on to the ranks
    unused: ClassVar[tuple[str, ...]] = ("venv_script", "bind_cores_to_rank", "bind_core_list", "ssh_port")

    def __init__(
        self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int] | None = None
    ) -> None:
        self.args = args
        self.world_info_base64 = world_info_base64
        self.resource_pool = resource_pool or {}
        self.exports: dict[str, str] = {}
        self.hidden: dict[str, str] = {}
        self.user_script = args.user_script
        self.user_arguments = self.parse_user_args()
        self.validate_args()

    @property
    def name(self) -> str:
        """The word for `--launcher`."""
        return self.word or type(self).__name__

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


class PDSHRunner(MultiNodeRunner):
    """`pdsh -S -f 1024 -w h1,h2 export K=V; … cd …; python -u -m deepspeed.launcher.launch …`."""

    word: ClassVar[str] = "pdsh"
    programs: ClassVar[tuple[str, ...]] = ("pdsh",)
    forwards: ClassVar[bool] = False
    unused: ClassVar[tuple[str, ...]] = ()

    def backend_exists(self) -> str | None:
        return shutil.which("pdsh")

    def parse_user_args(self) -> list[str]:
        return [_quoted(word) for word in self.args.user_args]

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Slots
    ) -> tuple[list[str], list[str], MutableMapping[str, str]]:
        """The command, one that ends what it started on all hosts, and the environment of both."""
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if self.args.ssh_port is not None:
            given = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{given} -p {self.args.ssh_port}".strip()
        reach = ["pdsh", "-S", "-f", "1024", "-w", ",".join(active_resources), *self.launcher_words()]
        # What follows is one line for the shell of each host: every word of it is quoted.
        exports = "".join(f"export {key}={_quoted(value)}; " for key, value in self.exports.items())
        words = node_words(
            self.args,
            self.world_info_base64,
            node_rank="%n",
            master=(self.args.master_addr, self.args.master_port),
            script=(),
        )
        shown = [word if word == "--node_rank=%n" else _quoted(word) for word in words]
        launch = [_quoted(sys.executable), "-u", "-m", "deepspeed.launcher.launch", *shown]
        source = [f"source {_quoted(self.args.venv_script)};"] if self.args.venv_script else []
        script = [_quoted(self.user_script), *self.user_arguments]
        command = [*reach, *source, exports, f"cd {_quoted(os.getcwd())};", *launch, *script]
        # `[-]` matches what it says, but not the command line of pkill itself.
        pattern = f"deepspeed[.]launcher[.]launch [-]-world_info={self.world_info_base64}"
        return command, [*reach, "pkill", "-f", _quoted(pattern)], environment


def _quoted(word: str) -> str:
    """A word that the shell of a host leaves alone, and pdsh, which puts names in the place of %h, %u and %n."""
    return shlex.quote(word).replace("%", "%%")


class OpenMPIRunner(MultiNodeRunner):
    """`mpirun -n N -hostfile F --mca btl ^openib … -x K=V … python -u script`."""

    word: ClassVar[str] = "openmpi"
    programs: ClassVar[tuple[str, ...]] = ("mpirun.openmpi", "mpirun")

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        self.add_export("UCX_TLS", "tcp")

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


class SlurmRunner(MultiNodeRunner):
    """`srun -n N [--nodelist …] [--nodes …] [--gpus-per-node …] --export=ALL,K=V,… python -u script`."""

    word: ClassVar[str] = "slurm"
    programs: ClassVar[tuple[str, ...]] = ("srun",)

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


class _HydraRunner(MultiNodeRunner):
    """What the three share: a fixed set of hosts, and variables by `-genv`.

    mpirun gives the ranks its whole environment, so what must not be seen only has to be there. (Naming variables with
    -genvlist loses the last one of the environment.)
    """

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

    word: ClassVar[str] = "mpich"
    programs: ClassVar[tuple[str, ...]] = ("mpirun.mpich", "mpirun.hydra", "mpirun")

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

    word: ClassVar[str] = "impi"
    programs: ClassVar[tuple[str, ...]] = ("mpirun",)
    unused: ClassVar[tuple[str, ...]] = ("venv_script", "ssh_port")

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

    word: ClassVar[str] = "mvapich"
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
