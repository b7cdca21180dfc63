"""A Mixtral of Transformers whose experts lie on two ranks; the model and the loop are unmodified.

    deepspeed --num_gpus 2 examples/moe/mixtral.py --deepspeed_config examples/moe/mixtral.json --output mixtral

What is saved at the end is the whole model as Transformers reads it.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import deepspeed


class Songs(torch.utils.data.Dataset[Tensor]):
    """Sequences that go up or down in steps of their own: what comes next is known from two numbers."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Tensor:
        return (7 * index + (index % 5 - 2) * torch.arange(16)) % 64


def tiny_model() -> MixtralForCausalLM:
    """Random weights, the same on every rank."""
    torch.manual_seed(0)
    shape = MixtralConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        output_router_logits=True,  # the loss has a part that balances the experts
        vocab_size=64,
    )
    return MixtralForCausalLM(shape)


def main() -> None:
    """Train, say what a rank holds, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default=None, help="folder for the trained model")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by launchers")
    deepspeed.add_config_arguments(parser)
    options = parser.parse_args()
    model = tiny_model()
    whole = sum(param.numel() for param in model.parameters())
    deepspeed.init_distributed()
    songs = Songs(options.steps * 4 * deepspeed.comm.get_world_size())
    engine, _, loader, _ = deepspeed.initialize(args=options, model=model, training_data=songs)
    here = sum(param.numel() for param in engine.module.parameters())
    losses = []
    for batch in loader:
        tokens = batch.to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if engine.global_rank == 0:
        print(f"{here:,} of {whole:,} parameters on a rank; loss {losses[0]:.2f} to {losses[-1]:.2f}", flush=True)
    if options.output:
        state = engine.module_state_dict()  # all ranks call it, and get whole tensors
        if engine.global_rank == 0:
            model.save_pretrained(options.output, state_dict=state)
            again = MixtralForCausalLM.from_pretrained(options.output)
            print(f"saved, and loaded again with {sum(param.numel() for param in again.parameters()):,} parameters")


if __name__ == "__main__":
    main()
