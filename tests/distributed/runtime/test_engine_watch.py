"""What watches an engine: progress lines, CSV metrics, timers, overflow warnings, and nothing without being asked."""

from __future__ import annotations

import csv
import gc
import os
import re

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.events import PhaseBegan, StepFinished
from deepspeed.log import NOTICE
from deepspeed.runtime import engine as engine_module
from tests.harness import shared_ranks
from tests.told import Told

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
}


def run(config, steps=4):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, **config})
    for _ in range(2 * steps):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    return engine


@shared_ranks(2)
def test_csv_metrics_of_rank_0(tmp_path):
    engine = run({"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}})
    engine.destroy()
    dist.barrier()
    with open(tmp_path / "job" / "Train_Samples_lr.csv") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "lr"]
    assert [int(row[0]) for row in rows[1:]] == [8, 16, 24, 32]
    assert {float(row[1]) for row in rows[1:]} == {0.1}
    assert (tmp_path / "job" / "Train_Samples_train_loss.csv").exists()


def printed(config):
    """What a run writes to stdout."""
    read, write = os.pipe()
    kept = os.dup(1)
    os.dup2(write, 1)
    run(config)
    os.dup2(kept, 1)
    os.close(write)
    return os.read(read, 100_000).decode()


@shared_ranks(2)
def test_dump_state_tells_everything_once():
    text = printed({"dump_state": True, "vocabulary_size": 50257})
    if dist.get_rank() == 0:
        assert text.count("engine state") == 1
        assert "precision = fp32 parameters" in text
        assert "zero_optimization.stage = " in text
    else:
        assert text == ""


@shared_ranks(2)
def test_a_line_every_so_many_steps_on_rank_0():
    text = printed({"steps_per_print": 2, "wall_clock_breakdown": True})
    if dist.get_rank() == 0:
        assert "step 2 | loss" in text
        assert "step 4 | loss" in text
        assert "step 3" not in text
        assert "fwd" in text
    else:
        assert "step 2" not in text


@shared_ranks(1)
def test_nobody_listens_unless_the_config_asks():
    engine = run({})
    assert not engine.events.wants(PhaseBegan)
    assert not engine.events.wants(StepFinished)
    assert not engine.monitor.enabled


@shared_ranks(1)
def test_users_can_listen_and_write_events(tmp_path):
    engine = run({"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}, steps=1)
    heard = []
    with engine.events.subscribe(StepFinished, heard.append):
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
    assert heard[0].step == 2
    assert heard[0].applied
    assert heard[0].lr == (0.1,)
    engine.monitor.write_events([("Eval/accuracy", 0.5, 7)])
    engine.destroy()
    assert (tmp_path / "job" / "Eval_accuracy.csv").read_text().splitlines()[-1].startswith("7,")


@shared_ranks(2)
def test_a_run_is_one_line_at_its_start_and_one_at_its_end(tmp_path, monkeypatch):
    exits = []
    monkeypatch.setattr(engine_module.atexit, "register", exits.append)
    first = dist.get_rank() == 0
    for stage in (0, 3):
        sections = {"zero_optimization": {"stage": stage}}
        with Told(NOTICE) as lines:
            engine = run(sections, 2)
            start = [line for line in lines if "Linear: 5 parameters, 5 trained; 2 ranks (dp 2); " in line]
            assert len(start) == first
            assert all(
                f"ZeRO stage {stage}; fp32 parameters" in line and "bytes held by rank 0" in line for line in start
            )
            assert not any("ended at" in line or "precision:" in line for line in lines)
            engine.save_checkpoint(str(tmp_path / str(stage)))
            engine.load_checkpoint(str(tmp_path / str(stage)))
            pattern = rf"checkpoint 'global_step2' was loaded from \S+/{stage}/global_step2: [\d.]+ KiB in \d+\.\d s"
            assert len([line for line in lines if re.search(pattern, line)]) == first
            if stage:
                engine.destroy()
                engine.destroy()
            exits[-1]()  # the program ends, after `destroy` or without it
            end = [line for line in lines if "Linear: ended at step 2 after 16 samples, " in line]
            assert len(end) == first
    with Told(NOTICE) as lines:
        run({"log_level": "warning"}).destroy()
    assert lines == []


@shared_ranks(1)
def test_the_collector_is_off_while_an_engine_lives():
    first, second = run({"disable_python_gc": True}, 1), run({"disable_python_gc": True}, 1)
    assert not gc.isenabled()
    first.destroy()
    assert not gc.isenabled()
    second.destroy()
    assert gc.isenabled()


@shared_ranks(2)
def test_recording_of_communication_outlives_initialize_and_other_engines():
    comm.configure(enabled=True)
    run({})
    before = comm.get_comm_operation_count()
    assert before > 0
    run({"comms_logger": {"enabled": False}, "zero_optimization": {"stage": 3}})
    assert comm.get_comm_operation_count() > before
    comm.configure(enabled=False)
    comm.reset_log()
    run({})
    assert not comm.has_comm_data()


@shared_ranks(2)
def test_a_second_engine_does_not_silence_the_first():
    first = run({"comms_logger": {"enabled": True}})
    comm.reset_log()
    run({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["barrier"]}})
    comm.reset_log()
    for _ in range(2):
        first.backward(first(torch.ones(2, 4)).sum())
        first.step()
    assert comm.has_comm_data()
