"""What ranks agree upon before an optimizer step: who had a gradient, what was late, in which order gradients leave.

In the steady state, where all ranks had gradients of the same parameters and nothing was late, that is one exchange of
a few numbers between hosts: the device does not know of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from deepspeed.comm import Pending
from deepspeed.zero.agreement import STEP, RankAgreement, digest


@dataclass(frozen=True)
class AgreedGradients:
    """What all ranks know afterwards."""

    had: frozenset[int]
    """Parameters of which any rank had a gradient."""
    late: list[int]
    """Buckets that go again."""
    order: list[int] | None
    """In which gradients leave from now on; None: as before."""


class StepAgreement:
    """The ranks over which gradients are summed."""

    def __init__(self, hosts: RankAgreement) -> None:
        self._hosts = hosts

    def open_polls(self) -> None:
        """See `RankAgreement`."""
        self._hosts.open_polls()

    def poll(self, flags: Sequence[bool]) -> Pending[Tensor]:
        """See `RankAgreement`."""
        return self._hosts.poll(flags)

    def confirm(self) -> None:
        """Every rank takes an optimizer step now; an error on all of them if one does something else."""
        self._check(self._hosts.exchange([STEP, 0, 0, 0], "begin of an optimizer step")[:, 0].tolist())

    def meet(self, had: set[int], late: set[int], order: list[int] | None, sizes: tuple[int, int]) -> AgreedGradients:
        """`sizes` are the numbers of parameters and of buckets; the first rank's `order` counts."""
        words = [STEP, digest(sorted(had)), len(late), order is not None]
        said = self._hosts.exchange(words, "agreement on gradients")
        self._check(said[:, 0].tolist())
        everyone = set(had)
        if bool((said[:, 1] != words[1]).any()):
            everyone = self._hosts.unite(had, sizes[0])
        again: list[int] = []
        if bool(said[:, 2].any()):
            again = sorted(self._hosts.unite(late, sizes[1]))
        learned = None
        if bool(said[0, 3]):
            learned = self._hosts.tell(order or (), sizes[0])
        return AgreedGradients(frozenset(everyone), again, learned)

    def _check(self, codes: list[int]) -> None:
        if any(code != STEP for code in codes):
            raise self._hosts.refuse("is about to take an optimizer step")
