"""`python -m deepspeed.data`: `analyze` computes metrics of an indexed dataset, `inspect` shows what is in one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspeed.data.analyzer import ACCUMULATED, SINGLE, DataAnalyzer
from deepspeed.data.indexed_dataset import MMapIndexedDataset
from deepspeed.errors import DeepSpeedError, printable

__all__ = ["main"]


def _show(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _tokens(items: list[Any]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(each, dtype=np.int64)) for each in items]


def _analyze(args: argparse.Namespace) -> None:
    dataset = MMapIndexedDataset(args.data)

    def run(name: str, function: Any, kind: str) -> None:
        analyzer = DataAnalyzer(
            dataset,
            num_threads=args.threads,
            batch_size=args.batch_size,
            metric_names=[name],
            metric_functions=[function],
            metric_types=[kind],
            save_path=args.save,
            collate_fn=_tokens,
        )
        analyzer.run_map_reduce()
        _show(f"{name}: {Path(args.save, name)}")

    if "seqlen" in args.metric:
        run("seqlen", lambda batch: torch.tensor([len(each) for each in batch]), SINGLE)
    if "vocabularyrarity" in args.metric:
        size = 1 + max((int(each.max()) for each in dataset[:] if len(each)), default=0)
        run("vocabulary", lambda batch: torch.cat(batch).bincount(minlength=size), ACCUMULATED)
        counts = torch.from_numpy(
            np.array(MMapIndexedDataset(str(Path(args.save, "vocabulary", "vocabulary_metric_value")))[0], dtype=float)
        )
        rarity = -(counts.clamp(min=1) / counts.sum()).log()
        run("vocabularyrarity", lambda batch: torch.stack([rarity[each].sum() for each in batch]).long(), SINGLE)


def _inspect(args: argparse.Namespace) -> None:
    dataset = MMapIndexedDataset(args.data)
    sizes = dataset.sizes
    _show(f"{args.data}: memory-mapped, {np.dtype(dataset.dtype)}")
    _show(f"items: {len(dataset):,}; documents: {max(len(dataset.doc_idx) - 1, 0):,}")
    if len(sizes):
        _show(f"elements: {int(sizes.sum(dtype=np.int64)):,}; per item {sizes.min()} to {sizes.max()}")
    for number in range(min(args.items, len(dataset))):
        _show(f"{number}: {dataset[number].reshape(-1)[:16].tolist()}{' …' if dataset[number].size > 16 else ''}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 1 if its input was not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m deepspeed.data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    analyze = commands.add_parser("analyze", help="compute metrics of an indexed dataset for a curriculum")
    analyze.add_argument("data", help="path of the dataset, without .idx")
    analyze.add_argument("save", help="folder for the metrics")
    metrics = ["seqlen", "vocabularyrarity"]
    analyze.add_argument("--metric", nargs="+", choices=metrics, default=["seqlen"], help="what is computed")
    analyze.add_argument("--threads", type=int, default=1, help="processes")
    analyze.add_argument("--batch-size", type=int, default=256, help="samples per call of a metric")
    inspect = commands.add_parser("inspect", help="show what is in an indexed dataset")
    inspect.add_argument("data", help="path of the dataset, without .idx")
    inspect.add_argument("--items", type=int, default=3, help="how many items are shown")
    args = parser.parse_args(arguments)
    try:
        (_analyze if args.command == "analyze" else _inspect)(args)
    except (DeepSpeedError, OSError) as error:
        sys.stderr.write(f"python -m deepspeed.data {args.command}: {printable(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
