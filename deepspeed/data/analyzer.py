"""Metrics of the samples of a dataset, computed before training: each worker maps its part, one reduces them.

[Note: the files of a metric]
In the folder of a metric `m`, as indexed datasets: `m_sample_to_metric` has the value of each sample in order;
`m_index_to_metric` has the values that occur, ascending, and `m_index_to_sample` the samples with each of them;
`m_index_to_sample_percentile_merged` has the samples of about a hundredth of these values in each item. A metric that
accumulates over samples has one item in `m_metric_value`.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import track
from torch.utils.data import DataLoader, Subset

from deepspeed import comm
from deepspeed.data.indexed_dataset import write_indexed
from deepspeed.errors import FileError, UsageError
from deepspeed.log import log_dist

__all__ = ["DataAnalyzer", "DistributedDataAnalyzer"]

SINGLE, ACCUMULATED = "single_value_per_sample", "accumulate_value_over_samples"
_PERCENTILES = 100
_Results = list[dict[str, Any]]


class DataAnalyzer:
    """Computes metrics of a dataset on `num_workers` machines with `num_threads` processes each.

    `run_map` computes this worker's part, `run_reduce` joins the parts of all and is called on one worker once all
    have mapped; `run_map_reduce` does both with a barrier between. A metric's function takes a batch and returns a
    tensor of integers, one for each sample, or sums for metrics that accumulate. A batch that is a mapping with
    `index` names its samples itself. The custom functions replace `init_metric_results`, `update_metric_results`,
    `finalize_metric_results` and `merge_map_results`, with the same arguments.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[..., Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str = "./",
        collate_fn: Callable[..., Any] | None = None,
        custom_map_init: Callable[..., Any] | None = None,
        custom_map_update: Callable[..., Any] | None = None,
        custom_map_finalize: Callable[..., Any] | None = None,
        custom_reduce: Callable[..., Any] | None = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        if not len(metric_names) == len(metric_functions) == len(metric_types):
            raise UsageError(
                f"metric_names, metric_functions and metric_types have {len(metric_names)}, {len(metric_functions)} "
                f"and {len(metric_types)} entries; each metric has one of each"
            )
        for name, kind in zip(metric_names, metric_types, strict=True):
            if kind not in (SINGLE, ACCUMULATED):
                raise UsageError(f"metric_types: {name} has {kind!r}; it must be {SINGLE} or {ACCUMULATED}")
        if not (0 <= worker_id < num_workers and num_threads >= 1 and batch_size >= 1):
            raise UsageError(
                f"worker_id {worker_id} of num_workers {num_workers}, num_threads {num_threads}, batch_size "
                f"{batch_size}: the first must be below the second, the others at least 1"
            )
        self.dataset = dataset
        self.num_workers, self.worker_id = num_workers, worker_id
        self.num_threads, self.num_threads_reduce = num_threads, num_threads_reduce
        self.specific_threads = list(specific_threads)
        self.batch_size = batch_size
        self.metric_names, self.metric_functions = list(metric_names), list(metric_functions)
        self.metric_types, self.metric_dtypes = list(metric_types), list(metric_dtypes)
        self.save_path = save_path
        self.collate_fn = collate_fn
        self.sample_indices = sample_indices
        self._init = custom_map_init or self.init_metric_results
        self._update = custom_map_update or self.update_metric_results
        self._finalize = custom_map_finalize or self.finalize_metric_results
        self._reduce = custom_reduce or self.merge_map_results

    # ---- map

    def init_metric_results(
        self,
        thread_id: int,
        metric_names: Sequence[str],
        metric_types: Sequence[str],
        metric_dtypes: Sequence[Any],
        save_path: str,
        worker_id: int,
    ) -> _Results:
        """Where the results of a thread go: one entry for each metric."""
        return [
            {"folder": Path(save_path, name, _part(worker_id, thread_id)), "values": [], "samples": []}
            for name in metric_names
        ]

    def update_metric_results(
        self,
        data: Any,
        metric_types: Sequence[str],
        metric_dtypes: Sequence[Any],
        metric_functions: Sequence[Callable[..., Any]],
        metric_results: _Results,
        batch_start_idx: int = 0,
    ) -> None:
        """Take the metrics of a batch, whose first sample has this place in the dataset."""
        each = zip(metric_types, metric_functions, metric_results, strict=True)
        for place, (kind, function, result) in enumerate(each):
            values = function(data)
            wanted = metric_dtypes[place] if metric_dtypes else None
            if not isinstance(values, torch.Tensor) or values.is_floating_point() or wanted not in (None, values.dtype):
                found = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
                raise UsageError(
                    f"the function of metric {self.metric_names[place]} gave {found}; expected a tensor of "
                    f"{wanted or 'integers'}"
                )
            if kind == ACCUMULATED:
                result["values"] = [values if not result["values"] else result["values"][0] + values]
                continue
            result["values"].append(values.flatten().clone())
            result["samples"].append(self._numbers(data, batch_start_idx, values.numel()))

    def _numbers(self, data: Any, start: int, count: int) -> npt.NDArray[np.int64]:
        if isinstance(data, Mapping) and "index" in data:
            return np.asarray(data["index"], dtype=np.int64).reshape(count, -1)[:, 0]
        if self.sample_indices is not None:
            return np.asarray(self.sample_indices[start : start + count], dtype=np.int64)
        return np.arange(start, start + count)

    def finalize_metric_results(
        self, metric_types: Sequence[str], metric_dtypes: Sequence[Any], metric_results: _Results
    ) -> None:
        """Write what a thread found."""
        for kind, result in zip(metric_types, metric_results, strict=True):
            found = {"values": np.empty(0, np.int64)}
            if result["values"]:
                found["values"] = torch.cat([each.reshape(-1) for each in result["values"]]).numpy()
            if kind == SINGLE:
                found["samples"] = np.concatenate([np.empty(0, np.int64), *result["samples"]])
            result["folder"].mkdir(parents=True, exist_ok=True)
            with open(result["folder"] / "map.part", "wb") as file:
                np.savez(file, allow_pickle=False, **found)
            os.replace(result["folder"] / "map.part", result["folder"] / "map.npz")

    def run_map_helper(self, thread_id: int) -> None:
        """Map the part of one thread."""
        parts = self.num_workers * self.num_threads
        number, total = self.worker_id * self.num_threads + thread_id, len(self.dataset)
        begin, stop = number * total // parts, (number + 1) * total // parts
        results = self._init(
            thread_id, self.metric_names, self.metric_types, self.metric_dtypes, self.save_path, self.worker_id
        )
        loader = DataLoader(Subset(self.dataset, range(begin, stop)), self.batch_size, collate_fn=self.collate_fn)
        for place, batch in enumerate(_shown(loader, number == 0)):
            self._update(
                batch,
                self.metric_types,
                self.metric_dtypes,
                self.metric_functions,
                results,
                begin + place * self.batch_size,
            )
        if self._update == self.update_metric_results:
            for name, kind, result in zip(self.metric_names, self.metric_types, results, strict=True):
                given = sum(map(len, result["samples"]))
                if kind == SINGLE and given != stop - begin:
                    raise UsageError(
                        f"the function of metric {name} gave {given} numbers for {stop - begin} samples; expected one "
                        "for each sample of its batch"
                    )
        self._finalize(self.metric_types, self.metric_dtypes, results)

    def run_map(self) -> None:
        """Map this worker's part; `specific_threads` of it if they are given."""
        threads = self.specific_threads or list(range(self.num_threads))
        if len(threads) == 1:
            self.run_map_helper(threads[0])
            return
        context = multiprocessing.get_context("fork")
        running = [context.Process(target=self._one_core, args=(each,)) for each in threads]
        for each in running:
            each.start()
        for each in running:
            each.join()
        failed = [number for number, each in zip(threads, running, strict=True) if each.exitcode]
        if failed:
            raise UsageError(
                f"the analyzer's threads {failed} of worker {self.worker_id} failed; see their errors above"
            )

    def _one_core(self, thread_id: int) -> None:
        torch.set_num_threads(1)  # a forked process has no other threads of torch's
        self.run_map_helper(thread_id)

    # ---- reduce

    def run_reduce(self) -> None:
        """Join what all workers found."""
        self._reduce(
            self.dataset,
            self.metric_names,
            self.metric_types,
            self.save_path,
            self.num_workers,
            self.num_threads,
            self.num_threads_reduce,
        )

    def merge_map_results(
        self,
        dataset: Any,
        metric_names: Sequence[str],
        metric_types: Sequence[str],
        save_path: str,
        num_workers: int,
        num_threads: int,
        num_threads_reduce: int,
    ) -> None:
        """Write the files of each metric; see [Note: the files of a metric]. Sorting needs no threads of its own."""
        for name, kind in zip(metric_names, metric_types, strict=True):
            parts = list(_mapped(Path(save_path, name), name, num_workers, num_threads))
            if kind == ACCUMULATED:
                found = [values for values, _ in parts if values.size]
                total = np.sum(found, axis=0, keepdims=len(found) == 0)
                write_indexed(str(Path(save_path, name, f"{name}_metric_value")), [_fitting(total).reshape(-1)])
                continue
            values = np.concatenate([each for each, _ in parts])
            samples = np.concatenate([each for _, each in parts])
            if not values.size:
                raise UsageError(f"metric {name}: the dataset has no samples")
            _write_single(str(Path(save_path, name, name)), values, samples, len(dataset))
            counts = np.unique(values, return_counts=True)
            self.get_metric_value_percentiles(
                name, dict(zip(*map(np.ndarray.tolist, counts), strict=True)), len(values)
            )

    def get_metric_value_percentiles(
        self, metric_name: str, num_sample_per_value: Mapping[int, int], total_num_samples: int
    ) -> dict[int, int]:
        """Percentage of the samples → the value that so many reach; logged, for the choice of difficulties."""
        ordered = sorted(num_sample_per_value)
        reached = np.cumsum([num_sample_per_value[each] for each in ordered]) / total_num_samples * 100
        shares = range(5, 101, 5)
        found = {share: ordered[min(int(np.searchsorted(reached, share)), len(ordered) - 1)] for share in shares}
        log_dist(f"metric {metric_name}: values at percentiles {found}")
        return found

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Map on every worker, all of which call this, then reduce on the first."""
        self.run_map()
        _wait(comm_group)
        if self.worker_id == 0:
            self.run_reduce()
        _wait(comm_group)


class DistributedDataAnalyzer(DataAnalyzer):
    """The same with the ranks of a process group as workers; they share the folder `save_path`."""

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[..., Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: str = "./",
        collate_fn: Callable[..., Any] | None = None,
        device: Any = "cpu",
        comm_group: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        """Number and place of this worker are those of the rank where ranks exist; `device` is where batches go."""
        if comm.is_initialized():
            num_workers, worker_id = comm.get_world_size(comm_group), comm.get_rank(comm_group)
        super().__init__(
            dataset,
            num_workers=num_workers,
            worker_id=worker_id,
            num_threads=num_threads,
            batch_size=batch_size,
            metric_names=metric_names,
            metric_functions=[_on(device, each) for each in metric_functions],
            metric_types=metric_types,
            save_path=save_path,
            collate_fn=collate_fn,
            sample_indices=sample_indices,
        )
        self._group = comm_group

    def run_map_reduce(self, comm_group: Any = None) -> None:
        super().run_map_reduce(self._group if comm_group is None else comm_group)


def _on(device: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    def there(data: Any) -> Any:
        values = function(data.to(device) if isinstance(data, torch.Tensor) else data)
        return values.cpu() if isinstance(values, torch.Tensor) else values

    return there


def _wait(group: Any) -> None:
    if comm.is_initialized():
        comm.barrier(group)


def _part(worker: int, thread: int) -> str:
    return f"worker{worker}_thread{thread}"


def _shown(loader: DataLoader[Any], first: bool) -> Iterator[Any]:
    """The batches, with a bar of the first thread's progress where someone may look."""
    yield from track(loader, "analyzing samples") if first and sys.stderr.isatty() else loader


def _mapped(folder: Path, name: str, workers: int, threads: int) -> Iterator[tuple[Any, Any]]:
    for worker in range(workers):
        for thread in range(threads):
            path = folder / _part(worker, thread) / "map.npz"
            try:
                with np.load(path, allow_pickle=False) as found:
                    yield found["values"], found["samples"] if "samples" in found else np.empty(0, np.int64)
            except (OSError, ValueError, KeyError) as error:
                raise FileError(
                    errno.ENOENT,
                    f"metric {name}: worker {worker}, thread {thread} has no readable map results; run_map of "
                    f"{workers} workers with {threads} threads comes before run_reduce",
                    str(path),
                ) from error


def _fitting(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values in the smallest integers that hold them all."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    kinds = "uint8 uint16 uint32 uint64" if low >= 0 else "int8 int16 int32 int64"
    for kind in kinds.split():
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return values.astype(kind)
    raise UsageError(f"values from {low} to {high} fit in no integer of 64 bits")


def _write_single(prefix: str, values: npt.NDArray[Any], samples: npt.NDArray[np.int64], total: int) -> None:
    values = _fitting(values)
    ordered = np.argsort(values, kind="stable")
    unique, counts = np.unique(values, return_counts=True)
    numbers = samples[ordered].astype(_fitting(np.array([0, max(total - 1, int(samples.max()))])).dtype)
    step = max(1, len(unique) // _PERCENTILES)
    write_indexed(f"{prefix}_sample_to_metric", [values], np.ones(len(values)))
    write_indexed(f"{prefix}_index_to_metric", [unique], np.ones(len(unique)))
    write_indexed(f"{prefix}_index_to_sample", [numbers], counts)
    merged = np.add.reduceat(counts, np.arange(0, len(counts), step))
    write_indexed(f"{prefix}_index_to_sample_percentile_merged", [numbers], merged)
