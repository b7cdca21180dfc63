"""The summary of recorded communication: bandwidths, a dict, and the table that users read."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as td

from deepspeed.comm.collectives import all_gather_object, all_reduce
from deepspeed.comm.groups import get_rank, get_world_size, group_device, is_initialized
from deepspeed.comm.operations import ReduceOp
from deepspeed.comm.records import REDUCTIONS, SHARDS

TRIM = 0.1

_EXCHANGES = ("all_to_all", "all_to_all_single", "reduce_scatter_coalesced")


def bandwidth(op: str, size: int, duration: float, ranks: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth in Gbit/s of a message of `size` bytes that took `duration` ms among `ranks`.

    The message of a gather or reduce-scatter is one rank's shard, of an all-to-all what one rank sends.
    An operation that is not in the table moves its message once.
    """
    if duration <= 0:
        return 0.0, 0.0
    share = (ranks - 1) / ranks
    if op in REDUCTIONS:
        algorithm, bus = 2 * size / duration, size / duration * 2 * share
    elif op in SHARDS:
        algorithm = size * ranks / duration
        bus = algorithm * share
    elif op in _EXCHANGES:
        algorithm = size / duration
        bus = algorithm * share
    else:
        algorithm = bus = size / duration
    return algorithm * 8 / 1e6, bus * 8 / 1e6  # bytes per ms → Gbit per s


def calc_bw_log(comm_op: str, size: int, duration: float) -> tuple[float, float]:
    """As `bandwidth`, among all ranks of the world (one, if there is no world yet)."""
    ranks = td.get_world_size() if td.is_available() and td.is_initialized() else 1
    return bandwidth(comm_op, size, duration, ranks)


def convert_size(size_bytes: int) -> str:
    """`1536` → `"1.5 KB"`; units of 1024."""
    if size_bytes == 0:
        return "0B"
    units = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
    power = min((int(size_bytes).bit_length() - 1) // 10, len(units) - 1)
    return f"{round(size_bytes / 1024**power, 2)} {units[power]}"


def trimmed_mean(data: Sequence[float], trim: float = TRIM) -> float:
    """The mean without the lowest and the highest `trim` part of the values; 0 of nothing."""
    if not data:
        return 0.0
    cut = round(len(data) * trim)
    kept = sorted(data)[cut : len(data) - cut]
    return sum(kept) / len(kept)


# operation → message bytes → [count, latencies in ms, algorithm bandwidths, bus bandwidths in Gbit/s]
Recorded = Mapping[str, Mapping[int, list[Any]]]
Rows = dict[str, dict[int, dict[str, Any]]]
# operation → codec → [count, bytes that a rank sent within nodes, between nodes]
Traffic = dict[str, dict[str, list[float]]]
PLAIN = "plain"  # what is not encoded

_COLUMNS = (
    ("count", "Count", "d"),
    ("total_latency_ms", "Total Latency(ms)", ".2f"),
    ("avg_latency_ms", "Avg Latency(ms)", ".2f"),
    ("tput_avg_gbps", "tput_avg (Gbps)", ".2f"),
    ("busbw_avg_gbps", "busbw_avg (Gbps)", ".2f"),
)
_STRAGGLER_COLUMNS = (
    ("count", "Count", "d"),
    ("total_comm_lat_ms", "Total comm lat(ms)", ".2f"),
    ("total_straggler_ms", "Total straggler(ms)", ".2f"),
    ("avg_comm_lat_ms", "Avg comm lat(ms)", ".2f"),
    ("avg_straggler_ms", "Avg straggler(ms)", ".2f"),
)


_TRAFFIC_COLUMNS = (
    ("count", "Count", "d"),
    ("within_node_str", "Within nodes", ""),
    ("between_nodes_str", "Between nodes", ""),
)


def link_rows(traffic: Traffic) -> dict[str, dict[str, dict[str, Any]]]:
    """What a rank sent to its node and to others, by operation and codec; the mean over the ranks of its groups."""
    return {
        op: {
            codec: {
                "count": int(count),
                "within_node_bytes": round(within),
                "between_nodes_bytes": round(between),
                "within_node_str": convert_size(round(within)),
                "between_nodes_str": convert_size(round(between)),
            }
            for codec, (count, within, between) in sorted(codecs.items())
        }
        for op, codecs in traffic.items()
    }


def summarise(sizes: Mapping[int, list[Any]]) -> dict[int, dict[str, Any]]:
    """One operation's rows by message size, smallest first."""
    return {
        size: {
            "count": count,
            "total_latency_ms": sum(latencies),
            "avg_latency_ms": trimmed_mean(latencies),
            "tput_avg_gbps": trimmed_mean(algorithm),
            "busbw_avg_gbps": trimmed_mean(bus),
            "msg_size_bytes": size,
            "msg_size_str": convert_size(size),
        }
        for size, (count, latencies, algorithm, bus) in sorted(sizes.items())
    }


def stragglers(recorded: Recorded) -> Rows:
    """How much longer this rank took than the quickest one, call by call; every rank must ask at the same time.

    The quickest rank's latency is the communication itself: it came last, so it waited for nobody. What the
    others took longer, they waited for it. Only rows that all ranks recorded equally often can be compared.
    """
    counts = {(op, size): row[0] for op, sizes in recorded.items() for size, row in sizes.items()}
    if not is_initialized():
        common = sorted(counts)
    else:
        everyone: list[Any] = [None] * get_world_size()
        all_gather_object(everyone, counts)
        common = sorted(key for key, n in counts.items() if all(other.get(key) == n for other in everyone))
    if not common:
        return {}
    latencies = [recorded[op][size][1] for op, size in common]
    mine = torch.tensor([value for values in latencies for value in values], dtype=torch.float64)
    least = mine.clone()
    if is_initialized():
        least = least.to(group_device())
        all_reduce(least, op=ReduceOp.MIN)
        least = least.cpu()
    lengths = [len(values) for values in latencies]
    rows: Rows = {}
    for (op, size), quickest, own in zip(
        common, least.split_with_sizes(lengths), mine.split_with_sizes(lengths), strict=True
    ):
        waited = own - quickest
        rows.setdefault(op, {})[size] = {
            "count": len(own),
            "total_comm_lat_ms": float(quickest.sum()),
            "total_straggler_ms": float(waited.sum()),
            "avg_comm_lat_ms": trimmed_mean(quickest.tolist()),
            "avg_straggler_ms": trimmed_mean(waited.tolist()),
            "msg_size_bytes": size,
            "msg_size_str": convert_size(size),
        }
    return rows


def as_dict(recorded: Recorded, traffic: Traffic, straggler: Rows | None) -> dict[str, Any]:
    """The dict form of the summary."""
    return {
        "summary": {op: summarise(sizes) for op, sizes in recorded.items()},
        "traffic": link_rows(traffic),
        "straggler_analysis": straggler,
        "metadata": {
            "world_size": get_world_size() if is_initialized() else 1,
            "rank": get_rank() if is_initialized() else 0,
            "timestamp": datetime.datetime.now().isoformat(),
        },
    }


def as_text(summary: Mapping[str, Any]) -> str:
    """The summary as tables with columns 20 wide; the operation's name stands above its rows."""
    if not summary["summary"]:
        return "No communication has been recorded: is comms_logger enabled?\n"
    text = _table(summary["summary"], _COLUMNS)
    if summary["straggler_analysis"] is not None:
        text += "\n" + _table(summary["straggler_analysis"], _STRAGGLER_COLUMNS)
    if summary["traffic"]:
        text += "\n" + _table(summary["traffic"], _TRAFFIC_COLUMNS, "Codec")
    return text


def _table(
    rows: Mapping[str, Mapping[Any, Mapping[str, Any]]],
    columns: tuple[tuple[str, str, str], ...],
    second: str = "Message Size",
) -> str:
    titles = ("Comm. Op", second, *(title for _, title, _ in columns))
    lines = ["".join(f"{title:<20}" for title in titles)]
    for op, sizes in rows.items():
        lines.append(op)
        for key, row in sizes.items():
            cells = (row.get("msg_size_str", key), *(f"{row[key]:{form}}" for key, _, form in columns))
            lines.append(f"{'':<20}" + "".join(f"{cell:<20}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines) + "\n"
