"""`python -m deepspeed.checkpoint.ds_to_universal`: make a universal checkpoint of a tag's directory."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deepspeed.checkpoint.formats.universal.convert import convert
from deepspeed.checkpoint.storage.durable import gibibytes
from deepspeed.checkpoint.storage.manager import check_directory
from deepspeed.checkpoint.tools import bar, tell
from deepspeed.errors import DeepSpeedError

__all__ = ["main", "parse_arguments"]


def _workers(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:6]) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of workers, expected 1 to 1024")
    return int(text)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make a universal checkpoint.")
    parser.add_argument("--input_folder", required=True, help="folder of the tag")
    parser.add_argument("--output_folder", required=True, help="folder of the universal checkpoint, a new one")
    parser.add_argument(
        "--num_extract_workers", type=_workers, default=4, help="parameters that are converted at a time"
    )
    parser.add_argument(
        "--num_merge_workers", type=_workers, default=2, help="as --num_extract_workers; the larger counts"
    )
    parser.add_argument("--keep_temp_folder", action="store_true", help="accepted; no temporary files are made")
    parser.add_argument(
        "--no_strict", dest="strict", action="store_false", help="allow model-parallel ranks without merge rules"
    )
    parser.add_argument("--inject_missing_state", action="store_true", help="accepted; what is missing is always added")
    return parser.parse_args(arguments)


def main(args: argparse.Namespace) -> None:
    """Convert as the arguments say."""
    check_directory(args.input_folder, "the input folder")
    workers = max(args.num_extract_workers, args.num_merge_workers)
    started = time.monotonic()
    with bar("parameters") as progress:
        made = convert(args.input_folder, args.output_folder, workers=workers, strict=args.strict, progress=progress)
    size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
    tag, seconds = Path(args.input_folder).resolve().name, time.monotonic() - started
    tell(f"wrote {made}: universal checkpoint of tag {tag}, {gibibytes(size)} in {seconds:.1f} s")


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except DeepSpeedError as error:
        tell(error, style="red", stderr=True)
        sys.exit(1)
