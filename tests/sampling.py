"""`--sample`, with which `make test` runs: products become covering samples, and tests of `full.txt` are left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

LEFT_OUT = Path(__file__).parent / "full.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample", action="store_true", help="covering samples of products, nothing that is in tests/full.txt"
    )
    parser.addoption(
        "--pairs", action="store_true", help="covering samples of products of three or more parameters, all else"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Leave out what the sample does not need; each process of a run chooses the same."""
    sample = config.getoption("--sample")
    out = left_out(items) if sample else set()  # whose rows are checked before `-k` and `-m` choose
    yield
    if not sample and not config.getoption("--pairs"):
        return
    tests = defaultdict(list)
    for item in items:
        if id(item) not in out:
            tests[item.nodeid.partition("[")[0]].append(item)
    kept = {id(item) for cases in tests.values() for item in covering(cases, fewest=sample)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def left_out(items: list[pytest.Item]) -> set[int]:
    """The tests of `full.txt`: files, functions or cases. A row that names no test of a collected file is an error."""
    rows = [line for line in LEFT_OUT.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    by_name = defaultdict(set)
    for item in items:
        for name in (item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]):
            by_name[name].add(id(item))
    stale = [row for row in rows if row not in by_name and row.partition("::")[0] in by_name]
    if stale and all("::" not in argument for argument in items[0].config.args):
        raise pytest.UsageError(f"{LEFT_OUT.name} names tests that do not exist: {', '.join(stale)}")
    return {each for row in rows for each in by_name[row]}


def covering(cases: list[pytest.Item], *, fewest: bool) -> list[pytest.Item]:
    """Few cases of a test, in which of three or more parameters every two values meet; of one or two, each is there."""
    rows = [values(case) for case in cases]
    if len(rows[0]) < 3 and not fewest:
        return cases
    strength = 2 if len(rows[0]) > 2 else 1
    covered = [{*combinations(row, strength)} for row in rows]
    left, chosen = set().union(*covered), []
    while left:
        best = max(range(len(cases)), key=lambda at: len(covered[at] & left))  # the first of equals
        left -= covered[best]
        chosen.append(best)
    return [cases[at] for at in sorted(chosen)] or cases


def values(case: pytest.Item) -> list[tuple[int, tuple[int, ...]]]:
    """Which value of each parameter a case has, told apart by identity; parameters that are given together are one."""
    spec = getattr(case, "callspec", None)
    if spec is None:
        return []
    given = [mark.args[0] for mark in case.iter_markers("parametrize")]
    names = [[name.strip() for name in each.split(",")] if isinstance(each, str) else each for each in given]
    return [(at, tuple(id(spec.params[name]) for name in each)) for at, each in enumerate(names)]
