"""Text of 16 requests of mixed lengths on a CPU: `LLM` against `generate` and `generate_batch` of Transformers."""

from __future__ import annotations

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="generation",
    title="16 requests of mixed lengths, a Llama of 125M parameters, greedy, fp32 on a CPU",
    file=__file__,
    measures=(
        Measure("generate", "time ÷ generate's beside it", "×", targets=(Target(1.0),)),
        Measure("generate_batch", "time ÷ generate_batch's beside it", "×", targets=(Target(1.0),)),
        Measure("tokens", "ours", "tokens/s", better="higher"),
    ),
    contenders=("ours",),
    rounds=1,
    timeout_s=1200.0,
)

LAYERS, VOCABULARY = 12, 32_000
TURNS = 3


def measure(job: Job) -> dict[str, float]:
    """Ratios of medians over turns that alternate; each gives all requests at once."""
    import random
    import statistics
    import time
    from collections.abc import Callable

    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from deepspeed.inference import LLM, SamplingParams

    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_hidden_layers": LAYERS}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY)).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    chosen = random.Random(0)
    prompts = [[chosen.randrange(3, VOCABULARY) for _ in range(chosen.randint(16, 128))] for _ in range(16)]
    lengths = [chosen.randint(8, 64) for _ in prompts]
    params = [SamplingParams(max_tokens=length, temperature=0) for length in lengths]
    widest, longest = max(map(len, prompts)), max(lengths)
    padded = torch.tensor([[0] * (widest - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (widest - len(each)) + [1] * len(each) for each in prompts])
    asked = GenerationConfig(do_sample=False, max_new_tokens=longest, eos_token_id=-1, pad_token_id=0)

    def ours() -> None:
        cache = {"memory_config": {"mode": "allocate", "size": 256}, "prefix_cache": False}
        with LLM(model, state_manager=cache) as llm:
            llm.generate(prompts, params, progress=False)

    def padded_rows() -> None:
        model.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=longest)

    def batched() -> None:
        model.generate_batch(prompts, generation_config=asked, progress_bar=False)

    times: dict[Callable[[], None], list[float]] = {ours: [], padded_rows: [], batched: []}
    for _ in range(TURNS):
        for way, found in times.items():
            begin = time.perf_counter()
            with torch.no_grad():
                way()
            found.append(time.perf_counter() - begin)
    own, rows, batch = (statistics.median(found) for found in times.values())
    return {"generate": own / rows, "generate_batch": own / batch, "tokens": sum(lengths) / own}
