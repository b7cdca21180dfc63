"""What routers did, as numbers, as a table and as a picture."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.monitor import CSVConfig
from deepspeed.events import EventStream, ExpertsUsed, LayerUse
from deepspeed.moe.show import main, read, table
from deepspeed.monitor.monitor import MonitorSubscriber, csvMonitor


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
def test_load_and_entropy(counts):
    use = LayerUse(tuple(counts), 0)
    assert -1e-9 <= use.entropy <= 1 + 1e-9
    if any(counts):
        assert sum(use.loads) == pytest.approx(len(counts))
    else:
        assert set(use.loads) == {0.0}


def test_entropy_of_the_extremes():
    assert LayerUse((5, 5, 5, 5), 0).entropy == pytest.approx(1)
    assert LayerUse((7, 0, 0), 0).entropy == 0
    assert LayerUse((7,), 0).entropy == 0


def written(folder):
    """Two steps of two layers, by way of the monitor."""
    monitor = csvMonitor(CSVConfig(enabled=True, output_path=str(folder), job_name="job"))
    events = EventStream()
    with_monitor = MonitorSubscriber(monitor).attach(events)
    for step, counts in enumerate(((4, 4), (6, 2)), start=1):
        layers = {"model.layers.9.mlp": LayerUse(counts, 2), "model.layers.10.mlp": LayerUse((0, 8), 0)}
        events.emit(ExpertsUsed(step, 16 * step, layers))
    with_monitor.close()
    return folder / "job"


def test_the_files_of_a_monitor_become_a_table_and_a_picture(tmp_path, capsys):
    folder = written(tmp_path)
    (folder / "Train_Samples_lr.csv").write_text("step,lr\n16,0.1\n")
    layers = read(folder)
    assert list(layers) == ["model.layers.9.mlp", "model.layers.10.mlp"]
    nine = layers["model.layers.9.mlp"]
    assert nine.loads == {0: {16: 1.0, 32: 1.5}, 1: {16: 1.0, 32: 0.5}}
    assert nine.dropped == {16: 0.25, 32: 0.25}
    lines = table(layers).splitlines()
    assert lines[1].split() == ["model.layers.9.mlp", "2", "0.811", "1.50", "0.50", "25.0", "%"]
    assert lines[2].split() == ["model.layers.10.mlp", "2", "0.000", "2.00", "0.00", "0.0", "%"]
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    pytest.importorskip("matplotlib")
    assert main([str(folder), "--plot", str(tmp_path / "router.svg")]) == 0
    assert "<svg" in (tmp_path / "router.svg").read_text()


def test_what_cannot_be_shown_is_told(tmp_path, capsys, monkeypatch):
    assert main([str(tmp_path)]) == 1
    assert "no files Train_Experts_*.csv here" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 1
    assert "absent" in capsys.readouterr().err
    folder = written(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(folder), "--plot", str(tmp_path / "x.svg")]) == 1
    assert "needs matplotlib" in capsys.readouterr().err
    (folder / "Train_Experts_a_entropy.csv").write_text("step,entropy\nnot,a number\n")
    assert main([str(folder)]) == 1
    assert "not" in capsys.readouterr().err
