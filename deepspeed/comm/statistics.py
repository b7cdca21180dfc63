"""Numbers of the comms logger: bandwidth formulas, sizes in words, trimmed means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as td

__all__ = ["bandwidth", "calc_bw_log", "convert_size", "trimmed_mean"]

TRIM = 0.1

# How an operation loads the links: what all ranks exchange together, and how much of it crosses a link.
_GATHER, _EXCHANGE, _REDUCE, _PLAIN = "gather", "exchange", "reduce", "plain"
_TRAFFIC: Mapping[str, str] = {
    "all_gather": _GATHER,
    "all_gather_into_tensor": _GATHER,
    "all_gather_coalesced": _GATHER,
    "reduce_scatter": _GATHER,
    "reduce_scatter_tensor": _GATHER,
    "all_to_all": _EXCHANGE,
    "all_to_all_single": _EXCHANGE,
    "reduce_scatter_coalesced": _EXCHANGE,
    "all_reduce": _REDUCE,
    "all_reduce_coalesced": _REDUCE,
    "inference_all_reduce": _REDUCE,
}


def bandwidth(op: str, size: int, duration: float, ranks: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth in Gbit/s of a message of `size` bytes that took `duration` ms among `ranks`.

    The message of a gather or reduce-scatter is one rank's shard, of an all-to-all what one rank sends.
    An operation that is not in the table moves its message once.
    """
    if duration <= 0:
        return 0.0, 0.0
    traffic = _TRAFFIC.get(op, _PLAIN)
    share = (ranks - 1) / ranks
    if traffic == _REDUCE:
        algorithm, bus = 2 * size / duration, size / duration * 2 * share
    elif traffic == _GATHER:
        algorithm = size * ranks / duration
        bus = algorithm * share
    elif traffic == _EXCHANGE:
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
