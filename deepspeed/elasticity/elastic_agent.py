"""The agent for programs that bring a rendezvous and a `WorkerSpec` of torch's."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.utils.api import macros

from deepspeed.elasticity.agent import GuardedAgent
from deepspeed.errors import ElasticityError
from deepspeed.launcher.protocol import NodePlacement, NodePlan, RankPlan, log_files

__all__ = ["DSElasticAgent"]


class DSElasticAgent(GuardedAgent):
    """Runs the command `spec.entrypoint` with `spec.args` as every rank, where `${local_rank}` stands for its number.

    `env` is added to the environment; `log_dir` takes a file with the output of each rank. Ranks are programs, so
    that `start_method`, which is about functions, only has "spawn".
    """

    def __init__(
        self,
        spec: WorkerSpec,
        env: Mapping[str, str],
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_dir: str | None = None,
    ) -> None:
        if start_method != "spawn":
            raise ElasticityError(f"start_method is {start_method!r}; ranks are programs of their own: use 'spawn'")
        if not isinstance(spec.entrypoint, str):
            raise ElasticityError(
                f"the entrypoint of the WorkerSpec is {spec.get_entrypoint_name()}, a function; give a command, "
                "such as entrypoint=sys.executable with args=('-u', 'train.py')"
            )
        self._command = (spec.entrypoint, *map(str, spec.args))
        self._log_dir = log_dir
        environment = {**os.environ, **{name: str(value) for name, value in env.items()}}
        super().__init__(spec, self._ranks, environment, exit_barrier_timeout=exit_barrier_timeout)

    def _ranks(self, place: NodePlacement) -> NodePlan:
        environments = place.environments()
        logs = log_files(self._log_dir or "None", [int(each["RANK"]) for each in environments])
        ranks = [
            RankPlan(
                rank=int(environment["RANK"]),
                local_rank=local_rank,
                command=tuple(macros.substitute(list(self._command), str(local_rank))),
                environment=environment,
                log=logs.get(int(environment["RANK"])),
            )
            for local_rank, environment in enumerate(environments)
        ]
        return NodePlan(ranks=tuple(ranks))
