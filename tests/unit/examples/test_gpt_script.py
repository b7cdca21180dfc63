"""The real example script for a few small steps: one process, and two through the launcher."""

from __future__ import annotations

import os
import re

import pytest

from deepspeed.launcher import runner
from tests.distributed.launcher.launched import Launched, as_program
from tests.harness import ROOT, ranks
from tests.warm_python import Warm

pytestmark = pytest.mark.slow

SCRIPT = "examples/gpt/train.py"
CONFIG = "examples/gpt/ds_config.json"
TINY = "--layers 1 --heads 2 --width 16 --context 16 --evaluations 1 --validation_windows 8 --sample 20".split()
PATIENCE = 300.0  # seconds, only ever reached by a test that fails


def run(main, folder, *words, python=None):
    """What a program says that runs at the root of the repository."""

    def at_the_root(arguments):
        os.chdir(ROOT)
        main(arguments)

    folder.mkdir()
    given = [*words, "--output", folder / "made", "--deepspeed_config", CONFIG, *TINY]
    with Launched(given, folder, main=at_the_root, python=python) as job:
        assert job.wait(PATIENCE) == 0, job.output() + job.errors()
    return job.output()


def losses(output):
    return [float(number) for number in re.findall(r"^training step \d+/\d+ \| loss ([\d.]+)", output, re.MULTILINE)]


@ranks(1, init=False, timeout=600)
def test_two_ranks_train_like_one(tmp_path):
    pytest.importorskip("matplotlib")
    with Warm() as python:
        two = run(runner.main, tmp_path / "two", "--num_gpus", "2", SCRIPT, "--steps", "4", python=python)
    one = run(as_program, tmp_path / "one", SCRIPT, "--steps", "4")
    assert "(2 ranks x 2 micro steps x 4)" in two
    assert "(1 rank x 2 micro steps x 8)" in one
    assert len(losses(two)) == 4
    assert losses(two) == pytest.approx(losses(one), abs=2e-3)
    for output, folder in ((two, "two"), (one, "one")):
        assert (tmp_path / folder / "made" / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert re.search(r"^training loss +first \d\.\d+, final \d\.\d+", output, re.MULTILINE)
        found = re.search(r"^validation loss +first ([\d.]+), final ([\d.]+)", output, re.MULTILINE)
        assert found is not None
        assert float(found[2]) < float(found[1])
        assert re.search(r"^time +.* tokens/s$", output, re.MULTILINE)
        assert output.count("a sample, beginning with") == 1
