"""Fine-tune with Transformers' Trainer: the config is one argument, "auto" values come from the others.

deepspeed --num_gpus 2 examples/finetune/with_trainer.py --deepspeed examples/finetune/ds_auto.json
"""

from __future__ import annotations

import task
import torch
from transformers import Trainer, TrainingArguments


def main() -> None:
    parser = task.parser(__doc__)
    parser.add_argument("--deepspeed", required=True, help="the config")
    args = parser.parse_args()
    # Before the model: Trainer's arguments tell Transformers to construct it in shards, if the config asks for that.
    training = TrainingArguments(
        output_dir=str(args.output),
        deepspeed=args.deepspeed,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=5,
        max_steps=args.steps,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
    )
    trainer = Trainer(
        model=task.make_model(args.model),
        args=training,
        train_dataset=task.make_data(args.model, args.context),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
