"""A script in the shape of diffusion-pipe: layers of a ready model, its own loader, parts that each rank saves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import LayerSpec, PipelineModule
from torch import nn

import deepspeed
from tests.harness import ranks

WIDTH, BLOCKS, MICRO, COUNT, EPOCH, STEPS, RATE = 8, 4, 2, 2, 16, 4, 0.05


class Block(nn.Module):
    """A frozen layer with a trained adapter, as LoRA of a transformer block."""

    def __init__(self, number):
        super().__init__()
        draws = torch.Generator().manual_seed(number)
        self.base = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=draws) / 3, requires_grad=False)
        self.lora_a = nn.Parameter(torch.randn(2, WIDTH, generator=draws) / 3)
        self.lora_b = nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, hidden):
        return hidden + torch.tanh(hidden @ self.base.t() + hidden @ self.lora_a.t() @ self.lora_b.t())


class First(nn.Module):
    """Noise of the batch's time is added; the second value is what the last layer predicts."""

    def forward(self, inputs):
        latents, noise, time = inputs
        level = time.unsqueeze(-1)
        return ((1 - level) * latents + level * noise,)


class BlockLayer(nn.Module):
    """Takes and gives tuples, as all layers of diffusion-pipe."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, inputs):
        return (self.block(inputs[0]),)


class Last(nn.Module):
    def forward(self, inputs):
        return inputs[0]


class Network(nn.Module):
    """The model as it is loaded; the pipeline is made of its layers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(number) for number in range(BLOCKS))
        for name, param in self.named_parameters():
            param.original_name = name

    def to_layers(self):
        return [LayerSpec(First), *(LayerSpec(BlockLayer, block) for block in self.blocks), Last()]

    def forward(self, features):
        return Last()(tuple(nn.Sequential(First(), *map(BlockLayer, self.blocks))(features)))


def loss_of(output, label):
    target, mask = label
    return (mask * (output - target) ** 2).mean()


def sample(number):
    draws = torch.Generator().manual_seed(number)
    latents, noise = torch.randn(WIDTH, generator=draws), torch.randn(WIDTH, generator=draws)
    time = torch.rand((), generator=draws)
    return (latents, noise, time), (noise - latents, torch.ones(WIDTH))


def stacked(numbers):
    features, labels = zip(*map(sample, numbers), strict=True)
    return tuple(map(torch.stack, zip(*features, strict=True))), tuple(map(torch.stack, zip(*labels, strict=True)))


class PipelineDataLoader:
    """Splits batches of the replicas into micro batches; only stages that need data take any."""

    def __init__(self, engine, size=EPOCH):
        self.engine, self.size = engine, size
        self.epoch, self.position = 1, 0

    def __len__(self):
        return self.size // (MICRO * self.engine.grid.get_data_parallel_world_size())

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == len(self):
            self.position, self.epoch = 0, self.epoch + 1
        replicas = self.engine.grid.get_data_parallel_world_size()
        first = (self.position * replicas + self.engine.grid.get_data_parallel_rank()) * MICRO
        self.position += 1
        return stacked(range(first, first + MICRO))

    def reset(self):
        self.epoch, self.position = 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


def plain(replicas):
    """Losses of the same samples in one process, and the loss of all of them afterwards."""
    model, losses = Network(), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.01)
    at, size = 0, MICRO * COUNT * replicas
    for _ in range(STEPS):
        features, labels = stacked(range(at, at + size))
        at = (at + size) % EPOCH
        loss = loss_of(model(features), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        features, labels = stacked(range(EPOCH))
        return losses, loss_of(model(features), labels).item(), model


def save_parts(engine, module, folder):
    """As its Saver: a file of each stage of the first replica, which rank 0 joins."""
    dp_id, stage_id = engine.grid.get_data_parallel_rank(), engine.grid.get_pipe_parallel_rank()
    if dp_id == 0:
        part = {p.original_name: p.detach().cpu() for p in module.parameters() if p.requires_grad}
        torch.save(part, folder / f"state_dict_{stage_id}.bin")
    dist.barrier()
    whole = {}
    for path in sorted(folder.glob("state_dict_*.bin")):
        whole.update(torch.load(path, weights_only=True))
    return whole


@pytest.mark.parametrize("stages", [2, 1])
@ranks(2)
def test_a_script_in_the_shape_of_diffusion_pipe(stages, tmp_path):
    expected, at_end, trained = plain(2 // stages)
    network = Network()
    module = PipelineModule(
        layers=network.to_layers(), num_stages=stages, partition_method="parameters", loss_fn=loss_of
    )
    engine, optimizer, _, _ = deepspeed.initialize(
        args=SimpleNamespace(deepspeed_config=None, local_rank=dist.get_rank()),
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        optimizer=lambda params: torch.optim.AdamW(params, lr=RATE, weight_decay=0.01),
        config={
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": COUNT,
            "gradient_clipping": 1.0,
            "steps_per_print": 10,
        },
    )
    assert (engine.micro_batches, engine.is_pipe_parallel) == (COUNT, stages > 1)
    assert engine.is_data_parallel == (stages == 1)
    assert engine.grid.pipe_parallel_size == stages
    assert engine.is_first_stage() == (engine.grid.get_pipe_parallel_rank() == 0)
    engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = PipelineDataLoader(engine)
    engine.set_dataloader(loader)

    losses = []
    for step in range(STEPS):
        engine.reset_activation_shape()
        losses.append(engine.train_batch().item())
        assert engine.global_steps == step + 1
        assert (engine.total_loss is not None) == engine.is_last_stage()
    assert losses == pytest.approx(expected, abs=1e-5)
    assert optimizer.param_groups[0]["lr"] == RATE

    evaluation = PipelineDataLoader(engine)
    before, engine.micro_batches = engine.micro_batches, len(evaluation)
    with pytest.raises(deepspeed.errors.UsageError, match="micro_batches was set to"):
        engine.train_batch()
    found = engine.eval_batch(iter(evaluation)).item()
    engine.micro_batches = before
    assert found == pytest.approx(at_end, abs=1e-5)

    parts = save_parts(engine, module, tmp_path)
    wanted = {name: value.detach() for name, value in trained.named_parameters() if value.requires_grad}
    assert parts.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(parts[name], value, atol=1e-4, rtol=1e-4, msg=name)

    engine.save_checkpoint(str(tmp_path / "run"), client_state={"step": STEPS, "custom_loader": loader.state_dict()})
    after = engine.train_batch().item()
    path, state = engine.load_checkpoint(str(tmp_path / "run"), load_module_strict=False, load_lr_scheduler_states=True)
    assert path is not None
    loader.load_state_dict(state["custom_loader"])
    assert engine.global_steps == state["step"] == STEPS
    assert engine.train_batch().item() == after
