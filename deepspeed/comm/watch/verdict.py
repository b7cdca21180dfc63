"""Who keeps the others waiting, in a sentence: a pure function of what ranks reported.

[Note: the verdict] It begins with one call that does not complete and the ranks that have to make it. A rank is at
fault if it cannot answer, has ended, has not entered the call, or entered something else under that number. One that
has not entered because it waits elsewhere only passes the delay on: whoever keeps it waiting is looked for in the same
way, and reported first. The first number under which ranks differ is reported, since all later ones follow from it.
A rank may enter while it is being asked, after others have given up: it is reported as late. Only where all ranks have
waited inside the call is nobody at fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from deepspeed.comm.watch.report import CollectiveCall, GroupProgress, RankReport, WaitingCall

SHOWN = 8  # ranks that are listed one by one

# Operations to which every rank brings as many elements, and those that have one root.
_EQUAL = {
    *("all_reduce", "inference_all_reduce", "broadcast", "reduce", "all_gather", "gather_words", "unite"),
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single", "gather_parts"),
    *("all_reduce_coalesced", "broadcast_coalesced", "reduce_scatter_coalesced", "all_gather_coalesced"),
}
_ROOTED = {"broadcast", "reduce", "gather", "scatter", "broadcast_object_list"}


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """Ranks at fault, those that keep others waiting first, and all of it in sentences."""

    ranks: tuple[int, ...]
    text: str


NO_VERDICT = HangVerdict((), "")  # nothing says that a rank kept others waiting


@dataclass(frozen=True, slots=True)
class _Finding:
    rank: int
    text: str
    waits: tuple[WaitingCall, ...] = ()
    differs: bool = False
    """The rank is not late: it does something else."""


def judge(wait: WaitingCall, reports: Mapping[int, RankReport], *, over: bool = True) -> HangVerdict:
    """Why this call does not complete. With `over` it was given up; otherwise it may still come."""
    findings = _follow(wait, reports, over) or _latecomers(wait, reports)
    if not findings:
        return HangVerdict((), _nobody(wait, reports))
    roots = [finding for finding in findings if not finding.waits]
    others = [finding for finding in findings if finding.waits]
    sentences = [finding.text for finding in roots[:SHOWN]]
    if len(roots) > SHOWN:
        more = ", ".join(str(finding.rank) for finding in roots[SHOWN : 4 * SHOWN])
        rest = "" if len(roots) <= 4 * SHOWN else ", …"
        sentences.append(f"and {len(roots) - SHOWN} more, ranks {more}{rest}")
    if not roots:
        ring = ", ".join(str(finding.rank) for finding in others[: 2 * SHOWN])
        sentences.append(f"ranks {ring} wait for each other: they make these calls in different orders")
    sentences += [finding.text for finding in others[: max(0, SHOWN - len(roots))]]
    return HangVerdict(tuple(dict.fromkeys(finding.rank for finding in (*roots, *others))), "; ".join(sentences))


def _follow(wait: WaitingCall, reports: Mapping[int, RankReport], over: bool) -> list[_Finding]:
    """Findings about this call and about all that its late ranks wait for themselves."""
    found: dict[tuple[int, bool], _Finding] = {}
    open_waits, known = [wait], {wait.call.key}
    while open_waits:
        one = open_waits.pop(0)
        for finding in _blame(one, reports, over):
            found.setdefault((finding.rank, finding.differs), finding)
            for further in finding.waits:
                if further.call.key not in known:
                    known.add(further.call.key)
                    open_waits.append(further)
    return list(found.values())


def _blame(wait: WaitingCall, reports: Mapping[int, RankReport], over: bool) -> Iterable[_Finding]:
    """What is wrong with the ranks that this call needs."""
    call = wait.call
    if call.p2p:
        return _blame_peers(wait, reports, over)
    differing = _differing(wait, reports)
    found = []
    for rank in wait.ranks:
        report = reports.get(rank)
        finding = _absent(rank, report, call)
        if finding is None and rank not in differing and report is not None:
            finding = _late(report, call, over)
        if finding is not None:
            found.append(finding)
    if differing:
        found.insert(0, _difference(differing))
    return found


def _absent(rank: int, report: RankReport | None, call: CollectiveCall) -> _Finding | None:
    """A rank that cannot answer, or has ended."""
    if report is None:
        return _Finding(rank, f"rank {rank} does not answer, and no rank of its host tells about it")
    member = report.groups.get(call.group, GroupProgress())
    if report.ended and call.launched and (member.entered or 0) >= call.sequence:
        return None  # it did its part, and went
    if report.ended:
        return _Finding(rank, f"rank {rank} {report.ended}")
    if not report.condition:
        return None
    main = f"; its main thread is in {report.main}" if report.main else ""
    return _Finding(rank, f"rank {rank} {report.condition}{_last(report, call)}{main}")


def _last(report: RankReport, call: CollectiveCall) -> str:
    """What a rank entered last, in this group if that is known."""
    own = report.groups.get(call.group, GroupProgress()).calls
    calls = own or tuple(one for member in report.groups.values() for one in member.calls)
    if not calls:
        return ""
    last = calls[-1]
    return f"; the last that it entered is {_with_shape(last)} at {last.place}"


def _late(report: RankReport, call: CollectiveCall, over: bool) -> _Finding | None:
    """A rank that answers and has not entered the call."""
    member = report.groups.get(call.group, GroupProgress())
    count = member.entered if call.counted == "dispatcher" else member.position
    if _inside(report, call) is not None or (count or 0) >= call.sequence:
        return None
    never = "never entered" if over else "has not yet entered"
    text = f"rank {report.rank} {never} {call}"
    waits = tuple(wait for wait in report.waits if wait.call.key != call.key)
    if waits:
        text += f": it waits in {_with_shape(waits[0].call)}, {waits[0].place}"
    elif report.main:
        text += f"; its main thread is in {report.main}"
    return _Finding(report.rank, text, waits)


def _inside(report: RankReport, call: CollectiveCall) -> WaitingCall | None:
    """How a rank waits in this call, if it does."""
    return next((wait for wait in report.waits if wait.call.key == call.key), None)


def _latecomers(wait: WaitingCall, reports: Mapping[int, RankReport]) -> list[_Finding]:
    """Ranks that are inside by now, and came when others had waited for long."""
    found = []
    for rank in wait.ranks:
        own = _inside(reports.get(rank, RankReport(rank)), wait.call)
        if own is not None and own.seconds < wait.seconds / 2:
            late = f"rank {rank} entered {wait.call} {wait.seconds - own.seconds:.0f} s later than others"
            found.append(_Finding(rank, f"{late}, at {own.place}"))
    return found


def _blame_peers(wait: WaitingCall, reports: Mapping[int, RankReport], over: bool) -> Iterable[_Finding]:
    call = wait.call
    peers = [rank for rank in wait.ranks if call.peer in (None, rank)]
    found = []
    for rank in peers:
        report = reports.get(rank)
        finding = _absent(rank, report, call)
        if finding is None and report is not None and _inside(report, call) is None:
            text = f"rank {rank} {'did not do' if over else 'has not yet done'} its part of {call}"
            if report.waits:
                text += f": it waits in {_with_shape(report.waits[0].call)}, {report.waits[0].place}"
            elif report.main:
                text += f"; its main thread is in {report.main}"
            finding = _Finding(rank, text, report.waits)
        if finding is not None:
            found.append(finding)
    return found


# --- ranks that entered different things under one number ----------------------------------------------------------


def _meaning(call: CollectiveCall) -> tuple[object, ...]:
    name = call.op.rpartition(".")[2]
    sized = (call.dtype, call.numel) if name in _EQUAL else ()
    return (name, *sized, call.peer if name in _ROOTED else None)


def _differing(wait: WaitingCall, reports: Mapping[int, RankReport]) -> dict[int, CollectiveCall]:
    """The calls of all ranks at the first number where they differ; empty where none does."""
    call = wait.call
    by_number: dict[int, dict[int, CollectiveCall]] = {}
    for rank in wait.ranks:
        report = reports.get(rank, RankReport(rank))
        told = report.groups.get(call.group, GroupProgress()).calls if call.counted == "dispatcher" else ()
        # A wait tells the user's line, a recorded call only who made it.
        inside = (replace(waiting.call, place=waiting.place) for waiting in report.waits)
        for one in (*told, *inside):
            if (one.group, one.p2p, one.counted) == (call.group, False, call.counted):
                by_number.setdefault(one.sequence, {})[rank] = one
    for number in sorted(by_number):
        calls = by_number[number]
        if number <= call.sequence and len({_meaning(one) for one in calls.values()}) > 1:
            return calls
    return {}


def _difference(calls: Mapping[int, CollectiveCall]) -> _Finding:
    """The ranks that are in the minority, against the others."""
    counts = Counter(_meaning(calls[rank]) for rank in sorted(calls))
    usual = counts.most_common(1)[0][0]
    others = [rank for rank in sorted(calls) if _meaning(calls[rank]) == usual]
    odd = [rank for rank in sorted(calls) if _meaning(calls[rank]) != usual]
    one, other = calls[odd[0]], calls[others[0]]
    told = [f"rank {rank} entered {_with_shape(calls[rank])} at {calls[rank].place}" for rank in odd[:SHOWN]]
    rest = f"rank {others[0]} entered" if len(others) == 1 else f"ranks {_list(others)} entered"
    text = f"ranks differ in {_what_differs(one, other)}operation {one.sequence} of group {one.title}"
    return _Finding(odd[0], f"{text}: {', '.join(told)}; {rest} {_with_shape(other)} at {other.place}", differs=True)


def _what_differs(one: CollectiveCall, other: CollectiveCall) -> str:
    if one.op.rpartition(".")[2] != other.op.rpartition(".")[2]:
        return ""
    if one.peer != other.peer:
        return "the root of "
    if one.dtype != other.dtype:
        return "the dtype of "
    return "the shape of "


def _with_shape(call: CollectiveCall) -> str:
    root = "" if call.peer is None else f" {'with' if call.p2p else 'from'} rank {call.peer}"
    return f"{call}{root}" + (f" with {call.shape}" if call.shape else "")


def _list(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:SHOWN])
    return shown if len(ranks) <= SHOWN else f"{shown}, … ({len(ranks)})"


def _nobody(wait: WaitingCall, reports: Mapping[int, RankReport]) -> str:
    known = [rank for rank in wait.ranks if rank in reports]
    text = f"ranks {_list(known)} all entered {wait.call}"
    left = [rank for rank in known if _inside(reports[rank], wait.call) is None]
    if left and not wait.call.launched:
        where = f"; the main thread of rank {left[0]} is in {reports[left[0]].main}" if reports[left[0]].main else ""
        return f"{text}, and left it on ranks {_list(left)}, with a result or an error of their own{where}"
    return (
        f"{text} with the same operation and size, and it does not complete: "
        "the network between them, or a device, is stuck"
    )
