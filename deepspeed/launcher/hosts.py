"""Which slots of which hosts take part: the hostfile, the include and exclude grammar, counts, and their coded form.

`NODE_SPEC[@NODE_SPEC…]` with `NODE_SPEC = NAME[:SLOT[,SLOT…]]`: "w0@w1:0,2" is all of w0, and slots 0 and 2 of w1.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from deepspeed.launcher.errors import LaunchError
from deepspeed.log import logger
from deepspeed.trust import read_regular

# An id is a number, or where the user named devices by their UUIDs such a name.
Slots = Mapping[str, Sequence[int | str]]

# Each slot becomes an entry of a list: a number with a typing error would fill the memory.
MOST_SLOTS = 2**16  # of a host
_MOST_RANKS = 2**22  # of a job


def count_of(text: str) -> int | None:
    """The slots that a text of digits says, None if no host has so many."""
    count = int(text) if len(text.lstrip("0")) < 10 else MOST_SLOTS + 1
    return count if count <= MOST_SLOTS else None


def parse_node_configs(node_configs: Iterable[str]) -> dict[str, list[int]]:
    """["w1:2,0", "w2"] → {"w1": [0, 2], "w2": []}, where no slots mean all of a host; entries of a host are joined."""
    wanted: dict[str, list[int]] = {}
    for text in node_configs:
        host, colon, listed = text.rpartition(":") if ":" in text else (text, "", "")
        words = listed.split(",") if colon else []
        if not all(word.isascii() and word.isdigit() for word in words):
            raise LaunchError(
                f"{text!r}: {listed!r} is not a list of slots; write the host, a colon and numbers: worker-1:0,2"
            )
        if not host or any(letter.isspace() for letter in host):
            raise LaunchError(f"{text!r} does not begin with the name of a host; write worker-1 or worker-1:0,2")
        slots = {MOST_SLOTS if (slot := count_of(word)) is None else slot for word in words}
        known = wanted.get(host)
        wanted[host] = sorted(slots.union(known or ())) if slots and known != [] else []
    return wanted


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """The hosts and slots that an include or an exclude string leaves of a number of slots per host, in its order."""
    if inclusion and exclusion:
        raise LaunchError(f"--include {inclusion} and --exclude {exclusion} are mutually exclusive: give one of them")
    _check_ranks(sum(resource_pool.values()))
    pool = {host: list(range(count)) for host, count in resource_pool.items()}
    if not inclusion and not exclusion:
        return pool
    wanted = parse_node_configs((inclusion or exclusion).split("@"))
    for host, slots in wanted.items():
        if host not in pool:
            raise LaunchError(f"Hostname '{host}' not found in hostfile; there are {', '.join(pool)}")
        for slot in slots:
            if slot not in pool[host]:
                has = ",".join(map(str, pool[host])) or "no slots"
                raise LaunchError(f"No slot '{slot}' specified on host '{host}'; it has {has}")
    kept = {}
    for host, there in pool.items():
        listed = (wanted[host] or there) if host in wanted else []
        kept[host] = listed if inclusion else [slot for slot in there if slot not in listed]
    return {host: slots for host, slots in kept.items() if slots}


def apply_num_nodes_and_gpus(
    active_resources: Mapping[str, Sequence[int]], num_nodes: int, num_gpus: int
) -> dict[str, list[int]]:
    """The first `num_nodes` hosts, each with the ids 0 … num_gpus - 1; a count that is not positive changes nothing."""
    hosts = list(active_resources)
    if num_nodes > len(hosts):
        raise LaunchError(f"--num_nodes {num_nodes} asks for more than the {len(hosts)} hosts: {', '.join(hosts)}")
    if num_gpus > MOST_SLOTS:
        raise LaunchError(f"--num_gpus {num_gpus} asks for more than a host can have ({MOST_SLOTS})")
    if num_nodes > 0:
        hosts = hosts[:num_nodes]
    _check_ranks(len(hosts) * num_gpus)
    return {host: list(range(num_gpus)) if num_gpus > 0 else list(active_resources[host]) for host in hosts}


def _check_ranks(count: int) -> None:
    if count > _MOST_RANKS:
        raise LaunchError(f"the hosts have {count} slots together, more than a job can have ranks ({_MOST_RANKS})")


def encode_world_info(world_info: Slots) -> str:
    """Host → slot ids as one word without spaces: JSON in URL-safe base 64."""
    text = json.dumps({host: list(slots) for host, slots in world_info.items()})
    return base64.urlsafe_b64encode(text.encode()).decode()


def decode_world_info(coded: str) -> dict[str, list[int | str]]:
    """What `encode_world_info` was given."""
    try:
        found = json.loads(base64.urlsafe_b64decode(coded.encode("ascii")))
    except (ValueError, RecursionError) as error:  # no base 64, no UTF-8, no JSON, a number of thousands of digits
        raise LaunchError(f"--world_info {coded!r:.200} is not what encode_world_info writes: {error}") from error
    if not isinstance(found, dict) or not all(_is_slots(slots) for slots in found.values()):
        raise LaunchError(f"--world_info holds {repr(found)[:200]}; expected an object of host: [slot ids]")
    return found


def _is_slots(value: object) -> bool:
    """Whether it is a list of numbers from 0 on, or of names of devices."""
    return isinstance(value, list) and all(
        isinstance(slot, str) or (type(slot) is int and 0 <= slot <= MOST_SLOTS) for slot in value
    )


_MOST_BYTES = 2**24
_LINE = re.compile(r"^(\S+)\s+slots=(\d+)", re.ASCII)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Host → slots as the file says; None, with a warning, where there is no such file."""
    path = Path(hostfile_path)
    if not path.is_file():
        logger.warning("there is no hostfile %s: only this machine is used", hostfile_path)
        return None
    try:
        lines = read_regular(path, _MOST_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"the hostfile {hostfile_path} cannot be read: {error}") from error
    return parse_hostfile(lines, hostfile_path)


def parse_hostfile(lines: Iterable[str], name: str = "hostfile") -> dict[str, int]:
    """Host → slots; blank lines and lines that begin with # are skipped, text after the slots is ignored."""
    hosts: dict[str, int] = {}
    for number, text in enumerate(lines, 1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise LaunchError(
                f"{name}, line {number}: {line!r:.200} does not name a host and its slots; "
                "write lines such as: worker-1 slots=8"
            )
        if match[1] in hosts:
            raise LaunchError(
                f"{name}, line {number}: host {match[1]!r:.200} is listed twice; give it one line with all its slots"
            )
        slots = count_of(match[2])
        if slots is None:
            raise LaunchError(
                f"{name}, line {number}: host {match[1]!r:.200} has slots={match[2]:.20}, more than a host can have "
                f"({MOST_SLOTS}); write how many ranks it runs"
            )
        hosts[match[1]] = slots
    if not hosts:
        raise LaunchError(f"{name} lists no host; write lines such as: worker-1 slots=8")
    return hosts
