"""Every checkpoint loads everywhere: stages × ranks × precisions, other groups, files of DeepSpeed itself."""

from __future__ import annotations

import fcntl

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.saving.training_state import listed_groups
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.checkpoint_states import EXPECTED, FIXTURES
from tests.checkpoint_states import Net as Fixture
from tests.covering import triples
from tests.harness import ranks, shared_ranks
from tests.models import batches, make, share

STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 3)
PRECISIONS = ("fp32", "bf16", "fp16")
CLOSE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 3e-3}
SAMPLES = 12
# Of all ways to write and to read, so many that any three choices meet.
SAME_PRECISION = triples(STAGES, WORLDS, STAGES, WORLDS, PRECISIONS)  # reader's stage and ranks, then the writer's
OTHER_PRECISION = triples(STAGES, (1, 3), STAGES, PRECISIONS, (1, 2))  # both stages, and by how many they differ
FROM_DEEPSPEED = triples(STAGES, (1, 3), STAGES, PRECISIONS)


class Net(nn.Module):
    """Sizes that divide by nothing, a tied weight, a buffer, a frozen layer and a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(40))
        self.embedding = nn.Embedding(17, 7)
        self.body = nn.Linear(7, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(7, 17, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        hidden = hidden + self.frozen(torch.relu(self.body(hidden)))
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())


def build(stage, precision, params=None, seed=0):
    section = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        section["fp16"]["initial_scale_power"] = 6
    model = make(Net, seed=seed)
    return deepspeed.initialize(
        model=model,
        model_parameters=None if params is None else params(model),
        config={
            "train_batch_size": SAMPLES,
            "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-2, "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
            **section,
        },
    )[0]


def train(engine, first, last):
    """Mean losses over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for batch in batches(last, SAMPLES)[first:]:
        loss = engine(*share(batch, rank, world))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses


def assert_states(engine, wanted):
    """Masters and the optimizer's states of this rank are the saved ones, bit for bit."""
    for group in listed_groups(engine._parts):
        for place, (name, master) in enumerate(zip(group.names, group.masters, strict=True)):
            if master is None or not group.params[place].requires_grad:
                continue
            start, stop = group.interval(place)
            held = {"master": master, **engine.basic_optimizer.state.get(master, {})}
            assert {f"{kind}:{name}" for kind in held} == {key for key in wanted if key.endswith(f":{name}")}
            for kind, value in held.items():
                if not isinstance(value, torch.Tensor):
                    assert value == wanted[f"{kind}:{name}"], (kind, name)
                else:
                    part = wanted[f"{kind}:{name}"].reshape(-1)[start:stop]
                    assert torch.equal(value.detach().reshape(-1), part.to(value.dtype)), (kind, name)
    frozen = engine.module.frozen.bias
    assert torch.equal(frozen.detach().float(), wanted["frozen"].to(frozen.dtype).float())
    assert engine.module.steps == 2


def whole_states(engine):
    """The same of the whole model."""
    found = {"frozen": engine.module.frozen.bias.detach().float().clone()}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[f"master:{name}"] = safe_get_full_fp32_param(param)
            for kind in ("exp_avg", "exp_avg_sq", "step"):
                value = safe_get_full_optimizer_state(param, kind)
                if value is not None:
                    found[f"{kind}:{name}"] = value
    return found


def write(folder):
    """Every stage and precision on this number of ranks; what follows is kept beside each checkpoint."""
    world = dist.get_world_size()
    for stage in STAGES:
        for precision in PRECISIONS:
            engine = build(stage, precision)
            train(engine, 0, 2)
            engine.module.steps.fill_(2)
            place = folder / f"{stage}_{world}_{precision}"
            engine.save_checkpoint(place)
            kept = {
                "states": whole_states(engine),
                "losses": train(engine, 2, 3),
                "norm": engine.get_global_grad_norm(),
            }
            if dist.get_rank() == 0:
                torch.save(kept, place / "kept.pt")
            engine.destroy()
    dist.barrier()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, worker_id):
    """One folder for all processes of a test run: each number of ranks is written by whoever comes first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "matrix"
    folder.mkdir(exist_ok=True)
    for world in WORLDS if worker_id == "gw0" else reversed(WORLDS):  # two processes begin at different ends
        with (folder / f"lock{world}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / f"done{world}").exists():
                ranks(world)(write)(folder=folder)
                (folder / f"done{world}").touch()
    return folder


def check(engine, place, precision):
    kept = torch.load(place / "kept.pt", weights_only=True)
    path, _ = engine.load_checkpoint(place)
    assert path is not None
    assert_states(engine, kept["states"])
    assert train(engine, 2, 3) == pytest.approx(kept["losses"], rel=CLOSE[precision]), place.name
    assert engine.get_global_grad_norm() == pytest.approx(kept["norm"], rel=10 * CLOSE[precision]), place.name


@pytest.mark.parametrize("precision", PRECISIONS)
@shared_ranks(*WORLDS)
def test_any_stage_and_number_of_ranks(saved, precision):
    for stage in STAGES:
        engine = build(stage, precision, seed=5)
        for mine, ours, other, world, kind in SAME_PRECISION:
            if (mine, ours, kind) == (stage, dist.get_world_size(), precision):
                check(engine, saved / f"{other}_{world}_{precision}", precision)
        assert engine.global_steps == 3
        engine.destroy()


@pytest.mark.parametrize("precision", PRECISIONS)
@shared_ranks(1, 3)
def test_any_precision(saved, precision):
    for stage in STAGES:
        engine = build(stage, precision, seed=5)
        for mine, ours, other, kind, further in OTHER_PRECISION:
            if (mine, ours, kind) == (stage, dist.get_world_size(), precision):
                old = PRECISIONS[(PRECISIONS.index(precision) + further) % len(PRECISIONS)]
                check(engine, saved / f"{other}_2_{old}", "bf16")
        assert engine.global_steps == 3
        engine.destroy()


def three_groups(model):
    params = [param for param in model.parameters() if param.requires_grad]
    return [{"params": params[2:]}, {"params": params[:1], "weight_decay": 0.5}, {"params": params[1:2]}]


@shared_ranks(2)
def test_other_groups_of_the_optimizer(saved):
    for stage in STAGES:
        engine = build(stage, "bf16", three_groups, seed=5)
        for other in STAGES:
            check(engine, saved / f"{other}_3_bf16", "bf16")
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1] * 3
        engine.destroy()


# ---- files that DeepSpeed wrote


class Continued(Fixture):
    def forward(self, ids):
        hidden = self.emb(ids)
        hidden = hidden + self.body(hidden) + self.frozen(hidden)
        return nn.functional.cross_entropy(self.out(hidden).float().view(-1, 50), ids.roll(-1, 1).reshape(-1))


def by_dimension(model):
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim == 1], "weight_decay": 0.0},
    ]


def build_continued(stage, precision):
    section = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        section["fp16"]["initial_scale_power"] = 8
    model = make(Continued, seed=3)
    warmup = {"warmup_min_lr": 0, "warmup_max_lr": 3e-3, "warmup_num_steps": 5}
    return deepspeed.initialize(
        model=model,
        model_parameters=by_dimension(model),
        config={
            "train_batch_size": SAMPLES,
            "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
            "scheduler": {"type": "WarmupLR", "params": warmup},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            **section,
        },
    )[0]


def go_on(engine, name):
    """Three more steps from a checkpoint of DeepSpeed's; mean losses."""
    rank, world = dist.get_rank(), dist.get_world_size()
    path, client = engine.load_checkpoint(FIXTURES / name)
    assert path is not None
    assert client["note"] == "from DeepSpeed 0.19.8"
    assert engine.global_steps == 3
    losses = []
    for step in (3, 4, 5):
        ids = torch.randint(0, 50, (SAMPLES, 16), generator=torch.Generator().manual_seed(100 + step))
        loss = engine(share((ids,), rank, world)[0])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses


@pytest.mark.parametrize("precision", PRECISIONS)
@shared_ranks(1, 3)
def test_what_deepspeed_wrote(precision):
    # Rounded otherwise on other processors and numbers of ranks, and at its own stage 3, which has another order.
    close = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 2e-4}[precision]
    for stage in STAGES:
        engine = build_continued(stage, precision)
        for mine, ours, written, kind in FROM_DEEPSPEED:
            if (mine, ours, kind) != (stage, dist.get_world_size(), precision):
                continue
            name = f"stage{written}_{precision}"
            losses, wanted = go_on(engine, name), EXPECTED[name]
            if name == "stage0_fp16":  # there it clips by the norm times the loss scale, so only the weights agree
                losses, wanted = losses[:1], wanted[:1]
            assert losses == pytest.approx(wanted, rel=close), (stage, name)
        engine.destroy()
