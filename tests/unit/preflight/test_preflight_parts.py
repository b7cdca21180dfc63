"""Options, the program of a job, what the verdict shows, and the words about ranks that do not come."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console
from torch._C._distributed_c10d import HashStore

from deepspeed.comm.discover import RankFacts
from deepspeed.preflight import run
from deepspeed.preflight.arguments import Options, Program, code_of, digest_of, option_of, parse
from deepspeed.preflight.check import CheckFinding, Level
from deepspeed.preflight.checks import CHECKS
from deepspeed.preflight.checks.software import VersionFact, VersionsCheck
from deepspeed.preflight.run import PreflightResult, absent_words, judge_all

NAMES = [check.name for check in CHECKS]


def test_what_follows_the_script_is_its_own():
    options, program = parse(["--params", "7B", "--json", "train.py", "--json", "--skip=all", "--timeout", "x"], NAMES)
    assert options == Options(params=7 * 10**9, json=True)
    assert program == Program("train.py", "script", ("--json", "--skip=all", "--timeout", "x"))
    assert parse(["--local_rank=3", "--module", "a.b", "c"], NAMES)[1] == Program("a.b", "module", ("c",))
    assert parse(["--no_python", "run.sh"], NAMES)[1].kind == "program"
    assert parse([], NAMES) == (Options(), Program(None))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--params", "many"], "expected a number of parameters such as 350M or 7B"),
        (["--timeout", "0"], "expected seconds above 0"),
        (["--timeout", "nan"], "expected seconds above 0"),
        (["--skip", "clocks"], "there is no check 'clocks'; there are versions, config"),
        (["--write-size", "big"], "expected a number of bytes"),
        (["--module", "--no_python", "x"], "contradict each other"),
        (["--unknown"], "--unknown"),
    ],
)
def test_bad_input_is_named(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words, NAMES)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_options_of_the_script_that_tell_something():
    words = ("--lr", "1", "--deepspeed", "--deepspeed_config=a.json")
    assert Program("t.py", "script", words).config == "a.json"
    assert Program("t.py", "script", ("--deepspeed", "b.json")).config == "b.json"
    assert Program("t.py", "script", ("--deepspeed", "--lr", "1")).config is None
    assert option_of(["--a"], ["--a"]) is None
    assert option_of(["--a="], ["--a"]) == ""


def test_the_file_of_a_program(tmp_path, monkeypatch):
    package = tmp_path / "pkg" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "pkg" / "__init__.py").write_text("raise SystemExit('a check must not run this')")
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("x = 1")
    (package / "__main__.py").write_text("x = 2")
    (tmp_path / "train.py").write_text("x = 3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert Program("pkg.inner.train", "module").file == package / "train.py"
    assert Program("pkg.inner", "module").file == package / "__main__.py"
    assert Program("pkg.nothing", "module").file is None
    assert Program("no_such_module_here.x", "module").file is None
    assert Program("..", "module").file is None
    assert Program("train.py").file is not None
    assert Program("other.py").file is None
    assert Program("sh", "program").file is not None
    assert Program("no-such-program-here", "program").file is None
    assert Program(None).file is None


def test_code_beside_a_script(tmp_path):
    (tmp_path / "train.py").write_text("1")
    (tmp_path / "data.bin").write_text("2")
    for name, text in (("package", "__init__.py"), ("notes", "readme.py"), (".venv", "__init__.py")):
        (tmp_path / name).mkdir()
        (tmp_path / name / text).write_text("3")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert sorted(code_of(tmp_path)) == ["package/__init__.py", "train.py"]
    assert code_of(tmp_path / "nowhere") == {}
    assert digest_of(tmp_path) is None
    assert digest_of(tmp_path / "nowhere") is None
    before = digest_of(tmp_path / "train.py")
    (tmp_path / "train.py").write_text("4")
    assert digest_of(tmp_path / "train.py") != before


def drawn(verdict):
    out = StringIO()
    verdict.draw(Console(file=out, width=120, color_system=None, markup=False))
    return out.getvalue()


def test_the_table_ends_with_the_verdict():
    good = PreflightResult(4, ("a",), {"ranks": [CheckFinding(Level.OK, "4 ranks")]}, 1.0)
    assert good.status == 0
    assert drawn(good).splitlines()[-1] == "READY (1 check on 4 ranks in 1.0 s)"
    assert "What to do" not in drawn(good)
    warned = PreflightResult(1, ("a",), {"x": [CheckFinding(Level.WARNING, "hm", advice="rest")]}, 1.0)
    assert warned.status == 0
    assert drawn(warned).splitlines()[-1] == "READY, 1 warning (1 check on 1 rank in 1.0 s)"


def test_problems_come_first_and_advice_is_given_once():
    findings = {
        "config": [CheckFinding(Level.WARNING, "an [odd] \x1b[31m key", advice="remove it")],
        "code": [CheckFinding(Level.PROBLEM, f"rank {rank}", (rank,), "copy it") for rank in range(30)],
    }
    bad = PreflightResult(30, ("a", "b"), findings, 2.0)
    text = drawn(bad)
    assert bad.status == 1
    assert text.splitlines()[-1] == "NOT READY: 30 problems, 1 warning (2 checks on 30 ranks in 2.0 s)"
    assert text.count("copy it") == 1
    assert text.index("copy it") < text.index("remove it")
    assert "… and 18 more; --json has them" in text
    assert "\x1b" not in text
    assert "[odd]" in text
    told = json.loads(json.dumps(bad.as_json()))
    assert told["ready"] is False
    assert len(told["checks"]["code"]) == 30
    assert told["checks"]["code"][3] == {"level": "problem", "what": "rank 3", "ranks": [3], "advice": "copy it"}


def test_a_rank_without_facts_is_told_with_the_reason():
    fact = {"fact": {"versions": {"torch": "2"}}}
    gathered = {0: {"versions": fact}, 1: {"versions": {"error": "OSError: no"}}, 2: {}}
    found = judge_all([VersionsCheck()], gathered, {0: "a", 1: "a", 2: "b"})["versions"]
    assert [(finding.level, finding.ranks) for finding in found] == [(Level.PROBLEM, (1,)), (Level.PROBLEM, (2,))]
    assert found[0].what == "rank 1: OSError: no"
    assert judge_all([VersionsCheck()], {0: {"versions": fact}}, {0: "a"})["versions"][0].level is Level.OK
    assert VersionFact(**fact["fact"])


def test_who_did_not_come_is_waited_for_once(monkeypatch):
    """Those who came are heard as soon as the last of them has spoken, whoever else comes late."""
    store = HashStore()
    monkeypatch.setattr(run, "_open", lambda facts, timeout: store)
    said = [run.RankStore(RankFacts(rank, 4, rank, 4, None, None, "a test"), 3600.0) for rank in range(4)]
    for rank in (0, 1, 2):
        said[rank].post("alone", rank)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        said[3].post("alone", 3)

    monkeypatch.setattr(run.time, "sleep", sleep)
    assert said[0].collect("alone", [0, 1, 3]) == {0: 0, 1: 1, 3: 3}
    assert len(waits) == 1, "three words were there, and one of them was not asked for"
    assert said[0].collect("alone", [0, 2]) == {0: 0, 2: 2}
    assert len(waits) == 1


def test_where_absent_ranks_should_be():
    hosts = {0: "a", 1: "a", 3: "a", 4: "b", 7: "b"}
    assert absent_words([2], hosts) == "; going by the ranks beside, on a"
    assert absent_words([5, 6], hosts) == "; going by the ranks beside, on b"
    assert absent_words([8], hosts) == ""
    assert absent_words([1], {}) == ""
