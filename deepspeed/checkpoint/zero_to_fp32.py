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
from deepspeed.checkpoint.tools import bar, tell
from deepspeed.errors import CheckpointError


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
        tell(f"{parser.prog}: {type(error).__name__}: {error}", stderr=True)
        sys.exit(1)


def _convert(options: argparse.Namespace) -> None:
    started = time.monotonic()
    folder = find_tag(options.checkpoint_dir, options.tag)
    check_output(options.output_dir, folder)
    parse_size(options.max_shard_size)
    source = open_checkpoint(folder, verify=False)
    tensors = fp32_weights(source, exclude_frozen=options.exclude_frozen_parameters)
    ranks = source.world if source.stage else 1
    tell(f"{folder}: stage {source.stage}, {ranks} ranks, {len(tensors)} tensors", stderr=True)
    for name, tensor in tensors.items() if options.debug else ():
        tell(f"  {name} {tuple(tensor.shape)}: {tensor.parts()}", stderr=True)
    with bar("bytes") as progress:
        plan = write_shards(
            options.output_dir,
            tensors,
            source.aliases,
            limit=options.max_shard_size,
            safe=options.safe_serialization,
            dtype=DTYPES[options.dtype],
            progress=progress,
        )
    first, *more = (str(options.output_dir / file) for file in plan.shards)
    files = f"{first} and {len(more)} more, with an index" if more else first
    tag, seconds = options.tag or folder.resolve().name, time.monotonic() - started
    tell(f"wrote {files}: tag {tag}, {gibibytes(plan.total)} in {seconds:.1f} s", stderr=True)


if __name__ == "__main__":
    main()
