"""Which slots of which hosts take part: the include and exclude grammar, counts, and their coded form.

`NODE_SPEC[@NODE_SPEC…]` with `NODE_SPEC = NAME[:SLOT[,SLOT…]]`: "w0@w1:0,2" is all of w0, and slots 0 and 2 of w1.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence

from deepspeed.launcher.errors import LaunchError

__all__ = [
    "Slots",
    "apply_num_nodes_and_gpus",
    "decode_world_info",
    "encode_world_info",
    "parse_inclusion_exclusion",
    "parse_node_config",
    "parse_node_config_list",
    "parse_resource_filter",
]

# An id is a number, or where the user named devices by their UUIDs such a name.
Slots = Mapping[str, Sequence[int | str]]


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """ "w1:0,2" → ("w1", [0, 2]); no slots mean all of the host: "w1" → ("w1", [])."""
    if ":" not in node_config:
        host, slots = node_config, []
    else:
        host, _, listed = node_config.rpartition(":")
        words = listed.split(",")
        if not all(word.isascii() and word.isdigit() for word in words):
            raise LaunchError(
                f"{node_config!r}: {listed!r} is not a list of slots; write the host, a colon and numbers: worker-1:0,2"
            )
        slots = [int(word) for word in words]
    if not host or any(letter.isspace() for letter in host):
        raise LaunchError(f"{node_config!r} does not begin with the name of a host; write worker-1 or worker-1:0,2")
    return host, slots


def parse_node_config_list(node_config_list: Iterable[str]) -> dict[str, list[int]]:
    """Host → its slots in ascending order, an empty list for all; several entries of a host are joined."""
    wanted: dict[str, list[int]] = {}
    for node_config in node_config_list:
        host, slots = parse_node_config(node_config)
        if host in wanted and wanted[host] and slots:
            slots = wanted[host] + slots
        elif host in wanted:
            slots = []
        wanted[host] = sorted(set(slots))
    return wanted


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """The hosts and slots that an include or an exclude string leaves, in the order of `host_info`."""
    if include_str and exclude_str:
        raise LaunchError(
            f"--include {include_str} and --exclude {exclude_str} are mutually exclusive: give one of them"
        )
    if not include_str and not exclude_str:
        return {host: list(slots) for host, slots in host_info.items()}
    wanted = parse_node_config_list((include_str or exclude_str).split("@"))
    for host, slots in wanted.items():
        if host not in host_info:
            raise LaunchError(f"Hostname '{host}' not found in hostfile; there are {', '.join(host_info)}")
        for slot in slots:
            if slot not in host_info[host]:
                has = ",".join(map(str, host_info[host])) or "no slots"
                raise LaunchError(f"No slot '{slot}' specified on host '{host}'; it has {has}")
    kept: dict[str, list[int]] = {}
    for host, there in host_info.items():
        listed = (wanted[host] or list(there)) if host in wanted else []
        kept[host] = listed if include_str else [slot for slot in there if slot not in listed]
    return {host: slots for host, slots in kept.items() if slots}


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """As `parse_resource_filter`, from a number of slots per host."""
    pool = {host: list(range(count)) for host, count in resource_pool.items()}
    return parse_resource_filter(pool, include_str=inclusion, exclude_str=exclusion)


def apply_num_nodes_and_gpus(
    active_resources: Mapping[str, Sequence[int]], num_nodes: int, num_gpus: int
) -> dict[str, list[int]]:
    """The first `num_nodes` hosts, each with the ids 0 … num_gpus - 1; a count that is not positive changes nothing."""
    hosts = list(active_resources)
    if num_nodes > len(hosts):
        raise LaunchError(f"--num_nodes {num_nodes} asks for more than the {len(hosts)} hosts: {', '.join(hosts)}")
    if num_nodes > 0:
        hosts = hosts[:num_nodes]
    return {host: list(range(num_gpus)) if num_gpus > 0 else list(active_resources[host]) for host in hosts}


def encode_world_info(world_info: Slots) -> str:
    """Host → slot ids as one word without spaces: JSON in URL-safe base 64."""
    text = json.dumps({host: list(slots) for host, slots in world_info.items()})
    return base64.urlsafe_b64encode(text.encode()).decode()


def decode_world_info(coded: str) -> dict[str, list[int | str]]:
    """What `encode_world_info` was given."""
    try:
        found = json.loads(base64.urlsafe_b64decode(coded.encode("ascii")))
    except (UnicodeError, binascii.Error, json.JSONDecodeError) as error:
        raise LaunchError(f"--world_info {coded!r} is not what encode_world_info writes: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(slots, list) for slots in found.values()):
        raise LaunchError(f"--world_info holds {json.dumps(found)[:200]}; expected an object of host: [slot ids]")
    return found
