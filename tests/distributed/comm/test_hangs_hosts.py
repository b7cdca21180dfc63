"""The network of one host is cut while ranks are in a collective: both sides say what they cannot reach."""

from __future__ import annotations

import subprocess

from tests.harness import ROOT, ranks
from tests.hosts import TIMEOUT, Hosts, need, run, wait_for
from tests.warm_python import Warm

JOB = """
import sys
from datetime import timedelta
import torch
from deepspeed import comm as dist
from deepspeed.comm.watch import HangSettings

dist.init_distributed("gloo", timeout=timedelta(seconds=100), verbose=False)
dist.barrier()
dist.watch_hangs(HangSettings(timeout=3, patience=4))
print("ready", flush=True)
sys.stdin.readline()
dist.all_reduce(torch.ones(8))
"""


@ranks(1, init=False, timeout=300)
def test_the_network_of_a_host_is_cut(tmp_path):
    need()
    script = tmp_path / "job.py"
    script.write_text(JOB)
    with Warm() as python, Hosts(tmp_path) as hosts:
        places = [hosts[0], hosts[0], hosts[1]]
        outputs = [tmp_path / f"out{rank}" for rank in range(3)]
        jobs = []
        for rank, host in enumerate(places):
            environment = {
                **hosts.environment(),
                "RANK": str(rank),
                "WORLD_SIZE": "3",
                "LOCAL_RANK": str(rank % 2),
                "LOCAL_WORLD_SIZE": "2" if host is hosts[0] else "1",
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29500",
            }
            with outputs[rank].open("wb") as output:
                words = (python.path, "-u", str(script))
                options = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT, "cwd": ROOT}
                jobs.append(host.start(*words, env=environment, **options))
        wait_for(lambda: all("ready" in output.read_text() for output in outputs), "a rank")
        run("ip", "-n", hosts[1].space, "link", "set", "eth0", "down")
        for job in jobs:
            job.stdin.write(b"\n")
            job.stdin.close()
        for job in jobs:
            job.wait(TIMEOUT)
        said = [output.read_text(errors="replace") for output in outputs]
        for text in said[:2]:
            assert "rank 2 does not answer, nor does any rank of its host node2: the host, or the network to it" in text
        assert f"the job's store at {hosts[0].address}:29500, which rank 0 keeps, has not answered" in said[2]
        assert hosts.left() == []
