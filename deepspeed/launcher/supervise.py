"""The launcher's side of a running job: start the guard, pass signals to it, wait, and clean up if it dies.

See [Note: the guard] in guard.py. Where the launcher itself was started from another host, its stdin is the line that
it hangs on: bytes there are signals, and its end means that the other side is gone.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from deepspeed.launcher import processes
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.protocol import NodePlan, RelayPlan, framed
from deepspeed.log import logger

BEAT = 0  # the byte that says that the other side still lives
SILENCE = 90.0  # seconds without a beat, after the first one, until the other side counts as gone

_HELPER = Path(__file__).with_name("launcher_helper.py")
_CLEANUP = 10.0  # seconds until processes that do not die of SIGKILL are given up
_FAREWELL = 5.0  # seconds that ranks get to end once the other side is gone


class Supervision:
    """A plan that a small process runs; leaving the context ends whatever of it still runs."""

    def __init__(
        self, plan: NodePlan | RelayPlan, environment: Mapping[str, str], *, without_stdin: bool = False
    ) -> None:
        if os.name != "posix":
            raise LaunchError("the launcher needs Linux or another POSIX system; on Windows start one process per rank")
        _open_standard_streams()
        self._before = processes.descendants(os.getpid())
        control, self._pipe = os.pipe()
        processes.adopt_orphans()
        self._open = True
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_HELPER), plan.program, str(control)],
                pass_fds=(control,),
                env=dict(environment),
                stdin=subprocess.DEVNULL if without_stdin else None,
                start_new_session=True,
            )
            os.close(control)
            _send(self._pipe, plan)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Supervision:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tell(self, number: int) -> None:
        """Pass a signal on, by its number."""
        with suppress(OSError):  # it has just ended
            os.write(self._pipe, bytes([number]))

    def wait(self, patience: float | None = None) -> int | None:
        """The exit status of the job once no process of it is left; None if it still runs after so many seconds."""
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        if code < 0:
            pid, how = self._process.pid, processes.describe_exit(code)
            logger.error("the guard of the ranks (pid %d) %s: ending the job", pid, how)
            kill_below(self._before)
        return processes.status(code)

    def close(self) -> None:
        """Let go of it; if it lives, this is the sign for it to end everything."""
        if self._open:
            self._open = False
            os.close(self._pipe)
            processes.adopt_orphans(False)


def supervise(plan: NodePlan | RelayPlan, environment: Mapping[str, str], *, hangs_on_stdin: bool = False) -> int:
    """Run a plan, and return the exit status of the job; no process is left when it returns."""
    with Supervision(plan, environment, without_stdin=hangs_on_stdin) as running:
        if hangs_on_stdin:
            follow_stdin(running.tell)
        with forward_signals(running.tell):
            status = running.wait()
    assert status is not None, "it was waited for without a limit"
    return status


def follow_stdin(tell: Callable[[int], None]) -> None:
    """From now on, pass on what the launcher on another host says, and end this process when that is gone."""
    threading.Thread(target=_follow, args=(0, tell), daemon=True).start()


def _open_standard_streams() -> None:
    """Closed standard streams would be mistaken for the next files that are opened."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _follow(line: int, tell: Callable[[int], None]) -> None:
    """Pass on what the other side says, and end everything when it is gone; see [Note: beats] in relay.py."""
    heard, limit = True, None
    while heard:
        ready, _, _ = select.select([line], [], [], limit)
        numbers = os.read(line, 4096) if ready else b""
        heard = bool(numbers)
        if BEAT in numbers:
            limit = SILENCE
        for number in numbers:
            if number != BEAT:
                tell(number)
    tell(signal.SIGTERM)
    time.sleep(_FAREWELL)
    os.kill(os.getpid(), signal.SIGKILL)  # which the guard notices, and kills whatever is left


def _send(pipe: int, plan: NodePlan | RelayPlan) -> None:
    view = memoryview(framed(pickle.dumps(plan)))
    with suppress(BrokenPipeError):  # the guard is dead: its exit status will tell
        while view:
            view = view[os.write(pipe, view) :]


@contextmanager
def forward_signals(tell: Callable[[int], None]) -> Iterator[None]:
    """While open, signals of this process are told by their numbers; those that were ignored (nohup) stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread handle signals; somebody else does
        return

    def handle(number: int, frame: FrameType | None) -> None:
        tell(number)

    def pause(number: int, frame: FrameType | None) -> None:
        tell(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # here this process stops, until somebody continues it
        signal.signal(signal.SIGTSTP, pause)
        tell(signal.SIGCONT)

    numbers = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGWINCH")
    handlers = {getattr(signal, name): handle for name in numbers}
    replaced = {}
    for number, handler in {**handlers, signal.SIGTSTP: pause}.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            replaced[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in replaced.items():
            signal.signal(number, old)


def kill_below(spared: list[int]) -> None:
    """Kill what a dead guard left: its orphans come to this process."""
    until = time.monotonic() + _CLEANUP
    while left := set(processes.descendants(os.getpid())) - set(spared):
        processes.send(signal.SIGKILL, left)
        if time.monotonic() > until:
            logger.error("pid %s did not die of SIGKILL", ", ".join(map(str, sorted(left))))
            return
        time.sleep(0.02)
        for pid in left:
            with suppress(ChildProcessError):  # somebody else's child, or not ours yet
                os.waitpid(pid, os.WNOHANG)


# ---- the file of --save_pid


def pid_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of pid files: below XDG_RUNTIME_DIR, else below the user's cache folder."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "deepspeed"
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepspeed"


@contextmanager
def pid_file(name: int, folder: Path | None = None) -> Iterator[Path]:
    """`<name>.deepspeed` with this process's pid, while the context is open."""
    folder = folder or pid_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise LaunchError(
            f"--save_pid: {folder} is a link, belongs to another user or is writable by others; "
            "make it a folder of your own with mode 700, or set XDG_RUNTIME_DIR to one"
        )
    path = folder / f"{name}.deepspeed"
    # The name holds the pid of a live process of ours, so whatever is there was left by a dead one with that pid.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(f"{os.getpid()}\n")
    try:
        yield path
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
