"""A script in the shape of GPT-NeoX: activation checkpointing and random states of model-parallel ranks."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import deepspeed
from deepspeed.runtime.activation_checkpointing.checkpointing import (
    _CUDA_RNG_STATE_TRACKER,
    _MODEL_PARALLEL_RNG_TRACKER_NAME,
    get_cuda_rng_tracker,
)
from tests.harness import ranks
from tests.projects.test_megatron_loop import copy_to, slice_of, sum_of

WIDTH, LAYERS, SEED, STEPS = 8, 3, 1234, 3


class Mpu:
    """The names of NeoX's mpu, of a model that is sliced over all ranks."""

    def get_model_parallel_rank(self):
        return dist.get_rank()

    def get_model_parallel_world_size(self):
        return dist.get_world_size()

    def get_model_parallel_group(self):
        return dist.group.WORLD

    def get_data_parallel_rank(self):
        return 0

    def get_data_parallel_world_size(self):
        return 1

    def get_data_parallel_group(self):
        return self._alone

    def get_pipe_parallel_world_size(self):
        return 1

    def __init__(self):
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self._alone = groups[dist.get_rank()]

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


def configure(mpu, config, **options):
    """As `initialize_megatron`: the config file, what the arguments say, and names that the mpu offers further."""
    deepspeed.checkpointing.configure(mpu, deepspeed_config=config, num_checkpoints=LAYERS, **options)
    assert deepspeed.checkpointing.is_configured()
    mpu.checkpoint = deepspeed.checkpointing.checkpoint
    mpu.get_cuda_rng_tracker = deepspeed.checkpointing.get_cuda_rng_tracker
    mpu.model_parallel_cuda_manual_seed = deepspeed.checkpointing.model_parallel_cuda_manual_seed


class Layer(nn.Module):
    """A sliced product with dropout of the slice, which differs between ranks, and of the sum, which does not."""

    def __init__(self, number, mpu, dropout):
        super().__init__()
        draws = torch.Generator().manual_seed(number)
        self.up = slice_of(torch.randn(2 * WIDTH, WIDTH, generator=draws) / 3, 0, mpu)
        self.down = slice_of(torch.randn(WIDTH, 2 * WIDTH, generator=draws) / 3, 1, mpu)
        self.mpu, self.dropout = mpu, dropout

    def forward(self, hidden, mask):
        inner = torch.tanh(copy_to(hidden, self.mpu) @ self.up.t())
        if self.mpu is not None:
            with self.mpu.get_cuda_rng_tracker().fork():
                inner = F.dropout(inner, self.dropout)
        outer = sum_of(inner @ self.down.t(), self.mpu)
        return hidden + F.dropout(outer, self.dropout) * mask


class Model(nn.Module):
    def __init__(self, mpu=None, dropout=0.0, recompute=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer(number, mpu, dropout) for number in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)
        nn.init.ones_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.mpu, self.recompute = mpu, recompute

    def forward(self, hidden, mask, wanted):
        for layer in self.layers:
            hidden = self.mpu.checkpoint(layer, hidden, mask) if self.recompute else layer(hidden, mask)
        return F.mse_loss(self.head(hidden).squeeze(-1), wanted)


def batch():
    draws = torch.Generator().manual_seed(7)
    hidden = torch.randn(4, 6, WIDTH, generator=draws)
    return hidden.requires_grad_(), (hidden.sum(-1, keepdim=True) > -2).float(), hidden.detach()[..., 0]


def plain():
    model, losses = Model(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss = model(*batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(mpu, dropout, recompute):
    """Losses, and what the generators draw next."""
    mpu.model_parallel_cuda_manual_seed(SEED)
    model = Model(mpu, dropout, recompute)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        mpu=mpu,
        config={"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0},
    )
    losses = []
    for _ in range(STEPS):
        loss = engine(*batch())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with mpu.get_cuda_rng_tracker().fork():
        own = torch.rand(1).item()
    drawn = [own, torch.rand(1).item()]
    engine.destroy()
    return losses, drawn


def everywhere(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@ranks(2)
def test_recomputed_layers_draw_as_they_did(tmp_path):
    """Saved inputs are cut over the ranks or lie in one buffer; losses and draws are those without recomputing."""
    file = tmp_path / f"ds_config{dist.get_rank()}.json"
    file.write_text(json.dumps({"train_batch_size": 4, "activation_checkpointing": {"number_checkpoints": LAYERS}}))
    expected, mpu = plain(), Mpu()
    configure(mpu, str(file), partition_activations=True, contiguous_checkpointing=False)
    assert train(mpu, 0.0, recompute=True)[0] == pytest.approx(expected, abs=1e-5)

    losses, drawn = train(mpu, 0.2, recompute=False)
    assert losses[0] != pytest.approx(expected[0], abs=1e-3), "there is dropout"
    for options in (
        {"partition_activations": True, "contiguous_checkpointing": True, "synchronize": True, "profile": True},
        {"partition_activations": True, "checkpoint_in_cpu": True},
        {"partition_activations": False},
    ):
        configure(mpu, str(file), **options)
        found, draws = train(mpu, 0.2, recompute=True)
        assert found == pytest.approx(losses, abs=1e-6)
        assert draws == drawn
        deepspeed.checkpointing.reset()
    mine, others = everywhere(drawn)
    assert mine[0] != others[0], "slices draw different numbers"
    assert mine[1] == others[1], "what all slices hold is drawn alike"


@ranks(2)
def test_the_names_by_which_scripts_reach_the_states():
    """As Megatron's copy of the seeding, and its checkpoints, which hold the states."""
    mpu = Mpu()
    configure(mpu, None, partition_activations=True)
    mpu.model_parallel_cuda_manual_seed(SEED)
    expected = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
    assert get_cuda_rng_tracker() is _CUDA_RNG_STATE_TRACKER

    _CUDA_RNG_STATE_TRACKER.reset()
    assert get_cuda_rng_tracker().get_states() == {}
    torch.manual_seed(SEED)
    deepspeed.checkpointing._CUDA_RNG_STATE_TRACKER.add(
        deepspeed.checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME, SEED + 2718 + mpu.get_model_parallel_rank()
    )
    states = get_cuda_rng_tracker().get_states()
    assert list(states) == list(expected) == [_MODEL_PARALLEL_RNG_TRACKER_NAME]
    assert torch.equal(states[_MODEL_PARALLEL_RNG_TRACKER_NAME], expected[_MODEL_PARALLEL_RNG_TRACKER_NAME])

    saved = {name: state.clone() for name, state in states.items()}
    with get_cuda_rng_tracker().fork():
        first = torch.rand(2)
    get_cuda_rng_tracker().set_states(saved)
    with get_cuda_rng_tracker().fork(_MODEL_PARALLEL_RNG_TRACKER_NAME):
        assert torch.equal(torch.rand(2), first)
