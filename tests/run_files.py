"""Writes files of events as a long run of many ranks leaves them, with all that a page must bear."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOSTILE = "</script><script>window.hit=1</script><img src=x onerror='window.hit=1'>\x1b[31mred\x07"


def steps(last: int, rank: int = 0, seed: int = 0, first: int = 1) -> Iterator[dict[str, Any]]:
    """The records of a rank; rank 7 is slow."""
    rng = random.Random(seed * 10_000 + rank)
    slow = 1.4 if rank == 7 else 1.0
    for step in range(first, last + 1):
        busy = 40 * (1 + rng.random() / 20) * slow
        noise = rng.random() / 5
        record = {
            "kind": "step",
            "t": 1.7e9 + step,
            "step": step,
            "samples": 8 * step,
            "tokens": 8192,
            "applied": True,
            "lr": 1e-3 * min(step / 100, 1),
            "loss": 2 + 8 / math.sqrt(step) + noise,
            "norm": 1 + noise,
            "scale": 65536.0,
            "wall_ms": 150 + 10 * noise,
            "ms": {"forward": busy, "backward": 2 * busy, "backward_inner": busy, "step": 20.0},
        }
        if step % 50 == 1:
            record["memory"] = {"allocated": 5 << 30, "max_allocated": 7 << 30, "reserved": 8 << 30, "host": 1 << 30}
            sent = {"op": "all_gather", "group": "dp", "ranks": 8, "count": 4, "bytes": 1 << 26}
            record["comm"] = [{**sent, "within": 3 << 24, "between": step << 12}]
        yield record


def write_run(folder: Path, name: str, count: int, ranks: int = 1, tail: int = 64, seed: int = 0) -> None:
    """`count` steps of rank 0, and the last ones of the others."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"data": ranks, "parameters": 10**9, "peak_flops": 1e15, "device": "cuda:0", "model": HOSTILE}
    for rank in range(ranks):
        head = {"kind": "run", "t": 1.7e9, "schema": 1, "rank": rank, "world": ranks, **facts}
        mine = list(steps(count, rank, seed, max(count - tail, 1) if rank else 1))
        kinds = {"parameters": 2 << 30, "gradients": 1 << 30, "moments": 4 << 30}
        after = [
            {"kind": "memory", "t": 1.7e9, "step": 1, "kinds": kinds},
            {"kind": "overflow", "t": 1.7e9, "step": count // 3, "before": 65536.0, "after": 32768.0},
            {
                "kind": "checkpoint",
                "t": 1.7e9,
                "step": count // 2,
                "state": "finished",
                "tag": "global_step",
                "seconds": 2,
            },
            {"kind": "hang", "t": 1.7e9, "step": count // 4, "text": HOSTILE},
        ]
        lines = [json.dumps(each) for each in (head, *mine, *after)]
        (folder / f"{name}.rank{rank:05d}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
