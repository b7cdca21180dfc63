"""The small parts of a launch: remembered lines, words about failures, ports, pid files, processes, plans."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.comm.verdict_pipe import ReportedVerdict
from deepspeed.launcher import processes
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.guard import RankEnd, failure_report, rank_list
from deepspeed.launcher.hosts import encode_world_info
from deepspeed.launcher.launch import parse_args
from deepspeed.launcher.output import LINES, LastLines, last_lines
from deepspeed.launcher.ports import claim_port, free_port, is_free
from deepspeed.launcher.protocol import NodePlacement, NodePlan, RankPlan
from deepspeed.launcher.supervise import pid_file, pid_folder

# ---- remembered output


@given(st.lists(st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=50), min_size=1), st.data())
def test_the_tail_does_not_depend_on_the_pieces(lines, data):
    raw = "\n".join(lines).encode()
    tail = LastLines()
    while raw:
        cut = data.draw(st.integers(1, len(raw)))
        tail.feed(raw[:cut])
        raw = raw[cut:]
    wanted = lines[-LINES - (lines[-1] == "") :]
    while wanted and not wanted[-1].strip():
        wanted.pop()
    while wanted and not wanted[0].strip():
        wanted.pop(0)
    assert tail.lines() == wanted[-LINES:]


def test_a_redrawn_line_is_remembered_as_last_seen():
    tail = LastLines()
    for percent in range(100):
        tail.feed(f"\r{percent}%".encode())
    assert tail.lines() == ["99%"]
    tail.feed(b"\r\n\x1b[31mred\x1b[0m\r\n")
    assert tail.lines() == ["99%", "red"]
    tail.feed(b"x" * 100_000)
    assert len(tail.lines()[-1]) < 10_000


def test_the_tail_of_a_file(tmp_path):
    file = tmp_path / "log"
    file.write_text("old\n" + "".join(f"{i}\n" for i in range(50)))
    assert last_lines(str(file)) == [str(i) for i in range(30, 50)]
    assert last_lines(str(file), start=4 + 2 * 10 + 3 * 39) == ["49"]
    assert last_lines(str(tmp_path / "none")) == []


# ---- words


def ending(rank, code, *, told=False, at=1.0, lines=(), log=None, verdict=None):
    plan = RankPlan(rank=rank, local_rank=rank, command=("c", "--x"), environment={}, log=log)
    return RankEnd(plan, 100 + rank, code, at, told, "stderr", lines, verdict)


def test_the_report_of_a_failure():
    first = ending(3, -signal.SIGSEGV, at=12.34, lines=["one", "two"])
    others = [ending(0, -15, told=True), ending(1, 0), ending(2, 1, at=12.5)]
    assert failure_report(first, others, "node7").splitlines() == [
        "rank 3 failed first: it was killed by SIGSEGV (signal 11) after 12.3 s",
        "  where:   host node7, local rank 3, pid 103",
        "  command: c --x",
        "  hint:    native code crashed; PYTHONFAULTHANDLER=1 shows the Python line it was called from",
        "  its last lines (stderr):",
        "    | one",
        "    | two",
        "  then, before it was told to stop, rank 2 exited with code 1",
        "  stopped because of this: rank 0",
    ]
    assert "it wrote nothing to stderr" in failure_report(ending(0, 1), [], "h")
    assert "  log:     /x/y.log" in failure_report(ending(0, 1, log="/x/y.log"), [], "h")
    assert "dmesg" in failure_report(ending(0, -9), [], "h")


def test_the_report_names_the_rank_that_the_others_waited_for():
    victim = ending(
        0, 1, at=30.5, lines=["CommError: rank 2 hangs"], verdict=ReportedVerdict((2,), "rank 2 never entered x", 0.0)
    )
    others = [ending(1, 1, at=30.6), ending(2, -15, told=True, at=31.0, lines=["still here"])]
    assert failure_report(victim, others, "node7").splitlines() == [
        "the job failed because rank 2 never entered x",
        "  where:   host node7, local rank 2, pid 102",
        "  command: c --x",
        "  noticed: by rank 0, which exited with code 1 after 30.5 s",
        "  then, before it was told to stop, rank 1 exited with code 1",
        "  stopped because of this: rank 2",
    ]


def test_the_report_names_a_rank_that_ended_before_the_others():
    victim = ending(0, 1, at=30.5, lines=["CommError"], verdict=ReportedVerdict((1,), "rank 1 has finished", 0.0))
    text = failure_report(victim, [ending(1, 0, at=20.0, lines=["bye"])], "node7").splitlines()
    assert text[:2] == [
        "the job failed because rank 1 has finished",
        "  ended:   rank 1 exited with code 0 after 20.0 s",
    ]
    assert "  where:   host node7, local rank 1, pid 101" in text
    assert not any("|" in line for line in text)
    late = ending(1, 1, at=30.5, lines=["CommError"], verdict=ReportedVerdict((1,), "rank 1 came late", 0.0))
    assert failure_report(late, [ending(0, -15, told=True)], "node7").splitlines() == [
        "the job failed because rank 1 came late",
        "  ended:   rank 1 exited with code 1 after 30.5 s",
        "  where:   host node7, local rank 1, pid 101",
        "  command: c --x",
        "  stopped because of this: rank 0",
    ]
    failed = failure_report(victim, [ending(1, 3, at=20.0, lines=["bye"])], "node7")
    assert "  ended:   rank 1 exited with code 3 after 20.0 s" in failed
    assert "    | bye" in failed


def test_the_report_about_a_rank_of_another_host():
    victim = ending(0, 1, at=30.5, verdict=ReportedVerdict((9,), "rank 9 is dead", 0.0))
    assert failure_report(victim, [], "node7").splitlines() == [
        "the job failed because rank 9 is dead",
        "  noticed: by rank 0, which exited with code 1 after 30.5 s",
    ]


def test_a_traceback_is_not_repeated():
    lines = [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/x/train.py", line 49, in <module>',
        "[rank1]:     for x in batches():",
        '[rank1]:   File "/x/train.py", line 33, in batches',
        '[rank1]:     raise ValueError("no label")',
        "[rank1]: ValueError: no label",
    ]
    for shown in (lines, [line.removeprefix("[rank1]: ") for line in lines]):
        text = failure_report(ending(1, 1, lines=shown), [], "h").splitlines()
        assert text[-4:] == ["  its last lines (stderr):", *(f"    | {line}" for line in shown[3:])]
    assert f"    | {lines[0]}" in failure_report(ending(1, 1, lines=lines, log="/x/y.log"), [], "h"), (
        "seen for the first time"
    )
    native = [
        "Fatal Python error: Segmentation fault",
        '  File "a.py", line 3 in inner',
        '  File "a.py", line 9 in outer',
    ]
    assert failure_report(ending(1, -11, lines=native), [], "h").count("|") == 3


def test_lists_of_ranks():
    assert rank_list([4]) == "rank 4"
    assert rank_list([2, 0]) == "ranks 0, 2"
    assert rank_list(range(64)) == "ranks 0, 1, 2, … 63 (64 in all)"


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        (0, 0, "exited with code 0"),
        (3, 3, "exited with code 3"),
        (-9, 137, "was killed by SIGKILL (signal 9)"),
        (-40, 168, "was killed by signal 40"),
    ],
)
def test_endings(code, status, words):
    assert processes.status(code) == status
    assert processes.describe_exit(code) == words


# ---- processes


def test_processes_below(tmp_path):
    table = {
        1: (0, "S", "init"),
        5: (1, "S", "a b) R 1"),
        6: (5, "R", "x"),
        7: (6, "Z", "z"),
        8: (7, "S", "y"),
        9: (1, "S", "q"),
    }
    for pid, (parent, state, name) in table.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) {state} {parent} 0 0\n")
    (tmp_path / "10").mkdir()
    assert processes.descendants(5, tmp_path) == [6, 8]
    assert processes.descendants(1, tmp_path) == [5, 6, 8, 9]
    assert processes.descendants(8, tmp_path) == []


def test_signals_to_the_dead_do_not_matter():
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    processes.send(signal.SIGKILL, [pid])


# ---- plans and environments


def test_a_plan_survives_the_pipe():
    odd = b"\xff".decode("utf-8", "surrogateescape")
    rank = RankPlan(rank=1, local_rank=0, command=("a", odd, "é\n"), environment={"X": odd}, cores=(1, 2), log="/l")
    plan = NodePlan(host="h", ranks=(rank,), log_level="error", pid_file="/p", forward_to_groups=True)
    assert pickle.loads(pickle.dumps(plan)) == plan


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_ranks_are_numbered_host_by_host(counts):
    world = {f"h{i}": list(range(count)) for i, count in enumerate(counts)}
    found = [each for host in world for each in NodePlacement.of(world, host, ("a", 1)).environments()]
    assert [int(each["RANK"]) for each in found] == list(range(sum(counts)))
    assert [int(each["LOCAL_RANK"]) for each in found] == [slot for count in counts for slot in range(count)]
    assert [int(each["CROSS_RANK"]) for each in found] == [i for i, count in enumerate(counts) for _ in range(count)]
    assert {(each["WORLD_SIZE"], each["CROSS_SIZE"]) for each in found} == {(str(sum(counts)), str(len(counts)))}
    assert [int(each["LOCAL_SIZE"]) for each in found] == [count for count in counts for _ in range(count)]


def test_arguments_of_the_per_node_launcher():
    args = parse_args(["--world_info", encode_world_info({"h": [0]}), "s.py", "--module", "-q"])
    assert (args.node_rank, args.master_addr, args.master_port) == (0, "127.0.0.1", 29500)
    assert (args.module, args.quiet, args.log_level, args.save_pid) == (False, False, "info", 0)
    assert args.training_script_args == ["--module", "-q"]


# ---- ports


def test_a_port_that_is_listened_at_is_not_free():
    for address in ("127.0.0.1", ""):
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            assert not is_free(port)
            with pytest.raises(LaunchError, match=f"--master_port {port} is in use"), claim_port(port):
                pass
    for port in (-1, 65536):
        with pytest.raises(LaunchError, match="is not a port"), claim_port(port):
            pass


def test_a_claimed_port_is_free_for_rank_0_and_for_no_other_launcher():
    with claim_port(0) as one, claim_port(0) as two:
        assert one != two
        assert 29500 <= min(one, two) <= max(one, two) < 32768  # no outgoing connection is given one of these
        with pytest.raises(LaunchError, match=f"--master_port {one} is in use"), claim_port(one):
            pass
        with socket.create_server(("", two)):
            pass


def test_a_claim_is_given_back():
    port = free_port()
    with claim_port(port):
        pass
    if os.fork() == 0:  # also by a launcher that is killed
        with claim_port(port):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.wait()[1]) == signal.SIGKILL
    with claim_port(port) as again:
        assert again == port


# ---- pid files


def test_the_folder_of_pid_files(tmp_path):
    home = str(tmp_path / "home")
    assert pid_folder({"XDG_RUNTIME_DIR": str(tmp_path), "XDG_CACHE_HOME": home}) == tmp_path / "deepspeed"
    assert pid_folder({"XDG_RUNTIME_DIR": str(tmp_path / "no"), "XDG_CACHE_HOME": home}) == tmp_path / "home/deepspeed"


def test_a_pid_file(tmp_path):
    folder = tmp_path / "deepspeed"
    folder.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / "5.deepspeed").symlink_to(victim)  # left by somebody; it must not be followed
    with pid_file(5, folder) as path:
        assert path.read_text() == f"{os.getpid()}\n"
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert not path.is_symlink()
    assert not path.exists()
    assert victim.read_text() == "precious"
    with pid_file(5, folder) as path:
        path.unlink()  # somebody cleaned up: no error at the end


def test_a_folder_that_others_can_write_is_refused(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir(mode=0o700)
    for folder in (shared, link):
        with pytest.raises(ValueError, match="writable by others"), pid_file(1, folder):
            pass
        assert not (folder / "1.deepspeed").exists()
