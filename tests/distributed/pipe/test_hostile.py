"""What a script may get wrong: an error with its numbers on every rank, and the next batch trains."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import LayoutError, PipelineError, UsageError
from deepspeed.pipe import LayerSpec, PipelineModule
from tests.harness import shared_ranks
from tests.pipelines import config, data, micro_batch, pipeline, specs


@shared_ranks(2)
def test_arguments_of_a_module():
    for options, error, words in (
        ({"num_stages": 0}, LayoutError, "num_stages is 0; expected a whole number"),
        ({"num_stages": "2"}, LayoutError, "num_stages is '2'"),
        ({"num_stages": 1.0}, LayoutError, "num_stages is 1.0"),
        ({"num_stages": 3}, LayoutError, "world size 2 is not divisible by num_stages 3"),
        ({"num_stages": 2, "schedule": "interleaved", "chunks": 0}, LayoutError, "chunks is 0"),
        ({"num_stages": 2, "schedule": "2f2b"}, UsageError, "there is no schedule '2f2b'"),
        ({"num_stages": 2, "partition_method": None}, UsageError, "partition_method is None"),
        ({"num_stages": 2, "partition_method": "best"}, UsageError, "partition_method 'best' is not known"),
        ({"num_stages": 2, "partition_method": "type:("}, UsageError, "is no regular expression"),
        ({"num_stages": 2, "partition_method": "type:Conv"}, UsageError, "matches none of the layers"),
        ({"num_stages": 2, "activation_checkpoint_interval": -1}, UsageError, "at least 0; found -1"),
        ({"num_stages": 2, "checkpointable_layers": "Block"}, UsageError, "expected a list of names"),
        ({"num_stages": 2, "partition_method": "profile"}, UsageError, "profile"),
        ({}, UsageError, "needs num_stages"),
    ):
        with pytest.raises(error, match=words.replace("(", r"\(")):
            PipelineModule(specs(), **options)
    with pytest.raises(UsageError, match="2 layers cannot make 4 stages"):
        PipelineModule([nn.Linear(2, 2)] * 2, num_stages=2, schedule="zbv")
    with pytest.raises(UsageError, match="layer 0 is of the type int; expected a module"):
        PipelineModule([3, 4], num_stages=2)


@shared_ranks(3)
def test_arguments_of_a_batch():
    engine, *_ = deepspeed.initialize(model=pipeline(3), config=config(3))
    batches = [micro_batch(0, 0, number) for number in range(12)]
    for count in (0, -1, "3"):
        with pytest.raises(UsageError, match=f"num_micro_batches is {count!r}; expected a whole number"):
            engine.eval_batch(iter(batches), num_micro_batches=count)
    with pytest.raises(UsageError, match="reduce_output is 'avg' or None; found 'sum'"):
        engine.eval_batch(iter(batches), reduce_output="sum")
    with pytest.raises(PipelineError, match="rank 0 could not take its data: UsageError: there is no data"):
        engine.eval_batch(None)
    for wrong, kind in ((3, "int"), (batches, "list")):  # a list would begin anew with every batch
        with pytest.raises(PipelineError, match=rf"rank 0 could not take its data: UsageError: .*found a {kind}, of"):
            engine.train_batch(wrong)
    with pytest.raises(PipelineError, match="rank 0 could not take its data: TypeError"):
        engine.eval_batch(3)
    with pytest.raises(PipelineError, match="rank 0 could not take its data: UsageError: a pipeline's batch is a pair"):
        engine.train_batch(iter([batches[0][0]] * 3))
    if dist.get_rank() == 2:
        broken = iter([batches[0], batches[1], (batches[2][0], "labels")])
    else:
        broken = iter(batches)
    with pytest.raises(PipelineError, match="rank 2: stage 2 failed in the forward of micro-batch 2"):
        engine.train_batch(broken)
    assert engine.global_steps == 0
    losses = engine.eval_batch(iter(batches), num_micro_batches=5, reduce_output=None, bcast_loss=False)
    assert (losses is None) == (dist.get_rank() != 2)
    assert losses is None or len(losses) == 5
    loss, outputs = engine.eval_batch(iter(batches), return_logits=True, bcast_loss=False, num_micro_batches=1)
    assert (loss is None, outputs is None) == (dist.get_rank() != 2,) * 2
    mean, outputs = engine.eval_batch(iter(batches), compute_loss=False, return_logits=True)
    assert (mean is None, outputs is None) == (dist.get_rank() != 2,) * 2
    assert outputs is None or torch.allclose(mean, outputs.view(3, *mean.shape).mean(0))
    outputs = engine.inference_batch(iter(batches), num_micro_batches=7)
    assert outputs is None or len(outputs) == 7
    with pytest.raises(StopIteration):
        engine.eval_batch(iter(batches), num_micro_batches=13)
    source = iter(batches[:4])
    engine.train_batch(source)
    with pytest.raises(StopIteration):
        engine.train_batch(source)
    assert float(engine.train_batch(data(0, 3))) > 0
    assert engine.global_steps == 2
    with torch.no_grad(), pytest.raises(PipelineError, match="needs gradients"):
        engine.train_batch(data(0, 3))
    engine.destroy()


class Refuses(nn.Module):
    def __init__(self):
        super().__init__()
        raise ValueError("no room for it")


@shared_ranks(3)
def test_a_layer_that_cannot_be_built_is_named_on_every_rank():
    """Where layers are counted before, all ranks try to build it; by number, one rank alone does."""
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(Refuses), LayerSpec(nn.Linear, 4, 4)]
    with pytest.raises(
        PipelineError, match=r"rank 1: layer 1 \(Refuses\) of stage 1 could not be built: ValueError: no"
    ):
        PipelineModule(layers, num_stages=3, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    layers[1] = LayerSpec(nn.Linear, 4, 4)
    module = PipelineModule(layers, num_stages=3, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(2))
    assert float(engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 4))] * 2))) > 0
    engine.destroy()
