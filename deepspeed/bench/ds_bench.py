"""`ds_bench`: collectives over sizes, under any launcher, or under `deepspeed` if there is none."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as td

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.bench.arguments import parse, sizes_of, words_of
from deepspeed.bench.measure import Sample, sweep
from deepspeed.bench.operations import Room
from deepspeed.bench.show import Setting, as_json, draw_picture, draw_table
from deepspeed.comm.discover import ALONE, discover
from deepspeed.comm.init import DEFAULT_PORT
from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.launcher import runner
from deepspeed.launcher.console import emit

__all__ = ["main"]

_MODULE = "deepspeed.bench"
_LARGEST = 2  # tensors of the largest size that an operation holds at once


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status. Without a launcher, start one, which ends the process if a rank fails."""
    args, rest = parse(argv)
    try:
        if not _is_rank():
            _launch(args, rest)
            return 0
        if rest:
            raise UsageError(
                f"{' '.join(rest)}: no options of ds_bench, and a launcher has started this process already"
            )
        return _run(args)
    except DeepSpeedError as error:
        sys.stderr.write(f"ds_bench: error: {error}\n")
        return 2
    finally:
        if comm.is_initialized():
            comm.destroy_process_group()


def _is_rank() -> bool:
    """Whether a launcher told this process its place."""
    return discover(os.environ, port=DEFAULT_PORT, need_master=False).source != ALONE


def _launch(args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Start ranks of this program: the words that it does not know are the launcher's."""
    words = [*rest, "--module", "--no_local_rank", _MODULE, *words_of(args)]
    script = runner.parse_args(words, prog="ds_bench").user_script
    if script != _MODULE:
        raise UsageError(f"found {script!r}, which is no option of ds_bench or of the launcher")
    runner.main(words)


def _run(args: argparse.Namespace) -> int:
    accelerator = get_accelerator()
    comm.init_distributed(args.backend, verbose=False)
    if accelerator.device_name() != "cpu":
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    world, rank = comm.get_world_size(), comm.get_rank()
    if world < 2:
        raise UsageError("there is one rank, which has nobody to send to; start two or more, such as --num_gpus 2")
    device = comm.group_device()
    _require_memory(args.max_size, device)
    module = comm if args.dist == "deepspeed" else td
    room = Room(None, world, rank, args.element, device, module, args.async_op)
    setting = _setting(args, world, device)
    samples: list[Sample] = []
    absent: dict[str, str] = {}
    table = rank == 0 and not args.json
    if table:
        emit(f"{setting.title}\n\n")
    for name in args.operations:
        found = list(sweep([name], sizes_of(args), room, trials=args.trials, warmups=args.warmups))
        own = [sample for sample in found if isinstance(sample, Sample)]
        samples += own
        absent |= dict(each for each in found if isinstance(each, tuple))
        if table and own:
            emit(partial(draw_table, operation=name, samples=own, setting=setting))
        elif table:
            emit(f"{name}: not by {setting.backend}: {absent[name]}\n\n")
    if rank == 0:
        if args.json:
            emit(json.dumps(as_json(samples, absent, setting), indent=2) + "\n")
        if args.plot is not None and samples:
            draw_picture(args.plot, samples, setting)
    return 0 if samples else 1


def _setting(args: argparse.Namespace, world: int, device: torch.device) -> Setting:
    names: list[str] = [""] * world
    comm.all_gather_object(names, socket.gethostname())
    backend = str(td.get_backend())
    unit = args.bw_unit
    return Setting(world, len(set(names)), backend, device.type, args.dtype, args.trials, unit)


def _require_memory(size: int, device: torch.device) -> None:
    """All ranks must stop alike, so that they compare what each has."""
    if device.type == "cpu":
        return  # what the host has free is shared by its ranks, and swapping tells by itself
    free = torch.tensor([get_accelerator().available_memory()], dtype=torch.int64, device=device)
    comm.all_reduce(free, op=comm.ReduceOp.MIN)
    if _LARGEST * size > int(free.item()):
        raise UsageError(
            f"--max-size {size} needs {_LARGEST * size} bytes of the device, and a rank has {int(free.item())} free; "
            "give a smaller one"
        )
