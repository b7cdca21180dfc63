"""A script in the shape of Megatron-DeepSpeed's training: pipeline, its own tensor slices, universal checkpoints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import ProcessTopology
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn
from torch.nn import functional as F

import deepspeed
from deepspeed.checkpoint import (
    ORIGINAL_VOCAB_SIZE,
    PADDED_VOCAB_SIZE,
    PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    PIPELINE_REPLICATED_PARAMETER_PATTERNS,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
    VOCABULARY_PARAMETER_PATTERNS,
)
from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal
from deepspeed.checkpoint.ds_to_universal import parse_arguments
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from tests.harness import ranks

VOCABULARY, WIDTH, LENGTH, BLOCKS = 13, 8, 4, 2
MICRO, BATCHES = 2, (4, 4, 8)  # the global batch grows, as with --rampup-batch-size
RATE, CLIP = 0.1, 0.4


class Mpu:
    """What Megatron's `mpu` answers, for one rank of a topology."""

    def __init__(self, topology: ProcessTopology) -> None:
        self.coord = topology.get_coord(dist.get_rank())
        self.sizes = {axis: topology.get_dim(axis) for axis in ("pipe", "model", "data")}
        self.groups = {}
        for axis in self.sizes:
            for members in topology.get_axis_comm_lists(axis):
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    self.groups[axis] = group

    def get_tensor_model_parallel_rank(self):
        return self.coord.model

    def get_tensor_model_parallel_world_size(self):
        return self.sizes["model"]

    def get_tensor_model_parallel_group(self):
        return self.groups.get("model")

    def get_pipeline_model_parallel_rank(self):
        return self.coord.pipe

    def get_data_parallel_rank(self):
        return self.coord.data


class CopyToSlices(torch.autograd.Function):
    """The identity; its gradient is summed over the slices."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOfSlices(torch.autograd.Function):
    """The sum over the slices; its gradient is the identity."""

    @staticmethod
    def forward(ctx, value, group):
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def copy_to(value, mpu):
    return CopyToSlices.apply(value, mpu.get_tensor_model_parallel_group()) if sliced(mpu) else value


def sum_of(value, mpu):
    return SumOfSlices.apply(value, mpu.get_tensor_model_parallel_group()) if sliced(mpu) else value


def sliced(mpu):
    return mpu is not None and mpu.get_tensor_model_parallel_world_size() > 1


def slice_of(whole, dim, mpu):
    """This rank's part, marked as Megatron marks it."""
    if not sliced(mpu):
        return nn.Parameter(whole)
    part = whole.chunk(mpu.get_tensor_model_parallel_world_size(), dim)[mpu.get_tensor_model_parallel_rank()]
    made = nn.Parameter(part.contiguous().clone())
    made.tensor_model_parallel = True
    return made


def padded_vocabulary(mpu):
    """A multiple of the slices, as Megatron pads it."""
    slices = mpu.get_tensor_model_parallel_world_size() if sliced(mpu) else 1
    return -(-VOCABULARY // slices) * slices


class Embedding(nn.Module):
    """Rows of the vocabulary are split over the slices."""

    def __init__(self, mpu=None):
        super().__init__()
        whole = 0.3 * torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0))
        whole = F.pad(whole, (0, 0, 0, padded_vocabulary(mpu) - VOCABULARY))
        self.weight, self.mpu = slice_of(whole, 0, mpu), mpu
        self.first = mpu.get_tensor_model_parallel_rank() * len(self.weight) if sliced(mpu) else 0

    def forward(self, tokens):
        here = (tokens >= self.first) & (tokens < self.first + len(self.weight))
        rows = F.embedding((tokens - self.first).where(here, torch.zeros_like(tokens)), self.weight)
        return sum_of(rows * here.unsqueeze(-1), self.mpu)


def logits(embedding, hidden):
    """The head that shares the embedding's weight; each slice fills in its columns."""
    columns = copy_to(hidden, embedding.mpu) @ embedding.weight.t()
    after = padded_vocabulary(embedding.mpu) - embedding.first - len(embedding.weight)
    return sum_of(F.pad(columns, (embedding.first, after)), embedding.mpu)[..., :VOCABULARY]


class Block(nn.Module):
    """A column-parallel product, a row-parallel one, and a norm that all slices hold."""

    def __init__(self, number, mpu=None):
        super().__init__()
        draws = torch.Generator().manual_seed(number)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = slice_of(torch.randn(2 * WIDTH, WIDTH, generator=draws) / 3, 0, mpu)
        self.down = slice_of(torch.randn(WIDTH, 2 * WIDTH, generator=draws) / 3, 1, mpu)
        self.mpu = mpu

    def forward(self, hidden):
        inner = torch.tanh(copy_to(self.norm(hidden), self.mpu) @ self.up.t())
        return hidden + sum_of(inner @ self.down.t(), self.mpu)


def loss_of(outputs, labels):
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


class GPTModelPipe(PipelineModule):
    def __init__(self, topology, mpu):
        layers = [
            TiedLayerSpec("embed", Embedding, mpu, tied_weight_attr="weight"),
            *(LayerSpec(Block, number, mpu) for number in range(1, BLOCKS + 1)),
            TiedLayerSpec("embed", Embedding, mpu, forward_fn=logits, tied_weight_attr="weight"),
        ]
        super().__init__(layers=layers, loss_fn=loss_of, topology=topology, partition_method="type:block")
        self.mpu_of_slices = mpu

    def universal_checkpoint_info(self):
        return {
            UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE,
            VOCABULARY_PARAMETER_PATTERNS: [r"tied_modules.embed.weight"],
            ORIGINAL_VOCAB_SIZE: VOCABULARY,
            PADDED_VOCAB_SIZE: padded_vocabulary(self.mpu_of_slices),
            PIPELINE_REPLICATED_PARAMETER_PATTERNS: [],
            TP_REPLICATED_PARAMETER_PATTERNS: [r"\d+.norm.weight", r"\d+.norm.bias"],
            PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: [r"\d+.down"],
            PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0: [],
        }


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block(number) for number in range(1, BLOCKS + 1))

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return loss_of(logits(self.embedding, hidden), labels)


def text_of(step):
    """The samples of a global batch: tokens and the ones that follow."""
    generator = torch.Generator().manual_seed(10 + step)
    rows = torch.randint(VOCABULARY, (max(BATCHES), LENGTH + 1), generator=generator)
    return rows[: BATCHES[step]]


def plain():
    model, losses, norms = Whole(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step in range(len(BATCHES)):
        rows = text_of(step)
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, norms, model(text_of(0)[:, :-1], text_of(0)[:, 1:]).item()


def setup(pipe, model, stage, **options):
    """As `setup_model_and_optimizer`, which compares the engine's grid with its own."""
    topology = PipeModelDataParallelTopology(num_pp=pipe, num_mp=model, num_dp=2 // pipe // model)
    mpu = Mpu(topology)
    args = SimpleNamespace(deepspeed_config=None, local_rank=dist.get_rank())
    module = GPTModelPipe(topology, mpu)
    engine, optimizer, _, _ = deepspeed.initialize(
        args=args,
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9),
        config={
            "train_micro_batch_size_per_gpu": MICRO,
            "train_batch_size": BATCHES[0],
            "gradient_clipping": CLIP,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "steps_per_print": 2,
            **options,
        },
    )
    assert isinstance(engine, deepspeed.PipelineEngine)
    engine.set_batch_fn(lambda rows: (rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    assert engine.grid.get_pipe_parallel_rank() == mpu.get_pipeline_model_parallel_rank()
    assert engine.grid.get_slice_parallel_rank() == mpu.get_tensor_model_parallel_rank()
    assert engine.grid.get_data_parallel_rank() == mpu.get_data_parallel_rank()
    assert (engine.grid.pipe_parallel_size, engine.grid.model_parallel_size) == (pipe, model)
    assert engine.is_pipe_parallel == (pipe > 1)
    assert (engine.is_first_stage(), engine.is_last_stage()) == (mpu.coord.pipe == 0, mpu.coord.pipe == pipe - 1)
    assert (engine.prev_stage, engine.next_stage) == (mpu.coord.pipe - 1, mpu.coord.pipe + 1)
    return engine, optimizer


def micro_batches(engine, step):
    """This replica's part of a global batch."""
    grid = engine.grid
    yield from text_of(step).chunk(grid.get_data_parallel_world_size())[grid.get_data_parallel_rank()].split(MICRO)


def evaluate(engine):
    engine.set_train_batch_size(BATCHES[0])
    return float(engine.eval_batch(micro_batches(engine, 0)))


@pytest.mark.parametrize(("pipe", "model", "stage"), [(2, 1, 1), (1, 2, 1), (1, 1, 0)])
@ranks(2)
def test_a_loop_in_the_shape_of_megatron_deepspeed(pipe, model, stage, tmp_path):
    expected, norms, at_end = plain()
    engine, _ = setup(pipe, model, stage)
    for step, loss in enumerate(expected):
        engine.set_train_batch_size(BATCHES[step])
        assert engine.micro_batches == BATCHES[step] // MICRO // engine.grid.data_parallel_size
        found = engine.train_batch(data_iter=micro_batches(engine, step))
        assert float(found) == pytest.approx(loss, abs=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(norms[step], abs=1e-5)
        assert engine.get_additional_losses() is None
        assert engine.global_steps == step + 1
        assert engine.was_step_applied()
    assert evaluate(engine) == pytest.approx(at_end, abs=1e-5)

    state = {"iteration": 3, UNIVERSAL_CHECKPOINT_INFO: engine.module.universal_checkpoint_info()}
    engine.save_checkpoint(str(tmp_path), tag="global_step3", client_state=state)
    engine.destroy()
    if dist.get_rank() == 0:
        names = ["--input_folder", str(tmp_path / "global_step3"), "--output_folder", str(tmp_path / "universal")]
        ds_to_universal(parse_arguments(names))
        (tmp_path / "latest_universal").write_text("universal")
        file = torch.load(tmp_path / "universal/zero/tied_modules.embed.weight/fp32.pt", weights_only=True)
        assert file["param"].shape == (VOCABULARY, WIDTH), "without the padding"
    dist.barrier()

    # Another layout reads it, as after a change of the number of nodes.
    again, _ = setup(*((1, 1) if pipe * model > 1 else (2, 1)), 1, checkpoint={"load_universal": True})
    path, found = again.load_checkpoint(str(tmp_path))
    assert path is not None
    assert found["iteration"] == 3
    assert found[UNIVERSAL_CHECKPOINT_INFO][ORIGINAL_VOCAB_SIZE] == VOCABULARY
    assert evaluate(again) == pytest.approx(at_end, abs=1e-5)
    assert again.global_steps == len(BATCHES)
