"""What a device can do at most: as its maker states it, or as it was measured."""

from __future__ import annotations

import difflib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.peaks import peak_flops
from deepspeed.errors import UsageError


@dataclass(frozen=True, slots=True)
class DeviceCeilings:
    """Rates are per second. Between nodes: of one device, with as many network cards as the system of `source` has."""

    name: str
    memory: int
    """Bytes."""
    narrow_flops: float
    """Operations of products of 16-bit numbers."""
    wide_flops: float
    """Operations of 32-bit numbers."""
    bandwidth: float
    """Bytes from and to memory."""
    within: float
    """Bytes to devices of the same node, in one direction."""
    between: float
    """Bytes to other nodes, in one direction."""
    source: str
    allocator_block: int = 512
    """The device's allocator rounds sizes up to multiples of so many bytes."""
    launch: float = 0.0
    """Seconds that an operation takes however small it is."""


def _device(
    peak: str, memory: float, wide: float, bandwidth: float, within: float, between: float, source: str
) -> DeviceCeilings:
    """Sizes in GB of 10^9 bytes, rates in 10^12 operations and 10^9 bytes; `peak`: the name in accelerator/peaks.py."""
    narrow = peak_flops(peak)
    assert narrow is not None, f"{peak} is in the table of peaks"
    return DeviceCeilings(
        peak, int(memory * 1e9), narrow, wide * 1e12, bandwidth * 1e9, within * 1e9, between * 1e9, source
    )


# GB of memory, TFLOPS of fp32, GB/s of memory, GB/s to devices of the node and to other nodes, and where they stand.
DEVICES: Mapping[str, DeviceCeilings] = {
    "b200": _device("B200", 180, 75, 8000, 900, 50, "NVIDIA DGX B200 datasheet (8 GPUs: 1440 GB, 8 × 400 Gb/s)"),
    "h200": _device("H200", 141, 67, 4800, 450, 50, "NVIDIA H200 datasheet; DGX H200 datasheet (8 × 400 Gb/s)"),
    "h100": _device("H100", 80, 67, 3350, 450, 50, "NVIDIA H100 datasheet (SXM); DGX H100 datasheet (8 × 400 Gb/s)"),
    "a100-80": _device("A100", 80, 19.5, 2039, 300, 25, "NVIDIA A100 datasheet (SXM 80 GB); DGX A100 (8 × 200 Gb/s)"),
    "a100-40": _device("A100", 40, 19.5, 1555, 300, 25, "NVIDIA A100 datasheet (SXM 40 GB); DGX A100 (8 × 200 Gb/s)"),
    "v100": _device("V100", 32, 15.7, 900, 150, 12.5, "NVIDIA V100 datasheet (SXM2 32 GB); 100 Gb/s to other nodes"),
    "l40s": _device("L40S", 48, 91.6, 864, 32, 25, "NVIDIA L40S datasheet (PCIe 4.0 x16); 200 Gb/s to other nodes"),
    "l4": _device("L4", 24, 30.3, 300, 32, 12.5, "NVIDIA L4 datasheet (PCIe 4.0 x16); 100 Gb/s to other nodes"),
    "a10": _device("A10", 24, 31.2, 600, 32, 12.5, "NVIDIA A10 datasheet (PCIe 4.0 x16); 100 Gb/s to other nodes"),
    "t4": _device("T4", 16, 8.1, 300, 16, 12.5, "NVIDIA T4 datasheet (PCIe 3.0 x16); 100 Gb/s to other nodes"),
}
_NUMBERS = tuple(each.name for each in fields(DeviceCeilings) if each.name not in ("name", "source"))


def device_of(name: str) -> DeviceCeilings:
    """A device of the table, a file of `ds_plan --measure`, or one of either followed by one of `ds_bench --json`.

    `h200,links.json` is an H200 with the speed of links that was measured.
    """
    found: DeviceCeilings | None = None
    for word in filter(None, (part.strip() for part in name.split(","))):
        if not word.lower().endswith(".json"):
            found = _named(word)
            continue
        values = _read(Path(word))
        if "results" in values:
            if found is None:
                raise UsageError(
                    f"--device {name}: {word} has speeds of links (ds_bench --json) but no memory and no products. "
                    f"Name the device before it, such as h200,{word}"
                )
            found = _with_links(found, values, word)
        else:
            found = _measured_device(values, word)
    if found is None:
        raise UsageError(f"--device is {name!r}; expected {_choices()}")
    return found


def _choices() -> str:
    return f"one of {', '.join(DEVICES)}, or a JSON file of ds_plan --measure"


def _named(word: str) -> DeviceCeilings:
    key = word.lower()
    if key not in DEVICES:
        near = difflib.get_close_matches(key, DEVICES, 1)
        raise UsageError(
            f"--device {word!r} is not known{f'; did you mean {near[0]}?' if near else ''} Expected {_choices()}"
        )
    return DEVICES[key]


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--device: {file} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"--device: {file} is no JSON ({error})") from error
    if not isinstance(values, dict):
        raise UsageError(f"--device: {file} holds a {type(values).__name__}; expected a JSON object")
    return values


def _measured_device(values: Mapping[str, Any], file: str) -> DeviceCeilings:
    missing = [name for name in _NUMBERS if not _is_rate(values.get(name))]
    if missing:
        raise UsageError(f"--device: {file} has no number under {', '.join(missing)}; write it with ds_plan --measure")
    numbers = {name: values[name] for name in _NUMBERS}
    return DeviceCeilings(name=str(values.get("name", file)), source=str(values.get("source", file)), **numbers)


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _with_links(device: DeviceCeilings, values: Mapping[str, Any], file: str) -> DeviceCeilings:
    """The best bus bandwidth that was measured, for the links that the ranks of the measurement used."""
    rates: list[Any] = [each.get("bus") for each in values["results"] if isinstance(each, dict)]
    best: float = max(filter(_is_rate, rates), default=0.0)
    setting = values.get("setting")
    if not best or not isinstance(setting, dict):
        raise UsageError(f"--device: {file} has no result with a bus bandwidth; write it with ds_bench --json")
    source = f"{device.source}; links: {file}"
    if setting.get("hosts", 1) > 1:
        return replace(device, between=best, source=source)
    return replace(device, within=best, source=source)


# ---- measurements

_SECONDS = 1.0  # of each kernel


def measure() -> DeviceCeilings:
    """Ceilings of this machine's device, from some seconds of products, copies and small operations.

    Links are not measured: ranks of this machine are taken to exchange what memory copies.
    """
    accelerator = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    on_host = device.type == "cpu"
    side = 1024 if on_host else 8192
    products = [torch.randn(side, side, device=device, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    narrow, wide = (2 * side**3 / _best(partial(torch.mm, each, each)) for each in products)
    source = torch.empty((64 if on_host else 1024) << 20, dtype=torch.uint8, device=device).fill_(1)
    copied = source.clone()
    bandwidth = 2 * source.nbytes / _best(lambda: copied.copy_(source))
    small = torch.ones(8, device=device)
    launch = _best(lambda: small.add_(1.0), calls=200)
    return DeviceCeilings(
        name=accelerator.device_name(),
        memory=int(accelerator.total_memory()),
        narrow_flops=narrow,
        wide_flops=wide,
        bandwidth=bandwidth,
        within=bandwidth / 4,  # written and read once by each of two ranks
        between=bandwidth / 4,
        source=f"measured on this machine, torch {torch.__version__}",
        allocator_block=1 if on_host else 512,
        launch=launch,
    )


def _best(call: Callable[[], Any], calls: int = 1) -> float:
    """Seconds of the fastest call in about `_SECONDS`."""
    synchronize = get_accelerator().synchronize
    fastest, until = math.inf, time.perf_counter() + _SECONDS
    while time.perf_counter() < until or fastest == math.inf:
        synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        fastest = min(fastest, (time.perf_counter() - began) / calls)
    return fastest


def as_json(device: DeviceCeilings) -> str:
    """What `device_of` reads."""
    return json.dumps(asdict(device), indent=2) + "\n"
