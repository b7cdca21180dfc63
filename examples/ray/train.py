"""The elastic example as Ray Train starts it, unchanged: every worker of a TorchTrainer calls its `main`.

python examples/ray/train.py --workers 2 --checkpoints /shared/checkpoints
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

ELASTIC = Path(__file__).resolve().parents[1] / "elastic"


def on_worker(settings: dict[str, Any]) -> None:
    """What each worker does; Ray has joined its process group by then."""
    spec = importlib.util.spec_from_file_location("elastic_example", ELASTIC / "train.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(settings["words"])


def workers(text: str) -> int | tuple[int, int]:
    """ "2" → 2, "1:4" → (1, 4)."""
    fewest, sign, most = text.partition(":")
    return (int(fewest), int(most)) if sign else int(fewest)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--workers", type=workers, default=2, help="ranks; MIN:MAX lets Ray change their number")
    add("--gpu", action="store_true", help="give each worker a GPU")
    add("--checkpoints", required=True, help="folder of the checkpoints, seen by all hosts")
    add("--restarts", type=int, default=3, help="failures after which the job is given up")
    args, words = parser.parse_known_args()
    folder = Path(args.checkpoints).resolve()
    words = [f"--deepspeed_config={ELASTIC / 'ds_config.json'}", f"--checkpoints={folder}", *words]
    trainer = TorchTrainer(
        on_worker,
        train_loop_config={"words": words},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(
            storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=args.restarts)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
