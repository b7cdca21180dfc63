"""`ds_io` and `ds_nvme_tune`: they measure, refuse what cannot work, and leave nothing behind, however they end."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepspeed.config.memory import AioConfig
from deepspeed.io import ds_io, ds_nvme_tune
from deepspeed.io import trial as runs
from deepspeed.io.trial import ENGINES, Trial

PATIENCE = 600  # seconds: a busy machine is slow, not wrong
SMALL = ["--io_size", "64K", "--loops", "1", "--block_size", "4K"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [[], ["--read"], ["--read", "--different_file_each_iteration"]], ids=str)
def test_every_engine_moves_the_bytes(tmp_path, capsys, engine, options):
    assert ds_io.main(["--folder", str(tmp_path), *SMALL, "--validate", "--engine", engine, *options]) == 0
    way = "read" if "--read" in options else "write"
    assert re.match(
        rf"{way}: \d+\.\d\d GB/s  \({engine}, 64K x 1, blocks of 4K, queue depth 32, 1 thread\)", told(capsys)
    )
    assert list(tmp_path.iterdir()) == []


def told(capsys) -> str:
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--single_submit", "--sequential_requests", "--io_parallel", "2"],
        ["--warmup_loops", "0"],
        ["--warmup_loops", "2", "--include_warmup_time", "--different_file_each_iteration"],
        ["--engine", "torch_io", "--torch_legacy_save"],
        ["--engine", "torch_fastio", "--torch_legacy_save", "--fast_io_size", "16K"],
    ],
    ids=str,
)
def test_options(tmp_path, capsys, options):
    assert ds_io.main(["--folder", str(tmp_path), *SMALL, "--validate", *options]) == 0
    assert "GB/s" in told(capsys)


def test_every_option_reaches_the_trial(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(ds_io, "speed", lambda *given: seen.append(given) or 1.0)
    words = "--read --single_submit --sequential_requests --validate --include_warmup_time".split()
    words += "--different_file_each_iteration --use_accelerator_pin_memory --multi_process 3".split()
    words += "--io_size 1M --block_size 8K --queue_depth 5 --io_parallel 6 --loops 7 --warmup_loops 8".split()
    assert ds_io.main(["--folder_to_device_mapping", "/a:0", "/b:1", *words, "--fast_io_size", "1G"]) == 0
    (trial, folders, processes), *_ = seen
    assert (folders, processes) == ([("/a", 0), ("/b", 1)], 3)
    assert trial == Trial(
        read=True, io_size=2**20, block_size=8192, queue_depth=5, io_parallel=6, single_submit=True,
        sequential_requests=True, loops=7, warmup_loops=8, include_warmup_time=True, validate=True,
        different_file_each_iteration=True, use_accelerator_pin_memory=True, fast_io_size=2**30,
    )  # fmt: skip
    assert (trial.files, trial.counted) == (15, 15)


@pytest.mark.slow
def test_several_processes_and_folders(tmp_path, capsys):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    mapping = [f"{folder}:0" for folder in folders]
    assert ds_io.main(["--folder_to_device_mapping", *mapping, *SMALL, "--validate"]) == 0
    assert "2 processes" in told(capsys)
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


@pytest.mark.slow
def test_a_failure_of_one_process_is_the_error_and_ends_all(tmp_path, monkeypatch):
    with runs.own_folder(str(tmp_path)) as made:
        tasks = [(made, 0), (str(tmp_path / "gone"), 0)]
        with pytest.raises(OSError, match="gone"):
            runs._together(Trial(False, 65536, loops=1), tasks)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--io_size"),
        (["--io_size", "1M"], "either --folder or --folder_to_device_mapping"),
        (["--folder", "/tmp", "--folder_to_device_mapping", "/tmp:0", "--io_size", "1M"], "either"),
        (["--folder_to_device_mapping", "/tmp", "--io_size", "1M"], "expected FOLDER:DEVICE"),
        (["--folder", "/tmp", "--io_size", "0"], "whole number from 1 up"),
        (["--folder", "/tmp", "--io_size", "1.5"], "'1.5' is 1.5 bytes"),
        (["--folder", "/tmp", "--io_size", "many"], "such as 4096, 64K, 1M"),
        (["--folder", "/tmp", "--io_size", "1M", "--queue_depth", "-1"], "found '-1'"),
        (["--folder", "/tmp", "--io_size", "1M", "--engine", "x"], "aio_handle"),
        (["--folder", "/tmp", "--io_size", "1M", "--torch_legacy_save"], "needs --engine torch_io"),
        (["--folder", "/tmp", "--io_size", "1M", "--use_gds"], "GPUDirect Storage needs --gpu"),
        (["--folder", "/tmp", "--io_size", "1M", "--slow_bounce_buffer"], "needs --gpu"),
        (["--folder", "/tmp", "--io_size", "1M", "--engine", "aio_basic", "--io_parallel", "2"], "--io_parallel"),
    ],
)
def test_what_cannot_work_is_refused_with_its_name(capsys, words, message):
    with pytest.raises(SystemExit) as end:
        ds_io.main(words)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_absent_or_too_small_is_named(tmp_path, capsys):
    assert ds_io.main(["--folder", str(tmp_path / "gone"), "--io_size", "1M"]) == 1
    assert str(tmp_path / "gone") in capsys.readouterr().err
    assert ds_io.main(["--folder", str(tmp_path), "--io_size", "900T"]) == 1
    assert f"{900 * 2**40} bytes are needed" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert ds_io.main(["--folder", str(tmp_path / "file"), "--io_size", "4K"]) == 1
    assert "no folder can be made in it: Not a directory" in capsys.readouterr().err


def test_a_folder_of_its_own_is_private_and_goes(tmp_path):
    with pytest.raises(KeyError), runs.own_folder(str(tmp_path)) as made:
        assert stat.S_IMODE(os.stat(made).st_mode) == 0o700
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_folder_goes_with_what_a_late_request_makes_in_it(tmp_path, monkeypatch):
    late, remove = ["1.bin", "2.bin"], os.rmdir

    def rmdir(path, **options):
        if late:
            (made / late.pop()).write_text("")
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    with runs.own_folder(str(tmp_path)) as folder:
        made = Path(folder)
    assert late == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_program_that_is_stopped_removes_its_files(tmp_path, number, status):
    (tmp_path / "mine").write_text("stays")
    command = [sys.executable, "-m", "deepspeed.io.ds_io", "--folder", str(tmp_path), "--io_size", "1M"]
    program = subprocess.Popen([*command, "--loops", "100000000"], stderr=subprocess.DEVNULL)
    try:
        while not list(tmp_path.glob("ds_io-*/*.bin")):  # the program's end would end this, too
            assert program.poll() is None
            time.sleep(0.01)
        program.send_signal(number)
        assert program.wait(PATIENCE) == status
    finally:
        program.kill()
        program.wait()
    left = {path.name[:6] for path in tmp_path.iterdir()}
    assert left == ({"mine", "ds_io-"} if number == signal.SIGKILL else {"mine"})


@pytest.fixture
def sweep(tmp_path):
    path = tmp_path / "sweep.json"
    path.write_text(
        json.dumps({"block_size": ["4K"], "queue_depth": [2, 2], "single_submit": [False], "io_parallel": [1, 2]})
    )
    return str(path)


def test_tuning_writes_a_section_that_the_config_takes(tmp_path, sweep, capsys):
    folder, logs = tmp_path / "disk", tmp_path / "logs" / "deep"
    folder.mkdir()
    words = ["--nvme_dir", str(folder), "--io_size", "64K", "--log_dir", str(logs), "--sweep_config", sweep]
    assert ds_nvme_tune.main([*words, "--verbose"]) == 0
    captured = capsys.readouterr()
    section = json.loads((logs / "aio.json").read_text())["aio"]
    config = AioConfig(**section)
    assert (config.block_size, config.queue_depth) == (4096, 2)
    assert set(section) < set(AioConfig.model_fields)
    results = json.loads((logs / "results.json").read_text())
    assert len(results) == 4  # two kinds of requests × two numbers of threads, what was listed twice once
    assert all(row["read"] > 0 and row["write"] > 0 for row in results)
    assert "Best performance (GB/sec): read = " in captured.out
    assert f"written to {logs / 'aio.json'}" in captured.out
    assert "4/4 block size 4K" in captured.err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("way", ["read", "write"])
def test_tuning_for_one_direction(tmp_path, sweep, capsys, way):
    words = ["--nvme_dir", str(tmp_path), "--io_size", "64K", "--log_dir", str(tmp_path), "--sweep_config", sweep]
    assert ds_nvme_tune.main([*words, f"--no_{'write' if way == 'read' else 'read'}"]) == 0
    assert re.search(rf"\(GB/sec\): {way} = \d+\.\d\d\n", told(capsys))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds list"),
        ('{"depth": [1]}', "the key 'depth'; expected some of block_size"),
        ('{"queue_depth": []}', "queue_depth of"),
        ('{"queue_depth": 3}', "expected a list"),
        ('{"queue_depth": [0]}', "queue_depth: found 0, expected a whole number from 1 up"),
        ('{"single_submit": ["yes"]}', "single_submit: found 'yes', expected true or false"),
        ('{"io_parallel": [true]}', "io_parallel: found True"),
        ('{"io_parallel": [[1]]}', "io_parallel: found [1]"),
        ('{"block_size": [true]}', "block_size: found True, expected a number of bytes"),
    ],
)
def test_a_sweep_that_is_none_is_refused(tmp_path, capsys, content, message):
    (tmp_path / "sweep.json").write_text(content)
    words = ["--nvme_dir", str(tmp_path), "--log_dir", str(tmp_path / "logs")]
    assert ds_nvme_tune.main([*words, "--sweep_config", str(tmp_path / "sweep.json")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


def test_what_cannot_be_tuned_is_refused(tmp_path, capsys):
    for words, message in ((["--no_read", "--no_write"], "nothing to measure"), (["--gds"], "needs --gpu")):
        with pytest.raises(SystemExit):
            ds_nvme_tune.main(["--nvme_dir", str(tmp_path), *words])
        assert message in capsys.readouterr().err


def test_a_page_cache_that_may_not_be_flushed_is_told(tmp_path, capsys, monkeypatch, sweep):
    monkeypatch.setattr(ds_nvme_tune, "_DROP_CACHES", tmp_path / "gone" / "drop_caches")
    words = ["--nvme_dir", str(tmp_path), "--log_dir", str(tmp_path / "logs"), "--sweep_config", sweep]
    assert ds_nvme_tune.main([*words, "--flush_page_cache"]) == 1
    assert "only root may do that" in capsys.readouterr().err
