"""Fine-tune with Accelerate: an ordinary loop, `prepare` makes the engine.

accelerate launch --config_file examples/finetune/accelerate.yaml examples/finetune/with_accelerate.py
"""

from __future__ import annotations

from itertools import chain, islice, repeat

import task
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch.utils.data import DataLoader


def main() -> None:
    args = task.parser(__doc__).parse_args()
    # Accelerate knows the backend of a GPU; on the CPU it has to be told.
    gloo = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    accelerator = Accelerator(kwargs_handlers=gloo)
    model = task.make_model(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(task.make_data(args.model, args.context), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    micro_steps = args.steps * accelerator.gradient_accumulation_steps
    for step, batch in enumerate(islice(chain.from_iterable(repeat(loader)), micro_steps), start=1):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0:
            accelerator.print(f"micro step {step:4d}  loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}")

    state = accelerator.get_state_dict(model)  # all ranks take part, the first one gets the weights
    accelerator.unwrap_model(model).save_pretrained(
        args.output, is_main_process=accelerator.is_main_process, state_dict=state
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
