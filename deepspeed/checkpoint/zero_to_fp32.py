"""Makes one ordinary state dict of a ZeRO checkpoint: the program of the scripts that lie beside checkpoints.

Works at every stage, keeps frozen and tied parameters, and holds one tensor in memory at a time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deepspeed.checkpoint.formats.consolidate import DTYPES, fp32_weights, parse_size, write_shards
from deepspeed.checkpoint.formats.detect import find_tag, open_checkpoint
from deepspeed.checkpoint.storage.durable import gibibytes
from deepspeed.errors import CheckpointError, printable


class _Progress:
    """How much is written, on standard error, now and then: a line that is redrawn, or lines in a file."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._every = 0.5 if self._terminal else 10.0
        self._started = self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._last + self._every:
            self._last = time.monotonic()
            sys.stderr.write(f"{done / max(total, 1):4.0%} of {gibibytes(total)}" + ("\r" if self._terminal else "\n"))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started


def _say(text: object) -> None:
    """A line on standard error; what a name in a file could tell the terminal is spelled out."""
    sys.stderr.write(printable(text).replace("\n", "\\n") + "\n")


def check_output(output: Path, folder: Path) -> None:
    """Refuse to write into the checkpoint that is read."""
    target, source = Path(os.path.realpath(output)), Path(os.path.realpath(folder))
    if target == source or source in target.parents or (target.exists() and not target.is_dir()):
        raise CheckpointError(
            f"{output} is a file, or {folder}, or inside it: what is read stays as it is; name a folder"
        )


def main(arguments: Sequence[str] | None = None, *, choose_dtype: bool = False) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Makes one ordinary state dict of a ZeRO checkpoint.")
    parser.add_argument("checkpoint_dir", type=Path, help="the folder with the tags, for instance path/checkpoint-12")
    parser.add_argument("output_dir", type=Path, help="where the state dict goes")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes of a file, for instance 500MB (default: 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="checkpoint tag, for instance global_step1; default: what `latest` says")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="say where every tensor comes from")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default=None if choose_dtype else "fp32",
                        required=choose_dtype, help="of floating-point tensors")  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        _convert(options)
    except Exception as error:  # whatever a checkpoint of a stranger makes go wrong
        if options.debug:
            raise
        _say(f"{parser.prog}: {type(error).__name__}: {error}")
        sys.exit(1)


def _convert(options: argparse.Namespace) -> None:
    folder = find_tag(options.checkpoint_dir, options.tag)
    check_output(options.output_dir, folder)
    parse_size(options.max_shard_size)
    source = open_checkpoint(folder, verify=False)
    tensors = fp32_weights(source, exclude_frozen=options.exclude_frozen_parameters)
    world = source.world if source.stage else 1
    _say(f"{ascii(str(folder))[1:-1]}: stage {source.stage}, {world} ranks, {len(tensors)} tensors")
    for name, tensor in tensors.items() if options.debug else ():
        _say(f"  {ascii(name)[1:-1]} {tuple(tensor.shape)}: {tensor.parts()}")
    progress = _Progress()
    plan = write_shards(options.output_dir, tensors, source.aliases, limit=options.max_shard_size, progress=progress,
                        safe=options.safe_serialization, dtype=DTYPES[options.dtype])  # fmt: skip
    first, *more = (str(options.output_dir / file) for file in plan.shards)
    files = f"{first} and {len(more)} more, with an index" if more else first
    _say(f"wrote {files}: tag {folder.resolve().name}, {gibibytes(plan.total)} in {progress.seconds:.1f} s")
