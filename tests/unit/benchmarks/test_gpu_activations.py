"""The script about inputs in host memory, as far as it goes without a device."""

from __future__ import annotations

from benchmarks.gpu_activations import main, table
from tests.harness import ranks


def test_the_table_compares_with_the_first():
    lines = table([("on the device", 0.1, 2**30, True), ("in host memory", 0.2, 2**29, False)], moved=10**9)
    assert "1.000      1.00                 equal" in lines[1]
    assert "200.0 ms     2.000      0.50           10.0  DIFFERENT" in lines[2]


@ranks(1, init=False)
def test_it_runs():
    assert main(["--device", "cpu", "--layers", "2", "--hidden", "64", "--tokens", "32", "--steps", "1"]) == 0
