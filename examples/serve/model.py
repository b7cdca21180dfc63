"""Write a model that can be served: a small Llama, trained for a moment on source text of Python's standard library.

python examples/serve/model.py --output served-model

It is the model of `examples/finetune`, with a tokenizer of bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

import deepspeed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "finetune"))

import task

TEMPLATE = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
CONFIG = {"train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token n is byte n, as the model was trained."""
    # The letter that stands for each byte in byte-level tokenizers: visible bytes themselves, others from 256 on.
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)}
    made = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("served-model"), help="folder of the model")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps")
    args = parser.parse_args()

    model = task.make_model(None)
    loader = DataLoader(task.make_data(None, 64), batch_size=16, shuffle=True)
    engine, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)
    for step, batch in zip(range(args.steps), loader, strict=False):
        loss = engine(**{name: part.to(engine.device) for name, part in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.2f}")
    model.generation_config.eos_token_id = model.config.eos_token_id = None  # every byte is text
    model.save_pretrained(args.output)
    byte_tokenizer().save_pretrained(args.output)
    print(f"loss {loss.item():.2f}; the model is in {args.output}")


if __name__ == "__main__":
    main()
