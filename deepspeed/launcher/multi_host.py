"""A job on several hosts: which program starts it, its command line, and its run under the relay."""

from __future__ import annotations

import argparse
import copy
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

from deepspeed.accelerator import get_accelerator
from deepspeed.launcher.arguments import node_words
from deepspeed.launcher.binding import bind
from deepspeed.launcher.environment import ENVIRONMENT_FILE, ENVIRONMENT_FOLDERS, exported, looks_secret
from deepspeed.launcher.errors import LaunchError, option_words
from deepspeed.launcher.hosts import Slots, encode_world_info
from deepspeed.launcher.launch import FAR_END, job_bytes
from deepspeed.launcher.protocol import RELAY_VARIABLE, Link, RelayPlan, RelaySetting, new_token
from deepspeed.launcher.supervise import pid_file, supervise
from deepspeed.log import logger


def run_on_hosts(args: argparse.Namespace, active: Slots) -> int:
    """Start the ranks on all hosts, wait for them, and return the exit status of the job."""
    with ExitStack() as stack:
        return _run_on_hosts(copy.copy(args), active, stack)


def _run_on_hosts(args: argparse.Namespace, active: Slots, stack: ExitStack) -> int:
    kept = bool(args.elastic_training and not args.master_addr)
    _settle(args, active)
    if kept:  # here, so that the job survives the loss of any of its hosts
        from deepspeed.elasticity.node import kept_store  # torch's agents, which every other start would wait for

        args.master_addr, args.master_port = stack.enter_context(kept_store(args))
    relayed = RelaySetting(new_token(), labels=args.output != "plain")
    folders = [Path(folder) for folder in ENVIRONMENT_FOLDERS]
    exports = exported(os.environ, get_accelerator().export_envs(), folders, ENVIRONMENT_FILE)
    exports[RELAY_VARIABLE] = str(relayed)
    environment = dict(os.environ)
    if args.launcher == "ssh":
        links = _ssh_links(args, active, exports, kept)
    else:
        runner = _runner(args, exports)  # which keeps files that its program reads
        words = runner.get_cmd(environment, active)
        # Several MPIs may be installed side by side, and only one of them is called mpirun.
        program = next((found for name in runner.programs if (found := shutil.which(name))), words[0])
        links = (Link(host="", command=[program, *words[1:]], forwards=runner.forwards),)
    world = sum(map(len, active.values()))
    logger.info(
        "starting %d ranks on %d hosts (%s) with %s", world, len(active), ", ".join(active), Path(links[0].command[0])
    )
    saved = stack.enter_context(pid_file(os.getpid())) if args.save_pid else None
    plan = RelayPlan(
        links=links,
        world=world,
        token=relayed.token,
        style=args.output,
        elastic=args.elastic_training,
        hosts=tuple(active) if args.launcher == "pdsh" else (),
        log_level="error" if args.quiet else args.log_level,
        pid_file=None if saved is None else str(saved),
    )
    return supervise(plan, environment)


def run_here(args: argparse.Namespace, active: Slots, words: Sequence[str]) -> int:
    """Start the ranks of this host below a relay, which labels or folds their lines; `words` are the launcher's."""
    relayed = RelaySetting(new_token(), labels=True)
    link = Link(
        host="",
        command=[sys.executable, *FAR_END],
        opening=job_bytes(words, {RELAY_VARIABLE: str(relayed)}),
    )
    plan = RelayPlan(
        links=(link,),
        world=len(next(iter(active.values()))),
        token=relayed.token,
        style=args.output,
        elastic=args.elastic_training,
        log_level="error" if args.quiet else args.log_level,
    )
    return supervise(plan, os.environ)


def _settle(args: argparse.Namespace, active: Slots) -> None:
    """Decide what the user left open."""
    check_hosts(active)
    if not args.launcher_chosen and (args.elastic_training or shutil.which("pdsh") is None):
        args.launcher = "ssh"
    if args.elastic_training and args.launcher != "ssh":
        raise LaunchError(
            f"--elastic_training with --launcher {args.launcher}: only ssh can lose a host and reach it again; leave "
            "--launcher out, or start each host by itself with --no_ssh"
        )
    args.output = args.output or "rank"
    first = next(iter(active))
    if not args.master_addr and args.launcher != "slurm":  # whose tasks know the first of their nodes
        if args.no_ssh_check:
            args.master_addr = first.rpartition("@")[2]
        else:
            given = option_words("launcher_args", args.launcher_args) if args.launcher == "ssh" else []
            asked = list(active) if args.elastic_training else [first]  # of which some may be away
            args.master_addr = _first_address(asked, args.ssh_port, given)


def _runner(args: argparse.Namespace, exports: Mapping[str, str]) -> MultiNodeRunner:
    """What builds the command of a launcher that is not built in; an error if that is not installed."""
    runner = RUNNERS[args.launcher](args)
    if not runner.installed():
        raise LaunchError(f"launcher '{runner.name}' not installed; --launcher ssh needs nothing but OpenSSH")
    for option in runner.unused:
        if getattr(args, option):
            logger.warning("--%s has no effect with --launcher %s", option, runner.name)
    if not isinstance(runner, PDSHRunner):
        runner.add_export("MASTER_PORT", str(args.master_port))
        if args.master_addr:
            runner.add_export("MASTER_ADDR", args.master_addr)
    for key, value in exports.items():
        runner.add_export(key, value)
    if runner.hidden and isinstance(runner, PDSHRunner):
        logger.warning(
            "not passed on, since everybody on the hosts could read them in the list of processes: %s. "
            "--launcher ssh passes them on unseen.",
            ", ".join(sorted(runner.hidden)),
        )
    return runner


def _first_address(hosts: Sequence[str], port: int | None, given: Sequence[str]) -> str:
    """The address of the first host that answers; the error of the last one if none does."""
    for host in hosts[:-1]:
        try:
            return address_of(host, port, given)
        except LaunchError as error:
            logger.warning("%s", error)
    return address_of(hosts[-1], port, given)


# ---- ssh

# Nothing that ssh, pdsh or mpirun would take for an option, a list, a pattern or a file of hosts.
_HOST = re.compile(r"(?:[A-Za-z0-9_][\w.+-]*@)?[A-Za-z0-9_:][A-Za-z0-9_.:%-]*", re.ASCII)
_LATER = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
_PATIENCE = 30  # seconds for the first host to answer


def check_hosts(hosts: Iterable[str]) -> None:
    """End if a name is not that of a host."""
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise LaunchError(
                f"{host!r:.200} is not the name or address of a host; names have letters, digits, and . _ - within"
            )


def ssh_words(host: str, port: int | None, given: Sequence[str] = ()) -> list[str]:
    """The beginning of an ssh command; options of the user come first, since ssh takes the first value of each."""
    words = ["ssh", *given, "-T", "-x", "-o", "BatchMode=yes", *_LATER]
    return [*words, *(["-p", str(port)] if port is not None else []), "--", host]


def _ssh_links(args: argparse.Namespace, active: Slots, exports: Mapping[str, str], kept: bool) -> tuple[Link, ...]:
    """One link for each host."""
    info, master = encode_world_info(active), (args.master_addr, args.master_port)
    given = option_words("launcher_args", args.launcher_args)
    source = f"source {shlex.quote(args.venv_script)} && " if args.venv_script else ""
    python = shlex.join([f"PYTHONPATH={exports['PYTHONPATH']}", sys.executable])
    start = f"{source}cd {shlex.quote(os.getcwd())} && exec env {python} {' '.join(FAR_END)}"
    found = []
    for node, host in enumerate(active):
        words = node_words(args, info, node_rank=node, master=master, store_kept=kept)
        command = [*ssh_words(host, args.ssh_port, given), start]
        found.append(Link(host=host, command=command, opening=job_bytes(words, exports)))
    return tuple(found)


def address_of(host: str, port: int | None, given: Sequence[str] = ()) -> str:
    """The first address of a host as it says itself, which also shows that it can be reached."""
    command = [*ssh_words(host, port, given), "hostname -I"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except FileNotFoundError as error:
        raise LaunchError("there is no ssh on this machine: install OpenSSH, or use --no_ssh on each host") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"host {host} did not answer over ssh within {_PATIENCE} s; try: ssh {host} true") from error
    addresses = done.stdout.split()
    if done.returncode != 0 or not addresses:
        told = (done.stderr.strip().splitlines() or ["it told no address"])[-1]
        raise LaunchError(
            f"host {host} cannot be asked for its address over ssh (exit code {done.returncode}): {told}. "
            f"It must work without a password (ssh {host} hostname -I); or give --master_addr and --no_ssh_check."
        )
    return addresses[0]


# ---- programs that start the ranks of all hosts: each class builds one command line

HELPER = Path(__file__).resolve().with_name("launcher_helper.py")


class MultiNodeRunner(ABC):
    """Builds the command that starts a job on several hosts with one program.

    Variables given to `add_export` become part of the command. Those that look like secrets do not, since anybody can
    read the list of processes: `hidden` has them, and they go through the environment of the program.
    """

    name: ClassVar[str]  # for `--launcher`
    probe: ClassVar[str] = "mpirun"  # a program that is on PATH where this launcher is installed
    programs: ClassVar[tuple[str, ...]] = ("mpirun",)  # the first one on PATH is run
    chooses: ClassVar[bool] = False  # whether it can start ranks on some of the slots only
    forwards: ClassVar[bool] = True  # whether the program passes signals such as SIGUSR1 on to the ranks
    unused: ClassVar[tuple[str, ...]] = ("venv_script", "bind_cores_to_rank", "bind_core_list", "ssh_port")

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.exports: dict[str, str] = {}
        self.hidden: dict[str, str] = {}
        self.launcher_words = option_words("launcher_args", args.launcher_args)
        for option in () if self.chooses else ("include", "exclude", "num_nodes", "num_gpus"):
            if (value := getattr(args, option)) not in ("", -1):
                raise LaunchError(
                    f"--launcher {self.name} does not take --{option} {value}: it starts ranks on all slots of the "
                    "hostfile; write a hostfile with the hosts and slots to use"
                )

    def installed(self) -> bool:
        """Whether the program can be run here."""
        return shutil.which(self.probe) is not None

    @abstractmethod
    def get_cmd(self, environment: MutableMapping[str, str], active: Slots) -> list[str]:
        """The command; what it needs in its own environment is set in `environment`."""

    def add_export(self, key: str, var: str) -> None:
        """Let the ranks have a variable."""
        value = var.strip()
        (self.hidden if looks_secret(key, value) or not self.can_show(value) else self.exports)[key.strip()] = value

    def can_show(self, value: str) -> bool:
        """Whether the program takes such a value on its command line as it is."""
        return True

    # ---- for subclasses

    def rank_words(self) -> list[str]:
        """The command of a rank: our helper, which runs the user's script below a guard."""
        args = self.args
        words = [sys.executable, "-u", str(HELPER), "--launcher", self.name]
        words += [f"--enable_each_rank_log={args.enable_each_rank_log}"]
        words += [f"--log_level={'error' if args.quiet else args.log_level}"]
        words += [f"--{flag}" for flag in ("module", "no_python") if getattr(args, flag)]
        return [*words, args.user_script, *args.user_args]

    def host_file(self, hosts: Iterable[str]) -> str:
        """A file that lists hosts, with a name that nobody can guess, which only this user can read or write."""
        descriptor, path = tempfile.mkstemp(prefix=f"deepspeed_{self.name}_hostfile_")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{host}\n" for host in hosts)
        weakref.finalize(self, os.unlink, path)
        return path

    def even_slots(self, active: Slots) -> int:
        """Ranks per host where the program wants the same number on each."""
        counts = {host: len(slots) for host, slots in active.items()}
        if len(set(counts.values())) != 1:
            told = ", ".join(f"{host} {count}" for host, count in counts.items())
            raise LaunchError(
                f"--launcher {self.name} starts the same number of ranks on each host, but the slots are: {told}; "
                "even them out with --include, or use --launcher ssh"
            )
        return next(iter(counts.values()))


class PDSHRunner(MultiNodeRunner):
    """`pdsh -S -f 1024 -w h1,h2 export K=V; … cd …; python -u -m deepspeed.launcher.launch …`."""

    name: ClassVar[str] = "pdsh"
    probe: ClassVar[str] = "pdsh"
    programs: ClassVar[tuple[str, ...]] = ("pdsh",)
    chooses: ClassVar[bool] = True
    forwards: ClassVar[bool] = False
    unused: ClassVar[tuple[str, ...]] = ()

    def get_cmd(self, environment: MutableMapping[str, str], active: Slots) -> list[str]:
        args = self.args
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if args.ssh_port is not None:
            given = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{given} -p {args.ssh_port}".strip()
        # What follows the hosts is one line for the shell of each host: every word of it is quoted.
        exports = "".join(f"export {key}={_quoted(value)}; " for key, value in self.exports.items())
        master = (args.master_addr, args.master_port)
        info, rank, *words = node_words(args, encode_world_info(active), node_rank="%n", master=master)
        source = [f"source {_quoted(args.venv_script)};"] if args.venv_script else []
        return [
            *("pdsh", "-S", "-f", "1024", "-w", ",".join(active), *self.launcher_words),
            *(*source, exports, f"cd {_quoted(os.getcwd())};"),
            *(
                _quoted(sys.executable),
                "-u",
                "-m",
                "deepspeed.launcher.launch",
                _quoted(info),
                rank,
                *map(_quoted, words),
            ),
        ]


def _quoted(word: str) -> str:
    """A word that the shell of a host leaves alone, and pdsh, which puts names in the place of %h, %u and %n."""
    return shlex.quote(word).replace("%", "%%")


class OpenMPIRunner(MultiNodeRunner):
    """`mpirun -n N -hostfile F --mca btl ^openib … -x K=V … python -u launcher_helper.py … script`."""

    name: ClassVar[str] = "openmpi"
    probe: ClassVar[str] = "ompi_info"
    programs: ClassVar[tuple[str, ...]] = ("mpirun.openmpi", "mpirun")

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.add_export("UCX_TLS", "tcp")

    def can_show(self, value: str) -> bool:
        return ";" not in value and "\n" not in value  # between which it would see several variables

    def get_cmd(self, environment: MutableMapping[str, str], active: Slots) -> list[str]:
        words = ["mpirun", "-n", str(sum(map(len, active.values()))), "-hostfile", self.args.hostfile]
        words += ["--mca", "btl", "^openib"]
        if not {"btl_tcp_if_include", "btl_tcp_if_exclude"} & {*self.launcher_words}:
            words += ["--mca", "btl_tcp_if_include", "eth0"]
        words += self.launcher_words
        environment.update(self.hidden)
        # What must not be seen is given by its name only: mpirun takes the value from its environment.
        for variable in (*(f"{key}={value}" for key, value in self.exports.items()), *self.hidden):
            words += ["-x", variable]
        return [*words, *self.rank_words()]


class SlurmRunner(MultiNodeRunner):
    """`srun -n N [--nodelist …] [--nodes …] [--gpus-per-node …] --export=ALL,K=V,… python -u launcher_helper.py …`."""

    name: ClassVar[str] = "slurm"
    probe: ClassVar[str] = "sinfo"
    programs: ClassVar[tuple[str, ...]] = ("srun",)
    chooses: ClassVar[bool] = True

    def can_show(self, value: str) -> bool:
        # Commas part one variable from the next, unless they are between quotes.
        return re.fullmatch(r"[\w@%+=:./ -]*", value, re.ASCII) is not None

    def get_cmd(self, environment: MutableMapping[str, str], active: Slots) -> list[str]:
        args = self.args
        words = ["-n", str(sum(map(len, active.values()))), *self.launcher_words]
        if args.include or args.exclude:
            self._require_first_slots(active)
            words += ["--nodelist", ",".join(active), "--nodes", str(len(active))]
        elif args.num_nodes > 0:
            words += ["--nodes", str(args.num_nodes)]
        else:  # each rank on the host that the hostfile says, which may have more slots than another
            environment["SLURM_HOSTFILE"] = self.host_file(host for host, slots in active.items() for _ in slots)
            words.insert(0, "--distribution=arbitrary")
        if args.num_gpus > 0:
            words += ["--gpus-per-node", str(args.num_gpus)]
        environment.update(self.hidden)  # which ALL covers
        words.append(",".join(["--export=ALL", *(f"{key}={value}" for key, value in self.exports.items())]))
        return ["srun", *words, *self.rank_words()]

    def _require_first_slots(self, active: Slots) -> None:
        count = self.even_slots(active)
        for host, slots in active.items():
            if list(slots) != list(range(count)):
                raise LaunchError(
                    f"--launcher slurm cannot choose the slots {','.join(map(str, slots))} of {host}: Slurm gives a "
                    f"job the first ones of a node; include 0 to {count - 1}, or use --launcher ssh"
                )


class _HydraRunner(MultiNodeRunner):
    """What the three share: a fixed set of hosts, and variables by `-genv`.

    mpirun gives the ranks its whole environment, so what must not be seen only has to be there. (Naming variables with
    -genvlist loses the last one of the environment.)
    """

    def can_show(self, value: str) -> bool:
        return bool(value) and "\n" not in value

    def genv(self, total: int, more: Mapping[str, int]) -> list[str]:
        """The words for the variables of all ranks."""
        master = {"MASTER_ADDR": self.args.master_addr, "MASTER_PORT": self.args.master_port}
        settings = {**self.exports, **master, "WORLD_SIZE": total, **more}
        return [word for key, value in settings.items() for word in ("-genv", key, str(value))]


class MPICHRunner(_HydraRunner):
    """`mpirun -n N -ppn P -genv K V … -hosts h1,h2 python -u launcher_helper.py --launcher mpich … script`."""

    name: ClassVar[str] = "mpich"
    programs: ClassVar[tuple[str, ...]] = ("mpirun.mpich", "mpirun.hydra", "mpirun")

    def get_cmd(self, environment: MutableMapping[str, str], active: Slots) -> list[str]:
        counts = {host: len(slots) for host, slots in active.items()}
        total, even = sum(counts.values()), len(set(counts.values())) == 1
        environment.update(self.hidden)
        if even:
            per_host = next(iter(counts.values()))
            words = ["-ppn", str(per_host), *self.launcher_words, *self.genv(total, {"LOCAL_SIZE": per_host})]
            hosts = list(counts)
        else:
            words = [*self.launcher_words, *self.genv(total, {})]
            hosts = [f"{host}:{count}" for host, count in counts.items()]
        return ["mpirun", "-n", str(total), *words, "-hosts", ",".join(hosts), *self.rank_words()]


class IMPIRunner(_HydraRunner):
    """`mpirun -ppn P -genv K V … -hosts h1,h2 -n 1 -env RANK 0 … python -u … script : -n 1 -env RANK 1 …`."""

    name: ClassVar[str] = "impi"
    unused: ClassVar[tuple[str, ...]] = ("venv_script", "ssh_port")

    def get_cmd(self, environment: MutableMapping[str, str], active: Slots) -> list[str]:
        per_host = self.even_slots(active)
        total = per_host * len(active)
        environment.update(self.hidden)
        more = {"LOCAL_SIZE": per_host, "I_MPI_PIN": 0}
        prefixes: list[tuple[str, ...]] = [()] * per_host
        if self.args.bind_cores_to_rank or self.args.bind_core_list:
            bindings = bind(per_host, self.args.bind_core_list)
            prefixes = [binding.prefix for binding in bindings]
            more["OMP_NUM_THREADS"] = len(bindings[0].cores)
        words = ["mpirun", "-ppn", str(per_host), *self.launcher_words, *self.genv(total, more)]
        words += ["-hosts", ",".join(active)]
        for rank in range(total):
            local = rank % per_host
            words += [":"] if rank else []
            words += ["-n", "1", "-env", "RANK", str(rank), "-env", "LOCAL_RANK", str(local)]
            words += [*prefixes[local], *self.rank_words()]
        return words


class MVAPICHRunner(_HydraRunner):
    """`mpirun -np N -ppn P --hostfile F -env K=V … python -u … script`, with the variables that MVAPICH2-GDR needs."""

    name: ClassVar[str] = "mvapich"

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.exports |= {"MV2_SMP_USE_CMA": "0", "MV2_DEBUG_SHOW_BACKTRACE": "1"}
        if get_accelerator().device_name() == "cuda":
            self.exports["MV2_USE_CUDA"] = "1"
        self.exports |= {"MV2_SUPPORT_DL": "1", "MV2_ENABLE_AFFINITY": "0"}
        self.exports |= {"MV2_INTER_ALLGATHER_TUNING": "5", "MV2_CUDA_USE_NAIVE": "0"}

    def installed(self) -> bool:
        program = shutil.which("mpiname")
        if program is None:
            logger.warning("there is no mpiname on PATH, so MVAPICH is not installed properly")
            return False
        found = subprocess.run([program], capture_output=True, text=True, timeout=30, check=False).stdout
        if "MVAPICH2-GDR" not in found:
            logger.warning("mpiname says %.200r; MVAPICH2-GDR is needed", found.strip())
        return "MVAPICH2-GDR" in found

    def get_cmd(self, environment: MutableMapping[str, str], active: Slots) -> list[str]:
        per_host = self.even_slots(active)
        words = ["mpirun", "-np", str(per_host * len(active)), "-ppn", str(per_host)]
        words += ["--hostfile", self.host_file(active), *self.launcher_words]
        environment.update(self.hidden)
        for key, value in self.exports.items():
            words += ["-env", f"{key}={value}"]
        return [*words, *self.rank_words()]


RUNNERS: Mapping[str, type[MultiNodeRunner]] = {
    kind.name: kind for kind in (PDSHRunner, OpenMPIRunner, MPICHRunner, IMPIRunner, SlurmRunner, MVAPICHRunner)
}
