"""What `ds_report` tells: facts about this machine and this installation, gathered without changing either.

Every function works without a GPU, a network or any optional tool; what cannot be found out is None.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed._package import __git_branch__, __git_hash__, __version__
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.detect import survey
from deepspeed.accelerator.host import HostMemory
from deepspeed.accelerator.interface import DeepSpeedAccelerator
from deepspeed.errors import AcceleratorError, OpUnavailable
from deepspeed.launcher.binding import usable_cores
from deepspeed.launcher.environment import relevant
from deepspeed.ops import capability, registry

SHM_WANTED = 512 * 2**20


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device of the accelerator in use."""

    index: int
    name: str
    memory: int | None
    compute_capability: str | None


@dataclass(frozen=True, slots=True)
class SystemFeature:
    """Something that was looked for; `reason` says what was found, or why it is not available."""

    name: str
    available: bool
    reason: str


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The host; `cores` are those that this process may use, `memory` is in bytes."""

    system: str
    processor: str
    cores: int
    memory: int | None
    vector_instructions: tuple[str, ...]
    storage: tuple[SystemFeature, ...]


@dataclass(frozen=True, slots=True)
class AcceleratorFacts:
    """The accelerator in use, or the problem that left none."""

    name: str | None
    communication_backend: str | None
    problem: str | None
    devices: tuple[DeviceFacts, ...]
    candidates: tuple[SystemFeature, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """A program; `path` is None where it was not found."""

    name: str
    path: str | None
    version: str | None


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The memory that data-loader workers and NCCL share between processes, in bytes."""

    path: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class SystemReport:
    """Everything; `dataclasses.asdict` of it is what `--json` prints."""

    versions: Mapping[str, str | None]
    machine: HostFacts
    paths: Mapping[str, str | None]
    accelerator: AcceleratorFacts
    ops: tuple[registry.Explanation, ...]
    build_tools: tuple[Tool, ...]
    shared_memory: SharedMemory | None
    interfaces: tuple[Interface, ...]
    suggested_interface: str | None
    launchers: tuple[Tool, ...]
    environment: Mapping[str, str]
    warnings: tuple[str, ...]


def gather() -> SystemReport:
    """Ask everything once."""
    accelerator = accelerator_facts()
    tools = build_tools()
    shared = shared_memory()
    found = interfaces()
    warned = [*_accelerator_warnings(accelerator), *_build_warnings(tools), *_shm_warnings(shared)]
    return SystemReport(
        versions=versions(),
        machine=machine(),
        paths=paths(),
        accelerator=accelerator,
        ops=registry.explain(),
        build_tools=tools,
        shared_memory=shared,
        interfaces=found,
        suggested_interface=suggested(found),
        launchers=launchers(),
        environment=relevant(),
        warnings=(*warned, *variable_warnings()),
    )


def _distribution(name: str) -> str | None:
    """The installed version, without importing the package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl() -> str | None:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def versions() -> dict[str, str | None]:
    """Name → version of what is installed."""
    git = f" (git {__git_hash__}, {__git_branch__})" if __git_hash__ else ""
    optional = ("triton", "pydantic", "hjson", "rich", "numpy", "mpi4py", "transformers", "accelerate", "peft", "trl")
    return {
        "deepspeed": __version__ + git,
        "torch": torch.__version__,
        "torch built for CUDA": torch.version.cuda,
        "torch built for ROCm": torch.version.hip,
        "nccl": _nccl(),
        "python": platform.python_version(),
        **{name: _distribution(name) for name in optional},
    }


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    models = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(models, None) or platform.processor() or None


def machine() -> HostFacts:
    """The host: system, processor, cores that this process may use, memory, what kernels and storage could use."""
    sets = (capability.has_avx2, capability.has_avx512, capability.has_neon, capability.has_sve)
    return HostFacts(
        system=platform.platform(),
        processor=" ".join(part for part in (platform.machine(), _cpu_model()) if part),
        cores=usable_cores(),
        memory=HostMemory().total() or None,
        vector_instructions=tuple(fact.name for fact in sets if fact.holds),
        storage=(SystemFeature(capability.has_gds.name, capability.has_gds.holds, capability.has_gds.reason),),
    )


def paths() -> dict[str, str | None]:
    """Where things are installed."""
    return {
        "python": sys.executable or None,
        "torch": torch.__path__[0],
        "deepspeed": str(Path(__file__).resolve().parents[1]),
    }


def gibibytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _device(accelerator: DeepSpeedAccelerator, index: int) -> DeviceFacts:
    kind = accelerator._name
    name, arch = accelerator.device_name(index), None
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(index)
        name, arch = properties.name, f"{properties.major}.{properties.minor}"
    elif kind == "xpu":
        name = torch.xpu.get_device_name(index)
    elif kind == "cpu":
        name = _cpu_model() or platform.machine()
    try:
        memory: int | None = accelerator.total_memory(index)
    except (AttributeError, RuntimeError):
        memory = None
    return DeviceFacts(index, name, memory, arch)


def accelerator_facts() -> AcceleratorFacts:
    """The accelerator that this process would use, its devices, and why the others are not there."""
    candidates = tuple(SystemFeature(each.name, each.available, each.reason or "") for each in survey())
    try:
        accelerator = get_accelerator()
        devices = tuple(_device(accelerator, index) for index in range(accelerator.device_count()))
    except (AcceleratorError, RuntimeError) as error:
        return AcceleratorFacts(None, None, str(error), (), candidates)
    return AcceleratorFacts(accelerator._name, accelerator.communication_backend_name(), None, devices, candidates)


def _output(*command: str) -> str:
    """What a program prints, empty if it cannot be run or takes too long."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")


def _first_line(text: str) -> str | None:
    return next((line.strip() for line in text.splitlines() if line.strip()), None)


def _tool(name: str, *version: str, path: str | None = None) -> Tool:
    path = path or shutil.which(name)
    return Tool(name, path, _first_line(_output(path, *version)) if path and version else None)


def build_tools() -> tuple[Tool, ...]:
    """What compiling a kernel needs."""
    nvcc = capability.nvcc()
    release = [line for line in _output(nvcc, "--version").splitlines() if "release" in line] if nvcc else []
    compiler = _tool("C++ compiler", "--version", path=capability.cxx_compiler())
    return compiler, Tool("nvcc", nvcc, _first_line("".join(release[:1]))), _tool("ninja", "--version")


def mpi_name(text: str) -> str | None:
    """Which MPI a `mpirun --version` belongs to."""
    known = {
        "open mpi": "Open MPI",
        "openrte": "Open MPI",
        "intel(r) mpi": "Intel MPI",
        "mvapich": "MVAPICH",
        "hydra": "MPICH",
        "mpich": "MPICH",
    }
    low = text.lower()
    return next((name for mark, name in known.items() if mark in low), None)


def launchers() -> tuple[Tool, ...]:
    """The programs that can start ranks, and what they lean on."""
    path = shutil.which("mpirun")
    text = _output(path, "--version") if path else ""
    name, line = mpi_name(text), _first_line(text)
    # An environment that is not activated has torchrun beside its interpreter, but not on PATH.
    torchrun = shutil.which("torchrun") or shutil.which("torchrun", path=str(Path(sys.executable).parent))
    return (
        _tool("torchrun", path=torchrun),
        _tool("pdsh", "-V"),
        _tool("ssh", "-V"),
        Tool("mpirun", path, f"{name}: {line}" if name and line else line),
        _tool("srun", "--version"),
        _tool("numactl"),
    )


def shared_memory(path: str = "/dev/shm") -> SharedMemory | None:
    """Size of the shared-memory file system; None where there is none."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return SharedMemory(path, usage.total, usage.free)


def _accelerator_warnings(found: AcceleratorFacts) -> list[str]:
    if found.problem is not None:
        first, *others = found.problem.splitlines() or [""]
        return [f"{first}. {others[-1].strip()}" if others else first]  # what lies between is in the table
    if found.name == "cpu" and torch.version.cuda is None and Path("/dev/nvidiactl").exists():
        return [
            f"this machine has an NVIDIA GPU, but torch {torch.__version__} is built without CUDA: "
            "install a CUDA build of torch"
        ]
    return []


def _build_warnings(tools: tuple[Tool, ...]) -> list[str]:
    wanted = torch.version.cuda
    nvcc = next((tool.version for tool in tools if tool.name == "nvcc" and tool.version), None)
    if wanted is None or nvcc is None:
        return []
    found = nvcc.partition("release ")[2].partition(",")[0]
    if found.split(".")[0] == wanted.split(".")[0]:
        return []
    return [f"nvcc is of CUDA {found}, torch of CUDA {wanted}: kernels built here would not load; set CUDA_HOME"]


def _shm_warnings(found: SharedMemory | None) -> list[str]:
    if found is None or found.total >= SHM_WANTED:
        return []
    return [
        f"{found.path} holds only {gibibytes(found.total)}, less than {gibibytes(SHM_WANTED)}: NCCL and data-loader "
        "workers may fail; in Docker add --shm-size=1g or --ipc=host"
    ]


# ---- network interfaces, as the kernel tells them

_SIOCGIFADDR = 0x8915
_IFF_UP = 0x1
_IFF_LOOPBACK = 0x8
_DOWN = ("down", "lowerlayerdown", "notpresent", "dormant")
# Made by container engines and hypervisors: ranks on other machines are not reached through them.
_VIRTUAL = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "ifb", "dummy", "tunl", "podman")


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface; `up` is None where the system does not say."""

    name: str
    up: bool | None
    loopback: bool
    addresses: tuple[str, ...]
    speed_mbit: int | None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # many of these files answer EINVAL while the interface is down
        return ""


def ipv4_address(name: str) -> str | None:
    """The main IPv4 address of an interface, asked from the kernel (Linux only)."""
    if sys.platform != "linux":
        return None
    import fcntl  # not on every system

    request = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_addresses(table: Path) -> dict[str, list[str]]:
    """Interface name → IPv6 addresses, from lines of: 32 hex digits, index, prefix, scope, flags, name."""
    found: dict[str, list[str]] = {}
    for line in _read(table).splitlines():
        words = line.split()
        if len(words) == 6 and len(words[0]) == 32:
            found.setdefault(words[5], []).append(str(ipaddress.IPv6Address(int(words[0], 16))))
    return found


def interfaces(
    names: Iterable[str] | None = None,
    root: Path = Path("/sys/class/net"),
    inet6: Path = Path("/proc/net/if_inet6"),
    ipv4: Callable[[str], str | None] = ipv4_address,
) -> tuple[Interface, ...]:
    """Every interface in the kernel's order; the arguments replace the kernel's answers."""
    v6 = _ipv6_addresses(inet6)
    found = []
    if names is None:
        with suppress(OSError):
            names = [name for _, name in socket.if_nameindex()]
    for name in names or ():
        flags = _read(root / name / "flags")
        bits = int(flags, 16) if flags.startswith("0x") else None
        state = _read(root / name / "operstate")
        up = None if bits is None else bool(bits & _IFF_UP) and state not in _DOWN
        speed = _read(root / name / "speed")
        v4 = ipv4(name)
        addresses = (*([v4] if v4 else []), *v6.get(name, ()))
        found.append(
            Interface(
                name=name,
                up=up,
                loopback=bool(bits & _IFF_LOOPBACK) if bits is not None else name.startswith("lo"),
                addresses=addresses,
                speed_mbit=int(speed) if speed.isdigit() and int(speed) > 0 else None,
            )
        )
    return tuple(found)


def suggested(found: Iterable[Interface]) -> str | None:
    """The interface that other machines most likely reach: the fastest that is up and has an address."""
    usable = [
        each
        for each in found
        if each.up and not each.loopback and each.addresses and not each.name.startswith(_VIRTUAL)
    ]
    best = max(usable, key=lambda each: each.speed_mbit or 0, default=None)
    return best.name if best else None


# ---- variables


def variable_warnings(environ: Mapping[str, str] = os.environ) -> list[str]:
    """What is set but cannot work, or does nothing."""
    found = []
    try:
        capability.check_arch_list(environ.get("TORCH_CUDA_ARCH_LIST", ""))
    except ValueError as error:
        found.append(str(error))
    ops = {each.variable: each for each in registry.operations().values()}
    for name in sorted(environ):
        if name.startswith("DS_BUILD_") and environ[name] not in ("", "0"):
            found.append(f"{name} has no effect: nothing is compiled when the package is installed")
        elif name.startswith("DS_OP_") and name not in ops:
            found.append(f"{name} names no op; there are {', '.join(sorted(ops))}")
        elif name in ops and environ[name]:
            try:
                ops[name].demand(environ[name])
            except OpUnavailable as error:
                found.append(str(error))
    return found
