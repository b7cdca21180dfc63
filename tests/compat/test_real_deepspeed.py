"""DeepSpeed 0.19.8 itself continues from what we write, and we read what it writes then.

Needs its own environment at .bench/deepspeed-0.19.8 (`make bench` makes it); without it only the fixtures are compared,
in tests/unit/checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint.__main__ import main
from deepspeed.checkpoint.formats.adapters import state_of
from deepspeed.checkpoint.formats.detect import open_checkpoint
from deepspeed.checkpoint.formats.zero_files import writer
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint_states import EXPECTED, FIXTURES, ORDER, fixture

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".bench" / "deepspeed-0.19.8" / "bin" / "python"
PROGRAM = Path(__file__).with_name("continue_deepspeed.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"the real DeepSpeed is not at {PYTHON.parent.parent}"),
]

# Written again from a real checkpoint of the same stage: must continue bit for bit as that checkpoint does.
SAME = [f"stage{stage}_{dtype}" for stage in range(4) for dtype in ("fp32", "bf16", "fp16")]
# Cut anew from another stage (to ← from), whose own state already differs in the last bits.
CROSS = {
    "stage0_fp32_cross": "stage2_fp32",
    "stage1_fp32_cross": "stage3_fp32",
    "stage2_bf16_cross": "stage1_bf16",
    "stage2_fp32_cross": "stage0_fp32",
    "stage3_fp32_cross": "stage1_fp32",
}
OURS = {**{f"{name}_ours": name for name in SAME}, **CROSS}


def run(folder, names):
    """Three more steps from each checkpoint, in processes of the real DeepSpeed."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": ""}
    done = subprocess.run(
        [PYTHON, PROGRAM, folder, *names],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def continued(tmp_path_factory):
    folder = tmp_path_factory.mktemp("continued")
    for name in SAME:
        shutil.copytree(FIXTURES / name, folder / name)
    for target, origin in OURS.items():
        stage, tag = int(target[5]), folder / target / "tag"
        if origin == "stage3_fp16":  # [Note: objects without classes] in zero_files/class_stand_ins.py
            output = str(folder / target)
            assert main(["convert", str(fixture(origin)), output, "--to", "deepspeed", "--with-classes"]) == 0
            continue
        source = open_checkpoint(fixture(origin), order=ORDER)
        for rank in range(2):
            writer.files(state_of(source, stage=stage, rank=rank, world=2)).write(tag)
        (folder / target / "latest").write_text("tag")
    names = [*SAME, *OURS]
    # DeepSpeed's stage 3 replaces torch's linear for the rest of the process: other stages would compute otherwise.
    parts = [[name for name in names if (name[5] == "3") == sharded] for sharded in (False, True)]
    return folder, {name: result for part in parts for name, result in run(folder, part).items()}


@pytest.mark.parametrize("name", SAME)
def test_deepspeed_continues_from_ours_as_from_its_own(continued, name):
    _, results = continued
    ours, real = results[f"{name}_ours"], results[name]
    assert "error" not in ours, ours
    assert ours["client"] == real["client"] == {"note": "from DeepSpeed 0.19.8"}
    assert ours["losses"] == real["losses"]
    # Recorded on another machine: DeepSpeed's own files are up to 1.2e-6 away from it here.
    assert ours["losses"] == pytest.approx(EXPECTED[name], rel=3e-6)


@pytest.mark.parametrize("name", CROSS)
def test_deepspeed_continues_from_another_stage(continued, name):
    _, results = continued
    assert "error" not in results[name], results[name]
    assert results[name]["losses"] == pytest.approx(results[name.removesuffix("_cross")]["losses"], rel=1e-6)


@pytest.mark.parametrize("name", OURS)
def test_what_deepspeed_saves_then_is_read(continued, name):
    folder, _ = continued
    source = open_checkpoint(folder / name / "later", order=ORDER)
    assert source.small.counters.global_steps == 6
    assert {name for names, _ in source.groups for name in names} == {name for names in ORDER for name in names}
    if source.stage:
        state = get_fp32_state_dict_from_zero_checkpoint(str(folder / name), "later")
        assert torch.equal(state["emb.weight"].reshape(-1), source.read("emb.weight", "master"))
        assert len(state) == 11


def test_deepspeeds_own_zero_to_fp32_reads_ours(continued, tmp_path):
    folder, _ = continued
    code = (
        "import sys, torch; from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as get; "
        "torch.save(dict(get(sys.argv[1], 'tag')), sys.argv[2])"
    )
    for name in ("stage1_fp32_ours", "stage2_bf16_ours", "stage3_fp32_cross"):
        subprocess.run(
            [PYTHON, "-c", code, folder / name, tmp_path / name],
            cwd=tmp_path,
            capture_output=True,
            check=True,
            timeout=200,
        )
        real = torch.load(tmp_path / name, weights_only=True)
        ours = get_fp32_state_dict_from_zero_checkpoint(str(folder / name), "tag")
        assert real.keys() == ours.keys()
        assert all(torch.equal(real[key], ours[key]) for key in ours)
