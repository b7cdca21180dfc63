"""What the parts of `gpu_inference.py` share: the table, time limits, models of random weights, timed steps."""

from __future__ import annotations

import argparse
import gc
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.generate.llm import LLM
from deepspeed.generate.params import SamplingParams

__all__ = ["Bench", "params", "prompts", "some_steps", "start", "timed"]

GOALS: dict[str, tuple[float | None, float]] = {
    "decode 1": (283, 210),
    "decode 32": (7_880, 6_000),
    "decode 256": (28_000, 20_000),
    "decode 1 plain": (283, 150),
    "decode 32 plain": (7_880, 4_000),
    "context 131072, batch 1": (132, 100),
    "fp8 1": (526, 330),
    "fp8 32": (14_900, 8_800),
    "int4 1": (882, 440),
    "prompts of 2048": (54_500, 38_000),
    "prompts of 2048, fp8": (None, 50_000),
    "256 requests, output": (13_700, 9_000),
    "256 clients, LLM": (19_500, 12_000),
    "256 clients, ds_serve": (19_500, 10_000),
    "experts 1": (700, 280),
    "experts 32": (2_570, 1_800),
    "weights in the host, batch 256": (None, 180),
    "weights in the host, read": (55, 47),
    "speculation, times as fast": (2.5, 1.8),
    "rollouts, part of LLM": (1, 0.85),
    "first token by HTTP, median": (None, 25),
    "between tokens by HTTP, p99": (None, 40),
}
"""(limit by arithmetic, goal); of rows in ms the goal is the most."""
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8},
    "32b": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "30b_a3b": {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_TINY_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


@dataclass
class Bench:
    """Measures, prints and keeps rows."""

    args: argparse.Namespace
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    until: float = 0.0

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.args.seconds
        self.tiny: bool = self.args.tiny
        self.device = get_accelerator().device_name()
        self.vocabulary = 512 if self.tiny else 128_256
        self._model: tuple[str, Any] = ("", None)

    def count(self, number: int, least: int = 2) -> int:
        """A number of tokens, steps or requests: a 64th of it where all is tiny."""
        return max(least, number // 64) if self.tiny else number

    @property
    def batches(self) -> list[int]:
        """How many sequences decode together."""
        return [1, 3] if self.tiny else [int(each) for each in self.args.batches.split(",")]

    def config(self, **manager: Any) -> dict[str, Any]:
        """Keys of `LLM`."""
        size = {"mode": "allocate", "size": 256} if self.tiny else {"size": 8_000_000_000}
        keys = {"max_context": 256 if self.tiny else 8192, "memory_config": size, **manager}
        if self.tiny:
            keys["max_context"] = 256
        return {"state_manager": keys}

    def model(self, shape: str = "8b", device: str | None = None) -> Any:
        """A model of random values; the last one is kept, and freed before another is made."""
        if self._model[0] != f"{shape} {device}":
            self.drop()
            self._model = (f"{shape} {device}", self._make(shape, device or self.device))
        return self._model[1]

    def drop(self) -> None:
        """Free the model."""
        self._model = ("", None)
        gc.collect()
        get_accelerator().empty_cache()

    def _make(self, shape: str, device: str) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        begin = time.perf_counter()
        kind = "qwen3_moe" if "a3b" in shape else "qwen3" if shape == "32b" else "llama"
        sizes = {"num_attention_heads": 32, **SHAPES[shape]}
        if self.tiny:
            sizes |= _TINY | (_TINY_EXPERTS if kind == "qwen3_moe" else {})
        elif self.args.layers is not None:
            sizes["num_hidden_layers"] = self.args.layers
        config = AutoConfig.for_model(
            kind, vocab_size=self.vocabulary, max_position_embeddings=131_072, tie_word_embeddings=False, **sizes
        )
        config.bos_token_id = config.eos_token_id = config.pad_token_id = None
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if self.tiny else torch.bfloat16)
        model.to_empty(device=device)
        fresh = type(model.model.rotary_emb)(config)  # its buffers are no random numbers
        model.model.rotary_emb = fresh.to(device)
        _fill(model)
        model.generation_config.eos_token_id = None
        get_accelerator().synchronize()
        print(f"{shape} built in {time.perf_counter() - begin:.1f} s", flush=True)
        return model.eval()

    def row(self, name: str, value: float, unit: str = "tokens/s", **facts: Any) -> None:
        """One line of the table."""
        limit, goal = GOALS.get(name, (None, None))
        self.rows[name] = {unit: value, "limit": limit, "goal": goal, **facts}
        told = f"{name:32} {value:10.4g} {unit:8}" if value < 100 else f"{name:32} {value:10,.0f} {unit:8}"
        told += "" if goal is None else f"  goal {'≤' if unit == 'ms' else '≥'} {goal:,}"
        told += "" if limit is None else f"  limit {limit:,}: {100 * value / limit:.1f} %"
        print(told + "".join(f"  {key} {fact}" for key, fact in facts.items()), flush=True)

    @contextmanager
    def part(self, name: str, limit: float) -> Iterator[None]:
        """A part that fails, or takes longer than its limit, is told, and the others go on."""
        left = min(limit, self.until - time.monotonic())
        if left <= 1:
            self.rows[name] = {"failed": "no time was left"}
            print(f"# {name}: no time is left", flush=True)
            return
        print(f"# {name}, at most {left:.0f} s", flush=True)

        def late(_number: int, _frame: FrameType | None) -> None:
            raise TimeoutError(f"{name} took longer than {left:.0f} s")

        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            yield
        except Exception as error:  # noqa: BLE001  # a row less, but the table of the others
            import traceback

            traceback.print_exc()
            self.rows[name] = {"failed": repr(error)[:500]}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        gc.collect()
        get_accelerator().empty_cache()


@torch.no_grad()
def _fill(model: Any) -> None:
    """Random values; layers of host memory are copies of the first one, which are made faster."""
    first = dict(model.model.layers[0].named_parameters())
    for name, param in model.named_parameters():
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        if param.dim() == 1:
            param.fill_(1.0)
        elif param.device.type == "cpu" and layer.isdigit() and layer != "0":
            param.copy_(first[inner])
        else:
            param.normal_(0.0, 0.02)


def prompts(bench: Bench, count: int, length: int, seed: int) -> list[list[int]]:
    """Token ids."""
    chosen = random.Random(seed)
    return [[chosen.randrange(bench.vocabulary) for _ in range(length)] for _ in range(count)]


def params(new: int) -> SamplingParams:
    """Greedy, to a length."""
    return SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)


def timed(call: Callable[[], Any]) -> float:
    """Seconds, the device included."""
    get_accelerator().synchronize()
    begin = time.perf_counter()
    call()
    get_accelerator().synchronize()
    return time.perf_counter() - begin


def start(bench: Bench, llm: LLM, batch: int, new: int, seed: int, length: int = 512) -> None:
    """Run prompts until all sequences decode."""
    for prompt in prompts(bench, batch, bench.count(length), seed):
        llm.submit(prompt, params(new))
    started: set[int] = set()
    while len(started) < batch:
        started.update(token.uid for token in llm.step())


def some_steps(llm: LLM, steps: int) -> tuple[int, float]:
    """(tokens, median of the host's seconds) of so many steps."""
    count, hosts = 0, []
    for _ in range(steps):
        count += len(llm.step())
        hosts.append(llm.stats()["host_seconds"])
    return count, sorted(hosts)[len(hosts) // 2]
