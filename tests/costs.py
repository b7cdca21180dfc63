"""What tests cost: core-seconds by folder at the end of a run; with `--budget` a folder that costs too much fails.

A test's core-seconds are those of its own process, of the programs it started and waited for, and of the ranks that
the fork servers ran for it. `budget.toml` has what each folder needed in one run. A folder may need half as much again
and 5 more, on a machine where all folders together need as much as there; a slower machine may take longer everywhere.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

from tests.harness import Server

BUDGET = Path(__file__).parent / "budget.toml"
PROPERTY = "core-seconds"
TICKS = os.sysconf("SC_CLK_TCK")
SPENT: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", action="store_true", help="fail if a folder costs more than tests/budget.toml allows")


def spent() -> float:
    """Core-seconds of this process, of what it waited for, and of the fork servers with their ranks."""
    servers = [server.process.pid for server in Server.started if server.process is not None]
    ranks = [int(pid) for server in servers for pid in _read(f"{server}/task/{server}/children").split()]
    return sum(os.times()[:4]) + sum(map(_of_process, servers + ranks))


def _of_process(pid: int) -> float:
    fields = _read(f"{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def _read(name: str) -> str:
    try:
        with open(f"/proc/{name}", encoding="utf-8") as file:
            return file.read()
    except OSError:  # it has ended, or the system has no such files
        return ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = spent()
    item.user_properties.append((PROPERTY, before))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.when == "teardown":
        before = dict(item.user_properties)[PROPERTY]
        report.user_properties = [(PROPERTY, spent() - before)]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of every process of the run, in the one that reports."""
    if report.when == "teardown":
        folder = "/".join(report.nodeid.partition("::")[0].split("/")[:-1][:3])
        SPENT[folder] += dict(report.user_properties).get(PROPERTY, 0.0)


def over(usual: dict[str, float]) -> dict[str, float]:
    """Folders that cost more than their part of the whole allows."""
    slower = max(1.0, sum(SPENT.values()) / sum(usual.values()))
    return {at: cost for at, cost in SPENT.items() if cost > 1.5 * slower * usual.get(at, 0.0) + 5.0}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if len(SPENT) < 2:
        return
    terminalreporter.section("core-seconds by folder")
    for folder, cost in SPENT.most_common():
        terminalreporter.write_line(f"{cost:8.1f}  {folder}")
    terminalreporter.write_line(f"{sum(SPENT.values()):8.1f}  in all")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("--budget") or hasattr(session.config, "workerinput"):
        return
    if found := over(tomllib.loads(BUDGET.read_text(encoding="utf-8"))["core-seconds"]):
        text = ", ".join(f"{folder} {cost:.0f}" for folder, cost in found.items())
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.get_terminal_writer().line(f"tests/budget.toml allows fewer core-seconds: {text}", red=True)
