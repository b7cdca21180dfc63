"""The process that forks this folder's ranks: as `tests/forkserver.py`, with the client libraries loaded."""

from __future__ import annotations

import atexit
import importlib.util
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection

from tests.harness import ROOT, Server

CLIENTS = ("transformers", "accelerate", "peft", "trl", "lightning")
MODULES = {
    "transformers": ("transformers.trainer", "transformers.models.llama", "transformers.integrations.deepspeed"),
    "accelerate": ("accelerate.utils.deepspeed",),
    "peft": ("peft.tuners.lora",),
    "trl": ("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer"),
    "lightning": ("lightning.fabric.strategies", "lightning.pytorch.strategies"),
}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
ONE_HOST = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


def missing(client: str) -> bool:
    return importlib.util.find_spec(client) is None


def environment() -> dict[str, str]:
    """What a process that uses clients sees: quiet, offline, on the CPU, in no job."""
    return {name: value for name, value in {**os.environ, **QUIET}.items() if name not in RANK_VARIABLES}


class ClientServer(Server):
    """A fork server that takes longer to start, and whose ranks find the clients loaded."""

    def start(self) -> Connection:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.clients.server", str(theirs.fileno())],
            cwd=ROOT,
            env={**environment(), **ONE_HOST},
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        atexit.register(self.close)
        return self.connection


SERVER = ClientServer()  # of this pytest process; two would load everything twice


if __name__ == "__main__":
    from tests import forkserver

    forkserver.main(*(module for client in CLIENTS if not missing(client) for module in MODULES[client]))
