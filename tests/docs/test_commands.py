"""Every command of README, CONTRIBUTING and docs runs: tools as they stand there, scripts of examples/ for a moment."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.run import main as torchrun

from benchmarks.cases import discover
from deepspeed.bench import ds_bench
from deepspeed.config.__main__ import main as look_at_config
from deepspeed.data.__main__ import main as look_at_data
from deepspeed.data.indexed_dataset import MMapIndexedDatasetBuilder
from deepspeed.inference.server import cli as serve_cli
from deepspeed.io import ds_io, ds_nvme_tune
from deepspeed.io.ds_nvme_tune import SWEEP
from deepspeed.launcher import report, runner
from deepspeed.launcher.ports import free_port
from deepspeed.moe.show import main as show_routers
from deepspeed.pipe.schedule.__main__ import main as draw_schedule
from deepspeed.planning.command import main as make_plan
from deepspeed.profiling.trace import main as join_traces
from deepspeed.run_page.__main__ import main as run_page
from tests import harness
from tests.clients.server import SERVER as CLIENT_SERVER
from tests.clients.server import environment
from tests.distributed.launcher.launched import Launched, as_program
from tests.docs.pages import all_commands, runs
from tests.docs.scene import checkpoint_folder, prepare_folder
from tests.harness import ROOT, ranks
from tests.run_files import write_run
from tests.warm_python import Warm

COMMANDS = all_commands()
# What makes an example end soon; one without an entry here has a test of its own that runs it.
SHORT = {
    "examples/collectives.py": [],
    "examples/data/train.py": ["--steps", "2"],
    "examples/fewer_bytes/train.py": ["--steps", "1", "--width", "64"],
    "examples/fast/train.py": ["--steps", "3", "--width", "16"],
    "examples/finetune/plain.py": ["--steps", "2", "--output", "{tmp}"],
    "examples/rlhf/train.py": ["--steps", "2"],
    "examples/finetune/with_accelerate.py": ["--steps", "2", "--output", "{tmp}"],
    "examples/finetune/with_trainer.py": ["--steps", "2", "--output", "{tmp}"],
    "examples/gpt/memory.py": ["--width", "32"],
    "examples/lora/train.py": ["--steps", "2", "--output", "{tmp}"],
    "examples/moe/mixtral.py": ["--steps", "3", "--output", "{tmp}"],
    "examples/moe/train.py": ["--steps", "3"],
    "examples/compile/train.py": ["--steps", "2"],
    "examples/compression/train.py": ["--steps", "4", "--output", "{tmp}"],
    "examples/sparse_attention/train.py": ["--steps", "2", "--length", "50"],
    "examples/verify/train.py": ["--steps", "4"],
    "examples/serve/model.py": ["--steps", "2", "--output", "{tmp}"],
}
MODELS = {"pytorch_model.bin", "model.safetensors", "adapter_model.safetensors"}
ELSEWHERE = {
    "examples/autotune/train.py": "tests/distributed/autotuning/test_search.py",
    "examples/elastic/train.py": "tests/distributed/elasticity/test_elastic_example.py",
    "examples/gpt/train.py": "tests/unit/examples/test_gpt_script.py",
    "examples/ray/train.py": "tests/distributed/elasticity/test_ray_train.py",
    "examples/serve/ask.py": "tests/clients/test_openai_client.py",
    "examples/serve/ray_serve.py": "tests/projects/test_ray_serve.py",
}


def example_of(command):
    """The script of examples/ that a command starts, if it does."""
    if runs(command) == "ds_plan":
        return None
    return next((word for word in command.words if word.startswith("examples/") and word.endswith(".py")), None)


def needs_clients(command):
    return any(folder in example_of(command) for folder in ("finetune", "fast", "lora", "mixtral", "serve"))


def alone():
    """The environment of a job that meets at a port of its own, also where torchrun starts it."""
    return {**environment(), "PET_MASTER_PORT": str(free_port())}


def unique(found):
    return list({command.words: command for command in found}.values())


EXAMPLES = unique(command for command in COMMANDS if example_of(command))
TOOLS = unique(command for command in COMMANDS if not example_of(command))


def of(*programs):
    return [command for command in TOOLS if runs(command) in programs]


LAUNCHES = of("deepspeed", "train.py", "torchrun")
BENCHMARKS = [command for command in TOOLS if runs(command).startswith(("benchmarks", "tests."))]


def test_every_command_is_tried_by_one_of_these():
    tried = {*of("make"), *of("ds_report"), *of("deepspeed.config"), *of("deepspeed", "train.py"), *of("pytest")}
    tried |= {*of("ds_io", "ds_nvme_tune", "ds_bench", "deepspeed.preflight", "deepspeed.pipe.schedule")}
    tried |= {
        *of("pip", "ds_serve"),
        *of("ds_plan", "deepspeed.planning"),
        *of("accelerate"),
        *of("torchrun"),
        *of("deepspeed.moe.show", "deepspeed.data"),
        *BENCHMARKS,
    }
    tried |= {*of("deepspeed.run_page", "deepspeed.profiling.trace")}
    tried |= {*of("deepspeed.checkpoint", "deepspeed.checkpoint.ds_to_universal", "out/zero_to_fp32.py")}
    assert [str(command) for command in TOOLS if command not in tried] == []
    assert [str(command) for command in EXAMPLES if example_of(command) not in {**SHORT, **ELSEWHERE}] == []
    for script, test in ELSEWHERE.items():
        assert script in (ROOT / test).read_text()


@pytest.mark.parametrize("command", of("make"), ids=str)
def test_make(command):
    rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in command.words[1:]:
        assert target in rules


@pytest.mark.parametrize("command", of("pip"), ids=str)
def test_pip(command):
    """Nothing is installed here; what would be is this package with extras that it has, or packages that it knows."""
    extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert command.words[1] == "install"
    for wanted in command.words[2:]:
        here = re.fullmatch(r"\.(?:\[(\w+)\])?", wanted)
        known = rf"^{here[1]} = " if here and here[1] else rf'"{wanted}[=>]'
        assert wanted == "." or re.search(known, extras, re.MULTILINE), wanted


@pytest.mark.parametrize("command", BENCHMARKS, ids=str)
def test_benchmarks(command):
    """They take minutes or a GPU, and so do tools of the tests; the file or the case that is named exists."""
    program = runs(command)
    if program == "benchmarks":
        assert {word for word in command.words[3:] if not word.startswith("-")} <= {*discover()}
    else:
        assert (ROOT / f"{program.removesuffix('.py').replace('.', '/')}.py").is_file()


def test_the_versions_that_are_tested_are_named():
    pins = (ROOT / "pyproject.toml").read_text().split("\nclients = [")[1].split("]")[0] + (
        ROOT / "Makefile"
    ).read_text()
    found = re.findall(r"\b(\w+)==([\d.]+)", pins)
    assert {name for name, _ in found} == {"torch", "transformers", "accelerate", "peft", "trl", "lightning"}
    for page in ("README.md", "CONTRIBUTING.md"):
        words = " ".join((ROOT / page).read_text().lower().split())
        assert [pair for pair in found if " ".join(pair) not in words] == [], page


@pytest.mark.parametrize("command", of("accelerate"), ids=str)
def test_accelerate(command):
    """It asks questions: that it is there is enough."""
    pytest.importorskip(f"accelerate.commands.{command.words[1]}")


@pytest.mark.parametrize("command", of("pytest"), ids=str)
def test_pytest(command):
    paths = [word for word in command.words if word.startswith("tests")]
    assert paths
    assert all((ROOT / path).exists() for path in paths)


@pytest.mark.parametrize("command", of("ds_report"), ids=str)
def test_report(command, capsys):
    assert report.main(command.words[1:]) in (None, 0)
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", of("ds_serve"), ids=str)
def test_serve(command, capsys):
    """A server waits for requests, which tests/clients sends; here its options are read."""
    try:
        assert serve_cli.options(command.words[1:]).model in ("served-model", "MODEL")
    except SystemExit as ended:  # of --help
        assert ended.code == 0
        assert "MODEL" in capsys.readouterr().out


def test_the_page_lists_the_options_of_ds_serve():
    page = (ROOT / "docs" / "serving.md").read_text()
    options = {word for action in serve_cli.parser()._actions for word in action.option_strings} - {"-h", "--help"}
    assert {*re.findall(r"^\| `(--[\w-]+)", page, re.MULTILINE)} == options


@pytest.mark.parametrize("command", of("deepspeed.moe.show"), ids=str)
def test_what_routers_did(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = command.words[command.words.index("deepspeed.moe.show") + 1 :]
    (tmp_path / words[0]).mkdir(parents=True)
    for name in ("entropy", "dropped", "load_0"):
        (tmp_path / words[0] / f"Train_Experts_layer_{name}.csv").write_text(f"step,{name}\n1,1.0\n")
    assert show_routers(words[:1]) == 0
    assert "layer" in capsys.readouterr().out


def test_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    builder = MMapIndexedDatasetBuilder("corpus.bin", dtype="uint16")
    for length in (3, 5, 2):
        builder.add_item(torch.arange(length))
        builder.end_document()
    builder.finalize("corpus.idx")
    commands = sorted(of("deepspeed.data"), key=lambda command: command.block.line)
    assert commands
    for command in commands:
        assert look_at_data(command.words[command.words.index("deepspeed.data") + 1 :]) in (None, 0)
    assert "seqlen" in capsys.readouterr().out


@pytest.mark.parametrize("command", of("deepspeed.pipe.schedule"), ids=str)
def test_schedule(command, capsys):
    assert draw_schedule(command.words[command.words.index("deepspeed.pipe.schedule") + 1 :]) in (None, 0)
    assert "bubble" in capsys.readouterr().out


@pytest.mark.parametrize("command", of("ds_io", "ds_nvme_tune"), ids=str)
def test_disks(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deepspeed.io.ds_nvme_tune.SWEEP", {key: values[:1] for key, values in SWEEP.items()})
    try:
        status = {"ds_io": ds_io, "ds_nvme_tune": ds_nvme_tune}[command.words[0]].main(command.words[1:])
    except SystemExit as ended:  # of --help
        status = ended.code
    assert status == 0
    assert capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} <= {"_aio_bench_logs"}


@pytest.mark.parametrize("command", of("deepspeed.config"), ids=str)
def test_config(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    prepare_folder(tmp_path)
    try:
        status = look_at_config(command.words[3:])
    except SystemExit as ended:  # of --help
        status = ended.code
    said = capsys.readouterr()
    assert status == int("misspelt.json" in command.words), said.err
    assert command.output in said.out + said.err


def by_python(command, python):
    """The words of a command that an interpreter runs, here a warm one."""
    module = ["-m", "torch.distributed.run"] if command.words[0] == "torchrun" else []
    return [python.path, "-u", *module, *command.words[1:]]


PREFLIGHTS = [each for each in TOOLS if {"--preflight", "deepspeed.preflight"} & {*each.words}]


@pytest.mark.parametrize("command", PREFLIGHTS, ids=str)
@ranks(1, init=False)
def test_preflight(command, tmp_path):
    """What it says of this machine is not known; it says something, and does not run the script."""
    folder = Path(tmp_path)
    prepare_folder(folder)
    with Warm() as python:
        if command.words[0] == "deepspeed":
            with Launched(command.words[1:], folder, main=runner.main, python=python) as job:
                status, output = job.wait(120), job.output()
        else:
            words = by_python(command, python)
            ran = subprocess.run(words, env=alone(), capture_output=True, text=True, timeout=120, check=False)
            status, output = ran.returncode, ran.stdout
    assert status in (0, 1), output
    assert any(word in output for word in (["usage"] if "--help" in command.words else ["READY", '"ready"']))
    assert not list(folder.glob("ran.*"))


@pytest.mark.parametrize("command", of("ds_plan", "deepspeed.planning"), ids=str)
@ranks(1, init=False)
def test_plan(command, tmp_path):
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in command.words]
    os.chdir(tmp_path)
    if "--help" in words:
        with pytest.raises(SystemExit):
            make_plan(["--help"])
        return
    assert make_plan(words[1:]) in (0, 1)


@pytest.mark.parametrize("command", of("ds_bench"), ids=str)
@ranks(1, init=False)
def test_bench(command, tmp_path):
    if "--plot" in command.words:
        pytest.importorskip("matplotlib")
    short = ["--min-size", "1K", "--max-size", "2K", "--trials", "1", "--warmups", "1"]
    words = [*command.words[1:], *short]
    with Warm() as python, Launched(words, tmp_path, main=ds_bench.main, python=python) as job:
        assert job.wait(120) == 0, job.errors()
    assert "all_reduce" in job.output()


@pytest.mark.parametrize("command", [each for each in LAUNCHES if each not in PREFLIGHTS], ids=str)
@ranks(1, init=False)
def test_launch(command, tmp_path):
    """A script of the reader's, on a machine that takes four ranks."""
    folder = Path(tmp_path)
    prepare_folder(folder)
    if command.words[0] != "deepspeed":
        with Warm() as python:
            subprocess.run(by_python(command, python), env=alone(), check=True)
        assert (folder / ("ran.0" if command.words[0] == "torchrun" else "ran.alone")).exists()
        return
    with Launched(command.words[1:], folder, main=runner.main, environ={"LOCAL_SIZE": "4"}) as job:
        assert job.wait() == 0, job.errors()
    given = " ".join(command.words[command.words.index("train.py") + 1 :])
    assert (folder / "ran.0").read_text() == f"--local_rank=0 {given}".strip()


@pytest.mark.parametrize(
    "command", of("deepspeed.checkpoint", "deepspeed.checkpoint.ds_to_universal", "out/zero_to_fp32.py"), ids=str
)
@ranks(1)
def test_checkpoint_tools(command, tmp_path):
    folder = Path(tmp_path)
    os.chdir(folder)
    checkpoint_folder(folder)
    before = sorted(os.listdir(folder))
    module = "-m" in command.words
    sys.argv = list(command.words[2 if module else 1 :])
    try:
        (runpy.run_module if module else runpy.run_path)(runs(command), run_name="__main__")
    except SystemExit as ended:
        assert ended.code in (None, 0)
    written = {word.strip("/") for word in {"OUT", "model/"} & {*command.words}}
    assert {*os.listdir(folder)} - {*before, "latest_universal"} == written


def program(words):
    """A `main` for the program that a command names, and its arguments."""
    name, *arguments = words
    if name == "deepspeed":
        return runner.main, arguments
    if name == "accelerate":
        from accelerate.commands.accelerate_cli import main as accelerate

        return lambda given: (sys.argv.__setitem__(slice(None), [name, *given]), accelerate()), arguments
    if arguments[:2] == ["-m", "torch.distributed.run"]:
        return torchrun, arguments[2:]
    return as_program, arguments


@pytest.fixture
def _loaded(command, monkeypatch):
    """Examples that use Transformers find it loaded."""
    if needs_clients(command) or "transformers" in (ROOT / example_of(command)).read_text():
        monkeypatch.setattr(harness, "SERVER", CLIENT_SERVER)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [each for each in EXAMPLES if example_of(each) in SHORT and not needs_clients(each)], ids=str
)
@pytest.mark.usefixtures("_loaded")
@ranks(1, init=False, timeout=400)
def test_example(command, tmp_path):
    run_example(command, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [each for each in EXAMPLES if example_of(each) in SHORT and needs_clients(each)], ids=str
)
@pytest.mark.usefixtures("_loaded")
@ranks(1, init=False, timeout=400)
def test_example_of_clients(command, tmp_path):
    pytest.importorskip("accelerate" if command.words[0] == "accelerate" else "transformers")
    run_example(command, tmp_path)


def run_example(command, tmp_path):
    short = [word.format(tmp=tmp_path / "output") for word in SHORT[example_of(command)]]
    main, words = program([*command.words, *short])

    def at_the_root(given):
        os.chdir(ROOT)
        main(given)

    with Warm() as python, Launched(words, tmp_path, main=at_the_root, environ=alone(), python=python) as job:
        assert job.wait(300) == 0, job.output() + job.errors()
    if "--output" in short:
        assert {path.name for path in (tmp_path / "output").iterdir()} & MODELS


@pytest.mark.parametrize("command", of("deepspeed.run_page", "deepspeed.profiling.trace"), ids=str)
def test_the_run_page_and_joined_traces(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deepspeed.run_page.server.RunPageServer.serve_forever", lambda server: None)
    write_run(tmp_path / "run", "events", 5)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "trace.rank00000.json").write_text('{"baseTimeNanoseconds": 0, "traceEvents": []}')
    program = join_traces if runs(command) == "deepspeed.profiling.trace" else run_page
    arguments = [*command.words[command.words.index(runs(command)) + 1 :]]
    if program is run_page and "--static" not in arguments:
        arguments += ["--port", "0"]
    assert program(arguments) == 0
    assert capsys.readouterr().out or (tmp_path / "page.html").stat().st_size > 10_000
