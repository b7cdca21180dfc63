"""`PipelineEngine`: trains and evaluates batch by batch; inside, a schedule is played over the stages."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.checkpoint.formats.source import Source
from deepspeed.comm import Pending
from deepspeed.comm.groups import played_backend
from deepspeed.data.pacing import Pacing
from deepspeed.errors import CommError, DeepSpeedConfigError, PipelineError, UsageError
from deepspeed.events import Phase, PhaseFailed
from deepspeed.log import log_dist, warn_once
from deepspeed.parallel import AxisGroup
from deepspeed.parallel.topology import ProcessTopology
from deepspeed.pipe.batch_agreement import BatchAgreement
from deepspeed.pipe.executor import Batch, Executor, Results
from deepspeed.pipe.layers import is_fake_world
from deepspeed.pipe.messages import MessageForm, StageLinks, flatten, unflatten
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.schedule.actions import Schedule
from deepspeed.pipe.schedule.generators import forward_only, kind_of, make
from deepspeed.pipe.schedule.replaced import KNOWN, Calls, read_steps, replaced_schedule
from deepspeed.pipe.schedule.views import PipeSchedule
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.patches import warn_of
from deepspeed.runtime.saving.model_state import collect, gather_experts
from deepspeed.runtime.step.choose import warn_if_frozen
from deepspeed.zero.agreement import RankAgreement

__all__ = ["DualPipeVEngine", "DualPipeVModule", "PipelineEngine"]


class BatchSource:
    """Takes micro-batches, on the ranks that need them: those of the first and of the last stage."""

    def __init__(self, loader: Any, *, needed: bool) -> None:
        self.needed = needed
        self.batch_fn: Callable[[Any], Any] | None = None
        self._source: Iterable[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._again = False
        if loader is not None:
            self.use_iterator(RepeatingLoader(loader))

    def use_iterator(self, iterator: Iterator[Any] | Iterable[Any] | None, *, again: bool = False) -> None:
        """Take batches from an iterator or a loader from now on; none is an error when they are taken, on all ranks.

        A source that is given `again` with every batch must be an iterator: a loader would begin anew each time.
        """
        self._source, self._iterator, self._again = iterator if self.needed else None, None, again

    def reopen(self) -> None:
        """Take batches from where the loader was set to continue."""
        if callable(getattr(self._source, "load_state_dict", None)):
            self._iterator = None

    def take(self, count: int, pacing: Pacing | None = None) -> list[Batch]:
        """So many micro-batches, or fewer at the end of the data, as long as `pacing` says; nothing if not needed."""
        if not self.needed:
            return []
        if self._source is None:
            raise UsageError(
                "there is no data: pass train_batch(data_iter=...), or training_data to deepspeed.initialize; the "
                "ranks of the first and of the last stage need it"
            )
        if self._iterator is None:
            goes_on = hasattr(self._source, "__next__")
            if self._again and not goes_on:
                raise UsageError(
                    f"train_batch(data_iter=...) takes an iterator, which iter(loader) makes once for many batches; "
                    f"found a {type(self._source).__name__}, of which every batch would be the first. Or let the "
                    "engine keep it: engine.set_dataloader(loader), and train_batch()"
                )
            self._iterator = cast("Iterator[Any]", self._source) if goes_on else iter(self._source)
        batches: list[Batch] = []
        while len(batches) < count:
            try:
                batches.append(self._pair(next(self._iterator)))
            except StopIteration:
                break
        return batches if pacing is None else list(map(pacing.cut, batches))

    def lend(self, iterator: Iterator[Any] | Iterable[Any] | None) -> BatchSource:
        """Another source with the same batch function, for an evaluation."""
        other = BatchSource(None, needed=self.needed)
        other.batch_fn = self.batch_fn
        other.use_iterator(iterator)
        return other

    def _pair(self, batch: Any) -> Batch:
        if self.batch_fn is not None:
            batch = self.batch_fn(batch)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            found = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
            raise UsageError(
                f"a pipeline's batch is a pair (inputs, labels); found {found}. Nest the inputs in a tuple of their "
                "own, or make a pair with engine.set_batch_fn(fn)."
            )
        return batch[0], batch[1]


def averaged(outputs: list[Any]) -> Any:
    """The mean over micro-batches, tensor by tensor; None without outputs."""
    if not outputs:
        return None
    if isinstance(outputs[0], Tensor):
        shapes = sorted({tuple(each.shape) for each in outputs})
        if len(shapes) > 1:
            raise UsageError(
                f"the outputs of micro-batches have the shapes {shapes}, of which there is no mean: pass "
                "eval_batch(..., reduce_output=None) for a list of them"
            )
        return torch.stack([each.float() for each in outputs]).mean(0)
    if isinstance(outputs[0], (tuple, list)):
        return type(outputs[0])(averaged([each[place] for each in outputs]) for place in range(len(outputs[0])))
    return outputs[0]


def joined(outputs: list[Any]) -> Any:
    """The outputs of all micro-batches along their first dim where they fit together, else a list; None without any."""
    if not outputs:
        return None
    rows = [each for each in outputs if isinstance(each, Tensor) and each.dim() > 0]
    if len(rows) == len(outputs) and len({each.shape[1:] for each in rows}) == 1:
        return torch.cat(rows)
    return outputs


def whole_state(parts: Parts, *, exclude_frozen: bool) -> dict[str, Any] | None:
    """Host copies of everything in the model's state dict on rank 0; None on other ranks, all of which help."""
    layout, experts = parts.layout, parts.experts
    leads = layout.stage.rank == 0
    found = collect(parts.module, keep=leads or experts is not None, exclude_frozen=exclude_frozen)
    if experts is not None:
        assert found is not None, "every rank keeps its experts"
        gather_experts(found, experts, keep=leads)
    if not leads:
        return None
    assert found is not None, "this rank keeps it"
    return _to_first(found, layout.pipeline, parts.device)


def _to_first(state: OrderedDict[str, Any], stages: AxisGroup, device: torch.device) -> dict[str, Any] | None:
    """Stage by stage, so that the first rank holds one message at a time."""
    with comm.labelled("weights of the stages"):
        if stages.rank > 0:
            _send(state, stages, device)
            return None
        for stage in range(1, stages.size):
            for name, value in _receive(stage, stages, device).items():
                state.setdefault(name, value)
    return state


def _send(state: OrderedDict[str, Any], stages: AxisGroup, device: torch.device) -> None:
    form, tensors = flatten(dict(state))
    text = torch.tensor(list(form.text().encode()), dtype=torch.uint8, device=device)
    for each in (torch.tensor([text.numel()], device=device), text, *tensors):
        if each.numel():
            data = each.detach().to(device).contiguous().view(-1).view(torch.uint8)
            comm.send(data, stages.ranks[0], stages.group)


def _receive(stage: int, stages: AxisGroup, device: torch.device) -> dict[str, Any]:
    def received(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        told = torch.empty(shape, dtype=dtype, device=device)
        if told.numel():
            comm.recv(told.view(-1).view(torch.uint8), stages.ranks[stage], stages.group)
        return told

    size = int(received((1,), torch.int64))
    form = MessageForm.parse(bytes(received((size,), torch.uint8).tolist()).decode())
    found: dict[str, Any] = unflatten(form, [received(kind.shape, kind.dtype).cpu() for kind in form.kinds])
    return found


_RANKS = re.compile(r"\branks? (\d+(?:, \d+)*)")


@contextmanager
def naming_stages(topology: ProcessTopology) -> Iterator[None]:
    """Reports of a lost rank also name its stage."""
    try:
        yield
    except CommError as error:
        first, *rest = str(error).split("\n", 1)  # who is at fault; why
        named = {int(rank) for found in _RANKS.findall(first) for rank in found.split(", ")}
        known = sorted(rank for rank in named if rank < topology.world_size())
        stages = ", ".join(f"stage {getattr(topology.get_coord(rank), 'pipe', 0)} on rank {rank}" for rank in known)
        raise CommError("\n".join([f"{first}; the pipeline has {stages}" if stages else first, *rest])) from error


# plain attributes that scripts read
_FACTS: dict[str, Callable[[Any], Any]] = {
    "first_output_send": lambda engine: engine.agg_train_loss is None,
    "grid": lambda engine: engine.module._grid,
    "is_data_parallel": lambda engine: engine.module._grid.data_parallel_size > 1,
    "is_model_parallel": lambda engine: engine.module._grid.model_parallel_size > 1,
    "is_pipe_parallel": lambda engine: engine.module._grid.pipe_parallel_size > 1,
    "micro_batch_size": lambda engine: engine.train_micro_batch_size_per_gpu(),
    "next_stage": lambda engine: engine.module.stage_id + 1,
    "prev_stage": lambda engine: engine.module.stage_id - 1,
}


class PipelineEngine(DeepSpeedEngine):
    """An engine over a `PipelineModule`: `train_batch` is forward, backward and step of a whole batch."""

    module: PipelineModule
    _facts: ClassVar = {**DeepSpeedEngine._facts, **_FACTS}
    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., Any]]] = {}
    """Class of an instruction of a script's own schedule → what carries it out."""
    total_loss: Tensor | None = None
    """The sum of the losses of the last training batch on the last stage; None elsewhere."""
    _micro_batches: int | None = None
    fwd_outputs: list[Any]
    """The outputs of the last evaluation that asked for them, on the last stage."""
    _collaborators = (*DeepSpeedEngine._collaborators, "_agreement", "_executor", "_batches", "_links")

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
        self._agreement = BatchAgreement(parts.layout)
        _require(parts, module, self._agreement)
        hosts = RankAgreement(parts.layout.world)
        module.ties.require_alike(hosts)
        warn_if_frozen(module, parts.basic_optimizer, hosts)
        foretold = {stage: form.cast(parts.precision.param) for stage, form in module.foretold.items()}
        self._links = StageLinks(parts.layout.pipeline, parts.device, dynamic=module.dynamic_shape, foretold=foretold)
        self._links.open()
        self._schedules: dict[tuple[Any, int], Schedule] = {}
        self._calls: Calls = {}
        self.fwd_outputs = []
        self._executor = Executor(parts, module, self._links, splits=self._splits())
        parts.reducer.keep_back(module.ties.shared())
        self._batches = BatchSource(parts.training_dataloader, needed=module.first or module.last)
        self._batches.batch_fn = None if module.cut is None else module.cut.pair
        self._plan(self.gradient_accumulation_steps())
        self._additional: dict[str, Tensor] | None = None
        self.agg_train_loss: Tensor | None = None
        log_dist(f"pipeline: {self.schedule_name}; {module.describe()}")

    # ---- the loop

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on the next batch; the mean loss of its micro-batches over all replicas, on every rank."""
        if not torch.is_grad_enabled():
            raise PipelineError("train_batch() needs gradients, and they are switched off; use eval_batch()")
        if data_iter is not None:
            self._batches.use_iterator(data_iter, again=True)
        with naming_stages(self.module.topology()):
            return self._train()

    def _train(self) -> Tensor:
        count = self.gradient_accumulation_steps()
        if self.micro_batches != count:
            found = f"engine.micro_batches was set to {self.micro_batches}, but a training batch has {count}"
            raise UsageError(f"{found}. Set it back after evaluation, or call engine.set_train_batch_size()")
        if self._parts.moved:
            self._must_be_here("engine.train_batch()", trains=True, steps=True)
        self.train()
        if self._parts.pacing is not None and self._parts.pacing.enter(self.global_steps, self.global_steps):
            self.reset_activation_shape()
        self._look_for_unfrozen()
        results = self._play(self._plan(count), *self._load(self._batches, "train_batch()", count))
        self.module.ties.reduce(self._parts.reducer.change_unreduced)
        loss = self._mean(results)
        assert loss is not None, "the loss of a training batch is sent to all ranks"
        self._additional = self._mean_extra(results)
        self.total_loss = torch.stack(results.losses).sum() if results.losses else None
        self.loss_of_step = loss
        try:
            self._take_batch_step(count)
        finally:  # also for whoever looks why the step failed
            self.agg_train_loss = loss.wait()
        return self.agg_train_loss

    def _take_batch_step(self, count: int) -> None:
        accumulation = self._parts.accumulation
        accumulation.micro_steps += count - 1
        accumulation.boundary = True  # the count alone would not say so once the size of a batch has changed
        try:
            super().step()
        finally:
            accumulation.boundary = None

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
        if not compute_loss:
            value: Any = averaged(results.outputs) if reduce_output == "avg" else results.outputs or None
        else:
            mean = self._mean(results, tell=bcast_loss)
            value = None if mean is None else mean.wait()
            value = value if reduce_output == "avg" else results.losses or None
        return (value, joined(results.outputs)) if return_logits else value

    def inference_batch(self, data_iter: Iterator[Any], num_micro_batches: int | None = None) -> list[Any] | None:
        """The outputs of the last stage for each micro-batch of the next batch; None on other stages."""
        return self._evaluate(data_iter, num_micro_batches, compute_loss=False, keep=True).outputs or None

    def _evaluate(self, data_iter: Any, count: int | None, compute_loss: bool, *, keep: bool) -> Results:
        count = self.micro_batches if count is None else count
        if not isinstance(count, int) or count < 1:
            raise UsageError(f"num_micro_batches is {count!r}; expected a whole number of at least 1")
        source, training = self._batches.lend(data_iter), self.module.training
        with naming_stages(self.module.topology()):
            loaded = self._load(source, "eval_batch()", count)
            self.module.eval()
            try:
                with torch.no_grad(), self._links.other_forms():
                    plan = self._plan(count, train=False)
                    results = self._play(plan, *loaded, compute_loss=compute_loss, keep_outputs=keep)
                    self.fwd_outputs = results.outputs
                    return results
            finally:
                self.module.train(training)

    def _load(self, source: BatchSource, what: str, count: int) -> tuple[list[Batch], Callable[[], None]]:
        """The micro-batches of a batch that this rank has, and what asks whether all ranks have theirs."""
        error: Exception | None = None
        batches: list[Batch] = []
        try:
            batches = source.take(count, self._parts.pacing if source is self._batches else None)
        except Exception as caught:  # noqa: BLE001 - the data is the script's; the error is raised on all ranks
            error = caught
        return batches, self._agreement.begin(what, count, len(batches) if source.needed else None, error)

    def _play(self, schedule: Schedule, batches: list[Batch], ask: Any, **options: Any) -> Results:
        layout, wanted = self._parts.layout, schedule.micro_batches * self._batches.needed
        try:
            # A rank that has its data computes before it asks, if no replica could wait for it inside of layers.
            if len(batches) < wanted or layout.pipeline.size < layout.world.size:
                ask()
                ask = None
            if self._calls and not schedule.forward_only:
                options["before"] = {at: [partial(call, self) for call in calls] for at, calls in self._calls.items()}
            before_last = self._agreement.listen_for_end
            results = self._executor.run(schedule, batches, ask=ask, before_last=before_last, **options)
        except BaseException:
            self._links.abandon()
            self.zero_grad()
            raise
        failure = results.failure
        try:
            error = None if failure is None else failure.error
            results.loss = self._agreement.end(results.failed, failure, error, self._on_host(results))
        except PipelineError as error:
            self._links.forget_forms()
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
        losses = results.losses or [torch.zeros(())] * is_fake_world()  # on pretended ranks nobody else tells it
        if self._parts.device.type != "cpu" or played_backend() == "fake" or results.failed or not losses:
            return None
        return float(torch.stack(losses).mean())

    def _mean(self, results: Results, *, tell: bool = True) -> Pending[Tensor] | None:
        """The mean over micro-batches and replicas, on all ranks if it is sent to them, else on the last stage."""
        layout, module = self._parts.layout, self.module
        if results.loss is not None:
            return Pending(torch.tensor(results.loss, dtype=torch.float32)) if tell or module.last else None
        mean = torch.zeros((), device=self._parts.device)
        if module.last:
            mean = torch.stack(results.losses).mean()
            if layout.samples.size > 1:
                comm.all_reduce(mean, group=layout.samples.group)
                mean /= layout.samples.size
        elif not tell:
            return None
        work = None
        if tell and layout.pipeline.size > 1:
            work = comm.broadcast(mean, layout.pipeline.ranks[module.owners[-1]], layout.pipeline.group, async_op=True)
        return Pending(mean, work)

    def _mean_extra(self, results: Results) -> dict[str, Tensor] | None:
        """Further losses of this rank's last stage, averaged over its micro-batches."""
        if not results.extra:
            return None
        return {name: torch.stack([extra[name] for extra in results.extra]).mean() for name in results.extra[0]}

    # ---- schedules

    def _plan(self, count: int, *, train: bool = True) -> Schedule:
        module, name = self.module, self.schedule_name if train else "forward"
        other = replaced_schedule() if train and name == "1f1b" else None
        if other is not None:
            return self._plan_of(other, count)
        if (name, count) not in self._schedules:
            if train:
                made = make(name, module.num_stages, count, module.chunks if kind_of(name).chosen else None)
            else:
                made = forward_only(module.num_stages, count, module.owners)
            self._schedules[name, count] = made
        return self._schedules[name, count]

    def _plan_of(self, kind: type[PipeSchedule], count: int) -> Schedule:
        """The schedule of a script, which the engine plays with its own handlers of DeepSpeed's instructions."""
        if (kind.steps, count) not in self._schedules:
            for known in self._INSTRUCTION_MAP.keys() & set(KNOWN):
                warn_of(f"PipelineEngine._INSTRUCTION_MAP[{known.__name__}]", "subclass the instruction and add that")
            stage, handlers = self.module.stage_id, self._INSTRUCTION_MAP
            made, self._calls = read_steps(kind, self.module.num_stages, count, stage, handlers)
            self._schedules[kind.steps, count] = made
        return self._schedules[kind.steps, count]

    def _splits(self) -> bool:
        """Whether gradients of weights can wait, where the schedule wants them to."""
        if self.module.splits_checkpoints:
            self.module.later.wanted = self._plan(self.gradient_accumulation_steps()).splits_backward
            sharded = self._parts.sharded
            if sharded.hooks is not None:
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
        self.training_dataloader = loader if self._batches.needed else None
        self._batches.use_iterator(loader)

    def _continue_run(self, source: Source, whole: bool) -> None:
        super()._continue_run(source, whole)
        if whole:
            self._batches.reopen()

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        self._batches.use_iterator(iterator)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        self._batches.batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Let the next batch have other shapes; on all ranks."""
        self._links.forget_forms()

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
        self._micro_batches = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a batch; scripts assign another number while they evaluate."""
        return self._micro_batches or self.gradient_accumulation_steps()

    @micro_batches.setter
    def micro_batches(self, count: int) -> None:
        self._micro_batches = None if count == self.gradient_accumulation_steps() else count

    # ---- where this rank is

    def is_first_stage(self) -> bool:
        return self.module.first

    def is_last_stage(self) -> bool:
        return self.module.last

    def get_pipeline_parallel_rank(self) -> int:
        return self.module.stage_id

    def is_gradient_accumulation_boundary(self) -> bool:
        """True while the optimizer steps: a batch is one accumulation."""
        return self._parts.accumulation.boundary is True

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
        raise PipelineError(_refusal("forward"))

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        raise PipelineError(_refusal("backward"))

    def step(self, *args: Any, **kwargs: Any) -> None:
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


def _require(parts: Parts, module: PipelineModule, accord: BatchAgreement) -> None:
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


class DualPipeVModule(PipelineModule):
    """A `PipelineModule` of which rank r holds the stages r and 2p - 1 - r of p ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, schedule="dualpipev", **kwargs)


DualPipeVEngine = PipelineEngine
"""One executor plays all schedules."""
