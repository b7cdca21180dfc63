"""Real ranks that save together: a full disk, a forbidden directory or a missing rank is an error on all of them."""

import os
import resource
import signal

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.formats.safe_load import CheckedFile, safe_load
from deepspeed.checkpoint.storage import manifest
from deepspeed.checkpoint.storage.block_writer import WriterOptions
from deepspeed.checkpoint.storage.manager import CheckpointManager, SavePolicy, SaveRequest
from deepspeed.checkpoint.storage.rank_meeting import default_exchange
from deepspeed.errors import CheckpointError
from tests.harness import shared_ranks


def manager(wait=60.0, **policy):
    return CheckpointManager(default_exchange(wait), SavePolicy(**policy))


def request(folder, tag, step, numel=1000):
    rank = dist.get_rank()
    return SaveRequest(folder, tag, {f"rank{rank}.pt": {"step": step, "w": torch.full((numel,), float(rank))}})


def steps(folder):
    """The steps in the files of the checkpoint that loads, by rank."""
    found = manager().locate(folder)
    files = found.checkpoint.manifest.files
    return [safe_load(found.path / name)["step"] for name in sorted(files)]


@shared_ranks(2, 4)
def test_save_and_find(tmp_path):
    rank, world = dist.get_rank(), dist.get_world_size()
    saver = manager()
    for step in range(3):
        saver.save(request(tmp_path, "same" if step else "first", step))
    found = saver.locate(tmp_path)
    assert found.tag == "same"
    known = found.checkpoint.manifest
    assert sorted(known.files) == [f"rank{r}.pt" for r in range(world)]
    assert known.world_size == world
    other = (rank + 1) % world
    file = CheckedFile(found.path / f"rank{other}.pt", known.files[f"rank{other}.pt"])
    assert file.require(file.state["w"]).unique().tolist() == [other]
    assert manifest.verify(found.path) == []
    dist.barrier()


@shared_ranks(2)
def test_a_background_save(tmp_path):
    saver = manager(background=True)
    for step in range(3):
        saver.save(request(tmp_path, f"step{step}", step))
        dist.all_reduce(torch.ones(1))  # training goes on
    saver.close()
    assert steps(tmp_path) == [2, 2]


@shared_ranks(3)
def test_a_limit_on_one_rank_fails_all(tmp_path):
    rank, saver = dist.get_rank(), manager(writer=WriterOptions(direct=False))
    saver.save(request(tmp_path, "a", 1))
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
    for tag in ("a", "b"):
        with pytest.raises(CheckpointError, match=r"failed\. rank 1: .*rank1\.pt: File too large.*ulimit -f"):
            saver.save(request(tmp_path, tag, 2, numel=200_000))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert steps(tmp_path) == [1, 1, 1]
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]
    saver.save(request(tmp_path, "a", 3))
    assert steps(tmp_path) == [3, 3, 3]


def as_nobody(act):
    """A function that runs without any rights; the rest of the rank keeps them, as it needs the job's store."""

    def run(*arguments):
        os.seteuid(65534)
        try:
            return act(*arguments)
        finally:
            os.seteuid(0)

    return run


@shared_ranks(3)
@pytest.mark.parametrize(("victim", "step"), [(0, "_prepare"), (0, "_seal"), (2, "_write")])
def test_a_forbidden_directory_on_one_rank_fails_all(tmp_path, victim, step):
    rank, saver = dist.get_rank(), manager()
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    saver.save(request(tmp_path, "a", 1))
    if rank == 0:
        for folder in (tmp_path, *(parent for parent in tmp_path.parents if "pytest" in str(parent))):
            folder.chmod(folder.stat().st_mode | 0o055)
    dist.barrier()
    if rank == victim:
        setattr(saver, step, as_nobody(getattr(saver, step)))
    with pytest.raises(CheckpointError, match=rf"failed\. rank {victim}: {tmp_path}.*Permission denied for user 65534"):
        saver.save(request(tmp_path, "a", 2))
    assert steps(tmp_path) == [1, 1, 1]
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]


@shared_ranks(3)
@pytest.mark.parametrize("caller", [0, 1])
def test_a_save_on_one_rank_only(tmp_path, caller):
    rank, saver = dist.get_rank(), manager(wait=0.3)
    if rank == caller:
        with pytest.raises(CheckpointError) as told:
            saver.save(request(tmp_path, "a", 1))
        absent = ", ".join(str(other) for other in range(3) if other != caller)
        assert f"rank {caller}: saving checkpoint 'a' to {tmp_path}: ranks {absent} of 3 did not" in str(told.value)
        assert not any(tmp_path.iterdir())
    dist.barrier()
    saver.exchange.wait = 60.0
    saver.save(request(tmp_path, "a", 2))
    assert steps(tmp_path) == [2, 2, 2]


@shared_ranks(2)
def test_different_tags(tmp_path):
    rank = dist.get_rank()
    with pytest.raises(CheckpointError, match=r"rank 0 says 'tag0', but rank 1 'tag1'"):
        manager(tag_validation="FAIL").save(request(tmp_path, f"tag{rank}", 1))
    manager(tag_validation="IGNORE").save(request(tmp_path, f"tag{rank}", 1))
    assert sorted(os.listdir(tmp_path)) == ["latest", "tag0"]


@shared_ranks(2)
def test_a_damaged_file_is_named_on_every_rank(tmp_path):
    saver = manager()
    saver.save(request(tmp_path, "good", 1))
    saver.save(request(tmp_path, "bad", 2))
    dist.barrier()
    if dist.get_rank() == 0:
        os.truncate(tmp_path / "bad" / "rank1.pt", 300)
    dist.barrier()
    assert saver.locate(tmp_path).tag == "good"
    with pytest.raises(CheckpointError, match=r"bad/rank1\.pt: truncated.*newest whole checkpoint here is 'good'"):
        saver.locate(tmp_path, "bad")
