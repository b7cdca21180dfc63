"""Is the checkpoint folder one folder? A job on several hosts loads what other hosts have written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as td

from deepspeed.preflight.check import Check, Here
from deepspeed.preflight.checks.folder import folder_of, nearest
from deepspeed.preflight.finding import Finding, Level, Told, who

__all__ = ["SharedFolder", "SharedFolderFact"]


@dataclass(frozen=True, slots=True)
class SharedFolderFact:
    """Whether a host sees the file that rank 0 has made; none where nobody looked, or there is no file."""

    sees: bool | None = None
    local: bool = False
    """The config says that every host keeps its own."""


class SharedFolder(Check[SharedFolderFact]):
    """Rank 0 makes a file, the first rank of every host looks for it."""

    name = "shared_folder"
    about = "the checkpoint folder is the same on all hosts"
    together = True
    fact = SharedFolderFact

    def gather(self, here: Here) -> SharedFolderFact:
        assert here.company is not None, "this check needs all ranks"
        config = here.config
        local = config is not None and not isinstance(config, str) and config.schema.checkpoint.use_node_local_storage
        folder = nearest(Path(folder_of(here.options.checkpoint, here.program.arguments)[0]).absolute())
        made: list[str | None] = [None]
        try:
            if here.rank == 0:
                made = [_make_file(folder)]
            td.broadcast_object_list(made, 0, group=here.company.messages)
            name = made[0]
            sees = None
            if name is not None and here.rank in here.company.first_ranks:
                sees = (folder / Path(name).name).exists()
            td.barrier(group=here.company.messages)
            return SharedFolderFact(sees, local)
        finally:
            if here.rank == 0 and made[0] is not None:
                os.unlink(made[0])

    def judge(self, told: Sequence[Told[SharedFolderFact]]) -> list[Finding]:
        looked = [each for each in told if each.fact.sees is not None]
        blind = [each for each in looked if not each.fact.sees]
        if blind and not looked[0].fact.local:
            what = f"{who(blind)} {'does' if len(blind) == 1 else 'do'} not see what rank 0 writes to the folder"
            advice = "save to a shared file system, or set checkpoint.use_node_local_storage"
            return [Finding(Level.WARNING, what, tuple(each.rank for each in blind), advice)]
        if len(looked) < 2:
            return [Finding(Level.OK, "one host, one folder" if looked else "nobody could look")]
        return [Finding(Level.OK, "every host keeps its own" if blind else f"{len(looked)} hosts see the same files")]


def _make_file(folder: Path) -> str | None:
    """A new file's path, None if none can be made: the check of the folder tells why, and the others wait here."""
    try:
        descriptor, path = tempfile.mkstemp(prefix=".preflight-", dir=folder)
    except OSError:
        return None
    os.close(descriptor)
    return path
