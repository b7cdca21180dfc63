"""Lightning's Fabric and Trainer with `DeepSpeedStrategy`; its refusal of devices other than CUDA is lifted here."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.harness import ranks
from tests.models import Tiny, batches, make, share

STEPS, SAMPLES = 4, 8


@contextlib.contextmanager
def on_cpu():
    """Both strategies accept CUDA only; everything below that check is the same."""
    import lightning.fabric.strategies.deepspeed as fabric
    import lightning.pytorch.strategies.deepspeed as pytorch
    from lightning.fabric.accelerators import CPUAccelerator as FabricCPU
    from lightning.pytorch.accelerators import CPUAccelerator as TrainerCPU

    with contextlib.ExitStack() as stack:
        for module, cpu in ((fabric, FabricCPU), (pytorch, TrainerCPU)):
            stack.enter_context(mock.patch.object(module, "CUDAAccelerator", cpu))
            stack.enter_context(mock.patch.object(module, "_validate_device_index_selection"))
        yield


def plain(clip=0.0, steps=STEPS):
    """Losses of the same training without any library, on this rank's share."""
    model = torch.nn.parallel.DistributedDataParallel(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches(steps, SAMPLES):
        loss = model(*share(batch, dist.get_rank(), 2))
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fabric_of(stage, **options):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DeepSpeedStrategy

    precision = options.pop("precision", "32-true")
    fabric = Fabric(
        accelerator="cpu", devices=2, strategy=DeepSpeedStrategy(stage=stage, **options), precision=precision
    )
    fabric.launch()
    return fabric


def fabric_train(fabric, *, init=False, steps=STEPS):
    if init:
        with fabric.init_module():
            torch.manual_seed(0)
            model = Tiny()
    else:
        model = make()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return *fabric_steps(fabric, model, optimizer, batches(steps, SAMPLES)), model, optimizer


def fabric_steps(fabric, model, optimizer, data):
    losses = []
    for batch in data:
        loss = model(*share(batch, fabric.global_rank, 2))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return (losses,)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_fabric_losses_are_those_of_a_plain_run(stage):
    expected = plain(clip=0.3)
    with on_cpu():
        fabric = fabric_of(stage, config=None)
        fabric.strategy.config["gradient_clipping"] = 0.3
        losses, _, optimizer = fabric_train(fabric)
        assert isinstance(fabric.strategy.model, deepspeed.DeepSpeedEngine)
        assert isinstance(optimizer.optimizer, deepspeed.DeepSpeedOptimizer)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert fabric.strategy.model.global_steps == 0  # the client steps the optimizer, not the engine


@ranks(2)
def test_fabric_constructs_sharded_models_and_saves_them(tmp_path):
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    expected = plain(clip=1.0)  # the default of the config
    with on_cpu():
        fabric = fabric_of(3)
        losses, model, optimizer = fabric_train(fabric, init=True)
        assert losses == pytest.approx(expected, abs=1e-5)
        more = batches(2, SAMPLES, seed=7)
        fabric.save(tmp_path / "saved", {"model": model, "optimizer": optimizer, "seen": 4})
        assert (tmp_path / "saved" / "checkpoint").is_dir()
        first = fabric_steps(fabric, model, optimizer, more)
        state = {"model": model, "optimizer": optimizer, "seen": 0}
        fabric.load(tmp_path / "saved", state)
        assert state["seen"] == 4
        assert fabric_steps(fabric, model, optimizer, more) == first
        fabric.load(tmp_path / "saved", {"model": model, "optimizer": optimizer, "seen": 0})
        if fabric.global_rank == 0:
            found = convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "one.pt")
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            values = {name: value.clone() for name, value in model.module.state_dict().items()}
        if fabric.global_rank == 0:
            whole = {name.removeprefix("module."): value for name, value in found["state_dict"].items()}
            for name, value in values.items():
                torch.testing.assert_close(whole[name], value)


@ranks(2)
def test_fabric_bf16_and_a_module_without_optimizer():
    with on_cpu():
        fabric = fabric_of(2, precision="bf16-true")
        losses, model, _ = fabric_train(fabric)
        assert next(model.parameters()).dtype == torch.bfloat16
        assert losses[-1] < losses[0]
        inference = fabric_of(3).setup(make(seed=2))
        with torch.no_grad():
            batch = batches(1, 4)[0]
            torch.testing.assert_close(inference(*batch), make(seed=2)(*batch))


def lightning_module():
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        """The model of the plain loop, with a schedule that must be stepped by one side only."""

        def __init__(self):
            super().__init__()
            self.model = make()
            self.losses, self.validated, self.rates = [], [], []

        def training_step(self, batch, index):
            loss = self.model(*batch)
            self.losses.append(loss.item())
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return loss

        def validation_step(self, batch, index):
            self.validated.append(self.model(*batch).item())

        def predict_step(self, batch, index):
            return self.model(*batch)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 3 else 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Module()


def loader(steps=STEPS, seed=1):
    """This rank's share of every batch."""
    data = [share(batch, dist.get_rank(), 2) for batch in batches(steps, SAMPLES, seed=seed)]
    joined = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*data, strict=True)))
    return torch.utils.data.DataLoader(joined, batch_size=SAMPLES // 2)


def trainer(stage, folder, **options):
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy

    given = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": DeepSpeedStrategy(stage=stage),
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": True,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
        "default_root_dir": str(folder),
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**given, **options})


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_trainer_losses_are_those_of_a_plain_run(tmp_path, stage):
    expected = plain(clip=0.3)
    with on_cpu():
        module, made = lightning_module(), trainer(stage, tmp_path, gradient_clip_val=0.3)
        made.fit(module, loader(), loader(2, seed=5))
    # the schedule halves the rate in the last step alone, which changes no loss
    assert module.losses == pytest.approx(expected, abs=1e-5)
    assert module.rates == pytest.approx([1e-2, 1e-2, 1e-2, 5e-3])
    assert len(module.validated) == 2
    assert isinstance(made.strategy.model, deepspeed.DeepSpeedEngine)


@ranks(2)
def test_trainer_accumulates_and_goes_on_from_a_checkpoint(tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    with on_cpu():
        given = {"accumulate_grad_batches": 2, "enable_checkpointing": True}
        straight = lightning_module()
        keep = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
        trainer(3, tmp_path, max_epochs=2, callbacks=[keep], **given).fit(straight, loader())
        again = lightning_module()
        resumed = trainer(3, tmp_path / "other", max_epochs=2, **given)
        resumed.fit(again, loader(), ckpt_path=str(tmp_path / "epoch=0.ckpt"))
        assert again.losses == straight.losses[STEPS:]
        predicted = resumed.predict(again, loader(1))
    assert len(predicted) == 1


@ranks(2)
def test_trainer_validates_without_training(tmp_path):
    with on_cpu():
        module = lightning_module()
        trainer(3, tmp_path).validate(module, loader(2, seed=5), verbose=False)
    expected = [make()(*batch).item() for batch in loader(2, seed=5)]
    assert module.validated == pytest.approx(expected, abs=1e-5)
