"""`Coordinator`: stage 3's fetch, prefetch and release, on ranks that may take different branches.

[Note: passes] A pass is one forward (from the outermost module's begin to its end) or one backward. Its first run
asks: every module that needs parameters tells the other ranks, and all gather what any of them needs. That gives a
trace, the same on all ranks, from which a plan is made. Later runs follow the plan without asking: gathers are issued
ahead of their use.

[Note: branches] A rank that skips a use takes part in its gathers all the same, and goes on. A rank that needs
something which the plan does not have first takes part in the rest of the plan, so that nobody waits for it, and then
asks. Whoever is through with the pass serves those who are not. So ranks may take different branches; it costs time
only in the passes where they do. What remains impossible, ranks that do different numbers of passes or steps, is told
to all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from deepspeed.utils.logging import logger, warn_once
from deepspeed.zero.parameters.agreement import DONE, STEP, Control, start_code
from deepspeed.zero.parameters.gather import Fetcher
from deepspeed.zero.parameters.passes import Known, Pass, Use
from deepspeed.zero.parameters.plan import Event, Limits, Plan, plan
from deepspeed.zero.parameters.shard import Shard

__all__ = ["Coordinator", "Use"]

_PATIENCE = 3  # plans that did not fit, after which a kind of pass is asked for every time


class Coordinator:
    """Makes parameters whole before modules need them, and lets go of them afterwards."""

    def __init__(
        self, control: Control, fetcher: Fetcher, limits: Limits, *, between_passes: bool, log_traces: bool = False
    ) -> None:
        self._control = control
        self._fetcher = fetcher
        self._limits = limits
        self._between = between_passes  # whether parameters may stay whole from forward to backward
        self._log_traces = log_traces
        self._known: dict[tuple[object, ...], Known] = {}
        self._uses: dict[int, Use] = {}
        self._shards: dict[int, Shard] = {}
        self._pass: Pass | None = None
        self._stack: list[tuple[Use, tuple[Shard, ...]]] = []
        self._held: dict[int, set[Shard]] = {}
        self._inputs_done: set[int] = set()
        self._forwards: list[tuple[object, ...]] = []
        self._keep: dict[int, frozenset[int]] = {}
        self._kept: frozenset[int] = frozenset()
        self.in_backward = False
        self.gathers = 0
        """Parameters gathered so far."""

    # ---- what is used

    def add(self, use: Use) -> None:
        """Know about a use; all ranks add the same ones in the same order."""
        self._uses[use.number] = use
        for shard in use.shards:
            self._shards[shard.number] = shard

    def clear(self) -> None:
        """Forget every use and every plan; let go of what is whole."""
        self._known.clear()
        self._uses.clear()
        self._stack.clear()
        self._held.clear()
        self._pass = None
        self.in_backward = False

    def invalidate(self) -> None:
        """Forget the plans."""
        self._known.clear()

    @property
    def current(self) -> Use | None:
        """The innermost module that is running."""
        return self._stack[-1][0] if self._stack else None

    @property
    def live(self) -> int:
        """Elements that are whole now, without those that always are."""
        return sum(s.numel for s in self._shards.values() if (s.whole or s.pending) and not s.persistent)

    # ---- forward

    def enter(self, use: Use) -> None:
        """A module begins to run."""
        if self._pass is None:
            self._open(("forward", use.number, torch.is_grad_enabled()))
        self._need(use)
        shards = tuple(use.shards)
        for shard in shards:
            shard.holds += 1
            shard.users.add(use.number)
        self._stack.append((use, shards))

    def leave(self, use: Use) -> None:
        """A module has run, or failed."""
        if not any(top is use for top, _ in self._stack):
            return  # it failed before it began
        while self._stack:  # modules above it were left by an exception
            top, shards = self._stack.pop()
            for shard in shards:
                shard.holds -= 1
                shard.users.discard(top.number)
            self._left(top, shards)
            if top is use:
                break
        if not self._stack and not self.in_backward and self._pass is not None:
            grad = self._pass.key[-1]
            if grad:
                self._forwards.append(self._pass.key)
            self._close()

    def also(self, shard: Shard) -> None:
        """The running module needs one more parameter, now and whenever it runs."""
        use = self.current
        if use is None:
            return
        if shard not in use.shards:
            use.shards.append(shard)
            self._shards[shard.number] = shard
            self._known.clear()
        self._need(use)
        top, shards = self._stack[-1]
        if shard not in shards:
            shard.holds += 1
            shard.users.add(use.number)
            self._stack[-1] = (top, (*shards, shard))

    def hand_over(self, use: Use, shard: Shard) -> None:
        """A module returns one of its parameters: whoever called it uses that from now on."""
        caller = next((top for top, _ in reversed(self._stack) if top is not use), None)
        if caller is None or shard in caller.shards:
            return
        place = next(i for i, (top, _) in enumerate(self._stack) if top is caller)
        caller.shards.append(shard)
        shard.holds += 1
        shard.users.add(caller.number)
        self._stack[place] = (caller, (*self._stack[place][1], shard))
        self._known.clear()

    # ---- backward

    def begin_backward(self) -> None:
        """A backward begins."""
        if self.in_backward:
            return
        self.in_backward = True
        self._open(("backward", *self._forwards, tuple(sorted(self._kept)), False))

    def before_backward(self, use: Use) -> None:
        """The gradient of a module's output is known: its parameters are needed next."""
        self.begin_backward()
        held = self._held.setdefault(use.number, set())
        if held and held.issuperset(use.shards):
            return  # told by another of the module's outputs, or by another call of it
        self._need(use)
        for shard in use.shards:
            if shard not in held:
                held.add(shard)
                shard.holds += 1
                shard.users.add(use.number)

    def gradient_arrived(self, shard: Shard) -> None:
        """Every use of a trained parameter in this backward is over: its gradient is there."""
        for number in [number for number, held in self._held.items() if shard in held]:
            self._drop(number, (shard,))
            self._drop_frozen(number)

    def inputs_done(self, use: Use) -> None:
        """The gradients of all inputs of a module are known, so nothing but its own parameters can be missing."""
        if use.number in self._held:
            self._inputs_done.add(use.number)
            self._drop_frozen(use.number)

    def _drop_frozen(self, number: int) -> None:
        held = self._held.get(number)
        if held and number in self._inputs_done and not any(shard.param.requires_grad for shard in held):
            self._drop(number, tuple(held))

    def _drop(self, number: int, shards: Iterable[Shard]) -> None:
        held, use = self._held[number], self._uses[number]
        for shard in shards:
            held.discard(shard)
            shard.holds -= 1
            shard.users.discard(number)
        if held:
            self._let_go(shards, self._keep.get(number, frozenset()))
        else:
            del self._held[number]
            self._inputs_done.discard(number)
            self._left(use, use.shards)

    def end_backward(self) -> None:
        """A backward is over: nothing is needed any more."""
        if not self.in_backward:
            return
        for number, held in list(self._held.items()):
            self._drop(number, tuple(held))
        self.in_backward = False
        self._forwards.clear()
        self._close()

    def step(self) -> None:
        """Every rank takes an optimizer step now."""
        if self._uses:
            codes = self._control.exchange(STEP, "begin of an optimizer step")
            if any(code != STEP for code in codes):
                raise self._control.refuse("is about to take an optimizer step")

    # ---- passes

    def _open(self, key: tuple[object, ...]) -> None:
        known = self._known.setdefault(key, Known())
        usable = known.plan if known.misfits < _PATIENCE else None
        self._pass = Pass(key, usable)
        mine = start_code((key, usable is not None))
        codes = self._control.exchange(mine, f"begin of a {key[0]} pass")
        if any(code == STEP for code in codes):
            self._pass = None
            raise self._control.refuse(f"begins a {key[0]} pass{self._where()}")
        if any(code != mine for code in codes):
            self._pass.plan = None  # passes of different kinds meet: ask for everything

    def _close(self) -> None:
        now, self._pass = self._pass, None
        if now is None:
            return
        planned = now.plan is not None
        if planned and not now.strayed:
            self._play(now, len(now.plan.steps) if now.plan else 0)
        alone = not self._serve(now)
        known = self._known.setdefault(now.key, Known())
        whole, self._kept = self._kept, frozenset()
        if now.plan is not None and alone:
            self._kept = now.plan.kept
        if not planned:
            known.plan = self._planned(now, whole)
        elif not alone:
            known.plan = None
            known.misfits += 1
            self._explain(now)
        self._keep.clear()
        self._let_go(self._shards.values(), self._kept)

    def _serve(self, now: Pass) -> bool:
        """Take part in what other ranks still need; True if anybody needed anything."""
        asked = False
        while True:
            codes = self._control.exchange(DONE, f"end of a {now.key[0]} pass")
            if all(code == DONE for code in codes):
                return asked or now.strayed
            asked = True
            self._answer(now, codes, None)

    def _answer(self, now: Pass, codes: Sequence[int], mine: Use | None) -> None:
        """Gather what any rank asked for; keep only what this rank asked for."""
        if any(code < 0 for code in codes):
            self._pass = None
            raise self._control.refuse(f"is in a {now.key[0]} pass{self._where()}")
        for number in sorted({code for code in codes if code > 0}):
            use = self._uses[number - 1]
            now.served.append(use.number)
            self._gather(use.shards)
            if use is not mine:
                self._let_go(use.shards, frozenset())

    def _need(self, use: Use) -> None:
        """Make the parameters of a use whole, by the plan or by asking."""
        now = self._pass
        if now is None:
            self._open(("use", use.number, torch.is_grad_enabled()))
            now = self._pass
            assert now is not None, "just opened"
        if now.plan is None or now.strayed:
            self._ask(now, use)
        else:
            self._follow(now, now.plan, use)
        now.events.append(Event(True, use.number, tuple(s.number for s in use.shards if not s.persistent)))

    def _ask(self, now: Pass, use: Use) -> None:
        codes = self._control.exchange(use.number + 1, f"request for {use.name}")
        self._answer(now, codes, use)

    def _follow(self, now: Pass, steps: Plan, use: Use) -> None:
        place = next((i for i in range(now.next, len(steps.steps)) if steps.steps[i].use == use.number), None)
        if place is None and not all(s.whole or s.pending or s.persistent for s in use.shards):
            self._play(now, len(steps.steps))
            now.strayed = True
            self._ask(now, use)
            return
        if place is not None:
            self._play(now, place)
            self._do(now, place)
        missing = [s for s in use.shards if not s.whole and s.pending is None and not s.persistent]
        if missing:
            self._play(now, len(steps.steps))
            now.strayed = True
            self._ask(now, use)
            return
        self._fetcher.finish([s for s in use.shards if not s.whole])

    def _play(self, now: Pass, until: int) -> None:
        """Take part in planned gathers that this rank does not need."""
        while now.next < until:
            place = now.next
            self._do(now, place)
            step = now.plan.steps[place] if now.plan else None
            if step is not None:
                skipped = self._uses.get(step.use)
                self._let_go(skipped.shards if skipped else (), step.keep)

    def _do(self, now: Pass, place: int) -> None:
        if now.plan is None:
            return
        step = now.plan.steps[place]
        now.next = place + 1
        self._let_go([self._shards[number] for number in step.drop], frozenset())
        if step.start:
            starting = [self._shards[number] for number in step.start]
            self.gathers += len(starting)
            self._fetcher.start(starting)
        self._keep[step.use] = step.keep

    def _gather(self, shards: Sequence[Shard]) -> None:
        wanted = [shard for shard in shards if not shard.persistent]
        self.gathers += len(wanted)
        self._fetcher.start(wanted)
        self._fetcher.finish(wanted)

    # ---- letting go

    def _left(self, use: Use, shards: Sequence[Shard]) -> None:
        if self._pass is not None:
            numbers = tuple(shard.number for shard in shards if not shard.persistent)
            self._pass.events.append(Event(False, use.number, numbers))
        self._let_go(shards, self._keep.get(use.number, frozenset()))

    def _let_go(self, shards: Iterable[Shard], keep: frozenset[int]) -> None:
        for shard in shards:
            if shard.holds or shard.persistent or shard.number in keep:
                continue
            if shard.whole or shard.pending is not None:
                shard.release()

    def _planned(self, now: Pass, whole: frozenset[int]) -> Plan:
        """A plan from what this pass used; without gathering ahead where ranks used different things."""
        served = tuple(now.served)
        agreed = self._agree(tuple(event.use for event in now.events if event.enter), served)
        numel = {number: shard.numel for number, shard in self._shards.items()}
        if agreed:
            returns = self._between and now.key[-1] is True
            return plan(now.events, numel, self._limits, whole=whole, returns=returns)
        events = [
            Event(enter, use, tuple(s.number for s in self._uses[use].shards if not s.persistent))
            for use in served
            for enter in (True, False)
        ]
        return plan(events, numel, Limits(0, self._limits.live, 0))

    def _agree(self, mine: tuple[int, ...], served: tuple[int, ...]) -> bool:
        code = start_code(mine) if mine == served else DONE
        codes = self._control.exchange(code, "comparison of traces")
        return len(set(codes)) == 1 and code != DONE

    def _explain(self, now: Pass) -> None:
        if now.strayed and self._log_traces:
            logger.info("the %s pass left its plan; it is traced anew", now.key[0])
        known = self._known[now.key]
        if known.misfits == _PATIENCE:
            warn_once(
                "stage 3: what modules a pass uses keeps changing, so parameters are gathered without prefetching. "
                "Where only a few modules choose by the data (experts), deepspeed.utils.set_z3_leaf_modules on them "
                "is faster."
            )

    def _where(self) -> str:
        use = self.current
        if use is None:
            return ""
        return f" in module {use.name!r}, which uses {', '.join(shard.name for shard in use.shards[:3])}"
