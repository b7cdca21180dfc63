"""A Slurm of its own on the hosts of a test: munged and slurmctld on this machine, a slurmd in each host."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack

from tests.hosts import run, wait_for, which

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")


class Slurm:
    """Runs while the context is open; `environment` is what srun needs."""

    def __init__(self, hosts):
        self.hosts = hosts
        self.folder = hosts.folder
        self.stack = ExitStack()
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self):
        with ExitStack() as undo:
            undo.callback(self.stack.close)
            self._build()
            undo.pop_all()
        return self

    def __exit__(self, *_):
        self.stack.close()

    def _build(self):
        key, socket = self.folder / "munge.key", self.folder / "munge.sock"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self.folder.chmod(0o755)  # which munged asks for
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("pid", "seed", "log", "key")]
        self._service([which("munged"), "--foreground", "--force", f"--socket={socket}", *files])
        wait_for(socket.exists, "munged")
        (self.folder / "slurm.conf").write_text(self._configuration(socket))
        (self.folder / "cgroup.conf").write_text("IgnoreSystemd=yes\n")
        (self.folder / "state").mkdir()
        for host in self.hosts.hosts:
            (self.folder / f"spool.{host.name}").mkdir()
        self._service([which("slurmctld"), "-D", "-c"])
        for host in self.hosts.hosts:
            self._service([which("slurmd"), "-D", "-N", host.name], host)
        wait_for(self._idle, "Slurm")

    def _service(self, words, host=None):
        log = (self.folder / f"{os.path.basename(words[0])}{host.name if host else ''}.out").open("wb")
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": log,
            "stderr": log,
            "env": {**os.environ, **self.environment},
        }
        process = subprocess.Popen(words, **options) if host is None else host.start(*words, **options)
        log.close()
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)

    def _idle(self):
        told = run("sinfo", "-h", "-o", "%t %D", check=False, env={**os.environ, **self.environment}).stdout
        return f"idle {len(self.hosts.hosts)}" in told

    def _configuration(self, socket):
        folder = self.folder
        nodes = "".join(f"NodeName={host.name} NodeAddr={host.address} CPUs=4\n" for host in self.hosts.hosts)
        return (
            f"ClusterName=test\nSlurmctldHost={os.uname().nodename}({self.hosts.own})\nSlurmUser=root\n"
            f"AuthType=auth/munge\nCredType=cred/munge\nAuthInfo=socket={socket}\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool.%n\n"
            f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.%n.pid\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nReturnToService=2\n"
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\nSlurmdParameters=config_overrides\n"
            "JobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none\nKillWait=2\n"
            f"{nodes}PartitionName=main Nodes=ALL Default=YES State=UP\n"
        )
