"""The file engine: bytes arrive for every size, offset and memory; failures say where and why; nothing is left."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import stat
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import FileError, UsageError
from deepspeed.ops.aio import FileEngine
from deepspeed.ops.aio.engine import FileTicket
from deepspeed.ops.aio.plan import ALIGNMENT

PATIENCE = 600  # seconds: a busy machine is slow, not wrong


def noise(size: int, shift: int = 0) -> torch.Tensor:
    """Bytes whose memory begins `shift` bytes after a page."""
    room = torch.randint(0, 256, (size + 2 * ALIGNMENT,), dtype=torch.uint8)
    start = -room.data_ptr() % ALIGNMENT + shift
    return room[start : start + size]


def threads_of_engines() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "deepspeed-file"]


@pytest.fixture
def engine():
    with FileEngine(block_size=ALIGNMENT, queue_depth=2, threads=2) as made:
        yield made


SETTINGS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, ALIGNMENT, 3 * ALIGNMENT, 2**20]),
        "queue_depth": st.integers(1, 4),
        "threads": st.integers(1, 3),
        "single_submit": st.booleans(),
        "overlap_events": st.booleans(),
    }
)
LENGTHS = st.integers(0, 9 * ALIGNMENT) | st.integers(0, 9).map(lambda pages: pages * ALIGNMENT)


@given(settings=SETTINGS, size=LENGTHS, offset=LENGTHS, shifts=st.tuples(*[st.sampled_from([0, 1, 64, 512])] * 2))
def test_what_was_written_is_read(tmp_path_factory, settings, size, offset, shifts):
    path = tmp_path_factory.mktemp("engine") / "file"
    before = noise(offset + size + 5000)
    path.write_bytes(before.numpy().tobytes())
    given_bytes, got = noise(size, shifts[0]), noise(size, shifts[1])
    with FileEngine(**settings) as engine:
        engine.write(path, given_bytes, offset).wait()
        engine.read(path, got, offset).wait()
    assert torch.equal(got, given_bytes)
    expected = before.clone()
    expected[offset : offset + size] = given_bytes
    assert path.read_bytes() == expected.numpy().tobytes()  # and nothing beside it


@given(sizes=st.lists(LENGTHS, min_size=1, max_size=12), data=st.data())
def test_many_requests_of_several_threads_are_in_flight(tmp_path_factory, sizes, data):
    path = tmp_path_factory.mktemp("engine") / "file"
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    tensors = [noise(size) for size in sizes]
    results = [noise(size) for size in sizes]
    order = data.draw(st.permutations(range(len(sizes))))
    with FileEngine(block_size=ALIGNMENT, queue_depth=2, threads=3) as engine:

        def each(run):
            tickets = []

            def begin(mine):
                tickets.extend(run(n) for n in mine)

            users = [threading.Thread(target=begin, args=(order[n::3],)) for n in range(3)]
            for user in users:
                user.start()
            for user in users:
                user.join()
            for ticket in tickets:
                ticket.wait()
                assert ticket.is_completed()

        each(lambda n: engine.write(path, tensors[n], ends[n] - sizes[n]))
        each(lambda n: engine.read(path, results[n], ends[n] - sizes[n]))
    assert all(torch.equal(a, b) for a, b in zip(tensors, results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_every_dtype_is_its_bytes(engine, tmp_path, dtype):
    tensor = noise(8 * 1000).view(dtype) if dtype != torch.bool else noise(1000) > 100
    got = torch.empty_like(tensor)
    engine.write(tmp_path / "file", tensor.view(-1)).wait()
    engine.read(str(tmp_path / "file"), got).wait()
    assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


def test_a_new_file_is_its_owners_alone(engine, tmp_path):
    engine.write(tmp_path / "file", noise(10)).wait()
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_an_empty_tensor_makes_an_empty_file(engine, tmp_path):
    engine.write(tmp_path / "file", torch.empty(0)).wait()
    engine.read(tmp_path / "file", torch.empty(0)).wait()
    assert (tmp_path / "file").stat().st_size == 0


def test_a_symlink_is_followed(engine, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    engine.write(tmp_path / "link", noise(10)).wait()
    assert (tmp_path / "file").stat().st_size == 10


@pytest.mark.parametrize("direct", [False, True])
def test_a_descriptor_is_as_good_as_a_path(engine, tmp_path, direct):
    flags = os.O_RDWR | os.O_CREAT | (getattr(os, "O_DIRECT", 0) if direct else 0)
    descriptor = os.open(tmp_path / "file", flags)
    tensor, got = noise(3 * ALIGNMENT + 5), noise(3 * ALIGNMENT + 5)
    engine.write(descriptor, tensor, 7).wait()
    engine.read(descriptor, got, 7).wait()
    os.fstat(descriptor)  # still open
    os.close(descriptor)
    assert torch.equal(got, tensor)
    with pytest.raises(FileError, match=f"descriptor {descriptor}"):
        engine.read(descriptor, got).wait()


def failure(ticket) -> FileError:
    with pytest.raises(FileError) as caught:
        ticket.wait()
    with pytest.raises(FileError):  # and again
        ticket.wait()
    assert ticket.is_completed()
    return caught.value


def test_a_missing_file_is_named(engine, tmp_path):
    error = failure(engine.read(tmp_path / "gone", noise(100), 4096))
    assert (error.errno, error.filename) == (errno.ENOENT, str(tmp_path / "gone"))
    assert "read of 100 bytes at offset 4096: No such file" in str(error)
    assert isinstance(error, OSError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("length", [0, 1, ALIGNMENT, 3 * ALIGNMENT - 1])
def test_a_truncated_file_is_named(engine, tmp_path, length):
    path = tmp_path / "file"
    engine.write(path, noise(3 * ALIGNMENT)).wait()
    os.truncate(path, length)
    error = failure(engine.read(path, noise(3 * ALIGNMENT)))
    assert error.errno == errno.ENODATA
    assert f"the file ends at byte {length}; expected at least {3 * ALIGNMENT} bytes: {str(path)!r}" in str(error)


def test_a_file_that_shrinks_meanwhile_is_named(engine, tmp_path, monkeypatch):
    path = tmp_path / "file"
    engine.write(path, noise(3 * ALIGNMENT)).wait()
    real = os.fstat

    def shrink(descriptor):
        facts = real(descriptor)
        os.truncate(path, 5000)
        return facts

    monkeypatch.setattr("deepspeed.ops.aio.open_file.os.fstat", shrink)
    assert "the file ends at byte" in str(failure(engine.read(path, noise(3 * ALIGNMENT))))


@pytest.mark.parametrize("kind", ["folder", "no folder", "pipe"])
def test_what_is_no_file_is_refused(engine, tmp_path, kind):
    path = {"folder": tmp_path, "no folder": tmp_path / "gone" / "file", "pipe": tmp_path / "pipe"}[kind]
    if kind == "pipe":
        os.mkfifo(path)
    for begin in (engine.read, engine.write):
        error = failure(begin(path, noise(100)))
        assert error.filename == str(path)
        assert error.errno in (errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENXIO)


def test_wrong_arguments_are_told_at_once(engine, tmp_path):
    with pytest.raises(UsageError, match="contiguous"):
        engine.write(tmp_path / "file", noise(100)[::2])
    with pytest.raises(UsageError, match="meta"):
        engine.write(tmp_path / "file", torch.empty(3, device="meta"))
    with pytest.raises(UsageError, match="offset is -1"):
        engine.read(tmp_path / "file", noise(1), -1)
    with pytest.raises(UsageError, match="NUL"):
        engine.read("a\0b", noise(1))
    with pytest.raises(TypeError):
        engine.read(None, noise(1))
    assert not (tmp_path / "file").exists()


def test_after_a_failure_the_engine_works(engine, tmp_path):
    for _ in range(10):
        failure(engine.read(tmp_path / "gone", noise(20 * ALIGNMENT)))
    engine.write(tmp_path / "file", noise(20 * ALIGNMENT)).wait()


def test_close_finishes_what_is_on_its_way(tmp_path):
    tensor = noise(50 * ALIGNMENT)
    engine = FileEngine(block_size=ALIGNMENT, queue_depth=1, threads=1)
    tickets = [engine.write(tmp_path / f"{n}", tensor) for n in range(10)]
    engine.close()
    engine.close()
    assert all(ticket.is_completed() for ticket in tickets)
    assert all((tmp_path / f"{n}").read_bytes() == tensor.numpy().tobytes() for n in range(10))
    with pytest.raises(UsageError, match="closed"):
        engine.read(tmp_path / "0", tensor)


def test_threads_and_descriptors_end_with_the_engine(tmp_path):
    # Threads of engines of other tests may be about to end.
    descriptors, threads = set(os.listdir("/proc/self/fd")), set(threads_of_engines())
    engine = FileEngine(block_size=ALIGNMENT, queue_depth=2, threads=2)
    assert set(threads_of_engines()) <= threads  # begun when there is work
    engine.write(tmp_path / "file", noise(50 * ALIGNMENT + 1)).wait()
    failure(engine.read(tmp_path / "gone", noise(50 * ALIGNMENT + 1)))
    assert set(threads_of_engines()) - threads
    del engine
    gc.collect()
    assert set(threads_of_engines()) <= threads
    assert set(os.listdir("/proc/self/fd")) <= descriptors


def test_a_finished_request_holds_no_memory(engine, tmp_path):
    tensor = noise(10 * ALIGNMENT)
    gone = weakref.ref(tensor)
    ticket = engine.write(tmp_path / "file", tensor)
    ticket.wait()
    del tensor
    engine.close()
    gc.collect()
    assert gone() is None


def test_a_tensor_that_nobody_holds_is_written_whole(engine, tmp_path):
    expected = noise(200 * ALIGNMENT).numpy().tobytes()
    ticket = engine.write(tmp_path / "file", torch.frombuffer(bytearray(expected), dtype=torch.uint8).clone())
    ticket.wait()
    assert (tmp_path / "file").read_bytes() == expected


def interrupted(call, at):
    """Whether a call was interrupted before the instruction of this number, of all that Python runs in it."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        if event == "opcode" and count == at:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_of_who_waits_stops_no_worker():
    """Wherever it comes; a worker that waits for a lock that is never given back would be joined forever."""
    for at in range(1, 1000):
        ticket, go = FileTicket(), threading.Event()

        def work(ticket=ticket, go=go):
            go.wait(0.1)  # for the interrupt, if that comes before the wait has to
            ticket.complete(None)

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        stopped = interrupted(ticket.wait, at)
        go.set()
        worker.join(PATIENCE)
        assert not worker.is_alive(), f"interrupted at instruction {at}"
        ticket.wait()
        if not stopped:
            break
    assert at > 5


@pytest.mark.slow
def test_a_program_that_ends_finishes_what_it_began(tmp_path):
    code = f"""
import torch
from deepspeed.ops.aio import FileEngine
engine = FileEngine(block_size=2**20, queue_depth=1, threads=1)
for n in range(4):
    engine.write({str(tmp_path / "file")!r}, torch.full((2**22,), n, dtype=torch.uint8), n * 2**22)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
    content = (tmp_path / "file").read_bytes()
    assert content == b"".join(bytes([n]) * 2**22 for n in range(4))


def test_a_forked_process_is_told_and_ends(engine, tmp_path):
    engine.write(tmp_path / "file", noise(10)).wait()
    child = os.fork()
    if child == 0:
        try:
            engine.read(tmp_path / "file", noise(10))
        except UsageError as error:
            engine.close()
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
