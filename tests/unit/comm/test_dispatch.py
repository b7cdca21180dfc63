"""The dispatcher: numbers, ring buffer, labels, call sites, events, switches, errors. One rank, one process."""

import gc
import linecache
import timeit
import warnings
import weakref

import pytest
import torch
import torch.distributed as td
from torch.overrides import TorchFunctionMode

from deepspeed.comm import CollectiveFinished, Dispatcher, labelled, recent_operations
from deepspeed.comm.dispatch import CAPACITY
from deepspeed.comm.operations import OPERATIONS, CommOperation, ReduceOp, switched_off
from deepspeed.errors import CommError
from deepspeed.log import warn_once

NOTHING = CommOperation("nothing", lambda *args: None)


def run(dispatcher, operation=NOTHING, message=None, group=None, args=(), async_op=False):
    return dispatcher.run(operation, args, message, group, async_op, (False, operation.name, None))


def test_records_what_was_called(single):
    with labelled("layers.3.weight"):
        single.all_reduce(torch.ones(2, 3, dtype=torch.bfloat16))  # the recorded line
    record = recent_operations()[-1]
    assert (record.op, record.sequence, record.p2p) == ("all_reduce", 1, False)
    assert (record.shapes, record.dtype, record.bytes, record.tensors) == (((2, 3),), "bfloat16", 12, 1)
    assert (record.label, record.function, record.returned) == ("layers.3.weight", "test_records_what_was_called", True)
    assert record.file == __file__
    assert "# the recorded line" in linecache.getline(__file__, record.line)
    assert (record.group, record.ranks) == ("world", (0,))
    for part in ("#1 all_reduce", "bfloat16[2, 3] (12 B)", "'layers.3.weight'", "group [0]", f"{__file__}:"):
        assert part in str(record)


def test_every_public_function_records_its_caller(single):
    x, one = torch.ones(2), lambda: torch.zeros(2)
    calls = [
        lambda: single.all_reduce(x),
        lambda: single.inference_all_reduce(x),
        lambda: single.all_reduce_coalesced([x, x]),
        lambda: single.broadcast(x, 0),
        lambda: single.broadcast_coalesced([x, x], 0),
        lambda: single.reduce(x, 0),
        lambda: single.all_gather([one()], x),
        lambda: single.all_gather_into_tensor(one(), x),
        lambda: single.allgather_fn(one(), x),
        lambda: single.all_gather_coalesced([one(), one()], [x, x]),
        lambda: single.reduce_scatter(one(), [x]),
        lambda: single.reduce_scatter_tensor(one(), x),
        lambda: single.reduce_scatter_fn(one(), x),
        lambda: single.reduce_scatter_coalesced([x]),
        lambda: single.all_to_all([one()], [x]),
        lambda: single.all_to_all_single(one(), x),
        lambda: single.gather(x, [one()], 0),
        lambda: single.scatter(one(), [x], 0),
        lambda: single.barrier(),
        lambda: single.monitored_barrier(),
        lambda: single.broadcast_object_list([1], 0),
        lambda: single.all_gather_object([None], 1),
        lambda: single.new_group([0]),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, call in enumerate(calls, 1):
            call()
            record = recent_operations()[-1]
            assert record.sequence == number
            assert (record.file, record.line) == (__file__, call.__code__.co_firstlineno)


def test_labels_nest_and_end(single):
    dispatcher = Dispatcher()
    with labelled("a", dispatcher):
        run(dispatcher)
        with labelled("b", dispatcher):
            run(dispatcher)
        run(dispatcher)
    with pytest.raises(KeyError), labelled("c", dispatcher):
        raise KeyError
    run(dispatcher)
    assert [record.label for record in dispatcher.recent()] == ["a", "b", "a", None]


def test_sequences_per_group_and_kind(single):
    dispatcher = Dispatcher()
    other = td.new_group([0])
    p2p = CommOperation("p2p", lambda *args: None, p2p=True)
    run(dispatcher)
    run(dispatcher, group=other)
    run(dispatcher, group=td.group.WORLD)
    run(dispatcher, p2p)
    run(dispatcher, group=other)
    assert [record.sequence for record in dispatcher.recent()] == [1, 1, 2, 1, 2]
    dispatcher.forget(other)
    run(dispatcher, group=other)
    assert dispatcher.recent()[-1].sequence == 1


def test_the_ring_keeps_the_last_and_nothing_alive(single):
    dispatcher = Dispatcher()
    tensor = torch.ones(4)
    gone = weakref.ref(tensor)
    run(dispatcher, message=tensor, args=(tensor,))
    del tensor
    gc.collect()
    assert gone() is None
    for _ in range(CAPACITY + 10):
        run(dispatcher)
    records = dispatcher.recent()
    assert (len(records), records[0].sequence, records[-1].sequence) == (CAPACITY, 12, CAPACITY + 11)


def test_groups_are_not_kept_alive_and_a_new_world_is_new(single):
    dispatcher = Dispatcher()
    run(dispatcher)
    world = weakref.ref(td.group.WORLD)
    td.destroy_process_group()
    gc.collect()
    assert world() is None
    with pytest.raises(CommError, match="init_distributed"):
        run(dispatcher)
    single.init_distributed("gloo")
    run(dispatcher)
    assert dispatcher.recent()[-1].sequence == 1


def test_lists_are_outlined(single):
    dispatcher = Dispatcher()
    run(dispatcher, message=[torch.ones(i + 1) for i in range(20)])
    record = dispatcher.recent()[-1]
    assert (record.tensors, record.bytes, record.shapes[:2]) == (20, 4 * 210, ((1,), (2,)))
    assert "20 tensors" in str(record)
    run(dispatcher, message=[])
    run(dispatcher, message="wrong")
    assert [record.tensors for record in dispatcher.recent()[-2:]] == [0, 0]


def test_peers_are_recorded(single):
    single.broadcast(torch.ones(1), 0)
    assert recent_operations()[-1].peer == 0


def test_an_operation_under_way_is_seen(single):
    dispatcher = Dispatcher()
    seen = []
    run(dispatcher, CommOperation("slow", lambda: seen.extend(dispatcher.recent())))
    assert "(not returned)" in str(seen[-1])
    assert dispatcher.recent()[-1].returned


def test_listeners_get_measured_events():
    """A clock that counts and a synchronise that leaves marks show what is measured."""
    td.init_process_group("gloo", store=td.HashStore(), rank=0, world_size=1)
    try:
        now, log = iter(range(100)), []
        dispatcher = Dispatcher(clock=lambda: next(now) * 0.5, synchronize=lambda: log.append("sync"))
        operation = CommOperation("work", lambda *args: log.append("call"))
        run(dispatcher, operation, torch.ones(3))
        assert log == ["call"]  # nobody listens: no synchronisation
        events = []
        with dispatcher.events.subscribe(CollectiveFinished, events.append), labelled("x", dispatcher):
            log.clear()
            run(dispatcher, operation, torch.ones(3))
        assert log == ["sync", "call", "sync"]
        (event,) = events
        assert (event.op, event.bytes, event.group_size, event.duration) == ("work", 12, 1, 0.5)
        assert (event.label, event.sequence, event.prof) == ("x", 2, False)
        assert event.caller == "test_listeners_get_measured_events"
        run(dispatcher, operation, torch.ones(3))
        assert len(events) == 1
    finally:
        td.destroy_process_group()


def test_asynchronous_operations_are_waited_for_only_while_listened_to(single):
    waited = []

    class Work:
        def wait(self):
            waited.append(1)

        def is_completed(self):
            return False

    dispatcher, events = Dispatcher(), []
    launch = CommOperation("launch", Work)
    run(dispatcher, launch, async_op=True)
    assert not waited
    free = CommOperation("free", Work, free=True)
    with dispatcher.events.subscribe(CollectiveFinished, events.append):
        run(dispatcher, launch, async_op=True)
        assert (len(waited), len(events)) == (1, 1)
        # what completes only with a later call is told once it was waited for
        handle = run(dispatcher, free, async_op=True)
        assert (len(waited), len(events)) == (1, 1)
        handle.wait()
        assert (len(waited), len(events)) == (2, 2)
        batch = run(dispatcher, CommOperation("batch", lambda: [Work(), Work()], free=True), async_op=True)
        batch[0].wait()
        assert len(events) == 2
        batch[1].wait()
        assert len(events) == 3


def test_errors_name_everything(single):
    single.all_reduce(torch.ones(5))
    with pytest.raises(CommError) as raised, labelled("block.0.bias"):
        single.all_gather_into_tensor(torch.zeros(3), torch.ones(8, 8))
    text = str(raised.value)
    for part in (
        "all_gather_into_tensor failed on rank 0: collective #2 of group 'world', ranks [0], gloo",
        "float32[3], float32[8, 8]",
        "label     : block.0.bias",
        f"called at : {__file__}:",
        "in test_errors_name_everything",
        "#1 all_reduce float32[5]",
    ):
        assert part in text
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert str(raised.value.__cause__) in text


def test_errors_keep_the_builtin_that_torch_raises(single):
    with pytest.raises(ValueError) as raised:
        single.gather(torch.ones(1), None, 0)
    assert isinstance(raised.value, CommError)
    with pytest.raises(TypeError) as wrong_type:
        single.all_reduce("not a tensor")
    assert isinstance(wrong_type.value, CommError)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, KeyError, CommError])
def test_other_errors_pass_unchanged(single, kind):
    error = kind("as it is")

    def fail():
        raise error

    with pytest.raises(kind) as raised:
        run(Dispatcher(), CommOperation("fails", fail))
    assert raised.value is error


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (ValueError("output tensor size must be world_size times input"), "refused this rank's own arguments"),
        (RuntimeError("output sizes differ, sometimes"), "must make the same call"),
        (td.DistBackendError("NCCL timed out"), "did not make this call in time"),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), "ended or left"),
    ],
)
def test_advice_fits_the_failure(single, theirs, said):
    def fail():
        raise theirs

    with pytest.raises(type(theirs), match=said) as raised:
        run(Dispatcher(), CommOperation("fails", fail))
    assert isinstance(raised.value, CommError)


def test_errors_of_handles_are_explained(single):
    class Work:
        def wait(self, *timeout):
            raise RuntimeError("Connection reset by peer")

    dispatcher = Dispatcher()
    handle = run(dispatcher, CommOperation("launch", lambda: Work()), torch.ones(4), async_op=True)
    with pytest.raises(CommError, match=r"launch failed on rank 0: collective #1 .*Connection reset"):
        handle.wait()


def test_switches(single, monkeypatch, caplog):
    warn_once.cache_clear()
    monkeypatch.setenv("DS_COMM_ALL_REDUCE_OFF", "1")
    dispatcher = Dispatcher()
    calls = []
    off = CommOperation("all_reduce", lambda: calls.append(1))
    assert run(dispatcher, off) is None
    handle = run(dispatcher, off, async_op=True)
    assert handle.is_completed()
    assert handle.wait() is True
    assert "skipped" in repr(handle)
    run(dispatcher, CommOperation("broadcast", lambda: calls.append(2)))
    assert calls == [2]


def test_switches_are_read_once_per_group_and_warn_once(single, monkeypatch, capsys):
    warn_once.cache_clear()
    monkeypatch.setenv("DS_COMM_REDUCE_OFF", "on")
    group = single.new_group([0])
    tensor = torch.ones(1)
    for _ in range(3):
        assert single.reduce(tensor, 0, group=group) is None
    assert capsys.readouterr().err.count("DS_COMM_REDUCE_OFF") == 1


def test_switch_values():
    assert switched_off({}) == {}
    assert switched_off({"DS_COMM_BROADCAST_OFF": "0", "DS_COMM_REDUCE_OFF": "false"}) == {}
    assert set(switched_off({"DS_COMM_ALL_GATHER_OFF": "true"})) == {
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_coalesced",
    }
    with pytest.raises(CommError, match="DS_COMM_REDUCE_SCATTER_OFF='maybe'"):
        switched_off({"DS_COMM_REDUCE_SCATTER_OFF": "maybe"})


@pytest.mark.parametrize("name", ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"])
def test_what_is_not_plain_goes_to_torch(single, name):
    """A mode that torch's function would meet is met, and complex numbers travel."""
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    def arguments(tensor):
        tensors = (tensor,) if name == "all_reduce" else (torch.empty_like(tensor), tensor)
        return (*tensors, *(() if name == "all_gather_into_tensor" else (ReduceOp.SUM,)), None, False)

    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # the old names of torch warn
        plain = arguments(torch.arange(4.0))
        OPERATIONS[name].call(*plain)
        assert torch.equal(plain[0], torch.arange(4.0))
        numbers = arguments(torch.tensor([1 + 2j, 3 - 1j]))
        if name != "reduce_scatter_tensor":
            OPERATIONS[name].call(*numbers)
            assert torch.equal(numbers[0], torch.tensor([1 + 2j, 3 - 1j]))
        with Watch():
            OPERATIONS[name].call(*arguments(torch.arange(4.0)))
    assert any(call.startswith(("all_reduce", "all_gather", "reduce_scatter")) for call in seen)


def test_cost_when_nobody_listens(single):
    """A generous bound against regressions; benchmarks/ measures it properly."""
    dispatcher, tensor = Dispatcher(), torch.ones(8, 8)

    def ours(tensor, group=None):
        return dispatcher.run(NOTHING, (tensor,), tensor, group, False, (False, "nothing", None))

    ours(tensor)
    best = min(timeit.repeat(lambda: ours(tensor), number=200, repeat=100)) / 200
    assert best < 5e-6
