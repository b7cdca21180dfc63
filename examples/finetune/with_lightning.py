"""Fine-tune with Lightning's Trainer; its DeepSpeed strategy accepts CUDA devices only.

python examples/finetune/with_lightning.py --devices 2 --deepspeed_config examples/finetune/ds_lightning.json
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import task
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.utils.data import DataLoader


class FineTune(pl.LightningModule):
    """A causal language model that is constructed where Lightning wants it: in shards at stage 3."""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self.name = name
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = task.make_model(self.name)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = task.parser(__doc__)
    parser.add_argument("--devices", type=int, default=1, help="GPUs of this machine")
    parser.add_argument("--deepspeed_config", required=True, help="the config")
    args = parser.parse_args()
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=args.devices,
        strategy=DeepSpeedStrategy(config=args.deepspeed_config),
        precision="bf16-true",
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
    )
    loader = DataLoader(task.make_data(args.model, args.context), batch_size=4, shuffle=True)
    trainer.fit(FineTune(args.model), loader)
    trainer.save_checkpoint(args.output)  # a folder: every rank writes its part


if __name__ == "__main__":
    main()
