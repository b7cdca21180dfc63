"""`PipelineEngine`: trains and evaluates batch by batch; inside, a schedule is played over the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.checkpoint.formats.source import Source
from deepspeed.comm import Pending
from deepspeed.errors import DeepSpeedConfigError, PipelineError, UsageError
from deepspeed.events import Phase, PhaseFailed
from deepspeed.log import log_dist, warn_once
from deepspeed.pipe.accord import Accord
from deepspeed.pipe.executor import Batch, Executor, Results
from deepspeed.pipe.feed import Feed
from deepspeed.pipe.gathering import whole_state
from deepspeed.pipe.lost import naming_stages
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.outputs import averaged, joined, number
from deepspeed.pipe.schedule.actions import Schedule
from deepspeed.pipe.schedule.generators import forward_only
from deepspeed.pipe.schedule.names import kind_of, make
from deepspeed.pipe.wires import Wires
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.step.choose import tell_if_frozen
from deepspeed.zero.agreement import Hosts

__all__ = ["PipelineEngine"]


class PipelineEngine(DeepSpeedEngine):
    """An engine over a `PipelineModule`: `train_batch` is forward, backward and step of a whole batch."""

    module: PipelineModule
    _collaborators = (*DeepSpeedEngine._collaborators, "_accord", "_executor", "_feed", "_wires")

    def __init__(self, parts: Parts, has_bool_tensors: bool = False) -> None:
        """`has_bool_tensors` needs no saying: every dtype is sent as it is."""
        super().__init__(parts)
        module = self.module
        parts.layers, parts.holds = module.layer_names(), module.holds
        schema = parts.config.schema
        self.schedule_name = _chosen(schema.pipeline.schedule, module)
        if schema.pipeline.activation_checkpoint_interval > 0:
            module.set_checkpoint_interval(schema.pipeline.activation_checkpoint_interval)
        if schema.pipeline.use_reentrant is not None:
            module.use_reentrant = schema.pipeline.use_reentrant
        self._accord = Accord(parts.layout)
        _require(parts, module, self._accord)
        hosts = Hosts(parts.layout.world)
        module.ties.require_alike(hosts)
        tell_if_frozen(module, parts.basic_optimizer, hosts)
        stages = parts.layout["pp"]
        self._wires = Wires(stages, parts.device, dynamic=module.dynamic_shape, foretold=module.foretold)
        self._wires.open()
        self._schedules: dict[tuple[str, int], Schedule] = {}
        self._executor = Executor(parts, module, self._wires, splits=self._splits())
        parts.reducer.keep_back(module.ties.shared())
        self._feed = Feed(parts.training_dataloader, needed=module.first or module.last)
        self._feed.batch_fn = None if module.cut is None else module.cut.pair
        self._plan(self.gradient_accumulation_steps())
        self._at_boundary = False
        self._additional: dict[str, Tensor] | None = None
        self.agg_train_loss: Tensor | None = None
        log_dist(f"pipeline: {self.schedule_name}; {module.describe()}")

    # ---- the loop

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on the next batch; the mean loss of its micro-batches over all replicas, on every rank."""
        if not torch.is_grad_enabled():
            raise PipelineError("train_batch() needs gradients, and they are switched off; use eval_batch()")
        if data_iter is not None:
            self._feed.use_iterator(data_iter, again=True)
        with naming_stages(self.module.topology()):
            return self._train()

    def _train(self) -> Tensor:
        count = self.gradient_accumulation_steps()
        if self._parts.moved:
            self._must_be_here("engine.train_batch()", trains=True, steps=True)
        self.train()
        self._look_for_unfrozen()
        results = self._play(self._plan(count), *self._load(self._feed, "train_batch()", count))
        self.module.ties.reduce(self._parts.reducer.change_unreduced)
        loss = self._mean(results)
        assert loss is not None, "the loss of a training batch is told to all ranks"
        self._additional = self._mean_extra(results)
        self.loss_of_step = loss
        try:
            self._take_batch_step(count)
        finally:  # also for whoever looks why the step failed
            self.agg_train_loss = loss.wait()
        return self.agg_train_loss

    def _take_batch_step(self, count: int) -> None:
        self._parts.accumulation.micro_steps += count - 1
        self._at_boundary = True
        try:
            super().step()
        finally:
            self._at_boundary = False

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss of the next batch without training on it; with `return_logits` (loss, outputs).

        Outputs are those of the last stage, None elsewhere; the loss is there only, too, without `bcast_loss`. Without
        `compute_loss` the mean of the outputs takes its place. `reduce_output=None` gives a list in place of a mean,
        with one for each micro-batch.
        """
        if reduce_output not in ("avg", None):
            raise UsageError(f"reduce_output is 'avg' or None; found {reduce_output!r}")
        results = self._evaluate(data_iter, num_micro_batches, compute_loss, keep=return_logits or not compute_loss)
        value: Any
        if not compute_loss:
            value = averaged(results.outputs) if reduce_output == "avg" else results.outputs or None
        else:
            mean = self._mean(results, tell=bcast_loss)
            value = None if mean is None else mean.wait()
            value = value if reduce_output == "avg" else results.losses or None
        return (value, joined(results.outputs)) if return_logits else value

    def inference_batch(self, data_iter: Iterator[Any], num_micro_batches: int | None = None) -> list[Any] | None:
        """The outputs of the last stage for each micro-batch of the next batch; None on other stages."""
        return self._evaluate(data_iter, num_micro_batches, compute_loss=False, keep=True).outputs or None

    def _evaluate(self, data_iter: Any, count: int | None, compute_loss: bool, *, keep: bool) -> Results:
        count = self.gradient_accumulation_steps() if count is None else count
        if not isinstance(count, int) or count < 1:
            raise UsageError(f"num_micro_batches is {count!r}; expected a whole number of at least 1")
        feed, training = self._feed.lend(data_iter), self.module.training
        with naming_stages(self.module.topology()):
            loaded = self._load(feed, "eval_batch()", count)
            self.module.eval()
            try:
                with torch.no_grad(), self._wires.other_forms():
                    return self._play(self._forward_plan(count), *loaded, compute_loss=compute_loss, keep_outputs=keep)
            finally:
                self.module.train(training)

    def _load(self, feed: Feed, what: str, count: int) -> tuple[list[Batch], Callable[[], None]]:
        """The micro-batches of a batch that this rank has, and what asks whether all ranks have theirs."""
        error: Exception | None = None
        batches: list[Batch] = []
        try:
            batches = feed.take(count)
        except Exception as caught:  # noqa: BLE001 - the data is the script's; the error is raised on all ranks
            error = caught
        return batches, self._accord.begin(what, count, len(batches) if feed.needed else None, error)

    def _play(self, schedule: Schedule, batches: list[Batch], ask: Any, **options: Any) -> Results:
        layout, wanted = self._parts.layout, schedule.micro_batches * self._feed.needed
        try:
            # A rank that has its data computes before it asks, if no replica could wait for it inside of layers.
            if len(batches) < wanted or layout["pp"].size < layout.world.size:
                ask()
                ask = None
            before_last = self._accord.listen_for_end
            results = self._executor.run(schedule, batches, ask=ask, before_last=before_last, **options)
        except BaseException:
            self._wires.abandon()
            self.zero_grad()
            raise
        failure = results.failure
        try:
            error = None if failure is None else failure.error
            results.loss = self._accord.end(results.failed, failure, error, self._on_host(results))
        except PipelineError as error:
            self._wires.forget_forms()
            if not schedule.forward_only:
                self._parts.backward.give_up()
                if self.events.wants(PhaseFailed):  # on all ranks, wherever it was
                    self.events.emit(PhaseFailed(Phase.FORWARD, error))
            self.zero_grad()
            raise
        return results

    # ---- what ranks tell each other

    def _on_host(self, results: Results) -> float | None:
        """The mean loss of this rank as a number, unless a device is still about to compute it."""
        if self._parts.device.type != "cpu" or results.failed or not results.losses:
            return None
        return float(torch.stack(results.losses).mean())

    def _mean(self, results: Results, *, tell: bool = True) -> Pending[Tensor] | None:
        """The mean over micro-batches and replicas, on all ranks if it is told to them, else on the last stage."""
        layout, module = self._parts.layout, self.module
        if results.loss is not None:
            return Pending(torch.tensor(results.loss, dtype=torch.float32)) if tell or module.last else None
        mean = torch.zeros((), device=self._parts.device)
        if module.last:
            mean = torch.stack(results.losses).mean()
            replicas = layout["dp", "sp"]
            if replicas.size > 1:
                comm.all_reduce(mean, group=replicas.group)
                mean /= replicas.size
        elif not tell:
            return None
        work = None
        if tell and layout["pp"].size > 1:
            source = layout["pp"].ranks[module.last_owner]
            work = comm.broadcast(mean, src=source, group=layout["pp"].group, async_op=True)
        return Pending(mean, work)

    def _mean_extra(self, results: Results) -> dict[str, Tensor] | None:
        """Further losses of this rank's last stage, averaged over its micro-batches."""
        if not results.extra:
            return None
        names = results.extra[0]
        return {name: torch.stack([number(extra[name]) for extra in results.extra]).mean() for name in names}

    # ---- schedules

    def _plan(self, count: int) -> Schedule:
        key = (self.schedule_name, count)
        if key not in self._schedules:
            chunks = self.module.chunks if kind_of(self.schedule_name).chosen else None
            self._schedules[key] = make(self.schedule_name, self.module.num_stages, count, chunks)
        return self._schedules[key]

    def _forward_plan(self, count: int) -> Schedule:
        key = ("forward", count)
        if key not in self._schedules:
            self._schedules[key] = forward_only(self.module.num_stages, count, self.module.owners)
        return self._schedules[key]

    def _splits(self) -> bool:
        """Whether gradients of weights can wait, where the schedule wants them to."""
        if self.module.splits_checkpoints:
            self.module.later.wanted = self._plan(self.gradient_accumulation_steps()).splits_backward
            sharded = self._parts.sharded
            if sharded is not None and sharded.hooks is not None:
                sharded.hooks.watches_inputs = self.module.later.wanted
            return True
        if self._plan(self.gradient_accumulation_steps()).splits_backward:
            warn_once(
                f"schedule {self.schedule_name!r}: gradients of inputs and of weights are computed together, so that "
                "its bubble is not as small as planned, because activation checkpoints are made by "
                "activation_checkpoint_func or without reentrance (pipeline.use_reentrant false)"
            )
        return False

    # ---- data

    def set_dataloader(self, loader: Any) -> None:
        """Take training batches from the beginning of a loader; at its end train_batch() raises StopIteration."""
        self.training_dataloader = loader if self._feed.needed else None
        self._feed.use_loader(loader)

    def _continue_run(self, source: Source, whole: bool) -> None:
        super()._continue_run(source, whole)
        if whole:
            self._feed.reopen()

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Take training batches from an iterator."""
        self._feed.use_iterator(iterator)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Make a pair (inputs, labels) of every batch by a function."""
        self._feed.batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Let the next batch have other shapes; on all ranks."""
        self._wires.forget_forms()

    def set_has_attention_mask(self, value: bool) -> None:
        """Nothing: what has no gradient, such as a mask, is found by itself."""
        if not isinstance(value, bool):
            raise UsageError(f"set_has_attention_mask takes True or False; found {value!r}")

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per optimizer step by changing the number of micro-batches."""
        before = self.train_batch_size()
        super().set_train_batch_size(train_batch_size)
        try:
            self._plan(self.gradient_accumulation_steps())
        except UsageError:
            super().set_train_batch_size(before)
            raise

    # ---- where this rank is

    def is_first_stage(self) -> bool:
        """True on the ranks of the first stage."""
        return self.module.first

    def is_last_stage(self) -> bool:
        """True on the ranks of the last stage, which compute the loss."""
        return self.module.last

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's place in the pipeline."""
        return self.module.stage_id

    def is_gradient_accumulation_boundary(self) -> bool:
        """True while the optimizer steps: a batch is one accumulation."""
        return self._at_boundary

    def get_global_grad_norm(self) -> float | None:
        """As of any engine; a stage that was lost while it was being found is named."""
        with naming_stages(self.module.topology()):
            return super().get_global_grad_norm()

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        """The module's further losses in the last training batch, averaged; on the last stage."""
        return self._additional

    def zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole model, of all stages, in host memory of rank 0; None on other ranks."""
        return whole_state(self._parts, exclude_frozen=exclude_frozen_parameters)

    # ---- what a pipeline has no use for

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a rank has a part of the model."""
        raise PipelineError(_refusal("forward"))

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: backward passes are interleaved with forward passes of other micro-batches."""
        raise PipelineError(_refusal("backward"))

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the step belongs to the batch."""
        raise PipelineError(_refusal("step"))


def _refusal(name: str) -> str:
    return (
        f"engine.{name}() is not available in a pipeline, where each rank has a part of the model and passes of "
        "several micro-batches are interleaved; use engine.train_batch() or engine.eval_batch()"
    )


def _chosen(wanted: str | None, module: PipelineModule) -> str:
    """The schedule of the config, or the module's own; both must put the same stages on a rank."""
    if wanted is None:
        return module.schedule
    kind = kind_of(wanted)
    if kind.owners(module.num_stages, module.chunks if kind.chosen else kind.chunks) != module.owners:
        raise DeepSpeedConfigError(
            f"pipeline.schedule is {wanted!r}, but the PipelineModule was built for {module.schedule!r}, which puts "
            f"other layers on a rank; build it with PipelineModule(..., schedule={wanted!r})",
            path="pipeline.schedule",
        )
    return wanted


def _require(parts: Parts, module: PipelineModule, accord: Accord) -> None:
    if not parts.accumulation.managed:
        raise DeepSpeedConfigError(
            "managed_gradient_accumulation false is not for a pipeline, whose batch is one accumulation; remove it",
            path="managed_gradient_accumulation",
        )
    if parts.basic_optimizer is None and parts.config.schema.optimizer.type is None:
        return
    error: UsageError | None = None
    if next(module.parameters(), None) is None:
        error = UsageError(
            f"pipeline rank {module.stage_id} has no parameters: {module.describe()}. Use fewer stages, or another "
            "partition_method"
        )
    accord.end(error is not None, error, error)
