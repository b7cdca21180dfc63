"""`python -m deepspeed.checkpoint inspect|verify|convert DIR`: look into checkpoints, check them, change their form."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deepspeed.checkpoint.formats.consolidate import parse_size
from deepspeed.checkpoint.tools import CHECKPOINTS, WEIGHTS, Conversion, convert, inspect, tell, verify
from deepspeed.errors import DeepSpeedError

_MOST_RANKS = 2**16


def _ranks(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:10]) <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks, expected 1 to {_MOST_RANKS}")
    return int(text)


def _size(text: str) -> str:
    try:
        parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m deepspeed.checkpoint", description="Look into checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("inspect", "what is in it"),
        ("verify", "is every byte what was written"),
        ("convert", "change its form"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("directory", help="folder of a tag, or of tags (then of `latest`)")
        command.add_argument("--tag", help="which tag")
        if name == "inspect":
            command.add_argument("--short", action="store_true", help="without the list of tensors")
        if name == "convert":
            _add_convert(command)
    return parser


def _add_convert(command: argparse.ArgumentParser) -> None:
    command.add_argument("output", help="folder to make: of the weights, or of a checkpoint's tag and `latest`")
    command.add_argument(
        "--to", choices=(*WEIGHTS, *CHECKPOINTS), default="fp32", help="weights in a dtype, or a checkpoint"
    )
    weights = command.add_argument_group("weights", "with --to fp32, fp16 or bf16")
    weights.add_argument("--max_shard_size", type=_size, help="bytes of a file of weights, 5GB unless given")
    weights.add_argument("--torch", action="store_true", help="weights as torch files, not safetensors")
    checkpoints = command.add_argument_group("checkpoints", "with --to deepspeed or native")
    checkpoints.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage of a checkpoint")
    checkpoints.add_argument("--ranks", type=_ranks, help="ranks of a checkpoint")
    checkpoints.add_argument(
        "--with-classes",
        action="store_true",
        help="store the loss scaler as DeepSpeed's object, which DeepSpeed itself needs at stage 3 in fp16",
    )


def _refuse_idle(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """An option that the wanted form has no use for is a mistake."""
    forms = {
        "--max_shard_size": (options.max_shard_size is not None, WEIGHTS),
        "--torch": (options.torch, WEIGHTS),
        "--stage": (options.stage is not None, ("deepspeed", "native")),
        "--ranks": (options.ranks is not None, ("deepspeed", "native")),
        "--with-classes": (options.with_classes, ("deepspeed",)),
    }
    for option, (given, uses) in forms.items():
        if given and options.to not in uses:
            parser.error(f"{option} has no meaning with --to {options.to}; it is for --to {', '.join(uses)}")


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.command == "inspect":
        return inspect(options.directory, options.tag, short=options.short)
    if options.command == "verify":
        return verify(options.directory, options.tag)
    _refuse_idle(parser, options)
    convert(
        Conversion(
            options.directory,
            options.output,
            to=options.to,
            tag=options.tag,
            max_shard_size=options.max_shard_size or "5GB",
            safe=not options.torch,
            stage=options.stage,
            ranks=options.ranks,
            with_classes=options.with_classes,
        )
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit status."""
    parser = _parser()
    try:
        return _run(parser, parser.parse_args(arguments))
    except DeepSpeedError as error:
        tell(error, style="red", stderr=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
