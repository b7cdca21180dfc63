"""`FetchSchedule`: gathers by a plan that all ranks share, or by asking, where ranks may take different branches.

A pass is one forward (of the outermost module) or one backward. Its first run asks: all ranks gather what any of them
needs. That gives a trace, and from it a plan, which later runs follow without asking. A rank that skips a use takes
part in its gathers. A rank that needs something outside the plan first completes the plan, and then asks. A rank that
is through with a pass serves the others.

[Note: gradients leave by the plan] A rank that waits for its gradients could keep others waiting for its parameters. So
buckets leave only at places that all ranks come to: at steps of the plan, or as agreed upon in each exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.log import logger, warn_once
from deepspeed.zero.agreement import DONE, STEP, RankAgreement, begin_code, digest
from deepspeed.zero.parameters.fetch_plan import FetchLimits, FetchPlan, UseEvent, plan
from deepspeed.zero.parameters.gather import GatherFor, finish, start
from deepspeed.zero.parameters.near import NearCopies
from deepspeed.zero.parameters.shard import Shard
from deepspeed.zero.parameters.uses import ModuleUse

if TYPE_CHECKING:
    from deepspeed.zero.gradients.reducer import GradientReducer

_NOTHING: frozenset[int] = frozenset()
_PATIENCE = 3  # plans that did not fit, after which a kind of pass is asked for every time


@dataclass
class _Pass:
    """Where a running pass is."""

    key: tuple[object, ...]
    backward: bool
    serves: GatherFor
    plan: FetchPlan | None
    learned: Any = None
    next: int = 0
    strayed: bool = False
    """This rank has left the plan."""
    events: list[UseEvent] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    """The uses that all ranks gathered, in order, while asking."""


@dataclass
class _Known:
    """What is known about one kind of pass."""

    plan: FetchPlan | None = None
    learned: Any = None
    """When gradients leave in it."""
    misfits: int = 0


class FetchSchedule:
    """Makes the parameters of uses whole, and lets go of them afterwards."""

    def __init__(
        self, agreement: RankAgreement, limits: FetchLimits, *, between_passes: bool, log_traces: bool = False
    ) -> None:
        self._agreement = agreement
        self.limits = limits
        """What gathers ahead may use."""
        self._between = between_passes  # whether parameters may stay whole from forward to backward
        self._log_traces = log_traces
        self._known: dict[tuple[object, ...], _Known] = {}
        self.uses: dict[int, ModuleUse] = {}
        self._shards: dict[int, Shard] = {}
        self._live: dict[int, Shard] = {}
        self._pass: _Pass | None = None
        self.keep: dict[int, frozenset[int]] = {}
        """What is not released when a use ends, by its number."""
        self.kept: frozenset[int] = frozenset()
        """What stays whole for the next pass."""
        self._partly_used: set[int] = set()
        """Blocks that are one use, of which ranks did not use all."""
        self.first: list[int] = []
        """The uses of the last forward that was asked for, in order."""
        self.reducer: GradientReducer | None = None
        """Whose buckets leave by the plan."""
        self.copies: NearCopies | None = None
        """What neighbours keep of parameters; ranks agree in each pass whether it is good."""
        self.gathers = 0
        """Parameters gathered so far."""
        self.position = 0
        """How many uses all ranks have come to in the pass that runs."""

    # ---- what is used

    def add(self, use: ModuleUse) -> None:
        """Know about a use; all ranks add the same ones in the same order."""
        self.uses[use.number] = use
        for shard in use.shards:
            self._shards[shard.number] = shard

    def clear(self) -> None:
        """Forget every use and every plan."""
        self._known.clear()
        self._partly_used.clear()
        self.uses.clear()
        self.first.clear()
        self._pass, self.position = None, 0

    def split_blocks(self) -> None:
        """No graph is left: blocks of which ranks did not use all are one use no more; see [Note: joined blocks]."""
        for number in sorted(self._partly_used):
            self.uses[number].split()
        if self._partly_used:
            self._partly_used = set()
            self.invalidate()

    def invalidate(self) -> None:
        """Forget the plans."""
        self._known.clear()
        if self.copies is not None:
            self.copies.outdated = True

    @property
    def live(self) -> int:
        """Elements that are whole now, without those that always are."""
        return sum(s.numel for s in self._shards.values() if (s.whole or s.pending) and not s.persistent)

    @property
    def key(self) -> tuple[object, ...]:
        """What kind of pass runs; the last of it is True in a forward with gradients. Empty outside of passes."""
        return () if self._pass is None else self._pass.key

    # ---- begin and end

    def open(self, key: tuple[object, ...], use: ModuleUse | None = None) -> None:
        """A pass begins, on all ranks; an error on all of them if one does something else."""
        known = self._known.setdefault(key, _Known())
        usable = known.plan if known.misfits < _PATIENCE else None
        backward = key[0] == "backward"
        serves = GatherFor.BACKWARD if backward else GatherFor.FORWARD
        self._pass, self.position = _Pass(key, backward, serves, usable, known.learned), 0
        mine = begin_code((key, usable is not None), backward=backward)
        said = self._say(mine, f"begin of a {key[0]} pass")
        if self.copies is not None and bool(said[:, 3].any()):
            self.copies.drop()
        codes = said[:, 0]
        if bool((codes == mine).all()):
            return
        if bool((codes >= STEP).any()) or bool(((codes - mine) % 2 != 0).any()):
            self._pass = None
            raise self._agreement.disagreement(f"begins a {key[0]} pass{_where(use)}")
        self._pass.plan = None  # passes of different kinds meet: ask for everything

    def close(self) -> None:
        """The pass is over on this rank; returns when it is on all."""
        now, self._pass = self._pass, None
        if now is None:
            return
        planned = now.plan is not None
        if now.plan is not None and not now.strayed:
            self._play(now, len(now.plan.steps))
            self._depart(now, None)
        alone = not self._serve(now)
        known = self._known.setdefault(now.key, _Known())
        whole, self.kept = self.kept, frozenset()
        if now.plan is not None and alone:
            self.kept = now.plan.kept
        if not planned:
            self._depart(now, None)
            known.plan = self._planned(now, whole)
            if now.backward and self.reducer is not None:
                known.learned = self.reducer.learn(self._agreement)
            elif now.key[-1] is True:
                self.first = list(now.served)
        elif not alone:
            known.plan = None
            known.misfits += 1
            self._explain(now)
        self.keep.clear()
        self.position = 0
        self.let_go(list(self._live.values()), self.kept)

    def abandon(self) -> None:
        """The pass failed; whatever is whole and not held is let go."""
        if self._pass is not None:
            self._pass, self.position = None, 0
            self.keep.clear()
            self.kept = frozenset()
            self.let_go(list(self._live.values()))

    def retrace(self) -> None:
        """Gradients came late: let the next backward passes be traced anew, if that may help."""
        for key, known in self._known.items():
            if key[0] == "backward" and known.plan is not None:
                known.plan = None
                known.misfits += 1

    # ---- a use

    def need(self, use: ModuleUse, also: Shard | None = None) -> None:
        """Make the parameters of a use whole, by the plan or by asking; `also` is one that it uses from now on."""
        if self._pass is None:
            self.open(("use", use.number, torch.is_grad_enabled()), use)
        now = self._pass
        assert now is not None, "just opened"
        if also is not None:
            self._stray(now)
        if now.plan is None or now.strayed:
            self._ask(now, use, also)
        else:
            self._follow(now, now.plan, use)
        if now.plan is None:
            now.events.append(use.event(True))

    def left(self, use: ModuleUse, shards: Sequence[Shard]) -> None:
        """A use is over."""
        now = self._pass
        if now is not None and now.plan is None:
            now.events.append(use.event(False))
        self.let_go(shards, self.keep.get(use.number, _NOTHING))

    def let_go(self, shards: Iterable[Shard], keep: frozenset[int] = _NOTHING) -> None:
        """Release what no use holds and nothing keeps."""
        for shard in shards:
            if shard.holds or shard.persistent or shard.number in keep:
                continue
            if shard.whole or shard.pending is not None:
                shard.release()
                self._live.pop(shard.number, None)

    # ---- graphs, which know what they use

    def run_graph(self, key: object, name: str) -> bool:
        """All ranks run the same graph next, or get an error; True if gradients wait for the same buckets on all."""
        waiting = digest(None if self.reducer is None else self.reducer.hooks.waiting())
        mine = begin_code(("graph", key), backward=self._pass is not None)
        said = self._say(mine, name, waiting)
        if self.copies is not None and bool((said[:, 3] % 2).any()):
            self.copies.drop()
        if bool((said[:, 0] != mine).any()):
            raise self._agreement.disagreement(f"runs {name}")
        return bool((said[:, 3] // 2 == waiting).all())

    def least(self, value: int, what: str) -> int:
        """The least that any rank says; all of them do, outside of passes."""
        return int(self._agreement.exchange([value], what).min())

    def stay(self, shards: Sequence[Shard]) -> None:
        """These stay whole from now on; all ranks come with the same ones."""
        self.fetch(shards)
        finish(shards)
        for shard in shards:
            shard.persistent = True
            self._live.pop(shard.number, None)
        for use in self.uses.values():
            use.events.clear()
        self.invalidate()

    def fetch(self, shards: Iterable[Shard]) -> None:
        """Begin to make these whole that neither are nor will be; all ranks begin the same ones in the same order."""
        self._begin(
            [shard for shard in shards if not shard.whole and shard.pending is None],
            GatherFor.FORWARD if self._pass is None else self._pass.serves,
        )

    def launch_ready(self) -> None:
        """Buckets that are complete, or too much to wait, leave; where all ranks come with the same gradients."""
        if self.reducer is not None:
            self.reducer.hooks.launch_until(max(self.reducer.hooks.ready()))

    # ---- by asking

    def _say(self, code: int, what: str, more: int = 0) -> Tensor:
        ready, forced = (0, 0) if self.reducer is None else self.reducer.hooks.ready()
        outdated = self.copies is not None and self.copies.outdated
        return self._agreement.exchange([code, ready, forced, 2 * more + outdated], what)

    def _serve(self, now: _Pass) -> bool:
        """Take part in what other ranks still need; True if any needed anything."""
        asked = False
        while True:
            said = self._say(DONE, f"end of a {now.key[0]} pass")
            if not bool(said[:, 0].any()):
                return asked or now.strayed
            asked = True
            self._answer(now, said, None)

    def _stray(self, now: _Pass) -> None:
        """Take part in the rest of the plan, to ask from then on."""
        if now.plan is not None and not now.strayed:
            self._play(now, len(now.plan.steps))
            self._depart(now, None)
            now.strayed = True

    def _ask(self, now: _Pass, use: ModuleUse, also: Shard | None = None) -> None:
        if use.number not in self.uses:
            raise UsageError(
                f"backward came to module {use.name!r}, whose stage-3 hooks were taken off after its forward and put "
                "on again. Run backward before hooks are removed; to generate between a forward and its backward, use "
                "deepspeed.zero.unwrap_model_for_generation(engine)."
            )
        more = 0 if also is None else list(self._shards).index(also.number) + 1
        self._answer(now, self._say(use.number + 1, f"request for {use.name}", more), use)

    def _answer(self, now: _Pass, said: Tensor, mine: ModuleUse | None) -> None:
        """Gather what any rank asked for; keep only what this rank asked for."""
        codes = said[:, 0]
        if bool((codes < 0).any()):
            self._pass = None
            raise self._agreement.disagreement(f"is in a {now.key[0]} pass{_where(mine)}")
        if now.plan is None:
            self._depart(now, max(int(said[:, 1].min()), int(said[:, 2].max())))
        if bool((said[:, 3] > 1).any()):
            self._extend(said[:, 0].tolist(), (said[:, 3] // 2).tolist())
        wanted = [mine.number + 1] if mine is not None and bool((codes == mine.number + 1).all()) else None
        own = _NOTHING if wanted or mine is None else frozenset(shard.number for shard in mine.shards)
        for number in wanted or sorted({int(code) for code in codes.tolist() if code > 0}):
            use = self.uses[number - 1]
            now.served.append(use.number)
            self._gather(now, use.shards)
            if use is not mine:
                self.let_go(use.shards, own)  # uses may share parameters
        if now.plan is None:
            self.position = len(now.served)

    def _extend(self, codes: Sequence[int], also: Sequence[int]) -> None:
        """Uses need one more parameter whenever they run, by what any rank found: plans do not fit any more."""
        known = list(self._shards.values())
        for code, more in sorted({(code, more) for code, more in zip(codes, also, strict=True) if code > 0 < more}):
            use, shard = self.uses[code - 1], known[more - 1]
            if shard not in use.shards:
                use.add(shard)
        self._known.clear()

    def _gather(self, now: _Pass, shards: Sequence[Shard]) -> None:
        wanted = [shard for shard in shards if not shard.persistent]
        self._begin(wanted, now.serves)
        finish(wanted)

    # ---- by the plan

    def _follow(self, now: _Pass, steps: FetchPlan, use: ModuleUse) -> None:
        place: int | None = now.next
        if now.next == len(steps.steps) or steps.steps[now.next].use != use.number:
            place = steps.find(use.number, now.next)
            self._play(now, now.next if place is None else place)
        if place is not None:
            self._do(now, place)
        absent = []
        for shard in use.shards:
            if shard.whole or shard.persistent:
                continue
            if shard.pending is None and not shard.alone:  # what this rank alone holds comes from no other one
                self._stray(now)
                self._ask(now, use)
                return
            absent.append(shard)
        if absent:
            finish(absent)

    def _play(self, now: _Pass, until: int) -> None:
        """Take part in planned gathers that this rank does not need."""
        while now.plan is not None and now.next < until:
            step = now.plan.steps[now.next]
            self._do(now, now.next)
            skipped = self.uses.get(step.use)
            self.let_go(skipped.shards if skipped else (), step.keep)

    def _do(self, now: _Pass, place: int) -> None:
        assert now.plan is not None, "this pass follows one"
        step = now.plan.steps[place]
        if now.learned is not None and self.reducer is not None and now.backward:
            self.reducer.launch_before(now.learned, place)
        self.position = now.next = place + 1
        if step.drop:
            self.let_go([self._shards[number] for number in step.drop])
        for batch in step.start:
            self._begin([self._shards[number] for number in batch], now.serves)
        self.keep[step.use] = step.keep

    def _begin(self, shards: list[Shard], serves: GatherFor) -> None:
        self.gathers += len(shards)
        start(shards, serves)
        for shard in shards:
            self._live[shard.number] = shard

    def _depart(self, now: _Pass, until: int | None) -> None:
        if self.reducer is not None and now.backward:
            self.reducer.hooks.launch_until(until)

    # ---- making plans

    def _planned(self, now: _Pass, whole: frozenset[int]) -> FetchPlan:
        """A plan from what this pass used; without gathering ahead where ranks used different things."""
        served = tuple(now.served)
        agreed = self._agree(tuple(event.use for event in now.events if event.enter), served)
        numel = {number: shard.numel for number, shard in self._shards.items()}
        if agreed:
            returns = self._between and now.key[-1] is True
            return plan(now.events, numel, self.limits, whole=whole, returns=returns)
        events = [self.uses[use].event(enter) for use in served for enter in (True, False)]
        return plan(events, numel, FetchLimits(0, self.limits.live, 0))

    def _agree(self, mine: tuple[int, ...], served: tuple[int, ...]) -> bool:
        code = digest(mine) + 1 if mine == served else DONE
        partly = [use.number for use in self.uses.values() if len({part.ran for part in use.parts}) > 1]
        said = self._agreement.exchange([code, bool(partly), 0, 0], "comparison of traces")
        if bool(said[:, 1].any()):
            self._partly_used = self._agreement.union(partly, max(self.uses) + 1)
        return code != DONE and bool((said[:, 0] == code).all())

    def _explain(self, now: _Pass) -> None:
        if now.strayed and self._log_traces:
            logger.info("the %s pass left its plan; it is traced anew", now.key[0])
        if self._known[now.key].misfits == _PATIENCE:
            warn_once(
                "stage 3: what modules a pass uses keeps changing, so parameters are gathered without prefetching. "
                "Where only a few modules choose by the data (experts), deepspeed.utils.set_z3_leaf_modules on them "
                "is faster."
            )


def _where(use: ModuleUse | None) -> str:
    if use is None:
        return ""
    names = ", ".join(shard.name for shard in use.shards[:3])
    return f" in module {use.name!r}" + (f", which uses {names}" if names else "")
