"""`EventFile` and `EventWriter`: lines of JSON, put aside in time, whatever ends the writer before."""

from __future__ import annotations

import gc
import json
import logging

import pytest
import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.events import (
    CheckpointFinished,
    EventStream,
    ExpertsUsed,
    LayerUse,
    OverflowFound,
    Phase,
    PhaseBegan,
    PhaseFailed,
    PhaseFinished,
    RunContinued,
    StepFinished,
)
from deepspeed.log import logger
from deepspeed.monitor.event_file import LONGEST, EventFile
from deepspeed.monitor.event_writer import EventSources, EventWriter


def opened(folder, **changes):
    return EventFile(folder / "run", 3, {"world": 4}, **{"limit": 1 << 20, "keep": 3, **changes})


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def finished(step, loss=1.5, norm=2.0):
    return StepFinished(
        *(step, 8 * step, True, 0, (0.1,), (), None), find_grad_norm=lambda: norm, find_loss=lambda: loss
    )


def test_records_of_this_rank_begin_with_the_run(tmp_path):
    file = opened(tmp_path)
    file.tell("mark", value=float("nan"), more=[float("inf"), -float("inf")])
    file.put(lambda: None)
    file.close()
    file.close()
    assert file.path.name == "run.rank00003.jsonl"
    run, mark = records(file.path)
    assert (run["kind"], run["schema"], run["rank"], run["world"]) == ("run", 1, 3, 4)
    assert (mark["kind"], mark["value"], mark["more"]) == ("mark", "NaN", ["Infinity", "-Infinity"])


def test_a_torn_line_is_ended_and_a_file_in_use_is_left_alone(tmp_path):
    (tmp_path / "run.rank00003.jsonl").write_bytes(b'{"kind":"ste')
    one, other = opened(tmp_path), opened(tmp_path)
    one.close()
    other.close()
    assert other.path.name == "run-2.rank00003.jsonl"
    first, second = one.path.read_bytes().splitlines()
    assert (first, json.loads(second)["kind"]) == (b'{"kind":"ste', "run")


def test_full_files_are_put_aside_and_the_oldest_go(tmp_path):
    file = opened(tmp_path, limit=2000)
    for number in range(40):
        file.tell("mark", number=number, text="x" * 150)
    file.close()
    aside = sorted(path.name for path in tmp_path.iterdir() if path != file.path)
    assert len(aside) == 2
    numbers = [int(name.split(".")[2]) for name in aside]
    assert numbers[1] == numbers[0] + 1 > 2
    for path in tmp_path.iterdir():
        assert records(path)[0]["kind"] == "run"
        assert path.stat().st_size < 2500


def test_a_line_is_never_longer_than_readers_take(tmp_path):
    file = opened(tmp_path)
    file.tell("mark", text="x" * LONGEST)
    file.close()
    assert records(file.path)[1] == {"kind": "too long", "t": records(file.path)[1]["t"], "of": "mark"}


def test_a_place_that_cannot_be_written_to_is_an_error_that_names_the_key(tmp_path):
    (tmp_path / "plain").write_text("")
    with pytest.raises(DeepSpeedConfigError, match=r"events.file .*DS_EVENTS.*rank 3 cannot write"):
        opened(tmp_path / "plain")


def test_an_error_while_a_record_is_made_is_logged_once_and_the_rest_is_written(tmp_path, caplog):
    logger.addHandler(caplog.handler)
    file = opened(tmp_path)
    for _ in range(2):
        file.put(lambda: {"kind": object()})
    file.tell("mark")
    file.close()
    logger.removeHandler(caplog.handler)
    assert [each["kind"] for each in records(file.path)] == ["run", "mark"]
    assert caplog.text.count("cannot take an event") == 1


class Operations:
    def __init__(self):
        self.dropped = 0

    def take(self):
        return lambda: [{"op": "all_reduce", "bytes": 8}]

    def drop(self):
        self.dropped += 1


def written(tmp_path, every, emit):
    file, events, operations = opened(tmp_path), EventStream(), Operations()
    tokens = iter(range(0, 1000, 10))
    sources = EventSources(lambda: {"allocated": 5}, lambda: {"moments": 7}, lambda: next(tokens), operations)
    writer = EventWriter(file, sources, every).attach(events)
    emit(events)
    writer.close()
    assert not events.wants_any([StepFinished, PhaseBegan, PhaseFinished, PhaseFailed])
    return records(file.path), operations


def step(events, number, **values):
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        events.emit(PhaseBegan(phase, number, True))
        events.emit(PhaseFinished(phase, number, True))
    events.emit(PhaseBegan(Phase.STEP, number, True))
    events.emit(finished(number, **values))
    events.emit(PhaseFinished(Phase.STEP, number, True))


def test_a_step_with_its_times_memory_and_communication(tmp_path):
    def emit(events):
        for number in (1, 2, 3):
            step(events, number, loss=torch.tensor([1.0, 2.0]), norm=torch.tensor(float("nan")))

    found, _ = written(tmp_path, 1, emit)
    steps = [each for each in found if each["kind"] == "step"]
    assert [each["step"] for each in steps] == [1, 2, 3]
    assert [(each["loss"], each["norm"], each["tokens"]) for each in steps[1:]] == [(1.5, "NaN", 10)] * 2
    assert all(set(each["ms"]) == {"forward", "backward", "step"} for each in steps)
    assert ("wall_ms" in steps[0], "wall_ms" in steps[1]) == (False, True)
    assert steps[0]["comm"] == [{"op": "all_reduce", "bytes": 8}]
    assert "comm" not in steps[1], "told again only where it changes"
    assert steps[0]["memory"] == {"allocated": 5}
    assert [each["kinds"] for each in found if each["kind"] == "memory"] == [{"moments": 7}]


def test_every_third_step_only(tmp_path):
    listened = []

    def emit(events):
        for number in range(1, 7):
            listened.append(events.wants(PhaseBegan))
            step(events, number)

    found, operations = written(tmp_path, 3, emit)
    steps = [each for each in found if each["kind"] == "step"]
    assert [(each["step"], bool(each["ms"]), each["tokens"]) for each in steps] == [(3, True, 10), (6, True, 10)]
    assert listened == [False, False, True, True, False, True]  # step 4 hands over step 3
    assert operations.dropped == 4


def test_what_happens_between_steps(tmp_path):
    def emit(events):
        events.emit(RunContinued(7))
        events.emit(OverflowFound(8, 4.0, 2.0))
        events.emit(CheckpointFinished(8, "tag", "folder", 0.5))
        events.emit(ExpertsUsed(8, 64, {"layer": LayerUse((3, 1), 1)}))
        logger.warning("slow %d", 1)
        logger.warning("rank 1 hangs", extra={"event": "hang"})
        events.emit(PhaseFailed(Phase.BACKWARD, RuntimeError("boom")))

    before = list(logger.handlers)
    found, _ = written(tmp_path, 1, emit)
    kinds = ["run", "continued", "overflow", "checkpoint", "experts", "warning", "hang", "error", "end"]
    assert [each["kind"] for each in found] == kinds
    by_kind = {each["kind"]: each for each in found}
    assert by_kind["experts"]["layers"] == {"layer": [0.81128, 0.25, 1.5]}
    assert (by_kind["warning"]["text"], by_kind["hang"]["level"]) == ("slow 1", "warning")
    assert (by_kind["error"]["type"], by_kind["error"]["text"]) == ("RuntimeError", "boom")
    assert logger.handlers == before


def test_a_writer_that_is_lost_leaves_neither_thread_nor_handler(tmp_path):
    before = list(logger.handlers)
    file, events = opened(tmp_path), EventStream()
    writer = EventWriter(file, EventSources(dict, dict, lambda: 0), 1).attach(events)
    del writer, events
    gc.collect()
    file._thread.join(10)
    assert not file._thread.is_alive()
    assert [h for h in logger.handlers if isinstance(h, logging.Handler)] == before
