"""Where the ranks of one node stand in a job, and the variables that tell each of them."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.launcher.resources import Slots

__all__ = ["Place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The `local` ranks of one node, of which the first is rank `first`; they meet the others at `master`."""

    first: int
    local: int
    world: int
    node: int
    nodes: int
    master: tuple[str, int]

    @classmethod
    def of(cls, world: Slots, host: str, master: tuple[str, int]) -> Place:
        """Of a host: ranks are numbered host by host, in the order of the slots."""
        hosts = list(world)
        node = hosts.index(host)
        return cls(
            first=sum(len(world[before]) for before in hosts[:node]),
            local=len(world[host]),
            world=sum(map(len, world.values())),
            node=node,
            nodes=len(hosts),
            master=master,
        )

    def environments(self) -> list[dict[str, str]]:
        """The variables of each rank."""
        common = {
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": self.master[1],
            "WORLD_SIZE": self.world,
            "CROSS_RANK": self.node,
            "CROSS_SIZE": self.nodes,
            "LOCAL_SIZE": self.local,
            "LOCAL_WORLD_SIZE": self.local,  # the same, as torch's own tools call it
        }
        return [
            {name: str(value) for name, value in {**common, "RANK": self.first + number, "LOCAL_RANK": number}.items()}
            for number in range(self.local)
        ]
