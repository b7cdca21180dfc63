"""`DeepSpeedDataSampler`: batches of samples that get harder, out of clusters of samples of like difficulty.

[Note: clusters]
Each change of a difficulty makes a cluster of the samples that are newly allowed. A global batch draws a cluster for
each of its samples, by the sizes of the clusters, and takes the next samples of the shuffled clusters; a cluster that
is used up is shuffled again. All ranks draw the same numbers, so that they need not talk. Rank 0 alone shuffles: it
writes the cluster, and beside it what its random state was before and is after, by an atomic rename; the other ranks
wait for that file and go on with that state. What a cluster holds follows from config, seed and step, so that after a
crash the same file is found, or written again. Files are memory-mapped: no rank holds the dataset.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed.config.data import CurriculumMetricConfig, DataEfficiencyConfig
from deepspeed.data.curriculum import CurriculumScheduler
from deepspeed.data.indexed_dataset import MMapIndexedDataset, write_indexed
from deepspeed.errors import DeepSpeedConfigError, FileError, UsageError

__all__ = ["DeepSpeedDataSampler"]

_WAIT_SECONDS = 1800.0
_STATE = (
    *("batch", "consumed_samples", "curriculum_step", "current_difficulties", "data_cluster_paths"),
    *("data_cluster_current_position", "np_rng_state"),
)


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
        self._values = {name: _values(_opened(name, "index_to_metric_path", each)) for name, each in by_value.items()}
        for name, values in self._values.items():
            if len(values) != len(self._samples[name]):
                raise _wrong_metric(
                    name, f"has {len(self._samples[name])} lists of samples and {len(values)} values of another dataset"
                )
        self._folder = Path(str(section.data_cluster_path))
        told = {name: each.model_dump(mode="json") for name, each in self._metrics.items()}
        text = json.dumps([told, config.seed, one_epoch_total_samples, self.global_batch_size], sort_keys=True)
        self._digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._clusters: list[npt.NDArray[Any]] = []

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
        first, last = np.searchsorted(self._values[metric], [value_start, value_end], side="right")
        return self._flat(metric, int(self._bounds(metric)[first]), int(self._bounds(metric)[last]))

    def get_sample_based_on_metric_percentile(
        self, metric: str, percentile_start: int, percentile_end: int
    ) -> npt.NDArray[Any]:
        """The samples between two percentages, of max_difficulty, in the order of the metric."""
        total, most = int(self._bounds(metric)[-1]), self._metrics[metric].max_difficulty or 100
        share = total // most
        stop = total if percentile_end == most else share * percentile_end
        return self._flat(metric, share * percentile_start, stop)

    def _bounds(self, metric: str) -> npt.NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self._samples[metric].sizes, dtype=np.int64)])

    def _flat(self, metric: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Samples in the order of the metric: the items lie one behind the other."""
        dataset = self._samples[metric]
        found = np.frombuffer(dataset._data, dataset.dtype_of_items)[start:stop]
        if len(found) != max(stop - start, 0) or (len(found) and int(found.max()) >= self.one_epoch_total_samples):
            raise _wrong_metric(metric, f"names samples beyond the {self.one_epoch_total_samples} of the dataset")
        return found

    def _allowed(self, metric: str, previous: int | None, now: int) -> npt.NDArray[Any]:
        if self._metrics[metric].difficulty_type == "value":
            return self.get_sample_based_on_metric_value(metric, float("-inf") if previous is None else previous, now)
        return self.get_sample_based_on_metric_percentile(metric, previous or 0, now)

    def get_new_cluster(self, previous_difficulties: Mapping[str, int]) -> None:
        """Make a cluster of what the difficulties newly allow; none if that is nothing."""
        number = len(self._clusters)

        def samples() -> npt.NDArray[Any]:
            now, names = self.current_difficulties, list(self._clustered)
            if len(names) == 1:
                return self._allowed(names[0], previous_difficulties.get(names[0]), now[names[0]])
            found: npt.NDArray[Any] = np.arange(self.one_epoch_total_samples) if not names else np.empty(0)
            for place, name in enumerate(names):
                each = self._allowed(name, None, now[name])
                found = each if place == 0 else np.intersect1d(found, each, assume_unique=True)
            for cluster in self._clusters:
                found = np.setdiff1d(found, cluster, assume_unique=True)
            return found

        if not self._clustered and number:
            return  # one cluster has all samples
        path = self._folder / f"cluster_{number}_step{self.curriculum_step}_{self._digest}"
        cluster = self._shuffled(path, samples)
        if len(cluster):
            self._clusters.append(cluster)
            self.data_cluster_paths.append(str(path))
            self.data_cluster_current_position.append(0)

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
            taken = self._clusters[cidx][begin : begin + num_samples - len(found)].tolist()
            found += taken
            self.data_cluster_current_position[cidx] = begin + len(taken)
            if len(found) < num_samples:
                self.reshuffle_clusters(cidx)
        return found

    def reshuffle_clusters(self, cidx: int) -> None:
        """Begin a cluster again in another order."""
        base, _, times = self.data_cluster_paths[cidx].partition(".again")
        path = Path(f"{base}.again{int(times or 0) + 1}")
        self._clusters[cidx] = self._shuffled(path, lambda: self._clusters[cidx])
        self.data_cluster_paths[cidx] = str(path)
        self.data_cluster_current_position[cidx] = 0

    def _shuffled(self, path: Path, samples: Any) -> npt.NDArray[Any]:
        """The samples of a file that rank 0 writes if it is not there; the random state goes on behind it."""
        before, note = _plain(self.np_rng.bit_generator.state), Path(f"{path}.json")
        if self.global_rank == 0 and _noted(note).get("before") != before:
            self._write(path, note, np.array(samples()), before)
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
        return _cluster(str(path)) if found["size"] else np.empty(0, np.int64)

    def _write(self, path: Path, note: Path, order: npt.NDArray[Any], before: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self.np_rng.shuffle(order)
        note.unlink(missing_ok=True)
        if order.size:
            write_indexed(str(path), order, np.array([order.size]))
        after = _plain(self.np_rng.bit_generator.state)
        part = Path(f"{note}.part")
        part.write_text(json.dumps({"before": before, "after": after, "size": order.size}), encoding="utf-8")
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
        self._clusters = [_cluster(path) for path in self.data_cluster_paths]


def _cluster(path: str) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = MMapIndexedDataset(path)[0]
    return found


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


def _values(dataset: MMapIndexedDataset) -> npt.NDArray[Any]:
    return np.frombuffer(dataset._data, dataset.dtype_of_items)


def _wrong_metric(metric: str, found: str) -> DeepSpeedConfigError:
    return DeepSpeedConfigError(
        f"data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.{metric}: index_to_sample {found}. "
        "Analyse the dataset again",
        path="data_efficiency.data_sampling.curriculum_learning.curriculum_metrics",
    )
