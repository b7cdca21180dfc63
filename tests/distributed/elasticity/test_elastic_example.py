"""The elastic example, unchanged, under every engine that starts it: a rank dies, and the losses go on."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import main as torchrun

from deepspeed.launcher import runner
from deepspeed.launcher.ports import free_port
from tests.distributed.launcher.launched import FOREIGN, Launched, as_program
from tests.harness import ROOT, ranks
from tests.warm_python import Warm

EXAMPLE = ROOT / "examples/elastic/train.py"
CONFIG = ROOT / "examples/elastic/ds_config.json"
MANIFEST = ROOT / "examples/kubernetes/job.yaml"
PATIENCE = 200.0  # seconds, only ever reached by a test that fails
STEPS = ["--steps=12", "--save_every=3"]


def words(folder, *more):
    return [str(EXAMPLE), f"--deepspeed_config={CONFIG}", f"--checkpoints={folder}/checkpoints", *STEPS, *more]


def environment():
    clean = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    return {**clean, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def losses(text):
    """Step and loss of every line that tells them, of whichever launcher."""
    return sorted((int(step), float(loss)) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text))


def undisturbed(folder):
    """What one process prints that nothing happens to."""
    (folder / "plain").mkdir()
    with Launched(words(folder / "plain"), folder / "plain", main=as_program) as job:
        assert job.wait(PATIENCE) == 0, job.errors()
    return losses(job.output())


def assert_goes_on(text, wanted, world=2):
    """A rank died after step 7: the second life begins at the checkpoint of step 6."""
    assert [step for step, _ in wanted] == [3, 6, 9, 12]
    assert losses(text) == [(step, pytest.approx(loss, abs=1e-4)) for step, loss in wanted]
    lives = re.findall(r"after step (\d+): a batch of 48 = (\d+) ranks", text)
    assert sorted(lives) == [("0", str(world)), ("6", str(world))]


@pytest.mark.slow
@ranks(1, init=False, timeout=600)
def test_the_deepspeed_command(tmp_path):
    given = ["--elastic_training", "--num_gpus=2", *words(tmp_path, "--die_at=7")]
    with Warm() as python, Launched(given, tmp_path, main=runner.main, python=python) as job:
        assert job.wait(PATIENCE) == 0, job.errors()
    assert_goes_on(job.output(), undisturbed(tmp_path))


@pytest.mark.slow
@ranks(1, init=False, timeout=600)
def test_torchrun(tmp_path):
    given = ["--nproc-per-node=2", "--max-restarts=1", f"--master-port={free_port()}", *words(tmp_path, "--die_at=7")]
    with Warm() as python, Launched(given, tmp_path, main=torchrun, python=python) as job:
        assert job.wait(PATIENCE) == 0, job.errors()
    assert_goes_on(job.output(), undisturbed(tmp_path))


def parts():
    """The objects of the manifest by their kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


def test_the_manifest_agrees_with_itself():
    found = parts()
    job = found["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    hosts = dict(line.split(" slots=") for line in found["ConfigMap"]["data"]["hostfile"].splitlines())
    name = found["Job"]["metadata"]["name"]
    assert list(hosts) == [f"{name}-{index}" for index in range(job["completions"])]
    assert job["completions"] == job["parallelism"]
    assert set(map(int, hosts.values())) == {container["resources"]["limits"]["nvidia.com/gpu"]}
    assert found["Service"]["spec"]["selector"] == {"job-name": name}
    assert found["Service"]["metadata"]["name"] == job["template"]["spec"]["subdomain"]
    assert f"--master_addr={name}-0.{found['Service']['metadata']['name']}" in container["args"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert set(mounts) == {each["name"] for each in job["template"]["spec"]["volumes"]}
    assert f"--hostfile={mounts['hosts']}/hostfile" in container["args"]
    assert all(Path(ROOT, word).exists() for word in container["args"] if word.startswith("examples/"))
    (variable,) = container["env"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"].endswith("job-completion-index']")


def pod(folder, index, port, python):
    """The command of a pod, as it runs on this machine."""
    found = parts()
    (container,) = found["Job"]["spec"]["template"]["spec"]["containers"]
    if not index:  # the other pod begins later, and the first may be reading by then
        (folder / "hostfile").write_text(found["ConfigMap"]["data"]["hostfile"])
    replaced = {
        "/job/": f"{folder}/",
        "/shared/": f"{folder}/",
        "$(NODE_RANK)": str(index),
        "=elastic-0.elastic": "=127.0.0.1",
        "examples/": f"{ROOT}/examples/",
    }
    given = []
    for word in container["args"]:
        for old, new in replaced.items():
            word = word.replace(old, new)
        given.append(word)
    assert container["command"] == ["deepspeed"]
    own = folder / f"pod{index}"
    own.mkdir()
    both = ["--min_elastic_nodes=2", f"--master_port={port}"]  # else one of them may begin alone
    return Launched([*both, *given, *STEPS, "--die_at=7"], own, main=runner.main, python=python)


@pytest.mark.slow
@ranks(1, init=False, timeout=600)
def test_the_command_of_the_kubernetes_job_on_two_nodes(tmp_path):
    port = free_port()
    with Warm() as python, pod(tmp_path, 0, port, python) as first, pod(tmp_path, 1, port, python) as second:
        assert first.wait(PATIENCE) == 0, first.errors()
        assert second.wait(PATIENCE) == 0, second.errors()
    assert_goes_on(first.output() + second.output(), undisturbed(tmp_path))
