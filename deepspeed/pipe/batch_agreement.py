"""What the ranks of a pipeline agree upon around a batch: that all have its data, and that all came through it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepspeed.errors import PipelineError
from deepspeed.log import warn_once
from deepspeed.parallel import ParallelLayout
from deepspeed.zero.agreement import RankAgreement

_FINE, _FAILED, _DRAGGED = 0, 1, 2
_NO_DATA_NEEDED = -1
_END = 4  # words that each rank says at the end


class BatchAgreement:
    """Small exchanges between the hosts of all ranks; what one rank cannot do is an error on every rank."""

    def __init__(self, layout: ParallelLayout) -> None:
        self._layout = layout
        self._hosts = RankAgreement(layout.world)

    def begin(self, what: str, count: int, taken: int | None, error: Exception | None) -> Callable[[], None]:
        """All ranks begin the same batch with all of its micro-batches; StopIteration on all where the data ends.

        That is looked at by what is returned, which is to be called before any message of the batch. `taken` is None
        on a rank that needs no data.
        """
        mine = [_FINE if error is None else _FAILED, sum(what.encode()), count]
        text = b"" if error is None else f"{type(error).__name__}: {error}".encode()
        words = [*mine, _NO_DATA_NEEDED if taken is None else taken, len(text)]
        saying = self._hosts.begin_exchange(words, f"begin of {what}")
        return lambda: self._all_begin(saying.wait(), mine, what, text, error)

    def _all_begin(self, said: Tensor, mine: list[int], what: str, text: bytes, error: Exception | None) -> None:
        count = mine[2]
        if all(row[:3] == mine and row[3] in (count, _NO_DATA_NEEDED) for row in said.tolist()) and not error:
            return
        self._raise_first(said[:, 0].tolist(), said[:, 4].tolist(), text, error, "could not take its data")
        kinds = {tuple(row) for row in said[:, 1:3].tolist()}
        if len(kinds) > 1:
            other = next(rank for rank, row in enumerate(said[:, 1:3].tolist()) if row != mine[1:])
            raise PipelineError(
                f"rank {self._layout.rank} begins {what} with {count} micro-batches, and rank {other} something else, "
                f"with {int(said[other, 2])}: all ranks of a pipeline call the same methods in the same order"
            )
        counts = [value for value in said[:, 3].tolist() if value != _NO_DATA_NEEDED]
        if all(value == count for value in counts):
            return
        if max(counts) > 0:
            least = said[:, 3].tolist().index(min(counts))
            warn_once(
                f"the data ended inside a batch: {min(counts)} of {count} micro-batches were left on rank {least}; "
                "they are not used"
            )
        raise StopIteration

    def listen_for_end(self) -> None:
        """This rank begins its last pass of a batch, while others may be through."""
        self._hosts.receive_early(_END)

    def end(self, failed: bool, failure: object, error: Exception | None, loss: float | None = None) -> float | None:
        """All ranks came through a batch; else an error on all, which names the stage that failed first.

        Returns the mean of the losses of those ranks that have one.
        """
        text = b"" if failure is None else str(failure).encode()
        code = _FINE if not failed else _DRAGGED if failure is None else _FAILED
        bits = int(torch.tensor(loss or 0.0, dtype=torch.float64).view(torch.int64))  # a number among whole ones
        words = [code, len(text), loss is not None, bits]
        assert len(words) == _END, "as many as are listened for"
        # Backward ends on the first stage, so that its first rank comes last.
        said = self._hosts.exchange_at_end(words, "end of a batch").t().contiguous()
        self._raise_first(said[0].tolist(), said[1].tolist(), text, error, "")
        losses: list[float] = said[3].view(torch.float64)[said[2].bool()].tolist()
        return sum(losses) / len(losses) if losses else None

    def _raise_first(self, codes: list[int], sizes: list[int], text: bytes, error: Exception | None, what: str) -> None:
        if not any(codes):
            return
        source = codes.index(_FAILED) if _FAILED in codes else codes.index(_DRAGGED)
        told = self._hosts.broadcast_bytes(source, text, sizes[source]).decode(errors="replace")
        rank = self._layout.rank if self._hosts.alone else source
        message = f"rank {rank}{f' {what}' if what else ''}: {told}. Nothing was updated."
        raise PipelineError(message) from (error if rank == self._layout.rank else None)
