"""The table and the curves of losses."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from benchmarks.convergence import WAYS, draw, table
from deepspeed.config import load


def test_the_last_tenth_is_compared_with_the_plain_one():
    found = {"AdamW": [[4.0] * 18 + [2.0, 2.0], [4.0] * 18 + [1.0, 3.0]], "MiCS": [[5.0] * 18 + [2.0, 2.2]]}
    assert table(found)[1].split() == ["AdamW", "2.0000", "1.0000"]
    assert table(found)[2].split() == ["MiCS", "2.1000", "1.0500"]
    lines = ET.fromstring(draw(found)).findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.get("points").split()) for line in lines] == [20, 20]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_a_config(way):
    base, optimizer, zero = WAYS[way]
    assert base in WAYS or base == "LAMB"
    params = {
        name: round(10 * value) if 0 < value < 1 and "step" in name else value
        for name, value in optimizer["params"].items()
    }
    load({"train_micro_batch_size_per_gpu": 1, "optimizer": {**optimizer, "params": params}, "zero_optimization": zero})
