"""Random settings, and the numbers of DeepSpeed 0.19.6 for them, kept in tests/fixtures/data-efficiency-0.19.6.json.

To make these again: `python -m tests.unit.data.oracle <folder of DeepSpeed's sources>`, in a Python that has what
DeepSpeed imports; the library here has the same import name, so that the file runs without it.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

FIXTURE = Path(__file__).parents[2] / "fixtures" / "data-efficiency-0.19.6.json"


def schedules(count: int = 1000) -> list[tuple[dict[str, Any], list[int]]]:
    """Random schedules of a curriculum, each with steps to ask for."""
    chance = random.Random(1)
    found = []
    for _ in range(count):
        kind = chance.choice(["fixed_linear", "fixed_root", "fixed_discrete"])
        low = chance.randint(1, 300)
        high = low + chance.randint(0, 900)
        total = chance.randint(1, 200)
        inner: dict[str, Any] = {"total_curriculum_step": total, "difficulty_step": chance.choice([1, 2, 8, 24])}
        if kind == "fixed_root":
            inner["root_degree"] = chance.randint(1, 5)
        if kind == "fixed_discrete":
            ends = sorted(chance.sample(range(1, 200), chance.randint(1, 5)))
            inner = {"difficulty": sorted(chance.sample(range(1, 500), len(ends) + 1)), "max_step": ends}
            low, high = inner["difficulty"][0], inner["difficulty"][-1]
        steps = [0, 1, *(chance.randint(1, 2 * total) for _ in range(6)), total, total + 1]
        found.append(
            ({"min_difficulty": low, "max_difficulty": high, "schedule_type": kind, "schedule_config": inner}, steps)
        )
    return found


def main(source: str) -> None:
    sys.path.insert(0, source)
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    found: dict[str, Any] = {}
    found["schedules"] = [
        [CurriculumScheduler(config).get_difficulty(step) for step in steps] for config, steps in schedules()
    ]
    FIXTURE.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
