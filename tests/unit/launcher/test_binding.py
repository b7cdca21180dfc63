"""Which cores and which memory a rank is bound to, on machines made of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.launcher import binding
from deepspeed.launcher.binding import Binding, Topology, bind, parse_range_list, ranges, share


def machine(root: Path, nodes: dict[int, tuple[str, str]], siblings: dict[int, str] | None = None) -> Path:
    for node, (cores, distance) in nodes.items():
        folder = root / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
        (folder / "distance").write_text(distance + "\n")
    for core, text in (siblings or {}).items():
        folder = root / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    return root


@given(st.sets(st.integers(0, 300), min_size=1))
def test_ranges_are_what_the_parser_reads(cores):
    assert parse_range_list(ranges(cores)) == sorted(cores)


@given(st.lists(st.integers(0, 500), unique=True, max_size=64), st.integers(1, 16))
def test_shares_are_equal_and_apart(cores, size):
    if len(cores) < size:
        with pytest.raises(ValueError, match="each needs at least one"):
            share(cores, 0, size)
        return
    parts = [share(cores, rank, size) for rank in range(size)]
    assert {len(part) for part in parts} == {len(cores) // size}
    assert [core for part in parts for core in part] == cores[: size * (len(cores) // size)]


@pytest.mark.parametrize(
    ("nodes", "cores", "words"),
    [
        ({0: ("0-3", "10 20"), 1: ("4-7", "20 10")}, [4, 5], ["-m", "1"]),
        ({0: ("0-3", "10 20"), 1: ("4-7", "20 10")}, [3, 4], []),
        # memory without cores, near and far
        (
            {0: ("0-3", "10 21 13 23"), 1: ("4-7", "21 10 23 13"), 2: ("", "13 23 10 23"), 3: ("", "23 13 23 10")},
            [5],
            ["-p", "3"],
        ),
        # one node split into two for tests
        ({0: ("0-3", "10 10"), 1: ("0-3", "10 10")}, [0, 1], ["-m", "0,1"]),
        ({}, [0], []),
    ],
)
def test_memory(tmp_path, nodes, cores, words):
    assert Topology.read(machine(tmp_path, nodes)).memory(cores) == words


def test_one_thread_of_each_allowed_core_node_by_node(tmp_path):
    # Cores 0 and 2 lie in node 0, 1 and 3 in node 1; 4-7 are their second threads.
    nodes = {0: ("0,2,4,6", ""), 1: ("1,3,5,7", "")}
    siblings = {core: f"{core % 4},{core % 4 + 4}" for core in range(8)}
    topology = Topology.read(machine(tmp_path, nodes, siblings))
    assert binding._physical(range(8), topology, tmp_path) == [0, 2, 1, 3]
    assert binding._physical({2, 3, 4, 6, 7}, topology, tmp_path) == [2, 4, 3]


def test_words_or_affinity(monkeypatch):
    core = min(os.sched_getaffinity(0))
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert bind(1, str(core), {}) == [Binding((core,), ())]
    assert bind(1, str(core), {})[0].affinity == (core,)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/numactl")
    (bound,) = bind(1, str(core), {})
    assert bound.prefix[0] == "/bin/numactl"
    assert bound.prefix[-2:] == ("-C", str(core))
    assert bound.affinity == ()


def test_all_cores_without_a_list():
    (bound,) = bind(1, None, {})
    assert set(bound.cores) <= os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("cores", "environ", "message"),
    [
        ("3-1", {}, "--bind_core_list: .*descends"),
        ("100000", {}, "may not use 100000"),
        (None, {"KMP_AFFINITY": "compact"}, "KMP_AFFINITY='compact'"),
    ],
)
def test_what_cannot_be_bound_is_an_error(cores, environ, message):
    with pytest.raises(ValueError, match=message):
        bind(1, cores, environ)
