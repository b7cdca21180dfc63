"""A script for `accelerate launch`: trains with whatever the command configured, rank 0 writes what happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from tests.models import batches, make


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, labels = batches(1, 16)[0]
    data = torch.utils.data.TensorDataset(tokens, labels)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for tokens, labels in loader:
        with accelerator.accumulate(model):
            loss = model(tokens, labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    if accelerator.is_main_process:
        told = {"losses": losses, "type": type(model).__name__, "ranks": accelerator.num_processes}
        if told["type"] == "DeepSpeedEngine":
            told |= {"stage": model.zero_optimization_stage(), "clip": model.gradient_clipping()}
            told |= {"steps": model.global_steps}
        Path(sys.argv[1]).write_text(json.dumps(told))
    accelerator.end_training()


if __name__ == "__main__":
    main()
