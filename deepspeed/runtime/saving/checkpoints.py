"""`Checkpoints`: the parts of an engine to files and back, together with all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import shutil
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from logging import WARNING
from pathlib import Path
from typing import Any, TypeVar

from deepspeed.checkpoint.formats import safetensors
from deepspeed.checkpoint.formats.adapters import Resliced, Selection
from deepspeed.checkpoint.formats.consolidate import scripts
from deepspeed.checkpoint.formats.detect import ModelShare, open_checkpoint
from deepspeed.checkpoint.formats.native import writer as safetensors_files
from deepspeed.checkpoint.formats.rank_files import Allocate, Files
from deepspeed.checkpoint.formats.safe_load import StandIns
from deepspeed.checkpoint.formats.source import Source
from deepspeed.checkpoint.formats.training_state import TrainingState
from deepspeed.checkpoint.formats.zero_files import writer as deepspeed_files
from deepspeed.checkpoint.storage.block_writer import BLOCK, Stream, WriterOptions
from deepspeed.checkpoint.storage.commit import LATEST, LATEST_UNIVERSAL
from deepspeed.checkpoint.storage.durable import write_tensorfile, write_text
from deepspeed.checkpoint.storage.manager import (
    CheckpointManager,
    FileContent,
    NodePlace,
    SavePolicy,
    SaveRequest,
    check_directory,
    check_tag,
)
from deepspeed.checkpoint.storage.rank_meeting import RankExchange, RankMeeting, default_exchange, on_all_ranks
from deepspeed.config.checkpoint import CheckpointConfig
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.events import CheckpointBegan, CheckpointFinished
from deepspeed.log import log_dist
from deepspeed.ops.onebit import ZeroOneAdam
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.dataloader import seek
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.rng import restore_states
from deepspeed.runtime.saving.restoring import LoadRequest, Restoring
from deepspeed.runtime.saving.training_state import (
    RunState,
    buffer_sum,
    collect,
    kinds_of,
    listed_groups,
    settle_edits,
    splits_in_files,
)


def save_files(
    engine: CheckpointEngine, exchange: RankExchange, files: Files, save_dir: Path, tag: str, *, latest: bool
) -> Path:
    """Hand this rank's files to the engine; once all ranks have, it commits, and then `latest` names the checkpoint."""
    if files.tensors:
        raise UsageError(
            "checkpoint.format is safetensors, whose files a checkpoint engine of your own cannot write: use the "
            "format deepspeed, or leave engine.checkpoint_engine as it is"
        )
    what = f"saving checkpoint {tag!r} to {save_dir} with {type(engine).__name__}"
    target = save_dir / tag
    info = CheckpointCommitInfo(tag, str(save_dir), latest)

    def write() -> None:
        engine.create(info)
        engine.set_commit_info(info)
        engine.makedirs(str(target), exist_ok=True)
        for name, value in files.objects.items():
            engine.save(value, str(target / name))
        for name, text in files.texts.items():
            write_text(target / name, text)

    def commit() -> None:
        if engine.commit(info) is False:
            raise CheckpointError(f"{type(engine).__name__}.commit refused checkpoint {tag!r} in {save_dir}")

    def publish() -> None:
        if latest and exchange.rank == 0:
            write_text(save_dir / LATEST, tag)

    with exchange.meeting(what) as meeting:
        for act in (write, commit, publish):
            on_all_ranks(meeting, what, act)
    return target


@contextlib.contextmanager
def plain_copy(
    engine: CheckpointEngine, exchange: RankExchange, load_dir: str | os.PathLike[str], tag: str | None
) -> Iterator[tuple[Path, str] | None]:
    """The folder and tag of a copy in torch's files, which any number of ranks can read; gone afterwards.

    Each rank loads its share of the files through the engine. None if no tag is given and nothing names one.
    """
    folder = Path(load_dir)
    named = folder / LATEST
    name = tag if tag is not None else named.read_text(encoding="utf-8").strip() if named.is_file() else None
    if name is None:
        yield None
        return
    what = f"loading checkpoint {folder / name} with {type(engine).__name__}"
    with exchange.meeting(what) as meeting:
        token = meeting.gather({"token": os.urandom(6).hex()})[0]["token"]
        copy = folder / f".{name.replace('/', '_')}.{token}.plain"

        def read() -> None:
            if not (folder / name).is_dir():
                raise UsageError(f"{folder / name} is no directory")
            (copy / name).mkdir(parents=True, exist_ok=True)
            files = sorted(path.name for path in (folder / name).iterdir() if path.is_file())
            for file in files[exchange.rank :: exchange.world]:
                write_tensorfile(copy / name / file, engine.load(str(folder / name / file), map_location="cpu"))

        try:
            on_all_ranks(meeting, what, read)
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise
    try:
        yield copy, name
        with exchange.meeting(what) as meeting:
            meeting.gather({})  # no rank reads any more
    finally:
        shutil.rmtree(copy, ignore_errors=True)


T = TypeVar("T")


def policy_of(section: CheckpointConfig) -> SavePolicy:
    """The `checkpoint` section as what the manager knows."""
    writer, options = section.writer, WriterOptions()
    if writer is not None:
        buffered = writer.io_buffer_size * writer.io_multiplier * (2 if writer.io_buffer_double else 1)
        options = WriterOptions(
            direct=writer.type == "FAST",
            discard=writer.type == "MOCK",
            depth=max(buffered // BLOCK, 1),
            statistics=writer.show_statistics,
        )
    return SavePolicy(
        tag_validation=section.tag_validation,
        keep_last=section.keep_last,
        background=writer is not None and writer.decoupled,
        zipped=section.checkpoint_serialization,
        writer=options,
    )


class Checkpoints:
    """Saves and loads the parts of one engine."""

    def __init__(self, parts: Parts) -> None:
        section = parts.config.schema.checkpoint
        self._parts = parts
        self._section = section
        self.plug: CheckpointEngine | None = None
        """What writes the files instead of the manager: an object of the user's own."""
        exchange = default_exchange(section.rank_wait, late=True)
        alone = section.use_node_local_storage
        place = (
            NodePlace(socket.gethostname(), parts.local_rank == 0) if alone else NodePlace(leader=exchange.rank == 0)
        )
        self.manager = CheckpointManager(exchange, policy_of(section), place)
        self._mixture = ""
        """Why the parts do not belong together, empty if they do."""
        parts.resources.callback(exchange.close)
        parts.resources.callback(self.manager.close)

    # ---- saving

    def save(
        self, save_dir: str | os.PathLike[str], tag: str, run: RunState, *, latest: bool, exclude_frozen: bool
    ) -> Path:
        """Write a checkpoint; returns its directory."""
        what = f"saving checkpoint {tag!r:.200} to {save_dir!s:.500}"
        finished = self._begun(run.counters.global_steps, tag, save_dir)
        background = self.manager.policy.background
        self.manager.wait()  # a save in the background has its own meeting, and perhaps an error
        with self.manager.exchange.meeting(what) as meeting:
            _, heard = on_all_ranks(meeting, what, lambda: self._look(save_dir, tag, run))
            if isinstance(self._parts.basic_optimizer, ZeroOneAdam) and self._parts.states is not None:
                self._parts.basic_optimizer.synchronise()  # ranks may have taken steps of their own
                self._parts.states.publish()
            allocate = self.manager.allocator() if background else None
            stood_in = not background and self.plug is None and self.manager.policy.zipped
            stand_ins = StandIns() if stood_in and StandIns.works() else None
            make = functools.partial(self._files, self._compared(run, heard), exclude_frozen, allocate, stand_ins)
            state, files = _here(meeting, what, make)
        if self.plug is not None:
            path = save_files(self.plug, self.manager.exchange, files, Path(save_dir), tag, latest=latest)
            finished()
            return path
        zero = state.stage > 0 and self._section.format == "deepspeed"
        path = self.manager.save(
            SaveRequest(
                save_dir,
                tag,
                _contents(files, stand_ins),
                format=self._section.format,
                facts=_facts(state),
                latest=LATEST if latest else None,
                scripts=scripts() if zero else {},
                settled=background,
                finished=finished,
            )
        )
        log_dist(f"checkpoint {tag!r} {'is being written' if background else 'was written'} to {path}")
        return path

    def _begun(self, step: int, tag: str, save_dir: str | os.PathLike[str]) -> Callable[[], None]:
        """Tell listeners that a save begins; what is returned tells them that it is complete."""
        events, began, where = self._parts.events, time.perf_counter(), (step, str(tag), str(save_dir))
        if events.wants(CheckpointBegan):
            events.emit(CheckpointBegan(*where))

        def finished() -> None:
            if events.wants(CheckpointFinished):
                events.emit(CheckpointFinished(*where, seconds=time.perf_counter() - began))

        return finished

    def _look(self, save_dir: object, tag: object, run: RunState) -> dict[str, Any]:
        """What this rank has to save; refuses what it cannot do, before any rank writes."""
        self.must_be_whole("save_checkpoint")
        check_directory(save_dir, "save_dir")
        check_tag(tag)
        if not isinstance(run.client_state, Mapping):
            raise UsageError(f"client_state is {type(run.client_state).__name__}, expected a dict of the caller's own")
        self._refuse_experts()
        experts, model = self._parts.experts, self._parts.layout.model.size
        if self._section.format == "safetensors" and model > 1 and experts is not None and experts.wide:
            raise UsageError(
                'checkpoint.format is "safetensors", which has no place for experts that are dealt to tensor-parallel '
                'ranks; use "deepspeed", from which python -m deepspeed.checkpoint convert makes safetensors of whole '
                "tensors"
            )
        settle_edits(self._parts)
        return {
            "model": self._parts.layout.model.rank,
            "data": self._parts.layout.samples.rank,
            "kinds": kinds_of(self._parts),
            "buffers": buffer_sum(self._parts.module),
        }

    def _refuse_experts(self) -> None:
        experts = self._parts.experts
        if experts is not None and len({experts.dealt(layer) for layer in experts.layers}) > 1:
            raise CheckpointError(
                f"the experts of some of {', '.join(layer.begin for layer in experts.layers[:8])} are dealt to "
                "tensor-parallel ranks and others are split over them, for which checkpoints have no place; use "
                "enable_expert_tensor_parallelism for all layers or for none"
            )

    def _compared(self, run: RunState, heard: list[dict[str, Any]]) -> RunState:
        """With what the ranks of this model-parallel part know of each other."""
        model, data = self._parts.layout.model.rank, self._parts.layout.samples.rank
        said = {answer["data"]: answer for answer in heard if answer["model"] == model}
        wide = self._parts.experts is not None and self._parts.experts.wide
        slices = self._parts.layout.tensor.size if wide else 1  # experts that are dealt to them lie on all of these
        alike = [answer["kinds"] for answer in heard if answer["model"] // slices == model // slices]
        kinds = [sorted(set().union(*groups)) for groups in zip(*alike, strict=True)]
        first = said.get(0, said[data])  # in a fake world only this rank speaks
        return dataclasses.replace(run, kinds=kinds, own_buffers=said[data]["buffers"] != first["buffers"])

    def _files(
        self, run: RunState, exclude_frozen: bool, allocate: Allocate | None, stand_ins: StandIns | None
    ) -> tuple[TrainingState, Files]:
        state = collect(self._parts, run, exclude_frozen=exclude_frozen)
        if self._section.format == "safetensors":
            return state, safetensors_files.files(state, allocate=allocate)
        return state, deepspeed_files.files(state, allocate=allocate, stand_ins=stand_ins)

    # ---- loading

    def find(self, load_dir: str | os.PathLike[str], tag: str | None) -> Path | None:
        """The directory of the checkpoint to load; None if nothing names one."""
        universal = self._section.load_universal
        found = self.manager.locate(load_dir, tag, LATEST_UNIVERSAL if universal else LATEST)
        if found.checkpoint is not None:
            return found.checkpoint.path
        if universal:
            raise UsageError(
                f"checkpoint.load_universal is true, but {load_dir} has no file {LATEST_UNIVERSAL}. Make a universal "
                "checkpoint with python -m deepspeed.checkpoint.ds_to_universal, or turn the key off: any checkpoint "
                "loads without it"
            )
        log_dist(
            f"{load_dir} has no file 'latest', so nothing was loaded; pass the tag to load a certain one", level=WARNING
        )
        return None

    def open(self, path: Path) -> Source:
        """The checkpoint in a tag's directory."""
        order = [list(group.names) for group in listed_groups(self._parts)]
        partial = self._section.use_node_local_storage
        mp_rank = self._parts.layout.model.rank
        near = self._parts.layout.samples.rank
        holds, splits = self._parts.holds, splits_in_files(self._parts)
        layers = None if self._parts.layers is None else self._parts.layers.known
        share = ModelShare(layers, splits)
        source = open_checkpoint(path, mp_rank=mp_rank, order=order or None, partial=partial, near=near, share=share)
        experts = self._parts.experts
        if experts is not None and experts.splits:
            own, _ = next(iter(experts.slices.values()))
            source = Resliced([source], {}, experts.splits, own, same_ranks=True)
        return source if holds is None else Selection(source, holds)

    def load(self, path: Path, wish: LoadRequest) -> Source:
        """Bring a checkpoint into the parts, except for what belongs to the run; a failure is one on all ranks."""
        what = f"loading checkpoint {path}"
        with self.manager.exchange.meeting(what) as meeting, _without_collections():

            def examine() -> tuple[Source, Restoring]:
                source = self.open(path)
                restoring = Restoring(self._parts, source, wish)
                restoring.examine()
                return source, restoring

            source, restoring = _here(meeting, what, examine)
            if self._parts.stepper is not None:
                self._parts.stepper.zero_grad()
            self._mixture = f"{path} was loaded half-way"  # until the caller is through with all of it
            on_all_ranks(meeting, what, restoring.read)
        restoring.publish()
        return source

    def loaded(self) -> None:
        """A load came to its end: the engine holds one checkpoint."""
        self._mixture = ""

    def must_be_whole(self, call: str) -> None:
        """Refuse to go on from a mixture of old and new values, which a load that failed half-way leaves."""
        if self._mixture:
            raise CheckpointError(
                f"{call}: {self._mixture}, because of the error that load_checkpoint raised; weights and optimizer are "
                "a mixture of old and new values. Load a checkpoint that is whole before training goes on"
            )

    def restore_rank(self, source: Source, loader: Any) -> None:
        """This rank's random states and, on any number of ranks, its place in the data."""
        axis = self._parts.layout.samples
        own = source.rank_state(axis.rank) if source.writers == axis.size else {}
        if own.get("rng"):
            restore_states(own["rng"])
        self._parts.sharded.load_reduction_states(own.get("reductions") or {})
        alike = own or source.rank_state(0)
        data = alike.get("data")
        if self._parts.pacing is not None and alike.get("pacing"):
            self._parts.pacing.load_state_dict(alike["pacing"])
        if data and loader is not None and not seek(loader, data):
            log_dist(
                f"the checkpoint holds a place in the data, but a {type(loader).__name__} has no load_state_dict: it "
                "goes on from where it is. Pass training_data to deepspeed.initialize, or a loader that has the method",
                level=WARNING,
            )


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Reading an index makes thousands of objects that stay: looking for cycles among them would take longer."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _here(meeting: RankMeeting, what: str, act: Callable[[], T]) -> T:
    """As `on_all_ranks`, for a result that the other ranks do not need."""
    kept: list[T] = []
    on_all_ranks(meeting, what, lambda: kept.append(act()))
    return kept[0]


def _write_safetensors(content: safetensors.TensorFile, stream: Stream) -> None:
    for chunk in safetensors.chunks(content):
        stream.write(chunk)


def _contents(files: Files, stand_ins: StandIns | None) -> dict[str, Any]:
    objects = files.objects
    if stand_ins is not None:
        objects = {name: FileContent(value, stand_ins.dump) for name, value in objects.items()}
    tensors = {name: FileContent(content, _write_safetensors) for name, content in files.tensors.items()}
    return {**objects, **tensors, **files.texts}


def _facts(state: TrainingState) -> dict[str, Any]:
    return {"stage": state.stage, "precision": state.precision, "global_steps": state.counters.global_steps}


def leftovers(source: Source, *, scheduler_loaded: bool) -> dict[str, Any]:
    """What DeepSpeed returns besides the client's own state; without tensors, which would keep files open."""
    small = source.small
    trained = {name for names, _ in source.groups for name in names}
    groups = [OrderedDict((name, source.shapes[name]) for name in names) for names, _ in source.groups]
    frozen = {n: shape for n, shape in source.shapes.items() if n not in trained and n not in source.buffers}
    return {
        "buffer_names": list(source.buffers),
        "param_shapes": groups or None,
        "frozen_param_shapes": OrderedDict(frozen) if groups else None,
        "shared_params": dict(source.aliases),
        **({} if scheduler_loaded else {"lr_scheduler": small.lr_scheduler}),
        "global_samples": small.counters.global_samples,
        "ds_config": small.ds_config,
        "ds_version": small.version,
    }
