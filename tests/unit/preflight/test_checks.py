"""The judgement of every check over facts of many ranks: nothing wrong, and one thing wrong, named."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.preflight.check import Level
from deepspeed.preflight.checks import CHECKS
from deepspeed.preflight.checks.folder import (
    FolderCheck,
    FolderFact,
    SharedFolderCheck,
    SharedFolderFact,
    _make_file,
    folder_of,
)
from deepspeed.preflight.checks.machine import (
    DeviceFact,
    DevicesCheck,
    MemoryCheck,
    MemoryFact,
    SharedMemoryCheck,
    ShmFact,
)
from deepspeed.preflight.checks.software import (
    CodeCheck,
    CodeFact,
    ConfigCheck,
    ConfigFact,
    EnvironmentCheck,
    EnvironmentFact,
    OpsCheck,
    OpsFact,
    VersionFact,
    VersionsCheck,
    driver_version,
)
from deepspeed.preflight.checks.speed import ClockCheck, ClockFact, ComputeCheck, ComputeFact, offset_of
from tests.unit.preflight.jobs import good, job, only

GB = 10**9


def test_every_check_has_a_name_of_its_own():
    assert len({check.name for check in CHECKS}) == len(CHECKS)


# ---- versions


def versions(**changed):
    return VersionFact({"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.20.0", "numpy": "2.0", **changed})


@given(st.integers(1, 5000))
def test_equal_versions(count):
    found = VersionsCheck().judge(job(lambda rank: versions(), count))
    assert good(found)
    assert only(found).what == "python 3.11.7, torch 2.13.0, deepspeed 0.20.0"


@pytest.mark.parametrize(("name", "level"), [("torch", Level.PROBLEM), ("numpy", Level.WARNING)])
def test_another_version_on_one_host(name, level):
    odd = {rank: versions(**{name: "1.9"}) for rank in range(8, 16)}
    finding = only(VersionsCheck().judge(job(lambda rank: versions(), 64, odd)))
    assert finding.level is level
    assert finding.ranks == tuple(range(8, 16))
    assert f"{name} is 1.9 for ranks 8-15 on host h1" in finding.what
    assert name in finding.advice


def test_a_library_that_one_rank_lacks():
    finding = only(VersionsCheck().judge(job(lambda rank: versions(), 4, {2: versions(numpy=None)})))
    assert "numpy is absent for rank 2 on host h0, and 2.0 for the others" in finding.what


def test_the_driver_tells_its_version(tmp_path):
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC version: 12\n")
    assert driver_version(file) == "550.54.15"
    file.write_text("")
    assert driver_version(file) is None


# ---- config


def config(stage=1, **changed):
    fact = ConfigFact("ds.json", digest=f"digest{stage}", values={"zero_optimization.stage": str(stage), "x": "1"})
    return replace(fact, **changed)


def test_equal_configs():
    assert good(ConfigCheck().judge(job(lambda rank: config(), 2000)))


def test_another_config_on_one_rank_names_the_key():
    finding = only(ConfigCheck().judge(job(lambda rank: config(), 32, {17: config(3)})))
    assert finding.level is Level.PROBLEM
    assert finding.ranks == (17,)
    assert finding.what == "rank 17 on host h2 has another config: zero_optimization.stage is 3, not 1"


def test_a_config_that_differs_where_nobody_told_its_values():
    finding = only(ConfigCheck().judge(job(lambda rank: config(), 32, {17: config(3, values={})})))
    assert finding.what == "rank 17 on host h2 has another config"


def test_a_host_without_the_file():
    absent = {rank: ConfigFact("ds.json", error="there is no such file") for rank in range(8, 16)}
    finding = only(ConfigCheck().judge(job(lambda rank: config(), 24, absent)))
    assert finding.level is Level.PROBLEM
    assert "ranks 8-15 on host h1: there is no such file" in finding.what
    assert finding.advice == "give all hosts the same file"
    everywhere = only(ConfigCheck().judge(job(lambda rank: absent[8], 4)))
    assert everywhere.advice == "correct the config"


def test_what_the_engine_would_refuse_is_told_once():
    found = ConfigCheck().judge(job(lambda rank: config(problems=["train_batch_size: no"], notes=["x: idle"]), 16))
    assert [(each.level, each.what) for each in found] == [
        (Level.PROBLEM, "ds.json: train_batch_size: no"),
        (Level.WARNING, "x: idle"),
    ]


def test_no_config_at_all():
    assert only(ConfigCheck().judge(job(lambda rank: ConfigFact(), 4))).level is Level.WARNING


# ---- code


def code(**changed):
    return replace(
        CodeFact("train.py", "script", "train.py", "s", "b", "l", {"train.py": "s", "model.py": "m"}), **changed
    )


def test_equal_code():
    assert good(CodeCheck().judge(job(lambda rank: code(), 3000)))


def test_another_script_on_one_host():
    odd = {rank: code(script="other", beside="other", files={"train.py": "x"}) for rank in range(8)}
    finding = only(CodeCheck().judge(job(lambda rank: code(), 24, odd)))
    assert (finding.level, finding.ranks) == (Level.PROBLEM, tuple(range(8)))
    assert finding.what == "ranks 0-7 on host h0 have another train.py"


def test_another_module_beside_the_script_is_named():
    odd = {9: code(beside="other", files={"train.py": "s", "model.py": "x", "new.py": "n"})}
    finding = only(CodeCheck().judge(job(lambda rank: code(), 24, odd)))
    assert finding.level is Level.WARNING
    assert finding.what == "rank 9 on host h1 has other Python files beside the script: model.py, new.py"


def test_a_script_that_a_host_lacks_and_another_copy_of_the_package():
    odd = {5: code(file=None, script=None, beside=None), 6: code(library="other")}
    found = CodeCheck().judge(job(lambda rank: code(), 8, odd))
    assert {finding.ranks for finding in found} == {(5,), (6,)}
    assert {finding.level for finding in found} == {Level.PROBLEM}


def test_no_script():
    assert only(CodeCheck().judge(job(lambda rank: CodeFact(library="l"), 2))).level is Level.WARNING


# ---- devices and memory


def device(rank, **changed):
    return replace(DeviceFact("cuda", 8, rank % 8, "H200", f"GPU-{rank % 8}"), **changed)


@given(st.integers(1, 2000))
def test_one_rank_on_each_device(count):
    assert good(DevicesCheck().judge(job(device, count)))


def test_two_ranks_on_one_device():
    finding = only(DevicesCheck().judge(job(device, 16, {11: device(11, identity="GPU-2")})))
    assert (finding.level, finding.ranks) == (Level.PROBLEM, (10, 11))
    assert "share the device GPU-2" in finding.what


def test_too_few_devices_another_kind_and_no_device():
    found = DevicesCheck().judge(
        job(device, 16, {7: device(7, count=7, name=None, identity=None), 9: device(9, name="A100")})
    )
    assert [(finding.level, finding.ranks) for finding in found] == [(Level.WARNING, (9,)), (Level.PROBLEM, (7,))]
    found = DevicesCheck().judge(job(device, 16, {3: DeviceFact("cpu", 1, 3)}))
    assert [(finding.level, finding.ranks) for finding in found] == [(Level.PROBLEM, (3,))]


def test_cores_have_no_such_limit():
    assert good(DevicesCheck().judge(job(lambda rank: DeviceFact("cpu", 1, rank), 16)))


def test_memory():
    def fact(rank):
        return MemoryFact(900 * GB, 140 * GB, 139 * GB)

    assert good(MemoryCheck().judge(job(fact, 64)))
    odd = {13: replace(fact(13), device_free=20 * GB)}
    finding = only(MemoryCheck().judge(job(fact, 64, odd)))
    assert (finding.level, finding.ranks) == (Level.WARNING, (13,))
    assert "20.00 GB of 140.00 GB" in finding.what
    odd = {rank: replace(fact(rank), host_free=2 * GB) for rank in range(8, 16)}
    finding = only(MemoryCheck().judge(job(fact, 64, odd)))
    assert finding.what == "host h1 has 2.00 GB free for 8 ranks"


@given(st.integers(0, 2**40), st.integers(1, 16), st.booleans())
def test_shared_memory(free, count, nccl):
    found = SharedMemoryCheck().judge(job(lambda rank: ShmFact(free, free, nccl), count, per_host=16))
    level = only(found).level
    if free >= 2**30:
        assert level is Level.OK
    elif nccl and count > 1 and free < count * 2**25:
        assert level is Level.PROBLEM
        assert "/dev/shm" in only(found).what
    assert not (level is Level.PROBLEM and not nccl)


def test_the_64_mebibytes_of_a_container_are_too_few_for_eight_ranks():
    docker = 64 * 2**20
    odd = {rank: ShmFact(docker, docker, True) for rank in range(8, 16)}
    finding = only(SharedMemoryCheck().judge(job(lambda rank: ShmFact(8 * GB, 8 * GB, True), 32, odd)))
    assert (finding.level, finding.ranks) == (Level.PROBLEM, tuple(range(8, 16)))
    assert "--shm-size" in finding.advice


# ---- the checkpoint folder


def folder(rank, **changed):
    looked = FolderFact("/ckpt", "--checkpoint", None, 500 * GB, 2e9)
    return replace(looked, **changed) if rank % 8 == 0 else FolderFact(looked=False)


def test_a_good_folder():
    assert good(FolderCheck().judge(job(folder, 4000)))


@pytest.mark.parametrize(
    ("changed", "level", "told"),
    [
        ({"error": "Permission denied (/ckpt)"}, Level.PROBLEM, "cannot write to /ckpt: Permission denied"),
        ({"error": "No space left on device"}, Level.PROBLEM, "No space left"),
        ({"free": GB}, Level.WARNING, "only 1.00 GB free"),
        ({"free": GB, "needed": 2 * GB}, Level.PROBLEM, "1.00 GB free, and a checkpoint takes about 2.00 GB"),
        ({"free": 3 * GB, "needed": 2 * GB}, Level.OK, ""),
        ({"speed": 1e6}, Level.WARNING, "only 1.0 MB/s"),
    ],
)
def test_a_folder_that_one_host_cannot_use(changed, level, told):
    finding = only(FolderCheck().judge(job(folder, 32, {8: folder(8, **changed)})))
    assert finding.level is level
    assert told in finding.what
    if level is not Level.OK:
        assert finding.ranks == (8,)
        assert finding.advice


def test_which_folder():
    assert folder_of("/a", ["--output_dir", "/b"]) == ("/a", "--checkpoint")
    assert folder_of(None, ["--lr", "1", "--output_dir=/b"])[0] == "/b"
    assert folder_of(None, ["--save_dir", "/c"])[0] == "/c"
    assert folder_of(None, ["--save_dir"])[1].startswith("the working folder")


def test_a_folder_that_is_not_shared():
    def fact(rank):
        return SharedFolderFact(True if rank % 8 == 0 else None)

    assert good(SharedFolderCheck().judge(job(fact, 800)))
    finding = only(SharedFolderCheck().judge(job(fact, 24, {16: SharedFolderFact(False)})))
    assert (finding.level, finding.ranks) == (Level.WARNING, (16,))
    assert finding.what == "rank 16 on host h2 does not see what rank 0 writes to the folder"
    own = job(lambda rank: SharedFolderFact(rank == 0 if rank % 8 == 0 else None, local=True), 24)
    assert good(SharedFolderCheck().judge(own))
    assert good(SharedFolderCheck().judge(job(lambda rank: SharedFolderFact(), 8)))
    assert good(SharedFolderCheck().judge(job(fact, 8)))


# ---- clock, compute, ops, environment


@given(st.integers(-(10**12), 10**12), st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)), min_size=1))
def test_the_offset_is_within_what_is_told_of_its_exactness(ahead, delays):
    start, trips = 10**15, []
    for there, back in delays:
        trips.append((start + ahead, start + there, start + there + back + ahead))
        start += there + back
    found = offset_of(trips)
    assert abs(found.ahead - ahead / 1e9) <= found.exact + 1e-6
    assert found.exact <= min(there + back for there, back in delays) / 2e9 + 1e-9


@pytest.mark.parametrize(
    ("ahead", "exact", "level"),
    [(0.1, 0.0, Level.OK), (2.0, 1.8, Level.OK), (-2.0, 0.01, Level.WARNING), (3600.0, 0.01, Level.PROBLEM)],
)
def test_a_skewed_clock(ahead, exact, level):
    def fact(rank):
        return ClockFact(0.001) if rank % 8 == 0 else ClockFact()

    finding = only(ClockCheck().judge(job(fact, 800, {16: ClockFact(ahead, exact)})))
    assert finding.level is level
    if level is not Level.OK:
        assert finding.ranks == (16,)
        assert "rank 16 on host h2" in finding.what
        assert ("behind" if ahead < 0 else "ahead of") in finding.what


def test_one_host_has_one_clock():
    assert good(ClockCheck().judge(job(lambda rank: ClockFact(0.0) if rank == 0 else ClockFact(), 8)))


@pytest.mark.parametrize(("part", "level"), [(0.9, Level.OK), (0.3, Level.WARNING), (0.05, Level.PROBLEM)])
def test_a_rank_that_computes_slowly(part, level):
    finding = only(ComputeCheck().judge(job(lambda rank: ComputeFact(1e14), 1024, {700: ComputeFact(part * 1e14)})))
    assert finding.level is level
    if level is not Level.OK:
        assert finding.ranks == (700,)
        assert "rank 700 on host h87" in finding.what


def test_ops():
    def fact(rank):
        return OpsFact({"adam": "fused", "cpu_adam": "native"}, {}, True)

    assert good(OpsCheck().judge(job(fact, 100)))
    odd = {3: OpsFact({"adam": "fused", "cpu_adam": "torch"}, {"cpu_adam.native": "no compiler"}, True)}
    found = OpsCheck().judge(job(fact, 16, odd))
    assert {finding.level for finding in found} == {Level.WARNING}
    assert {finding.ranks for finding in found} == {(3,)}
    assert any("no compiler" in finding.what for finding in found)
    assert any("without the compiled step" in finding.what for finding in found)


def test_environment():
    def fact(rank):
        return EnvironmentFact({"NCCL_SOCKET_IFNAME": "eth0"})

    assert good(EnvironmentCheck().judge(job(fact, 1000)))
    found = EnvironmentCheck().judge(job(fact, 16, {4: EnvironmentFact({}, ["DS_OP_X names no op"])}))
    assert found[0].what == "NCCL_SOCKET_IFNAME is not set for rank 4 on host h0, and eth0 for the others"
    assert found[1].what == "DS_OP_X names no op"


def test_judging_thousands_of_ranks_is_quick():
    began = time.process_time()
    VersionsCheck().judge(job(lambda rank: versions(torch=str(rank % 2)), 8192))
    ConfigCheck().judge(job(lambda rank: config(rank % 3), 8192))
    CodeCheck().judge(job(lambda rank: code(script=str(rank % 3)), 8192))
    DevicesCheck().judge(job(device, 8192))
    ComputeCheck().judge(job(lambda rank: ComputeFact(1.0 + rank), 8192))
    assert time.process_time() - began < 20


def test_a_file_for_others_to_look_for_is_made_or_not_without_an_error(tmp_path):
    made = Path(_make_file(tmp_path))
    assert made.parent == tmp_path
    assert _make_file(made) is None, "no folder"
    assert _make_file(tmp_path / "absent") is None
