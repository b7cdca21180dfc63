"""What ranks get from the launcher: environment, arguments, cores, files; and what the user gets of their output."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import socket
import stat
import struct
import termios
from contextlib import ExitStack
from pathlib import Path

import pytest

from deepspeed.accelerator import get_accelerator
from deepspeed.launcher import runner
from deepspeed.launcher.ports import free_port
from tests.distributed.launcher.launched import Launched, Mailbox, local, script, world
from tests.harness import ranks

SHOW = """
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE LOCAL_WORLD_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT".split()
with open(f"shown{rank}", "w") as file:
    json.dump({"env": {name: os.environ.get(name) for name in names}, "argv": sys.argv[1:], "cwd": os.getcwd(),
               "omp": os.environ.get("OMP_NUM_THREADS"), "cores": sorted(os.sched_getaffinity(0)),
               "session": os.getsid(0) == os.getpid()}, file)
"""


def shown(folder, count, first=0):
    return [json.loads((Path(folder) / f"shown{rank}").read_text()) for rank in range(first, first + count)]


@ranks(1, init=False)
def test_environment_and_arguments_of_each_rank(tmp_path):
    script(tmp_path, SHOW)
    # The second of three nodes with different numbers of slots: its ranks are 3 and 4.
    words = [world(3, 2, 1), "--node_rank=1", "--master_addr=10.1.2.3", "--master_port=12345"]
    with Launched([*words, "script.py", "--x", "a b", "", "--", "é"], tmp_path) as job:
        assert job.wait() == 0, job.errors()
    for local_rank, found in enumerate(shown(tmp_path, 2, first=3)):
        assert found["env"] == {
            "RANK": str(3 + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": "6",
            "LOCAL_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "CROSS_RANK": "1",
            "CROSS_SIZE": "3",
            "MASTER_ADDR": "10.1.2.3",
            "MASTER_PORT": "12345",
        }
        assert found["argv"] == [f"--local_rank={local_rank}", "--x", "a b", "", "--", "é"]
        assert found["cwd"] == str(tmp_path)
        if get_accelerator().device_name() == "cpu":
            assert found["omp"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert found["session"]


@ranks(1, init=False)
def test_module_without_local_rank(tmp_path):
    (tmp_path / "package").mkdir()
    script(tmp_path / "package", SHOW, "__main__.py")
    with Launched(local(1, "--module", "--no_local_rank", "package", "-v"), tmp_path) as job:
        assert job.wait() == 0, job.errors()
    assert shown(tmp_path, 1)[0]["argv"] == ["-v"]


@ranks(1, init=False)
def test_a_program_that_is_not_python(tmp_path):
    program = tmp_path / "program.sh"
    program.write_text('#!/bin/sh\necho "$RANK of $WORLD_SIZE: $*"\n')
    program.chmod(0o755)
    with Launched(local(2, "--no_python", "./program.sh", "x"), tmp_path) as job:
        assert job.wait() == 0, job.errors()
    assert sorted(job.output().splitlines()) == ["0 of 2: --local_rank=0 x", "1 of 2: --local_rank=1 x"]


@ranks(1, init=False)
def test_output_of_each_rank_in_a_file_of_its_own(tmp_path):
    body = """
print('out of', rank)
print('err of', rank, file=sys.stderr)
open('spoken', 'r' if rank else 'w').close()  # the failure of rank 1 ends rank 0, which must have spoken before
sys.exit(rank * 3)
"""
    script(tmp_path, body)
    os.mkfifo(tmp_path / "spoken")
    with Launched(local(2, "--enable_each_rank_log=logs/deep", "script.py"), tmp_path) as job:
        assert job.wait() == 3
    files = sorted((tmp_path / "logs/deep").iterdir())
    assert [re.sub(r"^\d{14}_", "", file.name) for file in files] == ["rank0.log", "rank1.log"]
    assert [file.read_text() for file in files] == [f"out of {rank}\nerr of {rank}\n" for rank in (0, 1)]
    assert job.output() == ""
    assert "    | out of 1\n    | err of 1\n" in job.errors()
    assert str(files[1]) in job.errors()


@ranks(1, init=False)
def test_lines_pass_whole_and_in_order(tmp_path):
    """print() writes the line and its end separately: without care the lines of two ranks mix."""
    script(tmp_path, "for i in range(300): print(f'rank{rank}-{i}', 'x' * (i % 80))")
    with Launched(local(2, "script.py"), tmp_path) as job:
        assert job.wait() == 0
    lines = job.output().splitlines()
    for rank in (0, 1):
        own = [line for line in lines if line.startswith(f"rank{rank}-")]
        assert own == [f"rank{rank}-{i} {'x' * (i % 80)}" for i in range(300)]
    assert len(lines) == 600


@ranks(1, init=False)
def test_output_is_live(tmp_path):
    """An unfinished line of a rank that goes on arrives; so do bytes that are no text."""
    box = Mailbox(tmp_path)
    script(tmp_path, "os.write(1, b'50%\\r\\xff')\ntell('written')\nwait_forever()")
    read, write = os.pipe()
    with Launched(local(1, "-q", "script.py"), tmp_path, out=write):
        os.close(write)
        box.lines(1)
        seen = b""
        while seen != b"50%\r\xff":
            assert select.select([read], [], [], 20)[0], seen
            seen += os.read(read, 100)


@ranks(1, init=False)
def test_on_a_terminal_ranks_see_a_terminal_of_the_same_size(tmp_path):
    script(
        tmp_path,
        "print(sys.stdout.isatty(), sys.stderr.isatty(), tuple(os.get_terminal_size(1)), sep='\\t', end='\\r\\n')",
    )
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    with Launched(local(1, "-q", "script.py"), tmp_path, out=theirs) as job:
        assert job.wait() == 0
    assert os.read(ours, 1000) == b"True\tTrue\t(77, 33)\r\n"


@ranks(1, init=False)
def test_a_reader_that_leaves_ends_the_ranks(tmp_path):
    """As in `deepspeed … | head`: a rank finds its output closed."""
    box = Mailbox(tmp_path)
    script(
        tmp_path,
        """
tell("started")
try:
    while True:
        print("y" * 1000)
except BrokenPipeError:
    tell("closed")
    os._exit(9)
""",
    )
    read, write = os.pipe()
    with Launched(local(1, "-q", "script.py"), tmp_path, out=write) as job:
        os.close(write)
        assert box.lines(1) == ["started"]
        os.close(read)
        assert box.lines(1) == ["closed"]
        assert job.wait() == 9


@ranks(1, init=False)
def test_the_guard_is_light(tmp_path):
    box = Mailbox(tmp_path)
    script(tmp_path, "tell('torch' in open(f'/proc/{os.getppid()}/maps').read())")
    with Launched(local(1, "script.py"), tmp_path) as job:
        assert box.lines(1) == ["False"]
        assert job.wait() == 0


# ---- cores


@ranks(1, init=False)
def test_cores_are_shared_out(tmp_path):
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    script(tmp_path, SHOW)
    words = local(2, f"--bind_core_list={allowed[0]},{allowed[1]}", "--bind_cores_to_rank", "script.py")
    with Launched(words, tmp_path) as job:
        assert job.wait() == 0, job.errors()
    assert [found["cores"] for found in shown(tmp_path, 2)] == [[allowed[0]], [allowed[1]]]
    assert [found["omp"] for found in shown(tmp_path, 2)] == ["1", "1"]


@ranks(1, init=False)
def test_numactl_binds_where_it_is_installed(tmp_path):
    core = min(os.sched_getaffinity(0))
    (tmp_path / "bin").mkdir()
    numactl = tmp_path / "bin/numactl"
    numactl.write_text('#!/bin/sh\necho "$@" > words\nwhile [ "${1#-}" != "$1" ]; do shift 2; done\nexec "$@"\n')
    numactl.chmod(0o755)
    script(tmp_path, SHOW)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    with Launched(local(1, f"--bind_core_list={core}", "script.py"), tmp_path, environ={"PATH": path}) as job:
        assert job.wait() == 0, job.errors()
    assert re.search(rf"-C {core} \S+ -u script.py --local_rank=0$", (tmp_path / "words").read_text().strip())
    assert shown(tmp_path, 1)[0]["argv"] == ["--local_rank=0"]
    assert str(numactl) in job.errors()  # the line that says what is started


@ranks(1, init=False)
def test_more_ranks_than_cores_and_foreign_affinity_are_errors(tmp_path):
    script(tmp_path, SHOW)
    core = min(os.sched_getaffinity(0))
    with Launched(local(2, f"--bind_core_list={core}", "script.py"), tmp_path) as job:
        assert job.wait() == 2
        assert "2 ranks cannot be bound to 1 cores" in job.errors()
    with Launched(local(1, "--bind_cores_to_rank", "script.py"), tmp_path, environ={"KMP_AFFINITY": "compact"}) as job:
        assert job.wait() == 2
        assert "KMP_AFFINITY='compact'" in job.errors()
    assert not (tmp_path / "shown0").exists()


# ---- pid file


@ranks(1, init=False)
def test_the_pid_file_is_private_and_removed(tmp_path):
    box = Mailbox(tmp_path)
    script(tmp_path, "tell('up')\nsys.exit(int(open('answer').readline()))")
    os.mkfifo(tmp_path / "answer")
    for answer in (0, 5):
        with Launched(
            local(1, "--save_pid=4711", "script.py"), tmp_path, environ={"XDG_RUNTIME_DIR": str(tmp_path)}
        ) as job:
            box.lines(1)
            file = tmp_path / "deepspeed/4711.deepspeed"
            assert file.read_text() == f"{job.pid}\n"
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
            (tmp_path / "answer").write_text(f"{answer}\n")
            assert job.wait() == answer
        assert list(file.parent.iterdir()) == []


# ---- the port


@ranks(1, init=False)
def test_a_port_in_use(tmp_path):
    script(tmp_path, SHOW)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with Launched([world(1), f"--master_port={port}", "script.py"], tmp_path) as job:
            assert job.wait() == 2
        assert f"--master_port {port} is in use" in job.errors()
        assert "Traceback" not in job.errors()
        with Launched(["--num_gpus=1", f"--master_port={port}", "script.py"], tmp_path, main=runner.main) as job:
            assert job.wait() == 2
    assert not (tmp_path / "shown0").exists()


# ---- the whole command


@ranks(1, init=False)
def test_the_command_starts_cpu_ranks(tmp_path):
    script(tmp_path, SHOW)
    with Launched(["--num_gpus", "3", "script.py", "--num_gpus", "7"], tmp_path, main=runner.main) as job:
        assert job.wait() == 0, job.errors()
    found = shown(tmp_path, 3)
    assert [each["env"]["RANK"] for each in found] == ["0", "1", "2"]
    assert {each["env"]["MASTER_ADDR"] for each in found} == {"127.0.0.1"}
    assert found[1]["argv"] == ["--local_rank=1", "--num_gpus", "7"]


@ranks(1, init=False)
def test_two_nodes_without_ssh_are_one_world(tmp_path):
    (tmp_path / "hosts").write_text("alpha slots=1\nbeta slots=2\n")
    script(tmp_path, SHOW)
    port = free_port()
    for node in (0, 1):
        words = ["-H", "hosts", "--no_ssh", "--node_rank", node, "--master_port", port, "script.py"]
        with Launched(words, tmp_path, main=runner.main) as job:
            assert job.wait() == 0, job.errors()
    found = [each["env"] for each in shown(tmp_path, 3)]
    assert [(each["RANK"], each["LOCAL_RANK"], each["LOCAL_SIZE"]) for each in found] == [
        ("0", "0", "1"),
        ("1", "0", "2"),
        ("2", "1", "2"),
    ]
    assert {(each["MASTER_ADDR"], each["WORLD_SIZE"], each["CROSS_SIZE"]) for each in found} == {("alpha", "3", "2")}


@ranks(1, init=False)
def test_launches_started_at_once_meet_at_different_ports(tmp_path):
    """All of them run before any rank 0 listens, which is when merely looking for a free port goes wrong."""
    mailbox = Mailbox(tmp_path)
    script(tmp_path, "tell(os.environ['MASTER_PORT'])\nwait_forever()")
    with ExitStack() as stack:
        folders = [tmp_path / str(number) for number in range(6)]
        for folder in folders:
            folder.mkdir()
            words = ["--num_gpus", "1", tmp_path / "script.py"]
            stack.enter_context(Launched(words, folder, main=runner.main))
        ports = mailbox.lines(len(folders))
    assert len(set(ports)) == len(folders), ports


@ranks(1, init=False)
def test_the_number_of_the_only_host_is_no_mistake(tmp_path):
    script(tmp_path, SHOW)
    words = ["--num_gpus", "2", "--node_rank", "0", "script.py"]
    with Launched(words, tmp_path, main=runner.main, environ={"LOCAL_SIZE": "nonsense"}) as job:
        assert job.wait() == 0, job.errors()
    assert [each["env"]["LOCAL_SIZE"] for each in shown(tmp_path, 2)] == ["2", "2"]
    assert "LOCAL_SIZE='nonsense' is not used" in job.errors()


@ranks(1, init=False)
def test_mistakes_end_with_a_message_and_status_2(tmp_path):
    with Launched(["missing.py"], tmp_path, main=runner.main) as job:
        assert job.wait() == 2
    assert "deepspeed: error: there is no script 'missing.py'" in job.errors()
    assert "Traceback" not in job.errors()
