"""A policy learns to prefer even tokens: rollouts and updates on one set of weights, as GRPO does it.

deepspeed --num_gpus 2 examples/rlhf/train.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from deepspeed.runtime.rollout import RolloutBatch, RolloutRequest, SamplingConfig, build_rollout
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed

PROMPTS, GROUP, PROMPT, RESPONSE = 4, 8, 4, 12


def reward(batch: RolloutBatch) -> Tensor:
    """[batch]: how many tokens of a response are even."""
    even = (batch.input_ids % 2 == 0) & batch.response_mask
    return even.sum(1) / batch.response_mask.sum(1).clamp(min=1)


def loss_of(logits: Tensor, batch: RolloutBatch, advantages: Tensor) -> Tensor:
    """The clipped objective of PPO, over the tokens of responses."""
    own = logits[:, :-1].float().log_softmax(-1).gather(2, batch.input_ids[:, 1:, None])[..., 0]
    mask = batch.response_mask[:, 1:]
    ratio = (own - batch.logprobs[:, 1:]).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return -(gain * mask).sum() / mask.sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, bos_token_id=None, eos_token_id=None))
    engine = deepspeed.initialize(model=model, config=str(Path(__file__).with_name("ds_config.json")))[0]
    rollout = build_rollout({"engine": "hybrid_engine"}, engine)
    sampling = SamplingConfig(max_new_tokens=RESPONSE, n_samples_per_prompt=GROUP)
    generator = torch.Generator().manual_seed(engine.global_rank)
    for step in range(steps):
        prompts = torch.randint(64, (PROMPTS, PROMPT), generator=generator).to(engine.device)
        batch = rollout.generate(RolloutRequest(prompts, torch.ones_like(prompts)), sampling)
        rewards = reward(batch)
        groups = rewards.view(PROMPTS, GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        if step == 0:  # all ranks compare together
            print(f"log-probabilities of rollout and trainer differ by {rollout.compare(batch).largest:.0e} at most")
        engine.backward(loss_of(engine(input_ids=batch.input_ids).logits, batch, advantages))
        engine.step()
        if engine.global_rank == 0 and (step % 5 == 0 or step == steps - 1):
            print(f"step {step}: {rewards.mean():.0%} of the tokens are even")
    engine.destroy()


if __name__ == "__main__":
    main()
