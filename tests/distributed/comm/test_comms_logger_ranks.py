"""The comms logger among ranks: group sizes, stragglers, who prints."""

import contextlib
import io

import pytest
import torch
import torch.distributed as td

from deepspeed import comm as dist
from tests.harness import ranks


def printed(**kwargs):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        summary = dist.log_summary(return_dict=True, **kwargs)
    return out.getvalue(), summary


@ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
def test_every_kind_is_recorded(async_op):
    dist.configure({"comms_logger": {"enabled": True}})
    x = torch.ones(256)
    dist.all_reduce(x, async_op=async_op)
    dist.all_gather_into_tensor(torch.empty(512), x, async_op=async_op)
    dist.reduce_scatter_tensor(torch.empty(128), x, async_op=async_op)
    dist.all_to_all_single(torch.empty(256), x, async_op=async_op)
    dist.barrier(async_op=async_op)
    dist.all_gather_object([None, None], 1)
    dist.monitored_barrier()
    text, summary = printed()
    rows = summary["summary"]
    assert {op: list(sizes) for op, sizes in rows.items()} == {
        "all_reduce": [1024],
        "all_gather_into_tensor": [1024],
        "reduce_scatter_tensor": [512],  # the shard, so that size × ranks is what travels
        "all_to_all_single": [1024],
        "barrier": [0],
        "all_gather_object": [0],
        "monitored_barrier": [0],
    }
    row = rows["all_reduce"][1024]
    assert row["busbw_avg_gbps"] == pytest.approx(row["tput_avg_gbps"] / 2)  # 2(n−1)/n : 2 with two ranks
    assert summary["metadata"]["rank"] == td.get_rank()
    assert bool(text) == (td.get_rank() == 0)


@ranks(3)
def test_bandwidth_is_that_of_the_group():
    group = dist.new_group([0, 1])
    dist.configure(enabled=True)
    if td.get_rank() < 2:
        dist.all_gather_into_tensor(torch.empty(512), torch.ones(256), group=group)
        row = dist.comms_logger.get_operation_summary("all_gather_into_tensor")[1024]
        assert row["tput_avg_gbps"] == pytest.approx(2 * 1024 * 8 / row["avg_latency_ms"] / 1e6)
        assert row["busbw_avg_gbps"] == pytest.approx(row["tput_avg_gbps"] / 2)


@ranks(2)
def test_stragglers():
    """Latencies put in by hand: rank 0 waited for rank 1 in both calls, 3 and 1 ms."""
    for latency in ([4.0, 2.0], [1.0, 1.0])[td.get_rank()]:
        dist.comms_logger.append("all_reduce", "all_reduce", latency, 64)
    dist.comms_logger.append("barrier", f"only on rank {td.get_rank()}", 1.0, 0)
    text, summary = printed(show_straggler=True)
    assert summary["straggler_analysis"] == {
        "all_reduce": {
            64: {
                "count": 2,
                "total_comm_lat_ms": 2.0,
                "total_straggler_ms": [4.0, 0.0][td.get_rank()],
                "avg_comm_lat_ms": 1.0,
                "avg_straggler_ms": [2.0, 0.0][td.get_rank()],
                "msg_size_bytes": 64,
                "msg_size_str": "64.0 B",
            }
        }
    }
    if td.get_rank() == 0:
        row = text.splitlines()[-1].split()
        assert row == ["64.0", "B", "2", "2.00", "4.00", "1.00", "2.00"]
