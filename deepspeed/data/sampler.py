"""`DeepSpeedDataSampler`: batches of samples that get harder, out of clusters of samples of like difficulty.

[Note: clusters]
Each change of a difficulty makes a cluster of the samples that are newly allowed. A global batch draws a cluster for
each of its samples, by the sizes of the clusters, and takes the next samples of the shuffled clusters; a cluster that
is used up is shuffled again. All ranks draw the same numbers, so that they need not talk. Rank 0 alone shuffles: it
writes the cluster, and beside it what its random state was before and is after, by an atomic rename; the other ranks
wait for that file and go on with that state. What a cluster holds follows from config, seed and step, so that after a
crash the same file is found, or written again. Files are memory-mapped: no rank holds the dataset.

Clusters of a dataset of more than four million samples are not shuffled, which would need them in memory and take
half a minute for 100 million. Their files stay in order, and samples are drawn through a `_Permutation` that follows
from the name of the cluster.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed.config.data import CurriculumMetricConfig, DataEfficiencyConfig
from deepspeed.data.curriculum import CurriculumScheduler
from deepspeed.data.indexed_dataset import MMapIndexedDataset, write_indexed
from deepspeed.errors import DeepSpeedConfigError, FileError, UsageError
from deepspeed.log import logger

__all__ = ["DeepSpeedDataSampler"]

_WAIT_SECONDS = 1800.0
_SHUFFLED = 1 << 22
"""Samples of the largest dataset whose clusters are shuffled in memory."""
_CHUNK = 1 << 18
_AGAIN = ".again"
_STATE = (
    *("batch", "consumed_samples", "curriculum_step", "current_difficulties", "data_cluster_paths"),
    *("data_cluster_current_position", "np_rng_state"),
)


class _Permutation:
    """A pseudo-random order of numbers below `size` that needs no memory.

    Four rounds of a Feistel network permute the numbers below a power of four; results that are too large go through
    it again until they are not.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = np.frombuffer(hashlib.sha256(name.encode()).digest(), "<u8")

    def __call__(self, places: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """What stands at these places."""
        found = self._permuted(places.astype(np.uint64))
        while (beyond := found >= self._size).any():
            found[beyond] = self._permuted(found[beyond])
        return found.astype(np.int64)

    def _permuted(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half, mixer = np.uint64(self._half), np.uint64(0x9E3779B97F4A7C15)
        left, right = numbers >> half, numbers & np.uint64((1 << self._half) - 1)
        for key in self._keys:
            mixed = (right ^ key) * mixer
            mixed = (mixed ^ (mixed >> np.uint64(32))) * mixer
            left, right = right, left ^ (mixed >> np.uint64(64 - self._half))
        found: npt.NDArray[np.uint64] = (left << half) | right
        return found


@dataclass(frozen=True)
class _Cluster:
    """Samples of a file, and the order in which they are drawn if that is not theirs."""

    samples: npt.NDArray[Any]
    order: _Permutation | None

    def __len__(self) -> int:
        return len(self.samples)

    def draw(self, begin: int, count: int) -> list[int]:
        """The samples from a place on, fewer where the cluster ends."""
        if self.order is None:
            return self.samples[begin : begin + count].tolist()  # type: ignore[no-any-return]
        places = np.arange(begin, min(begin + count, len(self)))
        return self.samples[self.order(places)].tolist()  # type: ignore[no-any-return]


class DeepSpeedDataSampler:
    """Gives the indices of each micro-batch of one rank; see [Note: clusters].

    `data_efficiency_config` is that section, as a dict or as the engine's config has it. Its state is the same on all
    ranks, and fits any number of them with the same global batch size.
    """

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any] | DataEfficiencyConfig,
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any,
        gradient_accumulation_steps: int,
        global_rank: int,
        drop_last: bool = True,
    ) -> None:
        given = data_efficiency_config
        config = given if isinstance(given, DataEfficiencyConfig) else DataEfficiencyConfig.model_validate(dict(given))
        if one_epoch_total_samples < 1:
            raise UsageError(f"one_epoch_total_samples is {one_epoch_total_samples}; there is nothing to sample")
        self.one_epoch_total_samples = one_epoch_total_samples
        self.total_samples = one_epoch_total_samples * config.data_sampling.num_epochs
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.global_batch_size = self.micro_batch_times_data_parallel_size * gradient_accumulation_steps
        self.global_rank = global_rank
        self.drop_last = drop_last  # global batches are whole: clusters begin again
        self.np_rng = np.random.default_rng(config.seed)
        self.batch: list[int] = []
        self.consumed_samples = 0
        self.curriculum_step = 0
        self.current_difficulties: dict[str, int] = {}
        self.data_cluster_paths: list[str] = []
        self.data_cluster_current_position: list[int] = []
        section = config.curriculum
        if section is None:
            raise DeepSpeedConfigError(
                "data_efficiency.data_sampling.curriculum_learning.enabled is not true; the sampler needs it",
                path="data_efficiency.data_sampling.curriculum_learning.enabled",
            )
        self._metrics = section.curriculum_metrics
        self.curriculum_schedulers = {name: CurriculumScheduler(each) for name, each in self._metrics.items()}
        self._clustered = {n: each for n, each in self._metrics.items() if each.clustering_type != "single_cluster"}
        self._samples = {name: _opened(name, "index_to_sample_path", each) for name, each in self._clustered.items()}
        by_value = {name: each for name, each in self._clustered.items() if each.difficulty_type == "value"}
        self._values = {name: _opened(name, "index_to_metric_path", each).elements() for name, each in by_value.items()}
        for name, dataset in self._samples.items():
            found = dataset.first_element(len(dataset))
            if found > one_epoch_total_samples:
                raise _wrong_metric(name, f"names {found} samples, and the dataset has {one_epoch_total_samples}")
            if found < one_epoch_total_samples:
                logger.warning(
                    "metric %s has %d of the %d samples of the dataset; the others are never drawn",
                    *(name, found, one_epoch_total_samples),
                )
        for name, values in self._values.items():
            if len(values) != len(self._samples[name]):
                raise _wrong_metric(
                    name, f"has {len(self._samples[name])} lists of samples and {len(values)} values of another dataset"
                )
        self._folder = Path(str(section.data_cluster_path))
        told: dict[str, Any] = {
            name: each.model_dump(mode="json", exclude={"index_to_sample_path", "index_to_metric_path"})
            for name, each in self._metrics.items()
        }
        for name, dataset in self._samples.items():
            told[name]["files"] = [len(dataset), dataset.first_element(len(dataset))]
        text = json.dumps([told, config.seed, one_epoch_total_samples, self.global_batch_size], sort_keys=True)
        self._digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._clusters: list[_Cluster] = []
        self._permutes = one_epoch_total_samples > _SHUFFLED

    def __len__(self) -> int:
        return self.total_samples

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Any]) -> None:
        """Give metrics whose schedule_type is custom their functions of the step."""
        for name, function in schedule_func_dict.items():
            if name in self.curriculum_schedulers:
                self.curriculum_schedulers[name].set_custom_get_difficulty(function)

    def __iter__(self) -> Iterator[list[int]]:
        size = self.micro_batch_times_data_parallel_size
        while self.consumed_samples < self.total_samples:
            if not self.batch:
                self.get_next_global_batch()
            current, self.batch = self.batch[:size], self.batch[size:]
            self.consumed_samples += len(current)
            start, stop = self.get_start_end_idx(len(current))
            yield current[start:stop]

    def get_start_end_idx(self, batch_len: int | None = None) -> tuple[int, int]:
        """This rank's part of a micro-batch of all ranks, which may be smaller than usual."""
        length = self.micro_batch_times_data_parallel_size if batch_len is None else batch_len
        rank, ranks = self.data_parallel_rank, self.data_parallel_size
        return rank * length // ranks, (rank + 1) * length // ranks

    def get_next_global_batch(self) -> None:
        """Draw the samples of the next step."""
        self.curriculum_step += 1
        previous: dict[str, int] = {}
        changed = False
        for name, scheduler in self.curriculum_schedulers.items():
            now = scheduler.update_difficulty(self.curriculum_step)
            before = self.current_difficulties.get(name)
            if before is not None:
                previous[name] = before
            changed = changed or before != now
            self.current_difficulties[name] = now
        if changed:
            self.get_new_cluster(previous)
        if not self._clusters:
            raise DeepSpeedConfigError(
                f"no sample is as easy as {self.current_difficulties}, what step {self.curriculum_step} allows; "
                "raise min_difficulty of the metrics",
                path="data_efficiency.data_sampling.curriculum_learning.curriculum_metrics",
            )
        batch: list[int] = []
        for cluster, count in enumerate(self.sample_from_clusters()):
            batch += self.get_sample_from_cluster(cluster, int(count))
        self.np_rng.shuffle(batch)
        self.batch = batch

    # ---- clusters

    def get_sample_based_on_metric_value(self, metric: str, value_start: float, value_end: float) -> npt.NDArray[Any]:
        """The samples whose value lies in (start, end]."""
        dataset, values = self._samples[metric], self._values[metric]
        first, last = (dataset.first_element(bisect_right(values, each)) for each in (value_start, value_end))
        return self._flat(metric, first, last)

    def get_sample_based_on_metric_percentile(
        self, metric: str, percentile_start: int, percentile_end: int
    ) -> npt.NDArray[Any]:
        """The samples between two percentages, of max_difficulty, in the order of the metric."""
        dataset, most = self._samples[metric], self._metrics[metric].max_difficulty or 100
        total = dataset.first_element(len(dataset))
        share = total // most
        stop = total if percentile_end == most else share * percentile_end
        return self._flat(metric, share * percentile_start, stop)

    def _flat(self, metric: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Samples in the order of the metric: the items lie one behind the other."""
        found, total = self._samples[metric].elements(start, stop), self.one_epoch_total_samples
        if len(found) != max(stop - start, 0) or (len(found) and not 0 <= int(found.min()) <= int(found.max()) < total):
            raise _wrong_metric(metric, f"names samples beyond the {self.one_epoch_total_samples} of the dataset")
        return found

    def _allowed(self, metric: str, previous: int | None, now: int) -> npt.NDArray[Any]:
        if self._metrics[metric].difficulty_type == "value":
            return self.get_sample_based_on_metric_value(metric, float("-inf") if previous is None else previous, now)
        return self.get_sample_based_on_metric_percentile(metric, previous or 0, now)

    def get_new_cluster(self, previous_difficulties: Mapping[str, int]) -> None:
        """Make a cluster of what the difficulties newly allow; none if that is nothing."""
        number = len(self._clusters)
        if not self._clustered and number:
            return  # one cluster has all samples
        name = f"cluster_{number}_step{self.curriculum_step}_{self._digest}"
        cluster = self._written(name, lambda: self._newly_allowed(previous_difficulties))
        if cluster is not None:
            self._clusters.append(cluster)
            self.data_cluster_paths.append(name)
            self.data_cluster_current_position.append(0)

    def _newly_allowed(self, previous: Mapping[str, int]) -> Iterator[npt.NDArray[Any]]:
        """What the difficulties allow and no cluster has; of several metrics, what all of them allow."""
        now, names, total = self.current_difficulties, list(self._clustered), self.one_epoch_total_samples
        kind = np.min_scalar_type(total - 1)
        if len(names) == 1:
            yield self._allowed(names[0], previous.get(names[0]), now[names[0]])
            return
        if not names:
            yield from (np.arange(at, min(at + _CHUNK, total), dtype=kind) for at in range(0, total, _CHUNK))
            return
        counts = np.min_scalar_type(len(names))
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.truncate(total * counts.itemsize)
            allowing = np.frombuffer(mmap.mmap(file.fileno(), 0), counts)  # by how many metrics a sample is allowed
            for place, name in enumerate(names):
                for chunk in _chunks(self._allowed(name, None, now[name])):
                    allowing[chunk[allowing[chunk] == place]] = place + 1
            for cluster in self._clusters:
                for chunk in _chunks(cluster.samples):
                    allowing[chunk] = 0
            for at in range(0, total, _CHUNK):
                yield (np.flatnonzero(allowing[at : at + _CHUNK] == len(names)) + at).astype(kind)

    def sample_from_clusters(self) -> npt.NDArray[np.int64]:
        """How many samples of a global batch come from each cluster."""
        sizes = [len(each) for each in self._clusters]
        weights = [size / sum(sizes) for size in sizes]
        drawn = self.np_rng.choice(len(sizes), self.global_batch_size, replace=True, p=weights)
        return np.bincount(drawn, minlength=len(sizes))

    def get_sample_from_cluster(self, cidx: int, num_samples: int) -> list[int]:
        """The next samples of a cluster."""
        found: list[int] = []
        while len(found) < num_samples:
            begin = self.data_cluster_current_position[cidx]
            taken = self._clusters[cidx].draw(begin, num_samples - len(found))
            found += taken
            self.data_cluster_current_position[cidx] = begin + len(taken)
            if len(found) < num_samples:
                self.reshuffle_clusters(cidx)
        return found

    def reshuffle_clusters(self, cidx: int) -> None:
        """Begin a cluster again in another order."""
        base, _, times = self.data_cluster_paths[cidx].partition(_AGAIN)
        name, before = f"{base}{_AGAIN}{int(times or 0) + 1}", self._clusters[cidx]
        again = self._opened(name) if self._permutes else self._written(name, lambda: [before.samples])
        assert again is not None, "a cluster has samples"
        self._clusters[cidx] = again
        self.data_cluster_paths[cidx] = name
        self.data_cluster_current_position[cidx] = 0

    def _opened(self, name: str) -> _Cluster:
        stored = name.partition(_AGAIN)[0] if self._permutes else name
        samples = MMapIndexedDataset(str(self._folder / stored)).elements()
        return _Cluster(samples, _Permutation(len(samples), name) if self._permutes else None)

    def _written(self, name: str, samples: Callable[[], Iterable[npt.NDArray[Any]]]) -> _Cluster | None:
        """A cluster that rank 0 writes if its file is not there, none of no samples; the random state goes on."""
        before, path = _plain(self.np_rng.bit_generator.state), self._folder / name
        note = Path(f"{path}.json")
        if self.global_rank == 0 and _noted(note).get("before") != before:
            self._write(path, note, samples, before)
        waited = time.monotonic()
        while (found := _noted(note)).get("before") != before:
            if time.monotonic() - waited > _WAIT_SECONDS:
                raise FileError(
                    errno.ETIMEDOUT,
                    f"rank 0 wrote no cluster in {_WAIT_SECONDS:.0f} s; data_cluster_path must be a folder that all "
                    "ranks see, and all ranks must have the same config and seed",
                    str(path),
                )
            time.sleep(0.02)
        self.np_rng.bit_generator.state = found["after"]
        return self._opened(name) if found["size"] else None

    def _write(self, path: Path, note: Path, samples: Callable[[], Iterable[npt.NDArray[Any]]], before: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        note.unlink(missing_ok=True)
        parts = samples()
        if not self._permutes:
            whole = np.concatenate([*parts])
            self.np_rng.shuffle(whole)
            parts = [whole]
        size = write_indexed(str(path), parts)
        after = _plain(self.np_rng.bit_generator.state)
        part = Path(f"{note}.part")
        part.write_text(json.dumps({"before": before, "after": after, "size": size}), encoding="utf-8")
        os.replace(part, note)
        self.np_rng.bit_generator.state = before

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Where the next micro-batch comes from."""
        state = {name: getattr(self, name) for name in _STATE if name != "np_rng_state"}
        state["np_rng_state"] = _plain(self.np_rng.bit_generator.state)
        return {name: value.copy() if isinstance(value, (list, dict)) else value for name, value in state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where the state was taken."""
        missing = set(_STATE) - set(state_dict)
        if missing:
            raise UsageError(f"the sampler's state has no {', '.join(sorted(missing))}; it has {sorted(state_dict)}")
        foreign = [each for each in state_dict["data_cluster_paths"] if self._digest not in Path(each).name]
        if foreign:
            raise DeepSpeedConfigError(
                f"data_efficiency.data_sampling.curriculum_learning: the cluster {foreign[0]} is of another config; "
                "metrics, seed, dataset and global batch size must be those that the checkpoint was trained with",
                path="data_efficiency.data_sampling.curriculum_learning",
            )
        for name in _STATE:
            value = state_dict[name]
            if name != "np_rng_state":
                setattr(self, name, value.copy() if isinstance(value, (list, dict)) else value)
        self.np_rng.bit_generator.state = state_dict["np_rng_state"]
        for name, difficulty in self.current_difficulties.items():
            self.curriculum_schedulers[name].set_current_difficulty(difficulty)
        self.data_cluster_paths = [Path(each).name for each in self.data_cluster_paths]  # the folder may have moved
        self._clusters = [self._opened(each) for each in self.data_cluster_paths]


def _chunks(samples: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    return (samples[at : at + _CHUNK] for at in range(0, len(samples), _CHUNK))


def _plain(state: Any) -> Any:
    """A random state as JSON gives it back."""
    return json.loads(json.dumps(state, default=int))


def _noted(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def _opened(metric: str, key: str, section: CurriculumMetricConfig) -> MMapIndexedDataset:
    path = str(getattr(section, key))
    try:
        return MMapIndexedDataset(path)
    except FileError as error:
        raise DeepSpeedConfigError(
            f"data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.{metric}.{key} is {path!r}: "
            f"{error}. deepspeed.data's analyzer writes these files",
            path=f"data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.{metric}.{key}",
        ) from error


def _wrong_metric(metric: str, found: str) -> DeepSpeedConfigError:
    return DeepSpeedConfigError(
        f"data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.{metric}: index_to_sample {found}. "
        "Analyse the dataset again",
        path="data_efficiency.data_sampling.curriculum_learning.curriculum_metrics",
    )
