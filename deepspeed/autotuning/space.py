"""What is tried: stages, micro batches and other values of a config, and what they make of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from deepspeed.autotuning.scheduler import TunedJob
from deepspeed.autotuning.utils import get_val_by_key, with_values
from deepspeed.config.autotuning import DeepSpeedAutotuningConfig
from deepspeed.config.batch import MICRO, STEPS, TRAIN
from deepspeed.config.model import walk
from deepspeed.config.schema import Schema
from deepspeed.errors import DeepSpeedConfigError

STAGE = "zero_optimization.stage"
_BUCKET = "zero_optimization.reduce_bucket_size"
_OVERLAP = "zero_optimization.overlap_comm"
_BUCKETS = (50_000_000, 500_000_000, 1_000_000_000)


@dataclass(frozen=True)
class Candidate:
    """One config of the search."""

    stage: int
    micro: int
    steps: int
    extras: tuple[tuple[str, Any], ...] = ()
    """Other keys, dotted, and their values."""

    @property
    def name(self) -> str:
        """Of its folder."""
        words = [f"z{self.stage}", f"gas{self.steps}", f"tmbspg{self.micro}"]
        others = (f"{path.rpartition('.')[2]}-{quote(str(value), safe='')}" for path, value in self.extras)
        return "_".join([*words, *others])

    @property
    def samples(self) -> int:
        """Of one rank in a step."""
        return self.micro * self.steps

    def config(self, given: Mapping[str, Any], replicas: int) -> dict[str, Any]:
        """The given config with these values, without the section of the search."""
        sizes = {MICRO: self.micro, STEPS: self.steps, STAGE: self.stage}
        made = with_values(given, {**sizes, **dict(self.extras)})
        if isinstance(made.get(TRAIN), int):
            made[TRAIN] = self.samples * replicas
        made.pop("autotuning", None)
        return made


class SearchSpace:
    """The candidates that a config and its `autotuning` section ask for."""

    def __init__(self, given: Mapping[str, Any], config: DeepSpeedAutotuningConfig, job: TunedJob) -> None:
        self._given, self._config, self._job = given, config, job
        shared = config.mp_size
        for path in ("tensor_parallel.autotp_size", "sequence_parallel_size"):
            size = get_val_by_key(given, path)
            shared *= size if isinstance(size, int) and size > 1 else 1
        if job.world % shared:
            raise DeepSpeedConfigError(
                f"autotuning.mp_size {config.mp_size} with the parallel sizes of the config makes models of {shared} "
                f"ranks, and this job has {job.world}; expected a divisor of {job.world}",
                path="autotuning.mp_size",
            )
        self.replicas = job.world // shared
        self.stages = self._stages()
        self.extras = self._extras()

    @property
    def baseline(self) -> Candidate:
        """The config as it is given; where it leaves a value open or lists several, the first of them."""
        extras = tuple((path, values[0]) for path, values in self.extras.items())
        micro = self._number(MICRO)
        train = self._number(TRAIN)
        if micro is None:
            steps = self._number(STEPS) or 1
            micro = train // (steps * self.replicas) if train else self._config.min_train_micro_batch_size_per_gpu
        candidates = [each for each in self.candidates() if each.extras == extras and each.stage == self.stages[0]]
        if not candidates:
            raise DeepSpeedConfigError(
                f"autotuning: no micro batch between {self._config.min_train_micro_batch_size_per_gpu} and "
                f"{self._config.max_train_micro_batch_size_per_gpu} makes a batch for {TRAIN} {train}, between "
                f"min_train_batch_size {self._config.min_train_batch_size} and max_train_batch_size "
                f"{self._config.max_train_batch_size}, on {self.replicas} replicas; change one of them",
                path="autotuning",
            )
        return min(candidates, key=lambda each: abs(each.micro - micro))

    def candidates(self, parameters: int | None = None) -> Iterator[Candidate]:
        """All of them; buckets larger than a model of so many parameters are alike."""
        extras = dict(self.extras)
        if parameters is not None and not isinstance(self._value(_BUCKET), list) and _BUCKET in extras:
            small = [size for size in extras[_BUCKET] if size < parameters]
            extras[_BUCKET] = [*small, *(size for size in extras[_BUCKET] if size >= parameters)][: len(small) + 1]
        others = list(itertools.product(*([(path, value) for value in values] for path, values in extras.items())))
        for stage, (micro, steps) in itertools.product(self.stages, self._batches()):
            yield from (Candidate(stage, micro, steps, extra) for extra in others)

    def _value(self, path: str) -> Any:
        value: Any = self._given
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def _number(self, key: str) -> int | None:
        """The value of a batch key, from the config or from the option of the script that is mapped to it."""
        value = self._value(key)
        if isinstance(value, list) and value:
            value = value[0]
        option = (self._config.arg_mappings or {}).get(key)
        text = self._job.argument(option) if option is not None and not isinstance(value, int) else None
        if text is not None and text.isdigit():
            return int(text)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def _stages(self) -> list[int]:
        value = self._value(STAGE)
        sections = {"offload_optimizer": 1, "offload_param": 3}
        devices = {each: self._value(f"zero_optimization.{each}.device") for each in sections}
        least = max(stage if devices[each] in ("cpu", "nvme") else 0 for each, stage in sections.items())
        listed = value if isinstance(value, list) else [value]
        if listed and all(type(each) is int and 0 <= each <= 3 for each in listed):
            return list(dict.fromkeys(listed))
        if value in (None, "auto", "all"):
            return list(range(least, 4))
        raise DeepSpeedConfigError(
            f'{STAGE} is {value!r}; for a search expected a stage from 0 to 3, a list of them, or "all"', path=STAGE
        )

    def _extras(self) -> dict[str, list[Any]]:
        """Keys with a list where the schema has one value, and what is tried unless the search is `fast`."""
        found: dict[str, list[Any]] = {}
        if not self._config.fast:
            found = {_BUCKET: list(_BUCKETS), _OVERLAP: [True, False]}
            for path, values in found.items():
                given = self._value(path)
                if given not in (None, "auto") and not isinstance(given, list):
                    found[path] = list(dict.fromkeys([given, *values]))
        for path, key in walk(Schema):
            value = self._value(path)
            if isinstance(value, list) and key.section is None and path not in (MICRO, STEPS, TRAIN, STAGE):
                if "list" in str(key.info.annotation).lower():
                    continue
                if not value:
                    raise DeepSpeedConfigError(f"{path} is an empty list; list the values to try", path=path)
                found[path] = value
        return found

    def _batches(self) -> Iterator[tuple[int, int]]:
        """(micro batch, accumulation steps): as many samples a step as given, where train_batch_size is."""
        config, train, listed = self._config, self._value(TRAIN), self._value(MICRO)
        least, most = config.min_train_micro_batch_size_per_gpu, config.max_train_micro_batch_size_per_gpu
        powers = itertools.takewhile(lambda size: size <= most, (least << power for power in range(32)))
        open_sizes: Iterable[int] = range(least, min(most, train) + 1) if isinstance(train, int) else powers
        sizes = set(listed if isinstance(listed, list) else [*open_sizes, self._number(MICRO)])
        steps = self._value(STEPS)
        counts = steps if isinstance(steps, list) else [self._number(STEPS) or 1]
        for micro in sorted(size for size in sizes if isinstance(size, int) and least <= size <= most):
            if isinstance(train, int):
                if train % (micro * self.replicas) == 0:
                    yield micro, train // (micro * self.replicas)
                continue
            for count in counts:
                samples = micro * count * self.replicas
                if config.min_train_batch_size <= samples <= (config.max_train_batch_size or samples):
                    yield micro, count
