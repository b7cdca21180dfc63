"""One rank of a preflight: meet, look, compare, judge; rank 0 decides, and all ranks end with its verdict.

A process group forms only when all ranks are there, and waits in silence. Here every rank leaves its message when it is
ready, so that rank 0 knows who is absent when the time is up.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as td
from rich.console import Console
from rich.text import Text
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.discover import RankFacts, discover
from deepspeed.comm.init import DEFAULT_PORT
from deepspeed.config import Loaded, load
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError, RendezvousError, printable
from deepspeed.launcher.console import plain_table
from deepspeed.log import logger
from deepspeed.preflight.arguments import Options, Program
from deepspeed.preflight.check import (
    AllRanks,
    CheckFinding,
    Level,
    PreflightCheck,
    RankFact,
    ThisRank,
    counted,
    grouped,
    name_ranks,
    passed,
    rank_words,
)

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
_MOST = 12
"""Findings of one check that the table shows; JSON has all."""


@dataclass(frozen=True)
class PreflightResult:
    """What a preflight found."""

    ranks: int
    hosts: tuple[str, ...]
    findings: Mapping[str, Sequence[CheckFinding]]
    """Check → what it says."""
    seconds: float = 0.0

    def count(self, level: Level) -> int:
        """How many findings have this level."""
        return sum(finding.level is level for own in self.findings.values() for finding in own)

    @property
    def status(self) -> int:
        """The exit status: 0 unless there is a problem; warnings do not fail."""
        return int(self.count(Level.PROBLEM) > 0)

    @property
    def line(self) -> str:
        """The verdict in one line."""
        warnings = self.count(Level.WARNING)
        warned = f", {counted(warnings, 'warning')}" if warnings else ""
        made = f"{counted(len(self.findings), 'check')} on {counted(self.ranks, 'rank')} in {self.seconds:.1f} s"
        problems = self.count(Level.PROBLEM)
        return f"NOT READY: {counted(problems, 'problem')}{warned} ({made})" if problems else f"READY{warned} ({made})"

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "ready": self.status == 0,
            "ranks": self.ranks,
            "hosts": list(self.hosts),
            "seconds": round(self.seconds, 3),
            "checks": {name: [asdict(finding) for finding in own] for name, own in self.findings.items()},
        }

    def draw(self, console: Console) -> None:
        """The table, what to do, and the verdict as its last line."""
        table = plain_table("check", "", "found")
        for name, own in self.findings.items():
            ordered = sorted(own, key=lambda finding: list(Level).index(finding.level), reverse=True)
            for number, finding in enumerate(ordered[:_MOST]):
                state = Text(finding.level.value, style=_STYLES[finding.level])
                table.add_row("" if number else name, state, printable(finding.what))
            if len(ordered) > _MOST:
                table.add_row("", "", f"… and {len(ordered) - _MOST} more; --json has them")
        console.print(table, highlight=False)
        advised = ((name, each) for name, own in self.findings.items() for each in own if each.advice)
        acts = grouped((f"{name}: {each.advice}", each.level) for name, each in advised if each.level is not Level.OK)
        if acts:
            console.print()
            console.print(Text("What to do", style="bold cyan"))
            grid = plain_table()
            grid.show_header = False
            grid.add_column()
            grid.add_column(overflow="fold")
            for act, levels in sorted(acts.items(), key=lambda item: Level.PROBLEM not in item[1]):
                level = Level.PROBLEM if Level.PROBLEM in levels else Level.WARNING
                grid.add_row(Text("!" if level is Level.PROBLEM else "-", style=_STYLES[level]), printable(act))
            console.print(grid, highlight=False)
        console.print()
        console.print(Text(self.line, style=_STYLES[Level.PROBLEM if self.status else Level.OK]))


_NODE = ("CROSS_RANK", "GROUP_RANK")  # number of the host, as our launcher and torchrun say it
# What looking at a machine can raise; anything else is a mistake in a check and is shown as such.
_FAILURES = (OSError, RuntimeError, ValueError, DeepSpeedError)

Gathered = dict[str, dict[str, Any]]
"""Check → {"fact": its fields} or {"error": why there is none}."""


def run(
    options: Options,
    program: Program,
    checks: Sequence[PreflightCheck[Any]],
    report: Callable[[PreflightResult], None],
    now: Callable[[], int] = time.time_ns,
) -> int:
    """Do this rank's part and return the exit status of all; rank 0 hands the verdict to `report`."""
    logger.setLevel(max(logger.level, logging.WARNING))  # the table tells what the library would
    environ = dict(os.environ)
    facts = discover(environ, port=DEFAULT_PORT)
    began = time.monotonic()
    store = RankStore(facts, options.timeout)
    here = ThisRank(
        rank=facts.rank,
        world=facts.world_size,
        local_rank=facts.local_rank or 0,
        options=options,
        program=program,
        config=_config(options, program),
        environ=environ,
        now=now,
    )
    wanted = [check for check in checks if check.name not in options.skip]
    alone = [check for check in wanted if not check.together]
    together = [check for check in wanted if check.together and facts.world_size > 1]
    store.post("here", {"host": socket.gethostname(), "node": _node()})
    store.post("alone", _gather(alone, here))
    if facts.rank != 0:
        return _follow(store, together, here)
    verdict = _lead(store, alone, together, here)
    verdict = dataclasses.replace(verdict, seconds=time.monotonic() - began)
    report(verdict)  # before anybody ends: a launcher ends the other ranks as soon as one fails
    store.decide("verdict", verdict.status)
    store.close()
    return verdict.status


def _lead(
    store: RankStore, alone: Sequence[PreflightCheck[Any]], together: Sequence[PreflightCheck[Any]], here: ThisRank
) -> PreflightResult:
    """The part of rank 0: read all messages, decide whether to go on, judge."""
    hosts = _host_names(store.collect("here"))
    absent = sorted(set(range(here.world)) - set(hosts))
    gathered: dict[int, Gathered] = store.collect("alone", hosts)
    findings = {"ranks": [_presence(absent, hosts, here.options.timeout, here.world)]}
    silent = sorted(set(hosts) - set(gathered))
    complete = not absent and not silent
    store.decide("together", list(hosts.values()) if complete and together else None)
    made = [*alone, *(together if complete else ())]
    if complete and together:
        store.post("together", _gather_together(together, here, list(hosts.values()), store))
        answers = store.collect("together")
        silent = sorted(set(hosts) - set(answers))
        for rank, own in answers.items():
            gathered[rank] = {**gathered[rank], **own}
    if silent:
        findings["ranks"].append(_silent(silent, hosts, here.options.timeout))
    told = {rank: own for rank, own in gathered.items() if rank not in silent}
    findings |= judge_all(made, told, hosts)
    return PreflightResult(here.world, tuple(dict.fromkeys(hosts.values())), findings)


def _follow(store: RankStore, together: Sequence[PreflightCheck[Any]], here: ThisRank) -> int:
    """The part of every rank but the first."""
    hosts = store.decided("together")
    if hosts is not None:
        store.post("together", _gather_together(together, here, hosts, store))
    status = int(store.decided("verdict"))
    store.leave(status)
    return status


def _config(options: Options, program: Program) -> Loaded | str | None:
    source = options.config or program.config
    if source is None:
        return None
    try:
        return load(source, partial=True)
    except DeepSpeedConfigError as error:
        return str(error)


def _node() -> str:
    return next((os.environ[name] for name in _NODE if os.environ.get(name)), "")


def _host_names(said: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Rank → host; hosts of one name are told apart by their number, as those of containers may be."""
    nodes = grouped((own["host"], own["node"]) for own in said.values())
    return {
        rank: own["host"] if len({*nodes[own["host"]]}) == 1 else f"{own['host']} (node {own['node']})"
        for rank, own in sorted(said.items())
    }


def _gather(checks: Sequence[PreflightCheck[Any]], here: ThisRank) -> Gathered:
    found: Gathered = {}
    for check in checks:
        try:
            found[check.name] = {"fact": dataclasses.asdict(check.gather(here))}
        except _FAILURES as error:
            found[check.name] = {"error": f"{type(error).__name__}: {error}"[:1000]}
    return found


def _gather_together(
    checks: Sequence[PreflightCheck[Any]], here: ThisRank, hosts: Sequence[str], store: RankStore
) -> Gathered:
    """Join as the job would, and gather; an error on the way is told for each check that it prevented."""
    try:
        joined = _join(here, hosts, store)
    except _FAILURES as error:
        return {check.name: {"error": f"no process group: {error}"[:1000]} for check in checks}
    found: Gathered = {}
    for check in checks:
        found |= _gather([check], dataclasses.replace(here, joined=joined))
        if "error" in found[check.name]:
            # The others wait for this rank, which cannot know how far they are.
            rest = checks[len(found) :]
            return found | {other.name: {"error": f"not made, since {check.name} failed"} for other in rest}
    return found


def _join(here: ThisRank, hosts: Sequence[str], store: RankStore) -> AllRanks:
    accelerator = get_accelerator()
    backend = accelerator.communication_backend_name() or "gloo"
    if accelerator.device_name() != "cpu":
        accelerator.set_device(here.local_rank)
    limit = timedelta(seconds=here.options.timeout)
    inner = PrefixStore("group", store.store)
    td.init_process_group(backend, store=inner, rank=here.rank, world_size=here.world, timeout=limit)
    messages = td.group.WORLD if backend == "gloo" else td.new_group(backend="gloo", timeout=limit)
    assert messages is not None, "the group was just made"
    return AllRanks(comm.group_device(), tuple(hosts), messages)


def _presence(absent: Sequence[int], hosts: Mapping[int, str], timeout: float, world: int) -> CheckFinding:
    if not absent:
        count = len(set(hosts.values()))
        return passed(f"{counted(world, 'rank')} on {counted(count, 'host')}")
    verb = "has" if len(absent) == 1 else "have"
    what = f"{rank_words(absent)} {verb} not come within {timeout:.0f} s{absent_words(absent, hosts)}"
    advice = "look whether they were started, and whether their hosts reach rank 0's; --timeout waits longer"
    return CheckFinding(Level.PROBLEM, what, tuple(absent), advice)


def _silent(silent: Sequence[int], hosts: Mapping[int, str], timeout: float) -> CheckFinding:
    place = name_ranks([RankFact(rank, hosts[rank], None) for rank in silent])
    what = f"{place} came, and said nothing more within {timeout:.0f} s"
    return CheckFinding(Level.PROBLEM, what, tuple(silent), "look at what they wrote last, and at their hosts")


def judge_all(
    checks: Sequence[PreflightCheck[Any]], gathered: Mapping[int, Gathered], hosts: Mapping[int, str]
) -> dict[str, list[CheckFinding]]:
    """Check → its findings, from the facts of all ranks; ranks that have none are told with the reason."""
    findings: dict[str, list[CheckFinding]] = {}
    for check in checks:
        found = {rank: own.get(check.name, {"error": "it was not told"}) for rank, own in sorted(gathered.items())}
        errors = grouped((own["error"], rank) for rank, own in found.items() if "error" in own)
        findings[check.name] = [
            CheckFinding(Level.PROBLEM, f"{rank_words(ranks)}: {error}", tuple(ranks), "mend this first")
            for error, ranks in errors.items()
        ]
        if found and not errors:
            told = [RankFact(rank, hosts[rank], check.fact(**own["fact"])) for rank, own in found.items()]
            findings[check.name] += check.judge(told)
    return findings


_PATIENCE = 3600.0  # seconds for rank 0 to answer; where it ends instead, its store does, too, and the wait is over
_LEAVE_AFTER = 1.0
_LOOK = 0.02


class RankStore:
    """The messages of all ranks, by subject."""

    def __init__(self, facts: RankFacts, timeout: float) -> None:
        self.rank, self.world = facts.rank, facts.world_size
        self.timeout = timeout
        self.answered = 0
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"deepspeed.preflight/{restart}", _open(facts, timeout))

    def post(self, subject: str, message: Any) -> None:
        """Leave this rank's message."""
        self.store.set(f"{subject}/{self.rank}", json.dumps(message))
        self.store.add(f"{subject}/came", 1)

    def collect(self, subject: str, ranks: Collection[int] | None = None) -> dict[int, Any]:
        """The messages of those `ranks`, or of all, that came in time; waits no longer than for the last of them."""
        keys = {rank: f"{subject}/{rank}" for rank in (range(self.world) if ranks is None else ranks)}
        # One number for as long as too few have come; then each, since one who came late may be among them.
        self._wait(
            lambda: int(self.store.add(f"{subject}/came", 0)) >= len(keys) and bool(self.store.check([*keys.values()]))
        )
        found = {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}
        self.answered = len(found)
        return found

    def decide(self, subject: str, message: Any) -> None:
        """Leave rank 0's message for all."""
        self.store.set(f"{subject}/decided", json.dumps(message))

    def decided(self, subject: str) -> Any:
        """Rank 0's message for all; an error if there is none."""
        key = f"{subject}/decided"
        try:
            self.store.wait([key], timedelta(seconds=_PATIENCE))
            return json.loads(self.store.get(key))
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {self.rank}: rank 0 has ended without a word; look at what it wrote"
            ) from error

    def close(self) -> None:
        """Wait on rank 0, which keeps the store, until the ranks that answered last have read the end."""
        self._wait(lambda: int(self.store.add("left", 0)) >= self.answered - 1)

    def leave(self, status: int) -> None:
        """Let every other rank end after rank 0 where that fails: a launcher names the one that fails first."""
        self.store.add("left", 1)
        if status:
            time.sleep(_LEAVE_AFTER)

    def _wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.timeout
        while not done() and time.monotonic() < deadline:
            time.sleep(_LOOK)


def _open(facts: RankFacts, timeout: float) -> Store:
    if facts.world_size == 1:
        return HashStore()
    assert facts.master_addr is not None, "a job of several ranks has an address"
    assert facts.master_port is not None, "a job of several ranks has a port"
    # torchrun keeps the store itself; all ranks come as guests.
    keep = facts.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=timeout)
    try:
        return TCPStore(facts.master_addr, facts.master_port, is_master=keep, timeout=limit, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        place = f"{facts.master_addr}:{facts.master_port}"
        what = f"rank 0 cannot listen at {place}: {str(error).splitlines()[0]}. Another job may: choose another port"
        if not keep:
            what = (
                f"rank {facts.rank} found nobody at {place} within {timeout:.0f} s: rank 0 was not started, or its "
                "host cannot be reached from here at that address and port (MASTER_ADDR, MASTER_PORT, a firewall)"
            )
        raise RendezvousError(what) from error


def absent_words(absent: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Where absent ranks should be, as far as their neighbours show it."""
    places = set()
    for rank in absent:
        before = max((there for there in hosts if there < rank), default=None)
        after = min((there for there in hosts if there > rank), default=None)
        if before is not None and after is not None and hosts[before] == hosts[after]:
            places.add(hosts[before])
    return f"; going by the ranks beside, on {', '.join(sorted(places))}" if 0 < len(places) <= 4 else ""
