"""`CommsLogger`: listens to finished operations, keeps sizes, counts, latencies and bandwidths, prints the summary."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.comm.dispatch import DEFAULT
from deepspeed.comm.groups import get_rank, is_initialized
from deepspeed.comm.records import CollectiveFinished
from deepspeed.comm.summary import (
    PLAIN,
    Traffic,
    as_dict,
    as_text,
    bandwidth,
    calc_bw_log,
    convert_size,
    stragglers,
    summarise,
)
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.events import EventStream, Subscription
from deepspeed.log import print_dist

_KEYS = ("enabled", "prof_all", "prof_ops", "verbose", "debug")


def _settings(config: object) -> dict[str, Any]:
    """The comms_logger keys of a whole config, of its comms part or of the section; a dict or an object."""
    for name in ("comms_config", "comms_logger"):
        inner = config.get(name, config) if isinstance(config, Mapping) else getattr(config, name, config)
        if inner is not config:
            return {} if inner is None else _settings(inner)
    if isinstance(config, Mapping):
        return {key: config[key] for key in _KEYS if key in config}
    return {key: getattr(config, key) for key in _KEYS if getattr(config, key, None) is not None}


def _op_names(value: object) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise DeepSpeedConfigError(
            f"comms_logger.prof_ops is {value!r}; give a list of operation names such as ['all_reduce'].",
            path="comms_logger.prof_ops",
        )
    return list(value)


class CommsLogger:
    """Records operations while enabled: all of them, those named in `prof_ops`, and those called with `prof=True`.

    Enabling it subscribes to the dispatcher's events, which makes every operation synchronous; disabling it
    unsubscribes, and nothing is left on the path of a collective.
    """

    def __init__(self, events: EventStream | None = None) -> None:
        self.enabled = False
        self.prof_all = True
        self.prof_ops: list[str] = []
        self.verbose = False
        self.debug = False
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}
        self.traffic: Traffic = {}
        self._events = DEFAULT.events if events is None else events
        self._subscription: Subscription | None = None

    def configure(self, comms_config: object) -> None:
        """Take the settings of a config (or of its comms_logger section) and start or stop accordingly."""
        self.update(**_settings(comms_config))

    def update(self, **settings: Any) -> None:
        """Change single settings; `None` leaves one as it is."""
        for key, value in settings.items():
            if value is None:
                continue
            setattr(self, key, _op_names(value) if key == "prof_ops" else bool(value))
        if self.enabled and self._subscription is None:
            self._subscription = self._events.subscribe(CollectiveFinished, self._finished)
        elif not self.enabled and self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    def join(self, comms_config: object) -> None:
        """Record what this config asks for, too; one that does not ask stops nobody else's recording."""
        asked = {"prof_all": True, "prof_ops": [], "verbose": False, "debug": False, **_settings(comms_config)}
        if not asked.get("enabled"):
            return
        if self.enabled:
            for key in ("prof_all", "verbose", "debug"):
                asked[key] = getattr(self, key) or asked[key]
            asked["prof_ops"] = list(dict.fromkeys([*self.prof_ops, *_op_names(asked["prof_ops"])]))
        self.update(**asked)

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Record one call of operation `raw_name` among all ranks under `record_name`; latency in ms, size in bytes."""
        self._add(record_name, latency, msg_size, *calc_bw_log(raw_name, msg_size, latency))

    def has_data(self) -> bool:
        """True if anything was recorded."""
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        """Forget everything recorded."""
        self.comms_dict.clear()
        self.traffic.clear()

    def get_operation_names(self) -> list[str]:
        """The names under which operations were recorded."""
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        """How many calls were recorded."""
        return sum(row[0] for sizes in self.comms_dict.values() for row in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]]:
        """The summary rows of one name by message size; empty if nothing was recorded under it."""
        return summarise(self.comms_dict.get(operation_name, {}))

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print the summary, return it, or both; with `show_straggler` every rank must call this."""
        summary = as_dict(self.comms_dict, self.traffic, self._stragglers() if show_straggler else None)
        if print_log:
            sys.stdout.write(as_text(summary))
            sys.stdout.flush()
        return summary if return_dict else None

    def _stragglers(self) -> dict[str, dict[int, dict[str, Any]]]:
        """The comparison needs collectives of its own, which must not be recorded."""
        enabled = self.enabled
        self.update(enabled=False)
        try:
            return stragglers(self.comms_dict)
        finally:
            self.update(enabled=enabled)

    def _finished(self, event: CollectiveFinished) -> None:
        if not (self.prof_all or event.prof or event.log_name in self.prof_ops):
            return
        name = f"{event.log_name} | [Caller Func: {event.caller}]" if self.debug else event.log_name
        latency = event.duration * 1e3
        self._add(name, latency, event.bytes, *bandwidth(event.op, event.bytes, latency, event.group_size))
        if event.links.total:
            sums = self.traffic.setdefault(name, {}).setdefault(event.codec or PLAIN, [0, 0.0, 0.0])
            for place, value in enumerate((1, *event.links)):
                sums[place] += value

    def _add(self, name: str, latency: float, size: int, algorithm: float, bus: float) -> None:
        row = self.comms_dict.setdefault(name, {}).setdefault(size, [0, [], [], []])
        row[0] += 1
        row[1].append(latency)
        row[2].append(algorithm)
        row[3].append(bus)
        if self.verbose:
            print_dist(
                f"comm op: {name} | time (ms): {latency:.2f} | msg size: {convert_size(size)} | "
                f"algbw (Gbps): {algorithm:.2f} | busbw (Gbps): {bus:.2f}",
                ranks=[0],
            )


COMMS_LOGGER = CommsLogger()


def configure(
    deepspeed_config: object = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Set up the comms logger from a config, from single values, or from both (single values win)."""
    given = {} if deepspeed_config is None else _settings(deepspeed_config)
    single = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    COMMS_LOGGER.update(**{**given, **{key: value for key, value in single.items() if value is not None}})


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print what the comms logger recorded, on rank 0; every rank must call this if stragglers are wanted."""
    speaks = not is_initialized() or get_rank() == 0
    return COMMS_LOGGER.log_all(print_log=speaks, show_straggler=show_straggler, return_dict=return_dict)


# Of the process's logger, as functions.
reset_log = COMMS_LOGGER.reset_data
has_comm_data = COMMS_LOGGER.has_data
get_comm_operation_count = COMMS_LOGGER.get_total_operations
get_logged_comm_ops = COMMS_LOGGER.get_operation_names
