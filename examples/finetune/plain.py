"""Fine-tune with a loop of your own: `initialize`, then forward, backward and step for every micro batch.

deepspeed --num_gpus 2 examples/finetune/plain.py --deepspeed_config examples/finetune/ds_config.json
"""

from __future__ import annotations

from itertools import islice

import task
from transformers.integrations import HfDeepSpeedConfig

import deepspeed
from deepspeed.runtime.dataloader import RepeatingLoader


def main() -> None:
    args = deepspeed.add_config_arguments(task.parser(__doc__)).parse_args()
    deepspeed.init_distributed()
    # Transformers constructs models in shards, never whole on one rank, as long as this object lives.
    sharding = HfDeepSpeedConfig(args.deepspeed_config)
    model = task.make_model(args.model)
    data = task.make_data(args.model, args.context)
    engine, _, loader, _ = deepspeed.initialize(args=args, model=model, training_data=data)
    del sharding

    micro_steps = args.steps * engine.gradient_accumulation_steps()
    for batch in islice(RepeatingLoader(loader), micro_steps):
        loss = engine(**{name: part.to(engine.device) for name, part in batch.items()}).loss
        engine.backward(loss)
        engine.step()

    engine.save_checkpoint(args.output)  # to go on training, with any number of ranks
    engine.save_16bit_model(args.output, "pytorch_model.bin")  # to use the model elsewhere


if __name__ == "__main__":
    main()
