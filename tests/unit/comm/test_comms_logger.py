"""The comms logger with a clock that is not real: numbers, selection, tables, dict form."""

import itertools

import pytest
import torch

from deepspeed.comm import CommsLogger, Dispatcher, labelled
from deepspeed.comm.operations import CommOperation
from deepspeed.comm.records import GroupRecord
from deepspeed.errors import DeepSpeedConfigError

REDUCE = CommOperation("all_reduce", lambda *args: None)
SEND = CommOperation("send", lambda *args: None, p2p=True, peer=1)
BARRIER = CommOperation("barrier", lambda *args: None)


@pytest.fixture
def parts(single):
    """A dispatcher whose every operation takes 2 ms, and its logger."""
    now = itertools.count()
    dispatcher = Dispatcher(clock=lambda: next(now) * 0.002, synchronize=lambda: None)
    logger = CommsLogger(dispatcher.events)
    yield dispatcher, logger
    logger.update(enabled=False)


def call(dispatcher, operation=REDUCE, size=256, prof=False, log_name=None, debug=None):
    tensor = torch.zeros(size, dtype=torch.uint8)
    dispatcher.run(operation, (), tensor, None, False, (prof, log_name or operation.name, debug))


def test_numbers(parts):
    dispatcher, logger = parts
    logger.configure({"enabled": True})
    for size in (10**6, 256, 256):
        call(dispatcher, size=size)
    assert logger.get_total_operations() == 3
    assert logger.get_operation_names() == ["all_reduce"]
    count, latencies, algorithm, bus = logger.comms_dict["all_reduce"][10**6]
    assert (count, latencies, algorithm, bus) == (1, [pytest.approx(2)], [pytest.approx(8)], [0])
    summary = logger.get_operation_summary("all_reduce")
    assert list(summary) == [256, 10**6]
    assert summary[256] == {
        "count": 2,
        "total_latency_ms": pytest.approx(4),
        "avg_latency_ms": pytest.approx(2),
        "tput_avg_gbps": pytest.approx(2 * 256 * 8 / 2 / 1e6),
        "busbw_avg_gbps": 0,
        "msg_size_bytes": 256,
        "msg_size_str": "256.0 B",
    }
    assert logger.get_operation_summary("none") == {}
    logger.reset_data()
    assert not logger.has_data()


def test_off_means_off(parts):
    dispatcher, logger = parts
    call(dispatcher)
    logger.configure({"enabled": False, "prof_all": True})
    call(dispatcher)
    assert not logger.has_data()
    logger.update(enabled=True)
    call(dispatcher)
    logger.update(enabled=False)
    call(dispatcher, prof=True)
    assert logger.get_total_operations() == 1


def test_selection(parts):
    dispatcher, logger = parts
    logger.configure({"enabled": True, "prof_all": False, "prof_ops": ["barrier"]})
    call(dispatcher)
    call(dispatcher, BARRIER)
    call(dispatcher, prof=True, log_name="chosen")
    assert logger.get_operation_names() == ["barrier", "chosen"]


def test_debug_adds_the_caller(parts):
    dispatcher, logger = parts
    logger.update(enabled=True, debug=True)
    call(dispatcher)
    call(dispatcher, debug="forward")
    assert logger.get_operation_names() == [
        "all_reduce | [Caller Func: test_debug_adds_the_caller]",
        "all_reduce | [Caller Func: forward]",
    ]


def test_verbose_line(parts, capsys):
    dispatcher, logger = parts
    logger.update(enabled=True, verbose=True)
    call(dispatcher, size=10**6)
    assert capsys.readouterr().out == (
        "[Rank 0] comm op: all_reduce | time (ms): 2.00 | msg size: 976.56 KB | "
        "algbw (Gbps): 8.00 | busbw (Gbps): 0.00\n"
    )


def test_append(single):
    logger = CommsLogger()
    logger.append("broadcast", "weights", 4.0, 10**6)
    assert logger.comms_dict == {"weights": {10**6: [1, [4.0], [2.0], [2.0]]}}
    logger.append("all_gather_object", "object", 1.0, 0)
    logger.append("monitored_barrier", "waiting", 1.0, 0)
    assert logger.get_total_operations() == 3


def test_prof_ops_must_be_a_list(parts):
    with pytest.raises(DeepSpeedConfigError, match="prof_ops"):
        parts[1].update(prof_ops="all_reduce")


def test_table(parts, capsys):
    dispatcher, logger = parts
    logger.update(enabled=True)
    call(dispatcher, size=10**6)
    call(dispatcher, BARRIER, size=0)
    assert logger.log_all() is None
    assert capsys.readouterr().out.splitlines() == [
        "Comm. Op            Message Size        Count               Total Latency(ms)   Avg Latency(ms)     "
        "tput_avg (Gbps)     busbw_avg (Gbps)",
        "all_reduce",
        "                    976.56 KB           1                   2.00                2.00                "
        "8.00                0.00",
        "barrier",
        "                    0B                  1                   2.00                2.00                "
        "0.00                0.00",
    ]


def test_straggler_table(parts, capsys):
    dispatcher, logger = parts
    logger.update(enabled=True)
    call(dispatcher)
    summary = logger.log_all(show_straggler=True, return_dict=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split("  ")[-1].strip() == "Avg straggler(ms)"
    for title in ("Total comm lat(ms)", "Total straggler(ms)", "Avg comm lat(ms)"):
        assert title in lines[4]
    assert summary["straggler_analysis"]["all_reduce"][256]["total_straggler_ms"] == 0
    assert logger.enabled
    assert logger.get_total_operations() == 1  # its own collectives are not recorded


def test_dict_form(single):
    logger = CommsLogger()
    logger.append("all_reduce", "all_reduce", 1.0, 8)
    summary = logger.log_all(print_log=False, return_dict=True)
    assert set(summary) == {"summary", "traffic", "straggler_analysis", "metadata"}
    assert summary["straggler_analysis"] is None
    assert (summary["metadata"]["world_size"], summary["metadata"]["rank"]) == (1, 0)
    assert set(summary["metadata"]) == {"world_size", "rank", "timestamp"}
    assert set(summary["summary"]["all_reduce"][8]) == {
        "count",
        "total_latency_ms",
        "avg_latency_ms",
        "tput_avg_gbps",
        "busbw_avg_gbps",
        "msg_size_bytes",
        "msg_size_str",
    }


def test_bytes_by_link_and_codec(monkeypatch, capsys):
    """Of rank 1 of 8 on 2 nodes: the operations of a made-up group, by what they are encoded in."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    dispatcher = Dispatcher(clock=lambda: 0.0, synchronize=lambda: None)
    dispatcher._world = GroupRecord("world", tuple(range(8)), 1, "none", {})
    logger = CommsLogger(dispatcher.events)
    logger.update(enabled=True)
    call(dispatcher, size=800)
    with labelled("weights", dispatcher, codec="int8"):
        call(dispatcher, size=400)
    dispatcher.run(SEND, (None, 2), torch.zeros(64), None, False, (False, "send", None))
    dispatcher.run(SEND, (None, 5), torch.zeros(64), None, False, (False, "send", None))
    logger.update(enabled=False)
    found = logger.log_all(return_dict=True)["traffic"]
    assert found["all_reduce"]["plain"] == {
        "count": 1,
        "within_node_bytes": 1050,  # 6 of 8 links of the ring, each 2 · 7/8 · 800
        "between_nodes_bytes": 350,
        "within_node_str": "1.03 KB",
        "between_nodes_str": "350.0 B",
    }
    assert found["all_reduce"]["int8"]["between_nodes_bytes"] == 175
    assert (found["send"]["plain"]["within_node_bytes"], found["send"]["plain"]["between_nodes_bytes"]) == (128, 128)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.split()[:1] == ["int8"]] == [
        ["int8", "1", "525.0", "B", "175.0", "B"]
    ]
    logger.reset_data()
    assert logger.log_all(print_log=False, return_dict=True)["traffic"] == {}


def test_an_empty_log_says_so(clean_env, capsys):
    CommsLogger().log_all()
    assert "No communication has been recorded" in capsys.readouterr().out


def test_module_functions(single, capsys):
    single.configure(enabled=True, prof_ops=["all_reduce"], prof_all=False)
    single.all_reduce(torch.ones(4))
    single.barrier()
    single.all_gather_object([None], "x", prof=True)
    single.monitored_barrier(prof=True)
    assert single.has_comm_data()
    assert single.get_comm_operation_count() == 3
    assert single.get_logged_comm_ops() == ["all_reduce", "all_gather_object", "monitored_barrier"]
    summary = single.log_summary(return_dict=True)
    assert summary["summary"]["all_reduce"][16]["count"] == 1
    assert "all_reduce" in capsys.readouterr().out
    single.reset_log()
    assert not single.has_comm_data()
    single.configure({"comms_logger": {"enabled": True}}, enabled=False)
    single.barrier()
    assert not single.has_comm_data()


def test_a_config_that_does_not_ask_stops_nothing(parts):
    _, logger = parts
    logger.update(enabled=True, verbose=True)
    for config in ({}, {"comms_logger": {"enabled": False}}, {"comms_logger": {"verbose": False}}):
        logger.join(config)
    assert (logger.enabled, logger.verbose) == (True, True)


def test_joining_records_what_either_asked_for(parts):
    dispatcher, logger = parts
    logger.join({"enabled": True, "prof_all": False, "prof_ops": ["barrier"]})
    call(dispatcher)
    call(dispatcher, BARRIER)
    assert logger.get_operation_names() == ["barrier"]
    logger.join({"enabled": True, "prof_all": False, "prof_ops": ["all_reduce", "barrier"], "debug": False})
    call(dispatcher)
    assert logger.get_operation_names() == ["barrier", "all_reduce"]
    assert logger.prof_ops == ["barrier", "all_reduce"]
    logger.join({"enabled": True})  # everything is the default
    assert logger.prof_all


def test_joining_a_stopped_logger_forgets_its_old_choice(parts):
    _, logger = parts
    logger.update(enabled=False, prof_all=False, prof_ops=["barrier"], verbose=True)
    logger.join({"enabled": True})
    assert (logger.prof_all, logger.prof_ops, logger.verbose) == (True, [], False)


@pytest.mark.parametrize("running", [False, True])
def test_joining_checks_as_configuring_does(parts, running):
    _, logger = parts
    logger.update(enabled=running)
    with pytest.raises(DeepSpeedConfigError, match="prof_ops"):
        logger.join({"enabled": True, "prof_ops": "all_reduce"})
