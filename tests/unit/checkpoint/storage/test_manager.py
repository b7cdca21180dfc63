"""CheckpointManager with one rank, and with ranks as threads: save, find, fail, keep, write in the background."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.formats.safe_load import CheckedFile, safe_load
from deepspeed.checkpoint.storage import manifest
from deepspeed.checkpoint.storage.block_writer import WriterOptions
from deepspeed.checkpoint.storage.manager import (
    CheckpointManager,
    FileContent,
    NodePlace,
    SavePolicy,
    SaveRequest,
    default_tag,
)
from deepspeed.checkpoint.storage.rank_meeting import SingleRank, StoreExchange
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.log import logger


def alone(**policy):
    return CheckpointManager(SingleRank(), SavePolicy(**policy))


def names(folder):
    return sorted(os.listdir(folder))


def test_a_checkpoint_of_one_rank(tmp_path):
    weights = torch.arange(10.0)
    request = SaveRequest(
        tmp_path / "runs",
        default_tag(7),
        {
            "model.pt": {"w": weights},
            "later.pt": lambda: {"made": "late"},
            "index.json": "{}",
            "zero/w/raw.bin": FileContent(b"abc", lambda value, stream: stream.write(value * 2)),
        },
        format="test",
        facts={"stage": 3},
        scripts={"zero_to_fp32.py": "pass\n"},
    )
    manager = alone()
    assert manager.save(request) == tmp_path / "runs" / "global_step7"
    assert names(tmp_path / "runs") == ["global_step7", "latest", "zero_to_fp32.py"]
    found = manager.locate(tmp_path / "runs")
    assert found.tag == "global_step7"
    assert manifest.verify(found.path) == []
    known = found.checkpoint.manifest
    assert sorted(known.files) == ["index.json", "later.pt", "model.pt", "zero/w/raw.bin"]
    assert (known.format, known.world_size, known.facts["stage"]) == ("test", 1, 3)
    assert torch.equal(CheckedFile(found.path / "model.pt", known.files["model.pt"]).state["w"], weights)
    assert safe_load(found.path / "later.pt") == {"made": "late"}
    assert (found.path / "zero/w/raw.bin").read_bytes() == b"abcabc"


def test_latest_is_left_alone_where_asked(tmp_path):
    manager = alone()
    manager.save(SaveRequest(tmp_path, "a", {"x": "1"}))
    manager.save(SaveRequest(tmp_path, "b", {"x": "2"}, latest=None))
    assert manager.locate(tmp_path).tag == "a"
    manager.save(SaveRequest(tmp_path, "c", {"x": "3"}, latest="latest_universal"))
    assert manager.locate(tmp_path).tag == "a"
    assert manager.locate(tmp_path, latest="latest_universal").tag == "c"


def test_locate_tells_what_it_passed_over(tmp_path, caplog):
    manager = alone()
    for tag in ("a", "b", "c"):
        manager.save(SaveRequest(tmp_path, tag, {"x.pt": {"tag": tag}}))
    os.truncate(tmp_path / "c" / "x.pt", 5)
    logger.propagate = True
    try:
        found = manager.locate(tmp_path)
    finally:
        logger.propagate = False
    assert found.tag == "b"
    assert "x.pt: truncated" in caplog.text
    assert "loading 'b'" in caplog.text
    with pytest.raises(CheckpointError, match=r"c/x\.pt: truncated.*newest whole checkpoint here is 'b' \(also: a\)"):
        manager.locate(tmp_path, "c")
    with pytest.raises(CheckpointError, match="d: no such checkpoint"):
        manager.locate(tmp_path, "d")
    assert manager.locate(tmp_path / "empty").tag is None
    for tag in ("a", "b"):
        (tmp_path / tag / "x.pt").unlink()
    with pytest.raises(CheckpointError, match="nothing to load"):
        manager.locate(tmp_path)


@pytest.mark.parametrize("tag", ["", ".hidden", "../up", "/absolute", "a/.b"])
def test_tags_that_cannot_be(tmp_path, tag):
    with pytest.raises(UsageError, match="tag"):
        alone().save(SaveRequest(tmp_path, tag, {}))


def test_arguments_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="save_dir is empty"):
        alone().save(SaveRequest("", "a", {}))
    with pytest.raises(UsageError, match="its manifest"):
        alone().save(SaveRequest(tmp_path, "a", {"manifest.json": "{}"}))


def test_retention(tmp_path):
    manager = alone(keep_last=2)
    for step in range(4):
        manager.save(SaveRequest(tmp_path, default_tag(step), {"x": "1"}))
    assert names(tmp_path) == ["global_step2", "global_step3", "latest"]


def test_a_failed_save_changes_nothing(tmp_path):
    manager = alone()
    manager.save(SaveRequest(tmp_path, "a", {"x": "old"}))

    def fail(value, stream):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    for tag in ("a", "b"):
        with pytest.raises(CheckpointError, match=r"rank 0: .*x: No space left on device.*"):
            manager.save(SaveRequest(tmp_path, tag, {"x": FileContent(None, fail)}))
    assert names(tmp_path) == ["a", "latest"]
    assert (tmp_path / "a" / "x").read_text() == "old"


def test_the_mock_writer_keeps_nothing(tmp_path):
    alone(writer=WriterOptions(discard=True)).save(SaveRequest(tmp_path, "a", {"x.pt": {"a": torch.ones(10)}}))
    assert names(tmp_path) == []


def test_background_saves_what_was(tmp_path, monkeypatch):
    manager, go = alone(background=True), threading.Event()
    original = CheckpointManager._write
    monkeypatch.setattr(CheckpointManager, "_write", lambda *arguments: (go.wait(60), original(*arguments))[1])
    weights = torch.zeros(1000)
    manager.save(SaveRequest(tmp_path, "a", {"model.pt": {"w": weights}}))
    weights.fill_(1)
    assert not (tmp_path / "a").exists()
    go.set()
    manager.save(SaveRequest(tmp_path, "b", {"model.pt": {"w": weights}}))
    weights.fill_(2)
    manager.close()
    assert safe_load(tmp_path / "a" / "model.pt")["w"].sum() == 0
    assert safe_load(tmp_path / "b" / "model.pt")["w"].sum() == 1000


def test_copies_made_by_the_caller_are_not_copied_again(tmp_path, monkeypatch):
    manager = alone(background=True)
    weights, allocate = torch.ones(5), manager.allocator()
    copy = allocate(5, torch.float32).copy_(weights)
    monkeypatch.setattr(manager._snapshot, "take", lambda state: pytest.fail("copied twice"))
    manager.save(SaveRequest(tmp_path, "a", {"model.pt": {"w": copy}}, settled=True))
    weights.zero_()
    assert manager.locate(tmp_path).tag == "a", "finding waits for the save"
    assert safe_load(tmp_path / "a" / "model.pt")["w"].sum() == 5
    manager.close()


def test_background_errors_come_with_the_next_call(tmp_path):
    manager = alone(background=True)

    def fail(value, stream):
        raise OSError(28, "No space left on device")

    manager.save(SaveRequest(tmp_path, "a", {"x": FileContent(None, fail)}))
    with pytest.raises(CheckpointError, match=r"background, failed.*No space left"):
        manager.save(SaveRequest(tmp_path, "b", {"x": "1"}))
    assert names(tmp_path) == []
    manager.save(SaveRequest(tmp_path, "b", {"x": "1"}))
    manager.close()
    assert names(tmp_path) == ["b", "latest"]


def test_a_program_that_ends_lets_its_save_finish(tmp_path):
    """Runs the end of a program in a forked child: Python waits for threads, but its executors take no more work."""
    state = {"w": torch.ones(9 * 2**20)}
    pid = os.fork()
    if pid == 0:
        try:
            alone(background=True).save(SaveRequest(tmp_path, "a", {"model.pt": state}, settled=True))
            threading._shutdown()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert manifest.verify(tmp_path / "a") == []
    assert names(tmp_path) == ["a", "latest"]


class Job:
    """Ranks as threads, each with a manager."""

    def __init__(self, world, places=None, wait=60.0, **policy):
        store = dist.HashStore()
        exchanges = [StoreExchange(store, rank, world, wait=wait) for rank in range(world)]
        places = places or [None] * world
        self.managers = [CheckpointManager(e, SavePolicy(**policy), p) for e, p in zip(exchanges, places, strict=True)]

    def run(self, act):
        results = [None] * len(self.managers)

        def one(rank):
            try:
                results[rank] = act(rank, self.managers[rank])
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.managers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a rank hangs"
        return results


def test_every_rank_writes_its_files(tmp_path):
    job = Job(3)
    job.run(lambda rank, manager: manager.save(SaveRequest(tmp_path, "a", {f"rank{rank}.pt": {"rank": rank}})))
    found = job.run(lambda rank, manager: manager.locate(tmp_path))
    assert [result.tag for result in found] == ["a"] * 3
    assert sorted(found[1].checkpoint.manifest.files) == ["rank0.pt", "rank1.pt", "rank2.pt"]
    assert found[0].checkpoint.manifest.world_size == 3
    assert manifest.verify(tmp_path / "a") == []


def test_one_failing_rank_fails_all(tmp_path):
    job = Job(3)
    job.run(lambda rank, manager: manager.save(SaveRequest(tmp_path, "a", {f"{rank}.txt": "old"})))

    def fail(value, stream):
        raise OSError(13, "Permission denied")

    def act(rank, manager):
        return manager.save(SaveRequest(tmp_path, "a", {f"{rank}.txt": FileContent(0, fail) if rank == 2 else "new"}))

    for result in job.run(act):
        assert isinstance(result, CheckpointError)
        assert "rank 2: " in str(result)
        assert "2.txt: Permission denied" in str(result)
    assert names(tmp_path) == ["a", "latest"]
    assert (tmp_path / "a" / "0.txt").read_text() == "old"


@pytest.mark.parametrize("mode", ["WARN", "IGNORE", "FAIL"])
def test_tags_that_differ(tmp_path, caplog, mode):
    logger.propagate = True
    try:
        results = Job(2, tag_validation=mode).run(
            lambda rank, manager: manager.save(SaveRequest(tmp_path, f"tag{rank}", {f"{rank}": "x"}))
        )
    finally:
        logger.propagate = False
    told = "rank 0 says 'tag0', but rank 1 'tag1' (1 of 2 ranks)"
    if mode == "FAIL":
        assert all(isinstance(result, CheckpointError) and told in str(result) for result in results)
        assert names(tmp_path) == []
    else:
        assert names(tmp_path / "tag0") == ["0", "1", "manifest.json"]
        assert (told in caplog.text) == (mode == "WARN")


def test_two_ranks_with_one_file(tmp_path):
    results = Job(2).run(lambda rank, manager: manager.save(SaveRequest(tmp_path, "a", {"same": str(rank)})))
    assert all("same is to be written by ranks 0 and 1" in str(result) for result in results)
    assert names(tmp_path) == []


def test_nodes_with_their_own_directories(tmp_path):
    places = [NodePlace(f"node{rank // 2}", leader=rank % 2 == 0) for rank in range(4)]
    job = Job(4, places)

    def save(tag, text):
        def act(rank, manager):
            files = {f"rank{rank}": text, **({"model": text} if manager.place.leader else {})}
            return manager.save(SaveRequest(tmp_path / manager.place.node, tag, files))

        return job.run(act)

    def locate(tag=None):
        return job.run(lambda rank, manager: manager.locate(tmp_path / manager.place.node, tag))

    save("a", "1")
    save("b", "2")
    assert names(tmp_path / "node1" / "b") == ["manifest.json", "model", "rank2", "rank3"]
    assert [str(found.path.relative_to(tmp_path)) for found in locate()] == ["node0/b"] * 2 + ["node1/b"] * 2
    os.truncate(tmp_path / "node1" / "b" / "rank2", 0)
    assert [found.tag for found in locate()] == ["a"] * 4
    assert all("rank2: truncated" in str(result) for result in locate("b"))
    # One node has another save under the same name: the two do not belong together.
    Job(1, [NodePlace("node1")]).run(
        lambda rank, manager: manager.save(SaveRequest(tmp_path / "node1", "a", {"x": "y"}))
    )
    assert all("different saves" in str(result) or "truncated" in str(result) for result in locate("a"))


def test_a_directory_that_a_rank_does_not_see(tmp_path):
    job = Job(2)
    job.run(lambda rank, manager: manager.save(SaveRequest(tmp_path / "a", "t", {f"{rank}": "x"})))
    for result in job.run(lambda rank, manager: manager.locate(tmp_path / "ab"[rank])):
        assert "rank 1: " in str(result)
        assert "use_node_local_storage" in str(result)


def test_background_saves_of_several_ranks(tmp_path):
    job = Job(2, background=True)

    def act(rank, manager):
        weights = torch.full((100,), float(rank))
        for step in range(3):
            manager.save(SaveRequest(tmp_path, default_tag(step), {f"rank{rank}.pt": {"w": weights}}))
            weights.add_(10)
        manager.close()

    assert job.run(act) == [None, None]
    assert safe_load(tmp_path / "global_step2" / "rank1.pt")["w"][0] == 21
    assert manifest.verify(tmp_path / "global_step1") == []
