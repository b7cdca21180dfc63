"""pdsh: one `deepspeed.launcher.launch` on every host, over ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import MutableMapping
from typing import ClassVar

from deepspeed.launcher.backends.base import MultiNodeRunner
from deepspeed.launcher.node_words import node_words
from deepspeed.launcher.resources import Slots

__all__ = ["PDSHRunner"]


class PDSHRunner(MultiNodeRunner):
    """`pdsh -S -f 1024 -w h1,h2 export K=V; … cd …; python -u -m deepspeed.launcher.launch …`."""

    programs: ClassVar[tuple[str, ...]] = ("pdsh",)
    forwards: ClassVar[bool] = False
    unused: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        return "pdsh"

    def backend_exists(self) -> str | None:
        return shutil.which("pdsh")

    def parse_user_args(self) -> list[str]:
        return [_quoted(word) for word in self.args.user_args]

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Slots
    ) -> tuple[list[str], list[str], MutableMapping[str, str]]:
        """The command, one that ends what it started on all hosts, and the environment of both."""
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if self.args.ssh_port is not None:
            given = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{given} -p {self.args.ssh_port}".strip()
        reach = ["pdsh", "-S", "-f", "1024", "-w", ",".join(active_resources), *self.launcher_words()]
        # What follows is one line for the shell of each host: every word of it is quoted.
        exports = "".join(f"export {key}={_quoted(value)}; " for key, value in self.exports.items())
        words = node_words(
            self.args,
            self.world_info_base64,
            node_rank="%n",
            master=(self.args.master_addr, self.args.master_port),
            script=(),
        )
        shown = [word if word == "--node_rank=%n" else _quoted(word) for word in words]
        launch = [_quoted(sys.executable), "-u", "-m", "deepspeed.launcher.launch", *shown]
        source = [f"source {_quoted(self.args.venv_script)};"] if self.args.venv_script else []
        script = [_quoted(self.user_script), *self.user_arguments]
        command = [*reach, *source, exports, f"cd {_quoted(os.getcwd())};", *launch, *script]
        # `[-]` matches what it says, but not the command line of pkill itself.
        pattern = f"deepspeed[.]launcher[.]launch [-]-world_info={self.world_info_base64}"
        return command, [*reach, "pkill", "-f", _quoted(pattern)], environment


def _quoted(word: str) -> str:
    """A word that the shell of a host leaves alone, and pdsh, which puts names in the place of %h, %u and %n."""
    return shlex.quote(word).replace("%", "%%")
