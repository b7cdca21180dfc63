"""A schedule as data: which rank computes what of which micro-batch in which order, and what it sends and receives.

A *stage* is a run of layers; a rank holds one, or several (*chunks*) where the schedule says so. Stages are numbered
along the model, whoever holds them. Sends and receives follow from the computations and from who holds which stage, so
that generators write computations only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class PassKind(Enum):
    """What is computed of one stage and one micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of inputs and of weights
    INPUT = "I"  # the gradients of the inputs alone, which the stage before waits for
    WEIGHT = "W"  # the gradients of the weights, which nobody waits for

    def __str__(self) -> str:
        return self.value

    @property
    def passes_back(self) -> bool:
        """True for what gives the stage before its gradients."""
        return self in (PassKind.BACKWARD, PassKind.INPUT)


class Action(NamedTuple):
    """One computation."""

    op: PassKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.micro_batch}"


class Message(NamedTuple):
    """Activations or gradients of one micro-batch on their way from one rank to another."""

    kind: str  # "activation" into `stage`, or "gradient" of what `stage` gave out
    stage: int  # the stage that receives it
    micro_batch: int
    source: int
    target: int

    @property
    def channel(self) -> tuple[str, int, int]:
        """What is received in the order in which it is sent."""
        return self.kind, self.source, self.target


@dataclass(frozen=True)
class Schedule:
    """The computations of every rank in their order."""

    name: str
    micro_batches: int
    owners: tuple[int, ...]  # stage → the rank that holds it
    ranks: tuple[tuple[Action, ...], ...]
    limits: tuple[int, ...]  # rank → of how many micro-batches and stages it may hold activations at a time
    forward_only: bool = False

    @property
    def stages(self) -> int:
        return len(self.owners)

    @property
    def chunks(self) -> int:
        return self.stages // len(self.ranks)

    @property
    def splits_backward(self) -> bool:
        """True if gradients of inputs and of weights are computed apart."""
        return any(action.op is PassKind.WEIGHT for action in self.ranks[0])

    def label(self, action: Action) -> str:
        """An action as text: `F0`, with the stage in front where a rank holds several."""
        return str(action) if self.chunks > 1 else f"{action.op}{action.micro_batch}"

    def rank(self, rank: int) -> str:
        """A rank's computations as text: `F0 F1 B0 B1`."""
        return " ".join(map(self.label, self.ranks[rank]))

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {self.rank(rank)}" for rank in range(len(self.ranks)))

    def received(self, action: Action) -> Message | None:
        """What another rank must have sent before an action; None if its input is on its own rank."""
        return self._message(action, action.stage + (-1 if action.op is PassKind.FORWARD else 1), action.stage)

    def sent(self, action: Action) -> Message | None:
        """What an action gives to another rank; None if its result stays."""
        return self._message(action, action.stage, action.stage + (1 if action.op is PassKind.FORWARD else -1))

    def _message(self, action: Action, source: int, target: int) -> Message | None:
        if action.op is PassKind.WEIGHT or min(source, target) < 0 or max(source, target) == self.stages:
            return None
        kind = "activation" if action.op is PassKind.FORWARD else "gradient"
        owners = self.owners[source], self.owners[target]
        return None if owners[0] == owners[1] else Message(kind, target, action.micro_batch, *owners)


def waits_for(action: Action, stages: int) -> list[Action]:
    """What must be finished before an action can begin, on any rank, where the model has so many stages."""
    op, stage, micro_batch = action
    if op is PassKind.FORWARD:
        return [Action(PassKind.FORWARD, stage - 1, micro_batch)] if stage > 0 else []
    if op is PassKind.WEIGHT:
        return [Action(PassKind.INPUT, stage, micro_batch)]
    behind = [Action(op, stage + 1, micro_batch)] if stage + 1 < stages else []
    return [Action(PassKind.FORWARD, stage, micro_batch), *behind]
