"""What layers do with what goes from stage to stage, and losses that are modules: the same numbers as one process."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import deepspeed
from deepspeed.errors import PipelineError, UsageError
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from tests.harness import shared_ranks, store_path
from tests.pipelines import config

WIDTH, COUNT, STEPS = 8, 4, 2


def batches(count=COUNT * STEPS, labels=None):
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        pair = torch.rand(2, WIDTH, generator=generator), torch.rand(2, WIDTH, generator=generator)
        yield pair if labels is None else (pair[0], labels)


class Linear(nn.Linear):
    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(WIDTH, WIDTH)


class Twice(Linear):
    """Gives one tensor under two names, with other things beside."""

    def forward(self, value):
        if isinstance(value, torch.Tensor):
            hidden = super().forward(value)
            beside = {"none": None, "number": 3, "flag": True, "list": [hidden.t(), torch.zeros(0, 3), value > 0.5]}
        else:
            beside = value["beside"]
            assert (beside["none"], beside["number"], beside["flag"]) == (None, 3, True)
            flipped, empty, mask = beside["list"]
            assert (empty.shape, mask.dtype) == ((0, 3), torch.bool)
            hidden = super().forward(value["first"] + 0.5 * value["second"]) + flipped.t() * mask
        return {"first": hidden, "second": hidden, "beside": beside}


class Counts(Linear):
    """Gives a number that changes from micro-batch to micro-batch."""

    def forward(self, value):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(value), self.calls


class Last(Linear):
    def forward(self, value):
        return super().forward(value["first"] * value["second"])


def in_place():
    relu = nn.ReLU(inplace=True)
    return [Linear(0), relu, Linear(1), Linear(2), relu, Linear(3), relu, Linear(4)]


def saving():
    """Every stage ends with a layer whose backward needs what it gave, which the next one may not spoil."""
    return [layer for number in range(4) for layer in (Linear(number), nn.Tanh())]


def twice():
    return [Twice(1), Twice(2), Twice(3), Last(4)]


def expected(layers):
    model, losses = nn.Sequential(*layers), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    source = batches()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = sum(mse_loss(model(inputs), labels) for inputs, labels in (next(source) for _ in range(COUNT))) / COUNT
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@shared_ranks(2)
def test_layers_that_change_their_input_and_tensors_at_two_places():
    """The second stage begins with a ReLU in place; between two stages of a rank, too, a tensor stays one."""
    for make in (in_place, saving, twice):
        wanted = expected(make())
        for schedule in ("1f1b", "zb-h1", "zbv", "interleaved"):
            module = PipelineModule(
                make(), num_stages=2, loss_fn=mse_loss, partition_method="uniform", schedule=schedule
            )
            engine, *_ = deepspeed.initialize(model=module, config=config(COUNT))
            source = batches()
            found = [float(engine.train_batch(source)) for _ in range(STEPS)]
            assert found == pytest.approx(wanted, abs=1e-6), f"{make.__name__} with {schedule}"
            engine.destroy()


class First(Linear):
    def forward(self, value):
        return super().forward(value[0])


@shared_ranks(2)
def test_numbers_that_change_are_shown():
    """Their tensors are of the same shapes, which would say nothing."""
    for dynamic in (False, True):
        layers = [Counts(0), First(1)]
        module = PipelineModule(layers, num_stages=2, loss_fn=mse_loss, dynamic_shape=dynamic)
        engine, *_ = deepspeed.initialize(model=module, config=config(2))
        if dynamic:
            assert float(engine.train_batch(batches(2))) > 0
            continue
        with pytest.raises(PipelineError, match=r'gives .*\["int", 2\].*micro-batch 1 .*\["int", 1\].* was expected'):
            engine.train_batch(batches(2))
        engine.destroy()


class OneTuple(Linear):
    """Gives a tuple of one tensor, and takes one, of which `value[0]` would be a row of the tensor itself."""

    def forward(self, value):
        return (torch.tanh(super().forward(value if isinstance(value, torch.Tensor) else value[0])),)


class Opens(Linear):
    def forward(self, value):
        return super().forward(value[0])


@shared_ranks(2)
def test_a_tuple_of_one_tensor_stays_one():
    """Wherever the cut lies, and where layers run again."""

    def make():
        return [OneTuple(0), Opens(1), OneTuple(2), OneTuple(3), Opens(4)]

    wanted = expected(make())
    for interval, schedule in ((0, "1f1b"), (1, "1f1b"), (1, "zb-h1"), (2, "interleaved")):
        module = PipelineModule(make(), num_stages=2, loss_fn=mse_loss, partition_method="uniform", schedule=schedule)
        module.set_checkpoint_interval(interval)
        engine, *_ = deepspeed.initialize(model=module, config=config(COUNT))
        source = batches()
        found = [float(engine.train_batch(source)) for _ in range(STEPS)]
        assert found == pytest.approx(wanted, abs=1e-6), (interval, schedule)
        engine.destroy()


class Doubles(nn.Module):
    """A loss without weights that is another one in training."""

    def forward(self, outputs, labels):
        return mse_loss(outputs, labels) * (2 if self.training else 1)


@shared_ranks(2)
def test_a_loss_follows_the_mode_of_the_model():
    model = nn.Sequential(Linear(0), Linear(1))
    pairs = list(batches(2))
    wanted = sum(float(mse_loss(model(inputs), labels).detach()) for inputs, labels in pairs) / 2
    module = PipelineModule(model, num_stages=2, loss_fn=Doubles(), partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(2))
    for _ in range(2):
        assert float(engine.eval_batch(iter(pairs))) == pytest.approx(wanted, abs=1e-6)
    assert float(engine.train_batch(iter(pairs))) == pytest.approx(2 * wanted, abs=1e-6)


@shared_ranks(2)
def test_tied_layers_with_more_than_they_share():
    """A checkpoint has no place for the bias of the second stage, which a warning says."""
    for shared, warnings in (["weight"], 1), (["weight", "bias"], 0):
        said = []
        layers = [TiedLayerSpec("t", Linear, 0, tied_weight_attr=shared) for _ in range(2)]
        module = PipelineModule(layers, num_stages=2, loss_fn=mse_loss, partition_method="uniform")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("deepspeed.pipe.ties.warn_once", said.append)
            engine, *_ = deepspeed.initialize(model=module, config=config(2))
        assert len(said) == (warnings if engine.is_last_stage() else 0)
        assert all("parameters that its stages do not share: bias" in line for line in said)
        engine.destroy()


class Learned(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, outputs, labels):
        return (self.factor * outputs).square().mean() + (outputs - labels).square().mean()


@shared_ranks(2)
def test_losses_that_are_modules():
    """One without weights to train is no part of the model; one with some is, on the last stage, also in files."""
    weighted = nn.CrossEntropyLoss(weight=torch.linspace(0.1, 1, WIDTH))
    for number, (loss, labels) in enumerate([(weighted, torch.tensor([1, 2])), (Learned(), None)]):
        specs, path = [LayerSpec(Linear, seed) for seed in range(4)], f"{store_path()}-{number}"

        def start(stages, specs=specs, loss=loss):
            module = PipelineModule(specs, num_stages=stages, loss_fn=loss, partition_method="uniform")
            return deepspeed.initialize(model=module, config=config(2))[0]

        engine = start(2)
        engine.train_batch(batches(2, labels))
        names = {name for name in engine.module.state_dict() if name.startswith("loss_fn")}
        assert names == ({"loss_fn.factor"} if number and engine.is_last_stage() else set())
        engine.save_checkpoint(path, tag="t")
        value = float(engine.eval_batch(batches(2, labels)))
        if number and engine.is_last_stage():
            assert float(loss.factor.detach()) != 2.0, "it was trained"
            with torch.no_grad():
                loss.factor.fill_(5.0)
        engine.load_checkpoint(path, tag="t")
        assert float(engine.eval_batch(batches(2, labels))) == pytest.approx(value, abs=1e-6)
        engine.destroy()
        engine = start(1)
        engine.load_checkpoint(path, tag="t")
        assert float(engine.eval_batch(batches(2, labels))) == pytest.approx(value, abs=1e-6)
        engine.destroy()


@shared_ranks(2)
def test_batches_of_other_sizes_are_whole_steps():
    """Also with evaluations in between, and where data ended inside a batch."""
    layers = [Linear(0), Linear(1), Linear(2)]
    whole = nn.Sequential(*copy.deepcopy(layers))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=PipelineModule(layers, 2, loss_fn=mse_loss), config=config(2))

    def loss_of(pairs):
        return sum(mse_loss(whole(inputs), labels) for inputs, labels in pairs) / len(pairs)

    for step, count in enumerate((2, 3, 3, 1, 4), start=1):
        engine.set_train_batch_size(2 * count)
        pairs = list(batches(count))
        loss = loss_of(pairs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert float(engine.train_batch(iter(pairs))) == pytest.approx(float(loss.detach()), abs=1e-6), step
        if count > 1:
            with pytest.raises(StopIteration):
                engine.train_batch(iter(pairs[:1]))
        value = float(engine.eval_batch(batches(5), num_micro_batches=5))
        assert value == pytest.approx(float(loss_of(list(batches(5))).detach()), abs=1e-6), step
        assert engine.global_steps == step


@shared_ranks(2)
def test_a_batch_size_that_the_schedule_refuses_changes_nothing():
    module = PipelineModule([Linear(n) for n in range(4)], num_stages=2, loss_fn=mse_loss, schedule="dualpipev")
    engine, *_ = deepspeed.initialize(model=module, config=config(4))
    with pytest.raises(UsageError, match="needs at least 4 micro-batches; found 1"):
        engine.set_train_batch_size(2)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (8, 4)
    assert float(engine.train_batch(batches())) > 0
