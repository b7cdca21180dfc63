"""Checkpoints as somebody would make them who wants to do harm: mutations of good ones, and what must hold after each.

`python -m tests.hostile_checkpoints COUNT SEED` tries as many; its memory and the time of each are bounded.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint import __main__ as program
from deepspeed.checkpoint import ds_to_universal, zero_to_fp32
from deepspeed.checkpoint.formats.detect import find_tag, open_checkpoint
from deepspeed.checkpoint.formats.megatron import DeepSpeedCheckpoint
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.formats.safetensors import open_file
from deepspeed.checkpoint.formats.universal.convert import convert
from deepspeed.checkpoint.storage.locate import find_loadable
from deepspeed.checkpoint.storage.manager import CheckpointManager, SavePolicy, SaveRequest
from deepspeed.checkpoint.storage.publishing import publishing
from deepspeed.checkpoint.storage.rank_meeting import SingleRank
from deepspeed.errors import DeepSpeedError
from deepspeed.log import logger
from deepspeed.utils import zero_to_fp32 as facade
from tests.checkpoint_states import SMALL

SECONDS = 20
MEMORY = 3 * 2**30
ESCAPE = "\x1b[2J"


def make(folder: Path, form: str) -> None:
    """A good checkpoint in `folder/tag` with `latest`; forms are a writer's name and a stage, or `universal`."""
    kind, _, stage = form.partition("-")
    if kind == "universal":
        SMALL.save(folder / "origin", 2, 2)
        convert(folder / "origin", folder / "tag")
        shutil.rmtree(folder / "origin")
    else:
        world = 1 if stage == "0" else 2
        with publishing(folder / "tag", kind, world) as place:
            SMALL.save(place, int(stage), world, kind)
    (folder / "latest").write_text("tag")


FORMS = ("deepspeed-0", "deepspeed-2", "deepspeed-3", "native-2", "native-3", "universal")


class Sandbox:
    """A folder with a checkpoint and one beside it that nobody may touch."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.outside = place / "outside"
        self.outside.mkdir()
        (self.outside / "keys").write_text("secret")
        self._good = {form: place / "good" / form for form in FORMS}
        for form, folder in self._good.items():
            folder.mkdir(parents=True)
            make(folder, form)
        self.run, self.out = place / "run", place / "out"

    def fresh(self, form: str) -> Path:
        """The folder of a good checkpoint, to be spoiled."""
        for folder in (self.run, self.out):
            if os.path.lexists(folder):
                shutil.rmtree(folder)
        shutil.copytree(self._good[form], self.run)
        return self.run

    def check(self) -> None:
        """Nothing was written but into the output, or by a save into the run."""
        assert {path.name for path in self.place.iterdir()} <= {"outside", "good", "run", "out"}
        assert [path.name for path in self.outside.iterdir()] == ["keys"]
        assert (self.outside / "keys").read_text() == "secret"

    def values(self, chance: random.Random) -> Any:
        """Something that a file should not hold in its place."""
        numbers = [0, -1, 1, 2, 7, 2**31, 2**63, -(2**70), 10**30, 0.5, float("inf"), float("nan"), 1j, True]
        texts = ["", "x", ".", "..", "/", "a/b", "a\0", "x" * 300, "\udcff", "float32", "(a*)*(a*)*b", "(?P<"]
        texts += ["../outside/keys", str(self.outside / "keys"), "../../outside/keys\0", f"[red]{ESCAPE}[/nonsense]"]
        holders = [
            [],
            {},
            (),
            [[]],
            {"a": 1},
            [1, 2],
            ["x"],
            set(),
            b"x",
            b"",
            None,
            torch.Size([2**40]),
            torch.float32,
        ]
        tensors = [torch.zeros(()), torch.zeros(3), torch.zeros(0), torch.arange(4), torch.zeros(2, 3).t()]
        tensors += [torch.zeros(1).expand(2**34), torch.eye(2).to_sparse(), torch.empty(2**40, device="meta")]
        large = ["array", "<f8", [2**40], torch.zeros(8).byte()]
        tagged = [{"__deepspeed_value__": large}, {"__deepspeed_value__": ["enum", "a", "b"]}]
        odd: list[Any] = [*numbers, *texts, *holders, *tensors, *tagged]
        return chance.choice(odd)


# ---- mutations


def places(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Every (container, key) in nested containers."""
    found: list[tuple[Any, Any]] = []
    if depth < 12 and isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found.append((value, key))
            found += places(value[key], depth + 1)
    return found


def spoil(value: Any, sandbox: Sandbox, chance: random.Random) -> Any:
    """A value with one or a few entries replaced, renamed, removed or repeated."""
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        known = places(value)
        if not known:
            return sandbox.values(chance)
        holder, key = chance.choice(known)
        with contextlib.suppress(TypeError, KeyError, IndexError):  # what cannot be a key
            how = chance.randrange(6)
            if how < 3:
                holder[key] = sandbox.values(chance)
            elif how == 3 and isinstance(holder, dict):
                holder[sandbox.values(chance)] = holder.pop(key)
            elif how == 4:
                del holder[key]
            elif isinstance(holder, list):
                holder *= chance.choice((2, 50)) if len(holder) < 100 else 1
            else:
                holder[key] = holder
    return value


def spoil_torch(path: Path, sandbox: Sandbox, chance: random.Random) -> None:
    try:
        value = torch.load(path, weights_only=True)
    except Exception:
        return
    with contextlib.suppress(Exception):  # torch.save cannot write all that is odd
        torch.save(spoil(value, sandbox, chance), path)


def spoil_json(path: Path, sandbox: Sandbox, chance: random.Random) -> None:
    value = json.loads(path.read_text())
    body = spoil(value["manifest"] if path.name == "manifest.json" else value, sandbox, chance)
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        if path.name == "manifest.json":  # with a true checksum, as an attacker would
            line = json.dumps(body, sort_keys=True)
            whole = {"checksum": f"{zlib.crc32(line.encode()):08x}", "manifest": body}
            path.write_text(json.dumps(whole, sort_keys=True, indent=1) + "\n")
        else:
            path.write_text(json.dumps(body))


def spoil_safetensors(path: Path, sandbox: Sandbox, chance: random.Random) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = spoil(json.loads(data[8 : 8 + length]), sandbox, chance)
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        text = json.dumps(header).encode()
        claimed = len(text) if chance.random() < 0.9 else chance.choice((0, 2**40, 2**63, len(data)))
        path.write_bytes(claimed.to_bytes(8, "little") + text + data[8 + length :])


def spoil_bytes(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 3, 20))):
        place = chance.randrange(len(data) + 1)
        how = chance.randrange(4)
        if how == 0:
            data[place : place + 1] = bytes([chance.randrange(256)])
        elif how == 1:
            data[place:place] = chance.randbytes(chance.choice((1, 8, 100)))
        elif how == 2:
            del data[place : place + chance.choice((1, 8, 1000))]
        else:
            data[place : place + 8] = chance.choice((b"\0" * 8, b"\xff" * 8, (2**40).to_bytes(8, "little")))
    path.write_bytes(data)


def spoil_file(path: Path, sandbox: Sandbox, chance: random.Random) -> None:
    """Another kind of entry in its place, or another name."""
    how = chance.randrange(8)
    if how == 0:
        name = chance.choice(("x", f"a{ESCAPE}b", "zero_pp_rank_99999999999_mp_rank_00_optim_states.pt", "[bold].pt"))
        path.rename(path.with_name(name))
        return
    path.unlink()
    if how == 1:
        os.mkfifo(path)
    elif how == 2:
        path.symlink_to("/dev/zero")
    elif how == 3:
        path.mkdir()
    elif how == 4:
        path.symlink_to(sandbox.outside / "keys")
    elif how == 5:
        path.symlink_to("nowhere")
    elif how == 6:
        path.touch()
        os.truncate(path, 2**40)
    else:
        path.touch()


def spoil_latest(folder: Path, sandbox: Sandbox, chance: random.Random) -> None:
    text = chance.choice(
        ("..", "/", str(sandbox.outside), "../outside", "tag\0", "", "x" * 10**6, ESCAPE, "tag/../../outside")
    )
    (folder / "latest").write_text(text)


def mutate(folder: Path, sandbox: Sandbox, chance: random.Random) -> None:
    """Spoil one file, mostly without leaving a manifest that would tell."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if chance.random() < 0.6:
        (folder / "tag" / "manifest.json").unlink()
        files = [path for path in files if path.name != "manifest.json"]
    path = chance.choice(files)
    how = chance.random()
    if path.name == "latest":
        spoil_latest(folder, sandbox, chance)
    elif how < 0.25:
        spoil_bytes(path, chance)
    elif how < 0.35:
        spoil_file(path, sandbox, chance)
    elif path.suffix == ".pt":
        spoil_torch(path, sandbox, chance)
    elif path.suffix == ".json":
        spoil_json(path, sandbox, chance)
    elif path.suffix == ".safetensors":
        spoil_safetensors(path, sandbox, chance)


# ---- whoever reads


def read_all(folder: Path) -> None:
    source = open_checkpoint(find_tag(folder), order=[["a.weight"]])
    _ = source.format, source.groups, source.small, source.files, source.buffers, source.aliases, source.stage
    for name in source.shapes:
        source.scalars(name)
        source.dtype(name)
        for kind in source.kinds(name):
            source.read(name, kind)
    for rank in range(min(source.world, 3)):
        source.rank_state(rank)


def parts(folder: Path) -> None:
    """The readers of single files."""
    for path in sorted(find_tag(folder).rglob("*")):
        with contextlib.suppress(DeepSpeedError):
            safe_load(path)
        with contextlib.suppress(DeepSpeedError, OSError):  # a reader of one file, whose opener explains
            open_file(path)
    with contextlib.suppress(DeepSpeedError):
        facade.get_fp32_state_dict_from_zero_checkpoint(str(folder))
    checkpoint = DeepSpeedCheckpoint(str(find_tag(folder)))
    checkpoint.get_iteration()
    checkpoint.get_zero_checkpoint_state(0, 0, 0)


def save_beside(folder: Path) -> None:
    manager = CheckpointManager(SingleRank(), SavePolicy(keep_last=1))
    manager.save(SaveRequest(folder, "mine", {"x": "1"}))
    assert manager.locate(folder, "mine").tag == "mine"
    find_loadable(folder)
    manager.save(SaveRequest(folder, "tag", {"x": "1"}))


def universal(folder: Path, out: Path) -> None:
    ds_to_universal.main(
        ds_to_universal.parse_arguments(["--input_folder", str(folder / "tag"), "--output_folder", str(out / "u")])
    )


def tools(folder: Path, out: Path) -> dict[str, Callable[[], object]]:
    """Everything that reads a checkpoint of a stranger."""

    def to(form: str) -> Callable[[], object]:
        return lambda: program.main(["convert", str(folder), str(out), "--to", form])

    return {
        "read": lambda: read_all(folder),
        "parts": lambda: parts(folder),
        "inspect": lambda: program.main(["inspect", str(folder)]),
        "verify": lambda: program.main(["verify", str(folder)]),
        "universal": lambda: universal(folder, out),
        "script": lambda: zero_to_fp32.main([str(folder), str(out), "--safe_serialization"]),
        "torch script": lambda: zero_to_fp32.main([str(folder), str(out)]),
        "save": lambda: save_beside(folder),
        **{f"to {form}": to(form) for form in ("fp32", "bf16", "universal", "deepspeed", "native")},
    }


class TooSlow(BaseException):
    """Nobody catches it by mistake."""


def _too_slow(*signals: object) -> None:
    raise TooSlow(f"it takes more than {SECONDS} s")


def attempt(tool: Callable[[], object]) -> str:
    """Run a tool in bounded time; what it printed. Anything but an exit or an error of ours comes out."""
    shown = io.StringIO()
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown), contextlib.suppress(SystemExit):
            tool()
    except DeepSpeedError as error:
        shown.write(str(error))
    finally:
        signal.alarm(0)
    return shown.getvalue()


def fuzz(count: int, seed: int, place: Path) -> None:
    """As many mutations; an AssertionError names the one that went wrong."""
    sandbox = Sandbox(place)
    signal.signal(signal.SIGALRM, _too_slow)
    for number in range(count):
        chance = random.Random(f"{seed}/{number}")
        form = chance.choice(FORMS)
        mutate(sandbox.fresh(form), sandbox, chance)
        available = tools(sandbox.run, sandbox.out)
        for name in chance.sample(sorted(available), 2):
            if os.path.lexists(sandbox.out):
                shutil.rmtree(sandbox.out)
            try:
                text = attempt(available[name])
                assert ESCAPE not in text, "it reaches the terminal"
                sandbox.check()
            except BaseException as error:
                raise AssertionError(f"mutation {seed}/{number} of {form}: {name}") from error


def main() -> None:
    """The command line."""
    logger.setLevel("ERROR")
    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    with tempfile.TemporaryDirectory() as folder:
        fuzz(int(sys.argv[1]), int(sys.argv[2]), Path(folder))
    print(f"{sys.argv[1]} mutations, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB at most")  # noqa: T201


if __name__ == "__main__":
    main()
