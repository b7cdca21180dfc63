"""Saving and finding checkpoints with all ranks: tags, staging, agreement, `latest`, retention, background writing.

It knows files and directories, not what is in them. Who leads: rank 0, or where nodes do not share the directory, one
rank of each node; the leader makes the staging directory, writes the manifest of what its ranks wrote, and publishes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.storage import manifest as manifests
from deepspeed.checkpoint.storage.background import Background, Snapshot
from deepspeed.checkpoint.storage.block_reader import FileProblem
from deepspeed.checkpoint.storage.block_writer import FileFacts, Stream, WriterOptions
from deepspeed.checkpoint.storage.commit import LATEST, LATEST_UNIVERSAL, Staging
from deepspeed.checkpoint.storage.durable import dump, explain, payload, write_file
from deepspeed.checkpoint.storage.locate import FoundCheckpoint, common, examine, find_loadable, retain
from deepspeed.checkpoint.storage.manifest import Manifest
from deepspeed.checkpoint.storage.rank_meeting import RankExchange, RankMeeting, on_all_ranks
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.log import logger
from deepspeed.trust import flaw_of_name


@dataclass(frozen=True, slots=True)
class FileContent:
    """What goes into a file and how it is written."""

    value: Any
    write: Callable[[Any, Stream], object] = dump


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Which ranks see the same directory: all of them, or with node-local storage those of a node."""

    node: str = ""
    leader: bool = True
    """This rank makes and publishes the directory."""


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """What the config says about saving."""

    tag_validation: str = "WARN"
    keep_last: int | None = None
    """How many checkpoints stay in a directory; None keeps all."""
    background: bool = False
    zipped: bool = True
    """torch's zip format; False is its older one."""
    writer: WriterOptions = field(default_factory=WriterOptions)


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """One checkpoint to write."""

    save_dir: str | os.PathLike[str]
    tag: str
    files: Mapping[str, Any]
    """This rank's files by name within the checkpoint: text, bytes, a `FileContent`, or what `torch.save` is to write;
    a callable without arguments is called for it just before."""
    format: str = "deepspeed"
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More for the manifest; the leader's are taken."""
    latest: str | None = LATEST
    """The file that is to name this checkpoint; None leaves it as it is."""
    scripts: Mapping[str, str] = field(default_factory=dict)
    """Executable texts that the leader places beside the checkpoint."""
    settled: bool = False
    """The tensors will not change any more, such as copies in memory from `allocator()`: no snapshot is needed."""
    finished: Callable[[], None] | None = None
    """Called once the checkpoint is complete, by the thread that wrote it."""


def default_tag(global_steps: int) -> str:
    """The tag of a checkpoint that was given none."""
    return f"global_step{global_steps}"


@dataclass(slots=True)
class _Save:
    """A save under way: what its steps share."""

    request: SaveRequest
    what: str
    meeting: RankMeeting
    staging: Staging
    token: str
    nodes: Sequence[str]
    """The node of each rank."""
    contents: dict[str, FileContent] = field(default_factory=dict)


class CheckpointManager:
    """Writes and finds checkpoints together with the other ranks of an exchange."""

    def __init__(
        self, exchange: RankExchange, policy: SavePolicy | None = None, place: NodePlace | None = None
    ) -> None:
        self.exchange = exchange
        self.policy = policy or SavePolicy()
        self.place = place or NodePlace(leader=exchange.rank == 0)
        self._background = Background()
        self._snapshot = Snapshot()

    # ---- saving

    def save(self, request: SaveRequest) -> Path:
        """Write a checkpoint; returns its directory, which is there unless it is written in the background.

        On an error every rank raises a CheckpointError, and what was in the directory before is still there.
        """
        self._background.wait()
        _check_names(request)
        with contextlib.ExitStack() as stack:
            what = f"saving checkpoint {request.tag!r} to {request.save_dir}"
            meeting = stack.enter_context(self.exchange.meeting(what))
            save = self._begin(request, what, meeting)
            stack.push(functools.partial(self._abandon, save))
            on_all_ranks(meeting, what, lambda: self._prepare(save))
            if not self.policy.background:
                self._complete(save)
                return save.staging.target
            rest = stack.pop_all()

        def finish() -> None:
            with rest:
                self._complete(save)

        self._background.start(what, finish)
        return save.staging.target

    def allocator(self) -> Callable[[int, torch.dtype], Tensor]:
        """(elements, dtype) → host memory for the copies of the next background save, which then is `settled`.

        Waits for the save before, whose memory it is.
        """
        self._background.wait()
        self._snapshot.begin()
        return self._snapshot.allocate

    def wait(self) -> None:
        """Wait for the background save and raise its error."""
        self._background.wait()

    def close(self) -> None:
        """Wait for the background save, raise its error, give memory back."""
        try:
            self._background.wait()
        finally:
            self._snapshot.close()

    def _begin(self, request: SaveRequest, what: str, meeting: RankMeeting) -> _Save:
        """All ranks are here: agree on the tag and on the name of the staging directory."""
        mine = {"tag": request.tag, "node": self.place.node, "token": uuid.uuid4().hex[:12]}
        heard = meeting.gather({**mine, "files": list(request.files)})
        _one_writer_each(heard)
        tags = [answer["tag"] for answer in heard]
        self._compare(tags)
        token = heard[0]["token"]
        staging = Staging(request.save_dir, tags[0], token)
        return _Save(request, what, meeting, staging, token, [answer["node"] for answer in heard])

    def _compare(self, tags: Sequence[str]) -> None:
        mode = self.policy.tag_validation.upper()
        odd = {rank: tag for rank, tag in enumerate(tags) if tag != tags[0]}
        if not odd or mode == "IGNORE":
            return
        told = ", ".join(f"rank {rank} {tag!r}" for rank, tag in list(odd.items())[:4])
        text = f"checkpoint tags differ: rank 0 says {tags[0]!r}, but {told} ({len(odd)} of {len(tags)} ranks)."
        if mode == "FAIL":
            raise CheckpointError(f"{text} Give every rank the same tag, or set checkpoint.tag_validation to WARN.")
        if self.exchange.rank == 0:
            logger.warning("%s The checkpoint is saved as %r.", text, tags[0])

    def _prepare(self, save: _Save) -> None:
        if self.place.leader:
            save.staging.open()
        contents = {name: self._content(value) for name, value in save.request.files.items()}
        if self.policy.background and not save.request.settled:
            self._snapshot.begin()
            taken = self._snapshot.take({name: content.value for name, content in contents.items()})
            contents = {name: FileContent(taken[name], content.write) for name, content in contents.items()}
        save.contents = contents

    def _content(self, value: Any) -> FileContent:
        if callable(value):
            value = value()
        if isinstance(value, FileContent):
            return value
        if isinstance(value, (str, bytes)):
            return FileContent(
                value.encode() if isinstance(value, str) else value, lambda data, stream: stream.write(data)
            )
        return FileContent(value, functools.partial(dump, zipped=self.policy.zipped))

    def _complete(self, save: _Save) -> None:
        """Write, seal, publish: each step ends when all ranks have done it."""
        _, heard = on_all_ranks(save.meeting, save.what, lambda: self._write(save))
        if self.policy.writer.discard:
            logger.warning("%s: nothing was kept, because checkpoint.writer.type is MOCK", save.what)
            self._abandon(save, None)
            return
        parts = [part for rank, part in enumerate(heard) if save.nodes[rank] == self.place.node]
        on_all_ranks(save.meeting, save.what, lambda: self._seal(save, parts) if self.place.leader else None)
        on_all_ranks(save.meeting, save.what, lambda: self._publish(save) if self.place.leader else None)
        if save.request.finished is not None:
            save.request.finished()

    def _write(self, save: _Save) -> dict[str, Any]:
        written: dict[str, FileFacts] = {}
        for name, content in save.contents.items():
            path = save.staging.path / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise explain(error, path.parent) from error
            written[name] = write_file(
                path,
                functools.partial(content.write, content.value),
                self.policy.writer,
                needed=functools.partial(payload, content.value),
            )
        return manifests.entries(written)

    def _seal(self, save: _Save, parts: Sequence[Mapping[str, Any]]) -> None:
        facts = {**save.request.facts, "save": save.token}
        files = manifests.merge(parts)
        save.staging.seal(Manifest(save.staging.tag, save.request.format, self.exchange.world, files, facts))

    def _publish(self, save: _Save) -> None:
        save.staging.publish(save.request.latest, save.request.scripts)
        if self.policy.keep_last is None:
            return
        try:
            gone = retain(save.request.save_dir, self.policy.keep_last, save.token, save.request.latest or LATEST)
        except CheckpointError as error:  # the new checkpoint is good all the same
            logger.warning("%s: old checkpoints could not be removed: %s", save.what, error)
        else:
            for path in gone:
                logger.info("%s: removed, %d checkpoints are kept", path, self.policy.keep_last)

    def _abandon(self, save: _Save, kind: type[BaseException] | None, *rest: object) -> None:
        """The end of a save: after a failure nothing of it stays."""
        failed = kind is not None or self.policy.writer.discard
        if failed and self.place.leader:
            save.staging.discard()

    # ---- loading

    def locate(self, load_dir: str | os.PathLike[str], tag: str | None = None, latest: str = LATEST) -> FoundCheckpoint:
        """The checkpoint that all ranks load; empty only if no tag is given and there is no `latest`.

        What was passed over is logged. A tag that is not there or not whole, and a directory without any whole
        checkpoint, are a CheckpointError that names the newest one that can be loaded.
        """
        self._background.wait()
        check_directory(load_dir, "load_dir")
        load_dir = Path(load_dir)
        what = f"finding checkpoint {tag or latest!r} in {load_dir}"
        with self.exchange.meeting(what) as meeting:
            _, heard = on_all_ranks(meeting, what, lambda: self._candidates(load_dir, tag, latest))
            leaders = [answer for answer in heard if answer is not None]
            place = common([answer["candidates"] for answer in leaders])
            told = [tuple(problem) for answer in leaders for problem in answer["problems"]]
            problems = [FileProblem(*problem) for problem in dict.fromkeys(told)]
            if place is None:
                return self._nothing(load_dir, leaders, problems)
            chosen, path = leaders[0]["candidates"][place][0], leaders[0]["paths"][place]
            on_all_ranks(meeting, what, lambda: _must_see(load_dir / path))
        if self.exchange.rank == 0:
            for problem in problems:
                logger.warning("%s", problem)
            if problems:
                logger.warning("%s: loading %r", load_dir, chosen)
        return FoundCheckpoint(examine(load_dir / path, chosen), tuple(problems))

    def _candidates(self, load_dir: Path, tag: str | None, latest: str) -> dict[str, Any] | None:
        """What this node could load, best first."""
        if not self.place.leader:
            return None
        found = find_loadable(load_dir, tag, latest)
        first = () if found.checkpoint is None else (found.checkpoint,)
        spare = found.others if tag is None and found.named else ()
        able = (*first, *spare)
        return {
            "candidates": [(checkpoint.tag, checkpoint.save) for checkpoint in able],
            "paths": [os.path.relpath(checkpoint.path, load_dir) for checkpoint in able],
            "problems": [(problem.file, problem.what) for problem in found.problems],
            "named": found.named,
            "explained": found.explained(),
        }

    def _nothing(self, load_dir: Path, leaders: list[Any], problems: list[FileProblem]) -> FoundCheckpoint:
        if not any(answer["named"] for answer in leaders):
            return FoundCheckpoint(None, tuple(problems), named=False)
        told = next((answer["explained"] for answer in leaders if not answer["candidates"]), "")
        text = told or "no checkpoint is whole on every node; the nodes hold parts of different saves"
        raise CheckpointError(f"{load_dir}: nothing to load: {text}")


def _one_writer_each(heard: Sequence[Mapping[str, Any]]) -> None:
    writers: dict[tuple[str, str], int] = {}
    for rank, answer in enumerate(heard):
        for name in answer["files"]:
            first = writers.setdefault((answer["node"], name), rank)
            if first != rank:
                raise CheckpointError(
                    f"{name} is to be written by ranks {first} and {rank}; a file of a checkpoint has one writer. "
                    "Where nodes do not share the directory, set checkpoint.use_node_local_storage."
                )


def _must_see(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not visible here, though the leading rank sees it. Where nodes do not share the directory, "
            "set checkpoint.use_node_local_storage."
        )


def check_directory(value: object, what: str) -> None:
    """Refuse what is not the path of a directory; `what` is the name of the argument."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise UsageError(f"{what} is {type(value).__name__} ({value!r:.100}), expected the path of a directory")
    if not os.fspath(value) or "\0" in os.fspath(value):
        flaw = "has a NUL character in it" if os.fspath(value) else "is empty"
        raise UsageError(f"{what} {flaw}; give the path of the directory of the checkpoints")


def check_tag(tag: object) -> None:
    """Refuse what cannot be the name of a checkpoint."""
    flaw = flaw_of_name(tag, hidden=False)
    if flaw is not None:
        raise UsageError(
            f"checkpoint tag {tag!r:.200} cannot be used: it {flaw}. It has to be a relative path without parts that "
            "begin with a dot, which are reserved for saves under way"
        )
    if tag in (LATEST, LATEST_UNIVERSAL):
        raise UsageError(f"checkpoint tag {tag!r} cannot be used: a file of that name lies beside checkpoints")


def _check_names(request: SaveRequest) -> None:
    check_directory(request.save_dir, "save_dir")
    check_tag(request.tag)
    if request.tag in (request.latest, *request.scripts):
        raise UsageError(f"checkpoint tag {request.tag!r} cannot be used: a file of that name lies beside checkpoints")
    for name in request.files:
        flaw = flaw_of_name(name, hidden=False)
        if flaw is not None:
            raise UsageError(f"checkpoint file name {name!r:.200} cannot be used: it {flaw}")
    if manifests.NAME in request.files:
        raise UsageError(f"a checkpoint cannot hold a file called {manifests.NAME}; that is its manifest")
